"""headstream circuits: what each head's weights read, move, and compose with."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

import click

from headstream.cli import Model, Options, cli, common
from headstream.commands.shared import load_model, number
from headstream.console import answer, printable, table


@cli.command()
@click.argument("model", type=Model())
@click.option("--head", metavar="L1H4", help="One head, taken apart; else a line a head.")
@click.option(
    "--distance",
    type=int,
    metavar="D",
    help="Rotary positions: keys D tokens back; else where each head looks most.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Token pairs listed of each circuit.",
)
@common
def circuits(
    options: Options, model: str, head: str | None, distance: int | None, top: int
) -> None:
    """What the heads of MODEL read (QK), move (OV) and compose with, by their weights."""
    place = None if head is None else _place(head)
    from headstream.analyses.studies.circuits import circuits as study

    loaded = load_model(model)
    if place is not None:
        from headstream.circuits.anatomy import head_anatomy

        found = head_anatomy(loaded, *place, distance=distance, top=top, seed=options.seed)
        answer(found.to_json(), printable_lines(str(found)), as_json=options.as_json)
        return
    result = study(loaded, distance=distance, top=top, seed=options.seed)
    rows = []
    for card in result.details["cards"]:
        layer, number_of_head = _place(card["head"])
        at = result.data.sel(layer=layer, head=number_of_head)
        back = float(at["distance"])
        through = [f"{name} {share:.0%}" for name, share in card["through"][:1]]
        rows.append(
            [
                card["head"],
                number(at["copying"]),
                f"{float(at['first']):.0%}",
                number(at["behaviour"]),
                "-" if back != back else f"{back:.0f}",
                *(through or ["-"]),
                " ".join(f"{t}:{e}" for t, e, later, _ in card["partners"] if later == card["head"])
                or "-",
            ]
        )
    header = ["head", "copying", "own first", "behaviour", "back", "matches through", "reads"]
    low, high = result.details["copying_random"]
    chance = _span(result.data["behaviour_chance"].values.flat)
    notes = [
        f"copying: eigenvalue score of OV (random heads {low:+z.2f} to {high:+z.2f}); own first: "
        f"tokens that raise themselves most (chance {result.details['first_chance']:.0%}); "
        "behaviour: the same asked of runs on random tokens, from -1 to 1 for a head that raises "
        f"nothing else (one that ignores its source {chance}); back: "
        "distance in tokens that its scores prefer; matches through: tokens whose best match in "
        "what that head wrote is the token itself; reads: earlier heads whose write it reads "
        "through Q, K or V above chance",
        result.details["compositions"],
        result.summary(),
        "MEASURED on weights and random tokens: what a head could do, not what it is for",
    ]
    lines = [table(header, rows), *(textwrap.fill(printable(note), 80) for note in notes)]
    answer(result.to_json(), "\n".join(lines), as_json=options.as_json)


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def _span(values: Iterable[float]) -> str:
    """The range of what is known, or one number where it rounds to one."""
    known = [value for value in values if value == value]
    if not known:
        return "unknown"
    low, high = f"{min(known):+z.2f}", f"{max(known):+z.2f}"
    return low if low == high else f"{low} to {high}"


def _place(name: str) -> tuple[int, int]:
    """(layer, head) of a name like L1H4."""
    match = re.fullmatch(r"[lL](\d+)[hH](\d+)", name)
    if match is None:
        raise click.UsageError(f"a head is named like L1H4 (layer 1, head 4), got '{name}'")
    return int(match[1]), int(match[2])
