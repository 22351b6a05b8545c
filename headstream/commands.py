"""The commands: models, heads, sinks, report, audit, train. Heavy imports happen inside them."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.cli import Model, Options, Output, cli, common
from headstream.console import answer, printable, table
from headstream.models.errors import StoreError
from headstream.models.zoo.registry import list_models, path_of

if TYPE_CHECKING:
    from headstream.analyses.result import Result
    from headstream.models.decoder import Decoder

# Score -> column heading; 80 columns must hold them all beside the longest label.
_SCORES = {
    "previous_token": "previous",
    "duplicate_token": "dupl.",
    "current_token": "current",
    "induction": "induction",
    "sink": "sink",
    "copying": "copying",
}


@cli.command()
@click.argument("name", required=False, type=Model())
@common
def models(options: Options, name: str | None) -> None:
    """List the shipped models, or show the card of one."""
    if name is None:
        cards = list_models()
        rows = [[card.name, str(card.card["purpose"])] for card in cards]
        value = [{"name": card.name, "sha256": card.weights_sha256, **card.card} for card in cards]
        answer(value, table(["name", "what it is for"], rows), as_json=options.as_json)
        return
    folder = Path(name) if (Path(name) / "config.json").is_file() else path_of(name)
    try:
        card: Any = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"'{folder}' has no readable card.json: {error}") from None
    if not isinstance(card, dict):
        raise StoreError(
            f"'{folder / 'card.json'}' must hold a JSON object, got {type(card).__name__}"
        )
    lines = [f"{key}: {_words(value)}" for key, value in card.items()]
    answer(card, "\n".join(lines), as_json=options.as_json)


@cli.command()
@click.argument("model", type=Model())
@click.option(
    "--sort",
    type=click.Choice(list(_SCORES)),
    default="induction",
    show_default=True,
    help="Score that decides the order.",
)
@click.option(
    "--length",
    type=int,
    metavar="N",
    help="Sequences of N tokens, up to the model's n_ctx: no n x n matrix is formed.",
)
@common
def heads(options: Options, model: str, sort: str, length: int | None) -> None:
    """Score every head of MODEL: what it attends to, beside what chance would give."""
    from headstream.analyses.studies.heads import heads as census_of
    from headstream.analyses.studies.heads import long_heads

    result = (
        census_of(_load(model), seed=options.seed)
        if length is None
        else long_heads(_load(model), length=length, seed=options.seed, progress=options.progress)
    )
    data = result.data
    order = sorted(
        ((int(layer), int(head)) for layer in data["layer"] for head in data["head"]),
        key=lambda at: -_sortable(data["value"].sel(score=sort, layer=at[0], head=at[1])),
    )
    rows = []
    for layer, head in order:
        cells = data.sel(layer=layer, head=head)
        scores = [_number(cells["value"].sel(score=score)) for score in _SCORES]
        rows.append([f"L{layer}H{head}", *scores, str(cells["label"].item())])
    chance = ["chance", *(_number(data["chance"].sel(score=score)) for score in _SCORES), ""]
    text = table(["head", *_SCORES.values(), "label"], [*rows, chance])
    note = (
        f"{result.details['n']} random sequences, seed {options.seed}; MEASURED: a pattern is not "
        "an effect"
    )
    notes = [note, *(result.details["notes"] if length is not None else [])]
    answer(result.to_json(), "\n".join([text, *notes]), as_json=options.as_json)


@cli.command()
@click.argument("model", type=Model())
@click.option(
    "-n",
    "n",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Sequences.",
)
@click.option(
    "--length",
    type=int,
    metavar="N",
    help="Random sequences of N tokens, in place of the prompts of the model's task.",
)
@click.option("-o", "--output", type=Output(), metavar="FILE", help="Also write an HTML report.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@common
def sinks(
    options: Options, model: str, n: int, length: int | None, output: str | None, force: bool
) -> None:
    """What rests on the first token in MODEL, and what the loss does when it is cut."""
    if output is not None:
        _require_writable(Path(output), force)
    from headstream.analyses.studies.sinks import sinks as study

    found = study(_load(model), n=n, length=length, seed=options.seed, progress=options.progress)
    words = ["headstream", "sinks", model, "--seed", str(options.seed), "-n", str(n)]
    words += [] if length is None else ["--length", str(length)]
    command = shlex.join([*words, "-o", "sinks.html"])
    result = replace(found, provenance=replace(found.provenance, command=command))
    data, details = result.data, result.details
    rows = []
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            at = data.sel(layer=layer, head=head)
            cells = [_number(at[name]) for name in ("sink_mass", "sink_rate", "value_drain")]
            rows.append([f"L{layer}H{head}", *cells, *_cuts(at, "effect")])
    rows.append(["all heads", "-", "-", "-", *_cuts(data, "together")])
    header = ["head", "mass", "rate", "drain", "dropped", "control", "redistr.", "control"]
    notes = [
        f"chance of the mass {details['chance']:.3f}; rate at eps = {details['eps']:g}, "
        f"T = {details['T']}; drain: norm of the first token's value over the others'",
        "dropped, redistr.: change of the loss in nats when that attention is cut and its weight "
        "lost, or spread over the row; control: cutting another key; * CAUSAL",
        *details["notes"],
        result.summary(),
    ]
    lines = [table(header, rows), *(textwrap.fill(printable(note), 80) for note in notes)]
    if output is not None:
        from headstream.reports.write import write_report

        lines.append(str(write_report([result], output)))
    answer(result.to_json(), "\n".join(lines), as_json=options.as_json)


@cli.command()
@click.argument("model", type=Model())
@common
def audit(options: Options, model: str) -> int:
    """Check on MODEL what algebra says of every decoder; exit 1 if a check fails."""
    from headstream.analyses.claims.ledger import audit as run_audit

    result = run_audit(_load(model), seed=options.seed)
    rows = []
    for row in result.details["rows"]:
        if not row["applies"]:
            rows.append([row["id"], "-", "-", f"does not apply: {row['reason']}"])
            continue
        label = "PROVEN" if row["passed"] else "FAILED"
        rows.append([row["id"], label, f"{row['largest_error']:.1e}", row["statement"]])
    text = table(["id", "label", "error", "statement"], rows)
    answer(result.to_json(), f"{text}\n{result.summary()}, in float64", as_json=options.as_json)
    return 1 if result.failed else 0


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
    help="Prompt pairs of a zoo task.",
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
def report(
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

    A TARGET that is a model (a zoo name or a folder) gets the standard study: audit, patching on
    the task it was trained for, head census, direct writes. A saved result (a .json file, or a
    folder of them) is rendered as it is, without the model.
    """
    if output == "-" and options.as_json:
        raise click.UsageError("-o - and --json both claim stdout; give one of them")
    if output != "-":
        _require_writable(Path(output), force)
    if results is not None:
        if not results:
            raise click.UsageError("the folder of --results is empty: name one")
        _require_room(Path(results))
    saved, fresh = _sort_targets(targets)
    if pairs is not None and not fresh:
        raise click.UsageError("--pairs needs a model among the targets, got saved results only")
    from headstream.analyses.result import load_result
    from headstream.reports.write import render_report, write_report

    found: list[Result] = [load_result(path) for path in saved]
    for name in fresh:
        found += _study(options, name, n_pairs, pairs)
    if results is not None:
        _save_all(found, Path(results))
    failed = any(claim.evidence == "FAILED" for result in found for claim in result.claims)
    if output == "-":
        click.echo(render_report(found, title=title), nl=False)
        return int(failed)
    path = write_report(found, output, title=title)
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()
    value = {
        "path": str(path),
        "bytes": len(body),
        "sha256": digest,
        "findings": [result.summary() for result in found],
        "failed": failed,
    }
    lines = [result.summary() for result in found if result.kind == "patching"][:1]
    lines.append(f"{path}  {len(body):,} bytes  sha256 {digest}")
    answer(value, "\n".join(lines), as_json=options.as_json)
    return int(failed)


