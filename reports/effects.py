"""Effect maps: what moved when one place was patched, as a map, a sentence and a table."""

from __future__ import annotations

import json
import math

from headstream.reports import formats
from headstream.reports.blocks import Block, Figure, Fold, Heading, Prose, Section
from headstream.reports.cells import Cells
from headstream.reports.maps import heatmap, symmetric_limit
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, exact, number_cell, table

_FULL_TABLE = 12  # a table this short needs no shorter one above it
_LONG_TABLE = 600  # more rows than this are shown as a grid of effects alone
_TEXT_COLUMNS = 14  # cells of a wider map are too narrow for their number


def effects(study: Study) -> Section | None:
    """One map a patching result, all of one metric on one scale; None without any."""
    items = study.of_kind("patching")
    if not items:
        return None
    grids = {item.anchor: Cells.of(item) for item in items}
    blocks: list[Block] = []
    for number, item in enumerate(items, 1):
        same = [other for other in items if _metric(other) == _metric(item)]
        limit = symmetric_limit([grids[other.anchor].mean.tolist() for other in same])
        title = f"Map {number}: {item.name}" if len(items) > 1 else formats.sentence(item.name)[:-1]
        blocks.append(Heading(title, item.anchor))
        blocks += _map(item, grids[item.anchor], limit, panels=len(same))
    return Section(
        "effects",
        "Where a change moves the answer",
        "Each cell is one place inside the model. The value there is swapped between the clean "
        "and the corrupted run, and the cell shows how far the metric moves: red towards the clean "
        "answer, blue away from it, no colour for no effect. A thick frame marks a place that "
        "carries the label CAUSAL; a thin stroke marks a cell that cannot be told from chance.",
        tuple(blocks),
    )


def _metric(item: Item) -> str:
    metric = item.details["metric"]
    return json.dumps([metric["name"], metric["unit"]])


def _map(item: Item, cells: Cells, limit: float, *, panels: int) -> list[Block]:
    faint = cells.indistinct()
    written = len(cells.columns.labels) <= _TEXT_COLUMNS
    struck = set(faint)
    texts = [
        [
            formats.short(cells.mean[r, c], sign=True)
            if written and (r, c) not in struck and cells.mean[r, c] != 0
            else ""
            for c in range(len(cells.columns.labels))
        ]
        for r in range(len(cells.rows.labels))
    ]
    framed = [(r, c) for r, c in cells.indices() if cells.causal[r, c]]
    drawing = heatmap(
        cells.mean.tolist(),
        rows=cells.rows,
        columns=cells.columns,
        limit=limit,
        unit=cells.unit,
        hover=[
            [cells.hover(r, c) for c in range(len(cells.columns.labels))]
            for r in range(len(cells.rows.labels))
        ],
        texts=[["" if text == "–" else text for text in row] for row in texts],
        faint=faint,
        framed=framed,
    )
    figure = Figure(
        id=f"figure-{item.anchor}",
        name=f"Map of effects: {item.name}",
        alt=_alt(cells),
        caption=_caption(item, cells, limit, panels=panels, written=written),
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )
    warned = [Prose(formats.sentence(str(text))) for text in item.details.get("warnings") or []]
    return [Prose(formats.summary(item.result.summary())), *warned, figure, *_tables(item, cells)]


def _alt(cells: Cells) -> str:
    """The map in one sentence, made from its data."""
    ranked = cells.ranked()
    if not ranked:
        return "No cell of this map was computed."
    top, bottom = ranked[0], ranked[-1]
    ends = [
        f"largest {formats.with_unit(float(cells.mean[top]), cells.unit)} at "
        f"{cells.names[top[0]][top[1]]}",
        f"lowest {formats.with_unit(float(cells.mean[bottom]), cells.unit)} at "
        f"{cells.names[bottom[0]][bottom[1]]}",
    ]
    if not any(cells.mean[at] for at in ranked):
        ends = ["every effect is zero"]
    elif len(ranked) == 1:
        ends = ends[:1]
    parts = list(ends)
    tested = cells.tested()
    if len(tested) == 1:
        parts.append(
            f"the one tested cell {'not ' if cells.indistinct() else ''}distinguishable from no "
            "effect"
        )
    elif tested:
        faint = len(cells.indistinct())
        parts.append(
            f"{faint} of {len(tested)} tested cells not distinguishable from no effect"
            if faint
            else f"{_all(len(tested))} tested cells distinguishable from no effect"
        )
    else:
        parts.append("no cell was tested")
    rows, columns = len(cells.rows.labels), len(cells.columns.labels)
    grid = f"{rows} by {columns} cells" if rows * columns > 1 else "one cell"
    return formats.sentence(f"{grid}: " + "; ".join(parts))


def _all(many: int) -> str:
    return "both" if many == 2 else f"all {many}"


def _caption(item: Item, cells: Cells, limit: float, *, panels: int, written: bool) -> str:
    """Direction, n, unit, scale, test, and what is hidden."""
    sentences = [
        f"{item.manner}: mean effect over {formats.count(cells.n or 0, 'prompt pair')} "
        f"(n = {cells.n}) in {cells.unit}",
        f"The scale runs from −{formats.number(limit)} to +{formats.number(limit)}"
        + (f", the same for all {panels} maps of this metric" if panels > 1 else ""),
    ]
    family = item.details.get("family")
    if cells.tested():
        sentences.append(
            f"Stroke: p > {cells.alpha:g} by sign flips with the maximum over "
            + (
                "the one cell that is not exactly zero"
                if family == 1
                else f"all {family} cells that are not exactly zero"
            )
        )
    elif bool((cells.mean == 0).all()):
        sentences.append("No cell was tested: every effect is zero")
    else:
        sentences.append("No cell was tested: that takes at least six pairs")
    random = item.details.get("random_site_95")
    if isinstance(random, (int, float)) and random != 0:
        sentences.append(
            f"95% of places outside the claimed ones move the metric by less than "
            f"{formats.number(abs(random))} {cells.unit}"
        )
    hidden = _hidden(item, cells)
    if not written:
        hidden.append("cells are too many to carry their numbers, which are in the table")
    if cells.columns.tokens or cells.rows.tokens:
        sentences.append(
            "Positions are labelled with the tokens of the first clean prompt; other pairs have "
            "other tokens there"
        )
    sentences.append("Not shown: " + "; ".join(hidden) if hidden else "Nothing is hidden")
    return " ".join(formats.sentence(text) for text in sentences)


