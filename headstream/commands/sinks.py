"""headstream sinks: what rests on the first token, and what cutting it does."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from headstream.cli import Model, Options, Output, cli, common
from headstream.commands.shared import (
    answer_and_write,
    load_model,
    number,
    require_writable,
    signed,
)
from headstream.console import printable, table


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
        require_writable(Path(output), force)
    from headstream.analyses.studies.sinks import sinks as study

    found = study(
        load_model(model), n=n, length=length, seed=options.seed, progress=options.progress
    )
    words = ["headstream", "sinks", model, "--seed", str(options.seed), "-n", str(n)]
    words += [] if length is None else ["--length", str(length)]
    command = shlex.join([*words, "-o", "sinks.html"])
    result = replace(found, provenance=replace(found.provenance, command=command))
    data, details = result.data, result.details
    rows = []
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            at = data.sel(layer=layer, head=head)
            cells = [number(at[name]) for name in ("sink_mass", "sink_rate", "value_drain")]
            rows.append([f"L{layer}H{head}", *cells, *_cuts(at, "effect")])
    if len(rows) > 1:
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

    def write() -> str:
        from headstream.reports.write import write_report

        return str(write_report([result], str(output)))

    answer_and_write(options, result.to_json(), "\n".join(lines), output, write)


def _cuts(at: Any, variable: str) -> list[str]:
    """Effect and control of both cuts; a star where the effect is CAUSAL."""
    cells = []
    for cut in ("dropped", "redistributed"):
        cell = at.sel(cut=cut)
        star = "*" if bool(cell[f"{variable}_causal"]) else ""
        cells.append(f"{signed(cell[variable])}{star}")
        cells.append(signed(cell[f"{variable}_control"]))
    return cells
