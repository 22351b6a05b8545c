"""The map of paths: receivers down, senders across, and the table with its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headstream.analyses.patching.result import Cell as Path
from headstream.reports import formats
from headstream.reports.blocks import Block, Figure, Fold
from headstream.reports.maps import Axis, heatmap, symmetric_limit
from headstream.reports.path_cells import LOGITS, Paths, arrows, row_label
from headstream.reports.study import Item
from headstream.reports.tables import Cell, Column, Table, number_cell, table

_MOST_ENDS = 24  # rows and columns of the map; of more the strongest are kept
_MOST_WRITTEN = 14  # cells of a wider map are too narrow for their number
_LONG_TABLE = 600  # a longer table shows effects alone


def map_blocks(item: Item, found: Paths) -> list[Block]:
    """Receivers down, senders across; the logits are in the table of totals."""
    size: dict[str, float] = {}
    for label, path in found.cells.items():
        sender, _, receiver = label.partition("->")
        if receiver != LOGITS:
            for end in (f"< {sender}", f"> {receiver}"):
                size[end] = max(size.get(end, 0.0), abs(path.mean))
    senders = _strongest(found.senders, "< ", size)
    receivers = _strongest(found.receivers, "> ", size)
    if len(senders) * len(receivers) < 2:
        return []
    return [
        _map(item, found, senders, receivers),
        Fold("The same numbers as a table", (_grid(item, found, senders, receivers),)),
    ]


def _strongest(ends: Sequence[str], which: str, size: Mapping[str, float]) -> list[str]:
    """Those with a path, in the order of the model; of too many those with the largest effects."""
    there = [end for end in ends if which + end in size]
    kept = set(sorted(there, key=lambda end: -size[which + end])[:_MOST_ENDS])
    return [end for end in there if end in kept]


def _map(item: Item, found: Paths, senders: Sequence[str], receivers: Sequence[str]) -> Figure:
    grid = [[found.at(sender, receiver) for sender in senders] for receiver in receivers]
    mean = [[math.nan if path is None else path.mean for path in row] for row in grid]
    limit = symmetric_limit([mean])
    written = len(senders) <= _MOST_WRITTEN
    drawn = [(r, c, path) for r, row in enumerate(grid) for c, path in enumerate(row) if path]
    drawing = heatmap(
        mean,
        rows=Axis("", tuple(row_label(receiver) for receiver in receivers)),
        columns=Axis("sender", tuple(senders)),
        limit=limit,
        unit=item.unit,
        hover=[[[] if path is None else _hover(item, path) for path in row] for row in grid],
        texts=[
            [
                formats.short(path.mean, sign=True)
                if path and written and path.mean and not found.struck(path)
                else ""
                for path in row
            ]
            for row in grid
        ],
        faint=[(r, c) for r, c, path in drawn if found.struck(path)],
        framed=[(r, c) for r, c, path in drawn if path.causal],
    )
    inner = [path for path in found.cells.values() if found.receiver[path.label] != LOGITS]
    top = max(inner, key=lambda path: abs(path.mean))
    faint = sum(found.struck(path) for path in inner)
    hidden = len(inner) - len(drawn)
    return Figure(
        id=f"figure-{item.anchor}",
        name=f"Map of paths: {item.name}",
        alt=(f"{formats.count(len(inner), 'path')} from one part to another: ".capitalize())
        + (
            f"the strongest is {top.label.replace('->', ' to ')}, "
            f"{formats.with_unit(top.mean, item.unit)}; {faint} "
            f"{'is' if faint == 1 else 'are'} not distinguishable from no effect."
            if top.mean
            else "every effect is zero."
        ),
        caption=f"Mean effect of handing what the sender (across) wrote to one receiver (down) "
        f"alone, {item.manner}, n = {item.n} prompt pairs, in {item.unit}; the scale runs from "
        f"−{formats.number(limit)} to +{formats.number(limit)}. Frame: CAUSAL. Stroke: "
        f"p > {found.alpha:g} by sign flips with the maximum over "
        + (
            "the one path that is not exactly zero. "
            if item.details["family"] == 1
            else f"all {item.details['family']} paths that are not exactly zero. "
        )
        + ("Grey: the sender comes later. " if len(drawn) < len(senders) * len(receivers) else "")
        + (
            f"Not shown: {hidden} of {len(inner)} paths; the ends with the largest effects are. "
            if hidden
            else ""
        )
        + (
            "Paths straight to the logits are in the table below."
            if LOGITS in found.receivers
            else "Nothing is hidden."
            if not hidden
            else ""
        ),
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )


def _hover(item: Item, path: Path) -> list[str]:
    lines = [
        arrows(path.label),
        f"effect {formats.number(path.mean, sign=True)} {item.unit} "
        f"{formats.interval(*path.interval, sign=True)}",
    ]
    if math.isfinite(path.normalized):
        lines.append(f"{formats.share(path.normalized)} of the gap")
    if math.isfinite(path.p_value):
        lines.append(f"p {formats.probability(path.p_value)} over all paths")
    return lines


def _grid(item: Item, found: Paths, senders: Sequence[str], receivers: Sequence[str]) -> Table:
    brief = len(senders) * len(receivers) > _LONG_TABLE
    rows = []
    for receiver in receivers:
        cells = [Cell(row_label(receiver))]
        for sender in senders:
            path = found.at(sender, receiver)
            if path is None:
                cells.append(Cell("–"))
            elif brief:
                cells.append(number_cell(path.mean, sign=True))
            else:
                low, high = path.interval
                cells.append(number_cell(path.mean, low=low, high=high, sign=True))
        rows.append(cells)
    columns = [Column("receiver"), *(Column(f"from {name}", numeric=True) for name in senders)]
    return table(
        f"Effects of paths in {item.unit}" + ("" if brief else ", with 95% intervals"),
        columns,
        rows,
        sortable=False,
    )