def _hidden(item: Item, cells: Cells) -> list[str]:
    hidden = []
    empty = cells.size - len(cells.computed())
    if empty:
        one = "is one cell" if empty == 1 else f"are {empty} cells"
        hidden.append(f"grey {one} that could not be computed")
    n_layers = item.result.provenance.config.get("n_layers")
    layers = item.result.data["mean"].coords.get("layer")
    if isinstance(n_layers, int) and layers is not None and layers.size < n_layers:
        hidden.append(f"{n_layers - layers.size} of {n_layers} layers were not patched")
    n_heads = item.result.provenance.config.get("n_heads")
    heads = item.result.data["mean"].coords.get("head")
    if isinstance(n_heads, int) and heads is not None and heads.size < n_heads:
        hidden.append(f"{n_heads - heads.size} of {n_heads} heads of a layer were not patched")
    for axis in (cells.rows, cells.columns):
        if axis.step > 1:
            hidden.append(f"only every {axis.step}th label of the axis '{axis.title}' is drawn")
    return hidden


def _tables(item: Item, cells: Cells) -> list[Block]:
    everything = cells.ranked()
    if len(everything) <= _FULL_TABLE:
        return [_cell_table(item, cells, everything, f"All effects: {item.name}")]
    top = [cell for cell in cells.ranked(_FULL_TABLE) if cells.mean[cell] != 0]
    top = top or cells.ranked(_FULL_TABLE)
    blocks: list[Block] = [
        _cell_table(item, cells, top, f"The {len(top)} effects furthest from zero: {item.name}")
    ]
    if len(everything) <= _LONG_TABLE:
        whole = _cell_table(item, cells, everything, f"All effects: {item.name}")
        blocks.append(Fold(f"The map as a table: all {len(everything)} cells", (whole,)))
    else:
        summary = f"The map as a table: all {len(everything)} cells"
        note = Prose("Mean effects only; intervals and p-values of all cells are in the JSON.")
        blocks.append(Fold(summary, (note, _grid_table(item, cells))))
    return blocks


def _cell_table(item: Item, cells: Cells, chosen: list[tuple[int, int]], caption: str) -> Table:
    second = any(math.isfinite(value) for value in cells.second.ravel().tolist())
    varying = len({int(count) for count in cells.counts.ravel().tolist()}) > 1
    refused = bool(item.details.get("normalized_refused"))
    columns = [
        Column("place"),
        Column("effect", f"{cells.unit}, 95% interval", numeric=True),
        *([] if refused else [Column("share of the gap", "95% interval", numeric=True)]),
        *([Column(f"effect on {_second_name(item)}", numeric=True)] if second else []),
        Column("p over the grid", "q", numeric=True),
        Column("unrelated prompt", cells.unit, numeric=True),
        *([Column("n", numeric=True)] if varying else []),
        Column("evidence"),
    ]
    rows = []
    for r, c in chosen:
        label = cells.label(r, c)
        share = Cell(
            formats.share(cells.normalized[r, c]),
            note=_share_interval(cells, r, c),
            value=exact(cells.normalized[r, c]),
        )
        rows.append(
            [
                Cell(cells.names[r][c], code=True),
                number_cell(
                    cells.mean[r, c], low=cells.low[r, c], high=cells.high[r, c], sign=True
                ),
                *([] if refused else [share]),
                *([number_cell(cells.second[r, c], sign=True)] if second else []),
                _probability(cells.p_value[r, c], cells.q_value[r, c]),
                number_cell(cells.unrelated[r, c], sign=True),
                *([Cell(str(cells.counts[r, c]))] if varying else []),
                Cell("no claim") if label is None else Cell(evidence=label),
            ]
        )
    return table(caption, columns, rows)


def _grid_table(item: Item, cells: Cells) -> Table:
    columns = [Column(cells.rows.title)] + [
        Column(text, numeric=True) for text in cells.columns.labels
    ]
    rows = [
        [
            Cell(cells.rows.labels[r], code=True),
            *(number_cell(cells.mean[r, c], sign=True) for c in range(len(cells.columns.labels))),
        ]
        for r in range(len(cells.rows.labels))
    ]
    return table(f"Mean effects in {cells.unit}: {item.name}", columns, rows, sortable=False)


def _second_name(item: Item) -> str:
    second = item.details.get("second_metric") or {}
    return str(second.get("name", "the second metric")) if isinstance(second, dict) else str(second)


def _share_interval(cells: Cells, r: int, c: int) -> str:
    low, high = cells.normalized_low[r, c], cells.normalized_high[r, c]
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"[{formats.share(low)}, {formats.share(high)}]"


def _probability(p: float, q: float) -> Cell:
    note = f"q {formats.probability(q)}" if math.isfinite(q) else ""
    return Cell(formats.probability(p), note=note, value=exact(p))
