"""headstream heads: the census of a model as a table."""

from __future__ import annotations

from typing import Any

import click

from headstream.cli import Model, Options, cli, common
from headstream.commands.shared import load_model, number
from headstream.console import answer, table

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
        census_of(load_model(model), seed=options.seed)
        if length is None
        else long_heads(
            load_model(model), length=length, seed=options.seed, progress=options.progress
        )
    )
    data = result.data
    order = sorted(
        ((int(layer), int(head)) for layer in data["layer"] for head in data["head"]),
        key=lambda at: -_sortable(data["value"].sel(score=sort, layer=at[0], head=at[1])),
    )
    rows = []
    for layer, head in order:
        cells = data.sel(layer=layer, head=head)
        scores = [number(cells["value"].sel(score=score)) for score in _SCORES]
        rows.append([f"L{layer}H{head}", *scores, str(cells["label"].item())])
    chance = ["chance", *(number(data["chance"].sel(score=score)) for score in _SCORES), ""]
    text = table(["head", *_SCORES.values(), "label"], [*rows, chance])
    note = (
        f"{result.details['n']} random sequences, seed {options.seed}; MEASURED: a pattern is not "
        "an effect"
    )
    notes = [note, *(result.details["notes"] if length is not None else [])]
    answer(result.to_json(), "\n".join([text, *notes]), as_json=options.as_json)


def _sortable(value: Any) -> float:
    number = float(value)
    return -1.0 if number != number else number
