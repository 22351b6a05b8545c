"""headstream report: studies and saved results as one HTML file."""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.cli import Model, Options, Output, cli, common
from headstream.commands.shared import (
    load_model,
    read_pairs,
    refuse_n_with_pairs,
    require_room,
    require_writable,
    writing,
)
from headstream.console import answer, printable

if TYPE_CHECKING:
    from headstream.analyses.result import Result


@cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option(
    "-o",
    "--output",
    type=Output(stdout=True),
    required=True,
    metavar="FILE",
    help="HTML file, or - for stdout.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--title", help="Heading of the report.")
@click.option(
    "-n",
    "n_pairs",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Prompt pairs of a zoo task; of --pairs all are used.",
)
@click.option(
    "--pairs",
    type=click.Path(exists=True, dir_okay=False),
    help='Your own pairs: lines of {"clean", "corrupted", "answer", "wrong"}.',
)
@click.option(
    "--results",
    type=click.Path(file_okay=False),
    help="Also save each result in this folder, to render again without the model.",
)
@common
@click.pass_context
def report(
    context: click.Context,
    /,
    options: Options,
    targets: tuple[str, ...],
    output: str,
    force: bool,
    title: str | None,
    n_pairs: int,
    pairs: str | None,
    results: str | None,
) -> int:
    """Study TARGET and write one self-contained HTML file.

    A TARGET that is a model (a zoo name or a folder) gets the standard study: audit, patching and
    paths on the task that its card names, head census, induction, circuits, sinks, direct writes. A
    saved result (a .json file, or a folder of them) is rendered as it is, without the model.
    """
    refuse_n_with_pairs(context, "n_pairs", pairs)
    if output == "-" and options.as_json:
        raise click.UsageError("-o - and --json both claim stdout; give one of them")
    if output != "-":
        require_writable(Path(output), force)
    if results is not None:
        if not results:
            raise click.UsageError("the folder of --results is empty: name one")
        require_room(Path(results))
    saved, fresh = _sort_targets(targets)
    if pairs is not None and not fresh:
        raise click.UsageError("--pairs needs a model among the targets, got saved results only")
    from headstream.analyses.stored import load_result
    from headstream.reports.write import render_report, write_report

    found: list[Result] = [load_result(path) for path in saved]
    for name in fresh:
        found += _study(options, name, n_pairs, pairs)
    failed = any(claim.evidence == "FAILED" for result in found for claim in result.claims)
    # What was found is said first: a disk that is full by now must not take it along.
    if output == "-":
        click.echo(render_report(found, title=title), nl=False)
    elif not options.as_json:
        for line in _findings(found):
            click.echo(line)
    value: dict[str, Any] = {
        "path": None,
        "bytes": None,
        "sha256": None,
        "findings": [result.summary() for result in found],
        "failed": failed,
    }
    last = ""
    try:
        if results is not None:
            with writing(results, options):
                _save_all(found, Path(results))
        if output != "-":
            with writing(output, options):
                path = write_report(found, output, title=title)
                body = path.read_bytes()
            digest = hashlib.sha256(body).hexdigest()
            value |= {"path": str(path), "bytes": len(body), "sha256": digest}
            last = f"{path}  {len(body):,} bytes  sha256 {digest}"
    except click.exceptions.Exit:
        if options.as_json:
            answer(value, "", as_json=True)
        raise
    if output != "-":
        answer(value, last, as_json=options.as_json)
    return int(failed)


def _findings(found: list[Result]) -> list[str]:
    """What the head of the page says, model by model, in signs that every terminal has."""
    from headstream.reports.headline import headline
    from headstream.reports.study import Study

    models: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        origin = result.provenance
        models.setdefault((origin.model, origin.weights_sha256), []).append(result)
    lines = []
    for (name, _), results in models.items():
        said = headline(Study.of(name, results))
        before = f"{name}: " if len(models) > 1 else ""
        lines += [before + sentence for sentence in (*said.alarms, *said.finding)]
    plain = str.maketrans({"\N{MINUS SIGN}": "-", "\N{NO-BREAK SPACE}": " ", "→": "->"})
    return [printable(line.translate(plain)) for line in lines]


def _study(options: Options, name: str, n_pairs: int, pairs: str | None) -> list[Result]:
    from headstream.analyses.standard import standard_study

    model = load_model(name)
    task = None
    if pairs is not None:
        task = read_pairs(pairs, model, options)
    words = ["headstream", "report", name, "--seed", str(options.seed)]
    words += ["-n", str(n_pairs)] if pairs is None else ["--pairs", Path(pairs).name]
    return standard_study(
        model,
        task=task,
        n=n_pairs,
        seed=options.seed,
        progress=options.progress,
        command=shlex.join([*words, "-o", "report.html"]),
    )


def _sort_targets(targets: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """Saved results (files, or the .json files of a folder) and models, before anything is run."""
    saved: list[Path] = []
    fresh: list[str] = []
    for target in targets:
        if not target:
            raise click.UsageError("a target is empty; name a model or a saved result")
        path = Path(target)
        if path.is_file():
            saved.append(path)
        elif path.is_dir() and not (path / "config.json").is_file():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise click.UsageError(f"folder '{target}' holds no model and no saved results")
            saved += inside
        else:
            fresh.append(Model().convert(target, None, None))
    # A folder by whatever path; a zoo name stays the name it is.
    given = [os.path.realpath(path) for path in saved]
    given += [os.path.realpath(name) if Path(name).is_dir() else name for name in fresh]
    twice = [name for index, name in enumerate(given) if name in given[:index]]
    if twice:
        raise click.UsageError(f"target '{twice[0]}' is given twice")
    return saved, fresh


def _save_all(found: list[Result], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, result in enumerate(found):
        result.save(folder / f"{index:02}-{result.kind}.json")
