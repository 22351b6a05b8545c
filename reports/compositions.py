"""Who reads whom: compositions of heads as a map and as the table behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headstream.reports import formats
from headstream.reports.blocks import Block, Figure, Fold, Prose
from headstream.reports.maps import Axis, heatmap, symmetric_limit
from headstream.reports.study import Item
from headstream.reports.tables import Cell, Column, Table, table

THROUGH = {"Q": "queries", "K": "keys", "V": "values"}
# Rows and columns of the map; of a larger model the strongest are kept.
_MOST = 24


class Pair(NamedTuple):
    """One composition: `later` reads what `earlier` writes, through its Q, K or V."""

    through: str
    earlier: str
    later: str
    score: float


@dataclass(frozen=True)
class Compositions:
    """The compositions that a result keeps, the strongest first, and what they are held against.

    Attributes:
        pairs: those kept.
        order: names of the heads, in the order of the model.
        chance: expected score of two random heads; NaN where nothing can be compared.
        bar: over which a score stands out; NaN likewise.
        compared, out: how many were scored, and how many of them stand out.
    """

    pairs: tuple[Pair, ...]
    order: Mapping[str, int]
    chance: float
    bar: float
    compared: int
    out: int

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> Compositions:
        """What a circuits result holds in its details."""
        held = details["composition"]
        return cls(
            pairs=tuple(Pair(str(t), str(e), str(r), float(s)) for t, e, r, s in details["pairs"]),
            order={str(card["head"]): i for i, card in enumerate(details["cards"])},
            chance=math.nan if held["chance"] is None else float(held["chance"]),
            bar=math.nan if held["bar"] is None else float(held["bar"]),
            compared=int(held["compared"]),
            out=int(held["out"]),
        )

    def stands_out(self, score: float) -> bool:
        return score > self.bar

    def standing_out(self) -> tuple[Pair, ...]:
        """Those above the bar, the strongest first."""
        return tuple(pair for pair in self.pairs if self.stands_out(pair.score))

    def read_by(self, name: str) -> tuple[tuple[str, str, float], ...]:
        """(through, earlier head, score) of what `name` reads beyond chance."""
        found = self.standing_out()
        return tuple((p.through, p.earlier, p.score) for p in found if p.later == name)

    def readers_of(self, name: str) -> tuple[tuple[str, str, float], ...]:
        """(through, later head, score) of those that read `name` beyond chance."""
        found = self.standing_out()
        return tuple((p.through, p.later, p.score) for p in found if p.earlier == name)


def composition_blocks(item: Item, compositions: Compositions) -> list[Block]:
    """The map with its numbers as a table, or why there is none."""
    if not compositions.pairs:
        return [
            Prose(
                "No head reads another here: the model has one layer, or the heads that could "
                "write for others are zero."
            )
        ]
    rows, columns = _axes(compositions)
    return [
        _map(item, compositions, rows, columns),
        Fold("The same numbers as a table", (_table(compositions, rows, columns),)),
    ]


def _axes(compositions: Compositions) -> tuple[list[tuple[str, str]], list[str]]:
    """(later head, through) of each row and the earlier head of each column, in model order.

    Of more than fit, those with the strongest compositions.
    """
    order, last = compositions.order, len(compositions.order)
    rows = list(dict.fromkeys((pair.later, pair.through) for pair in compositions.pairs))[:_MOST]
    kept = [pair for pair in compositions.pairs if (pair.later, pair.through) in set(rows)]
    columns = list(dict.fromkeys(pair.earlier for pair in kept))[:_MOST]
    paths = list(THROUGH)

    def place(row: tuple[str, str]) -> tuple[int, int]:
        return order.get(row[0], last), paths.index(row[1]) if row[1] in paths else len(paths)

    return sorted(rows, key=place), sorted(columns, key=lambda name: order.get(name, last))


def _map(
    item: Item,
    compositions: Compositions,
    rows: Sequence[tuple[str, str]],
    columns: Sequence[str],
) -> Figure:
    chance, bar = compositions.chance, compositions.bar
    known = {(pair.later, pair.through, pair.earlier): pair.score for pair in compositions.pairs}
    scores = [[known.get((*row, name), math.nan) for name in columns] for row in rows]
    excess = [[score - chance for score in row] for row in scores]
    # A score of 0 is on the scale too: noise about chance must not look like a finding.
    limit = max(chance, symmetric_limit([excess]))
    cells = [(r, c) for r in range(len(rows)) for c in range(len(columns))]
    drawn = [(r, c) for r, c in cells if math.isfinite(scores[r][c])]
    drawing = heatmap(
        excess,
        rows=Axis("", tuple(f"{later} {_path(through)}" for later, through in rows)),
        columns=Axis("earlier head, which writes", tuple(columns)),
        limit=limit,
        unit="over chance",
        hover=[
            [
                [
                    f"{later} reads {name} through its {_path(through)}",
                    f"score {formats.number(score)}, chance {formats.number(chance)}",
                    "stands out"
                    if compositions.stands_out(score)
                    else f"not above {formats.number(bar)}",
                ]
                for name, score in zip(columns, line, strict=True)
            ]
            for (later, through), line in zip(rows, scores, strict=True)
        ],
        texts=[
            [
                formats.short(value, sign=True)
                if len(columns) <= 20 and compositions.stands_out(score)
                else ""
                for value, score in zip(line, known_line, strict=True)
            ]
            for line, known_line in zip(excess, scores, strict=True)
        ],
        faint=[(r, c) for r, c in drawn if not compositions.stands_out(scores[r][c])],
    )
    strongest = compositions.pairs[0]
    said = (
        f"{compositions.out} of {compositions.compared} stand out; the strongest: "
        if compositions.out
        else f"None of {compositions.compared} stands out; the largest: "
    )
    missing = compositions.compared - len(drawn)
    none = "none of the strongest, or no pair" if missing else "no pair"
    return Figure(
        id=f"figure-{item.anchor}",
        name="Who reads whom",
        alt=f"{said}{strongest.later} reads {strongest.earlier} through its "
        f"{_path(strongest.through)}, {formats.number(strongest.score)}; chance is "
        f"{formats.number(chance)}.",
        caption="How much of what a later head (row) takes in through its queries, keys or values "
        f"comes from what an earlier one (column) writes: the composition score over chance, "
        f"{formats.number(chance)}, by weights alone. Stroke: not above {formats.number(bar)}, "
        f"which the largest of {compositions.compared} random pairs stays under in 95% of models. "
        + (f"Grey: {none}. " if len(drawn) < len(cells) else "")
        + (
            f"Not shown: {missing} of {compositions.compared}; the rows and columns with the "
            "strongest are."
            if missing
            else "Nothing is hidden."
        ),
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )


def _table(
    compositions: Compositions, rows: Sequence[tuple[str, str]], columns: Sequence[str]
) -> Table:
    known = {(pair.later, pair.through, pair.earlier): pair.score for pair in compositions.pairs}
    cells = [
        [
            Cell(later, code=True),
            Cell(_path(through)),
            *(_score_cell(compositions, known.get((later, through, name))) for name in columns),
        ]
        for later, through in rows
    ]
    caption = (
        f"Composition scores; chance {formats.number(compositions.chance)}, a score above "
        f"{formats.number(compositions.bar)} stands out"
    )
    heads = [Column(name, numeric=True) for name in columns]
    return table(caption, (Column("reader"), Column("through"), *heads), cells, sortable=False)


def _score_cell(compositions: Compositions, score: float | None) -> Cell:
    if score is None:
        return Cell("–")
    note = "stands out" if compositions.stands_out(score) else ""
    return Cell(formats.number(score), note=note, value=score)


def _path(through: str) -> str:
    return THROUGH.get(through, through)