@cli.command()
@click.argument("recipe")
@click.option(
    "-o",
    "--output",
    type=Output(),
    required=True,
    metavar="FOLDER",
    help="Where to save the model.",
)
@click.option("--overwrite", is_flag=True, help="Replace a model that is already there.")
@common
@click.pass_context
def train(
    context: click.Context, options: Options, recipe: str, output: str, overwrite: bool
) -> None:
    """Train a model of the zoo again, by its recipe, and save it to FOLDER."""
    target = Path(output)
    if not target.parent.is_dir():
        raise click.UsageError(f"folder '{target.parent}' does not exist")
    if target.exists() and not overwrite:
        raise click.UsageError(f"'{target}' exists; choose another folder, or --overwrite")
    _require_room(target.parent)
    from headstream.models.store import save
    from headstream.models.zoo.training import train as run

    given = context.get_parameter_source("seed") is not click.core.ParameterSource.DEFAULT
    model = run(recipe, seed=options.seed if given else None, progress=options.progress)
    save(model, target, overwrite=overwrite)
    card = model.card or {}
    loss = card.get("loss", {})
    answer(
        {"path": str(target), "card": card},
        f"{target}  sha256 {model.weights_sha256()}\nloss: {_words(loss)}",
        as_json=options.as_json,
    )


