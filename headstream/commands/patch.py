"""headstream patch: one causal sweep, long ones over many processes and across interruptions."""

from __future__ import annotations

import re
import shlex
import textwrap
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.cli import Model, Options, Output, cli, common
from headstream.commands.shared import (
    load_model,
    number,
    read_pairs,
    require_room,
    require_writable,
)
from headstream.console import answer, complain, printable, table

if TYPE_CHECKING:
    from headstream.analyses.patching.result import PatchingResult
    from headstream.analyses.patching.sweep_plan import SweepPlan
    from headstream.analyses.patching.sweeps.cost import SweepCost
    from headstream.analyses.patching.task import Task
    from headstream.models.decoder import Decoder

# What the analyses know by these names; a test compares them, since importing them loads torch.
SITES = (
    *("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"),
    *("z", "q", "k", "v", "pattern", "mlp_post"),
)
METRICS = ("logit_difference", "log_prob", "prob", "kl", "loss")
DIRECTIONS = ("denoise", "noise")
VALUES = ("pair", "zero", "mean", "resample")
ENGINES = ("suffix", "hooks")
# Rows of the table that is printed; the result holds all.
_ROWS = 12


class Numbers(click.ParamType[list[int]]):
    """`0,2,5-7`, negative ones by themselves: `-1,-2`."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> list[int]:
        found: list[int] = []
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(-?\d{1,9})(?:-(\d{1,9}))?\s*", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last or last - first > 10**6:
                self.fail(f"expected numbers like 0,2,5-7, got '{value}'", param, context)
            found += range(first, last + 1)
        return found


class Positions(Numbers):
    """A word, or numbers."""

    name = "positions"
    words = ("all", "each", "roles", "edges")

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> str | list[int]:
        if str(value) in self.words:
            return str(value)
        if str(value).strip()[:1].isalpha() or not str(value).strip():
            self.fail(
                f"expected {', '.join(self.words)} or numbers like 0,-1, got '{value}'",
                param,
                context,
            )
        return super().convert(value, param, context)


@cli.command()
@click.argument("model", type=Model())
@click.option(
    "--pairs",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE.jsonl",
    help='Your own pairs: lines of {"clean", "corrupted", "answer", "wrong"}; else the zoo task.',
)
@click.option(
    "-n",
    "n",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Prompt pairs of a zoo task.",
)
@click.option("--metric", type=click.Choice(METRICS), help="What a patch is measured by.")
@click.option(
    "--site",
    type=click.Choice(SITES),
    default="z",
    show_default=True,
    help="The kind of activation that is patched.",
)
@click.option(
    "--positions",
    type=Positions(),
    metavar="WHERE",
    help="all, each, roles, edges (of the pattern), or numbers; else each for the stream, all for "
    "heads.",
)
@click.option("--direction", type=click.Choice(DIRECTIONS), default="denoise", show_default=True)
@click.option("--values", type=click.Choice(VALUES), default="pair", show_default=True)
@click.option("--layers", type=Numbers(), metavar="0,2,5-7", help="Only these.")
@click.option("--heads", type=Numbers(), metavar="0,2,5-7", help="Only these (or neurons).")
@click.option("--engine", type=click.Choice(ENGINES), default="suffix", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="Processes, of one thread each.")
@click.option(
    "--resume",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Keep finished blocks there; the same command goes on from them.",
)
@click.option(
    "-o", "--output", type=Output(), metavar="FILE", help="Save the result: .json, or .html."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what it would cost, and stop.")
@common
def patch(
    options: Options,
    model: str,
    pairs: str | None,
    n: int,
    metric: str | None,
    workers: int | None,
    resume: str | None,
    output: str | None,
    force: bool,
    dry_run: bool,
    **sweep: Any,
) -> int:
    """Patch one kind of site of MODEL, cell by cell, and say what that does to the answer.

    Long sweeps: --dry-run says what it would cost, --workers spreads it over processes, --resume
    keeps what is finished through a kill, a crash or Ctrl-C.
    """
    if output is not None:
        if Path(output).suffix not in (".json", ".html"):
            raise click.UsageError(f"'{output}' must end in .json or .html")
        require_writable(Path(output), force)
    if resume is not None:
        if not resume:
            raise click.UsageError("the folder of --resume is empty: name one")
        require_room(Path(resume))
    from headstream.analyses.patching.patch import planned
    from headstream.analyses.patching.task import Task

    loaded = load_model(model)
    if pairs is not None:
        task = read_pairs(pairs, loaded, options, metric)
    else:
        task = Task.for_model(loaded, n, options.seed)
        if metric is not None:
            task = _measured_by(task, metric)
    if dry_run:
        plan = planned(loaded, task, **sweep, seed=options.seed)
        return _dry_run(options, loaded, plan, sweep["engine"], workers, resume)
    try:
        result = _run(options, loaded, task, sweep, workers, resume)
    except KeyboardInterrupt as stopped:
        kept = "; ".join(getattr(stopped, "__notes__", ["nothing was finished"]))
        complain(f"stopped; {kept}", "", "Interrupted", as_json=options.as_json)
        return 130
    command = _command(options, model, pairs, n, metric, sweep)
    result = replace(result, provenance=replace(result.provenance, command=command))
    lines = [*_table(result), textwrap.fill(printable(result.summary()), 80)]
    if output is not None:
        lines.append(_write(result, output))
    answer(result.to_json(), "\n".join(lines), as_json=options.as_json)
    return 0


def _measured_by(task: Task, metric: str) -> Task:
    from headstream.analyses.patching.task import Task

    return Task(
        task.clean,
        task.corrupted,
        task.answer,
        task.wrong,
        metric=metric,
        attention_mask=task.attention_mask,
        answer_pos=task.answer_pos,
        roles=task.roles,
    )


def _run(
    options: Options,
    model: Decoder,
    task: Task,
    sweep: dict[str, Any],
    workers: int | None,
    resume: str | None,
) -> PatchingResult:
    from headstream.analyses.patching.patch import patch as run
    from headstream.analyses.patching.sweeps.workers import local_pool

    with nullcontext() if workers is None else local_pool(workers) as pool:
        return run(
            model,
            task,
            **sweep,
            seed=options.seed,
            executor=pool,
            resume=resume,
            progress=options.progress,
        )


def _table(result: PatchingResult) -> list[str]:
    """The sites of the largest effects, from most towards the other run to most against it."""
    from headstream.analyses.patching.result import ranked_cells

    cells = ranked_cells(result.data)
    shown = sorted(cells, key=lambda cell: -abs(cell.mean))[:_ROWS]
    rows = [
        [
            cell.label,
            f"{cell.mean:+.3f}",
            f"{cell.interval[0]:+.3f}",
            f"{cell.interval[1]:+.3f}",
            number(cell.normalized),
            f"{cell.p_value:.4f}" if cell.p_value == cell.p_value else "-",
            f"{cell.unrelated:+.3f}",
            "CAUSAL" if cell.causal else "",
        ]
        for cell in cells
        if cell in shown
    ]
    unit = result.details["metric"]["unit"]
    header = ["site", unit, "low", "high", "of gap", "p", "unrelated", ""]
    hidden = len(cells) - len(rows)
    rest = [f"{hidden:,} more have smaller effects"] if hidden else []
    return [table(header, rows), *rest]


def _write(result: PatchingResult, output: str) -> str:
    if output.endswith(".json"):
        path = result.save(output)
        page = Path(output).with_suffix(".html")
        return f"{path}; next: headstream report {shlex.quote(output)} -o {shlex.quote(str(page))}"
    from headstream.reports.write import write_report

    return str(write_report([result], output))


def _command(
    options: Options,
    model: str,
    pairs: str | None,
    n: int,
    metric: str | None,
    sweep: dict[str, Any],
) -> str:
    """What decides the numbers, as one would type it."""
    words = ["headstream", "patch", model, "--seed", str(options.seed)]
    words += ["-n", str(n)] if pairs is None else ["--pairs", Path(pairs).name]
    for name, value in {"metric": metric, **sweep}.items():
        if isinstance(value, list):
            value = ",".join(map(str, value))
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


def _dry_run(
    options: Options,
    model: Decoder,
    plan: SweepPlan,
    engine: str,
    workers: int | None,
    resume: str | None,
) -> int:
    from headstream.analyses.patching.sweeps.cost import sweep_cost
    from headstream.analyses.patching.sweeps.sweep import finished_blocks

    done = 0 if resume is None else finished_blocks(resume, model, plan, engine, workers)
    cost = sweep_cost(model, plan, engine, threads=None if workers is None else 1)
    left = cost.block_seconds * (cost.blocks - done) / (workers or 1)
    value = asdict(cost) | {
        "forward_equivalents": cost.forward_equivalents,
        "workers": workers,
        "finished": done,
        "seconds_left": left,
    }
    text = "\n".join(_cost_lines(cost, plan, engine, workers, resume, done, left))
    answer(value, text, as_json=options.as_json)
    return 0


def _cost_lines(
    cost: SweepCost,
    plan: SweepPlan,
    engine: str,
    workers: int | None,
    resume: str | None,
    done: int,
    left: float,
) -> list[str]:
    rows = [
        ("cells", f"{cost.cells:,} of {plan.site}, {len(plan.task)} pairs of prompts"),
        ("passes", f"{cost.passes}: the effects and their controls"),
        ("blocks", f"{cost.blocks:,}" + (f", {done:,} finished in '{resume}'" if resume else "")),
        ("forwards", f"{cost.forwards:,} passes of all pairs, were every cell run whole"),
        (
            "costs",
            f"as much as {cost.forward_equivalents:,.0f} passes with engine {engine}",
        ),
        (
            "time",
            f"about {_duration(left)}"
            + ("" if workers is None else f" on {workers} workers, beside their start")
            + f" ({cost.block_seconds:.2g} s a block, mean of {cost.tried} tried)",
        ),
    ]
    if cost.peak_bytes is not None:
        memory = f"about {cost.peak_bytes / 1e6:,.0f} MB a process"
        processes = "" if workers is None else f", {workers + 1} processes"
        rows.append(("memory", memory + processes))
    return [f"{name:<10}{printable(words)}" for name, words in rows]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} minutes" if seconds < 7200 else f"{seconds / 3600:.3g} hours"