def _study(options: Options, name: str, n_pairs: int, pairs: str | None) -> list[Result]:
    from headstream.analyses.patching.task import Task
    from headstream.analyses.standard import standard_study

    model = _load(name)
    task = None
    if pairs is not None:
        # Without a wrong answer there is nothing to take a difference to.
        metric = "logit_difference" if _names_wrong(Path(pairs)) else "log_prob"
        task = Task.from_jsonl(pairs, model, metric=metric)
        if metric == "log_prob" and options.progress:
            click.echo("no pair names 'wrong': the metric is log_prob of the answer", err=True)
    words = ["headstream", "report", name, "--seed", str(options.seed), "-n", str(n_pairs)]
    if pairs is not None:
        words += ["--pairs", Path(pairs).name]
    return standard_study(
        model,
        task=task,
        n=n_pairs,
        seed=options.seed,
        progress=options.progress,
        command=shlex.join([*words, "-o", "report.html"]),
    )


def _names_wrong(pairs: Path) -> bool:
    """Whether any line gives `wrong`; lines that are damaged are left to who reads them."""
    try:
        lines = pairs.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return True
    for line in lines:
        try:
            pair = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(pair, dict) and "wrong" in pair:
            return True
    return False


def _load(name: str) -> Decoder:
    from headstream.models.store import load
    from headstream.models.threads import use_one_thread_if_small

    model = load(name)
    use_one_thread_if_small(model)
    return model


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


def _require_writable(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise click.UsageError(f"'{path}' exists; choose another name, or --force")
    if not path.parent.is_dir():
        raise click.UsageError(f"folder '{path.parent}' does not exist")
    if path.is_dir():
        raise click.UsageError(f"'{path}' is a folder; name a file")
    _require_room(path.parent)


def _require_room(folder: Path) -> None:
    """Raise StoreError, before anything is computed, unless files can be made in `folder`.

    Where it does not exist, in the nearest folder above it that does.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise StoreError(f"cannot write in '{folder}': {error.strerror or error}") from None


def _save_all(found: list[Result], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, result in enumerate(found):
        result.save(folder / f"{index:02}-{result.kind}.json")


def _number(value: Any) -> str:
    number = float(value)
    return "-" if number != number else f"{number:.3f}"


def _cuts(at: Any, variable: str) -> list[str]:
    """Effect and control of both cuts; a star where the effect is CAUSAL."""
    cells = []
    for cut in ("dropped", "redistributed"):
        cell = at.sel(cut=cut)
        star = "*" if bool(cell[f"{variable}_causal"]) else ""
        cells.append(f"{float(cell[variable]):+.3f}{star}")
        cells.append(f"{float(cell[f'{variable}_control']):+.3f}")
    return cells


def _sortable(value: Any) -> float:
    number = float(value)
    return -1.0 if number != number else number


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value)
