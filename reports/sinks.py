"""Attention sinks: what rests on the first token, what it gets there, what moves when it is cut."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

from headstream.analyses.evidence import Evidence
from headstream.models.names import head_name
from headstream.reports import formats
from headstream.reports.blocks import (
    Block,
    Bullets,
    Figure,
    Fold,
    Heading,
    Prose,
    Section,
    Term,
    Terms,
)
from headstream.reports.charts import Line, lines
from headstream.reports.maps import Axis, heatmap
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, number_cell, table

_MOST_LINES = 4
_MOST_ROWS = 24
_ALONE = (
    "One head at a time.",
    "Heads that can stand in for each other may each show nothing; the last row of the table "
    "cuts all of them together. Sets in between were not tried.",
)
_LIMITS = (
    (
        "Where, not why.",
        "Mass on the first token is where a head looks on these inputs. What it is for is said by "
        "the cuts alone, and only as far as the loss on these inputs goes.",
    ),
    _ALONE,
    (
        "A cut is no training.",
        "A model that had been trained without a sink could do well; this one is asked to do "
        "without it at once.",
    ),
)


def sinks(study: Study) -> Section | None:
    """A map, a table and the mass by position of every sink study; None without any."""
    items = study.of_kind("sinks")
    if not items:
        return None
    blocks: list[Block] = []
    for number, item in enumerate(items, 1):
        several = f"Study {number}: " if len(items) > 1 else ""
        blocks.append(Heading(f"{several}{item.result.title}", item.anchor))
        blocks += _one(item)
    many = any(item.result.data["sink_mass"].size > 1 for item in items)
    blocks.append(Bullets(tuple(limit for limit in _LIMITS if many or limit is not _ALONE)))
    return Section(
        "sinks",
        "What rests on the first token",
        "Attention must go somewhere: a head that finds nothing to read often rests on the first "
        "token, the sink. The map says how much of each head's attention does. The drain says "
        "what it gets there: 0 is nothing, 1 as much as from any other token. Then the head is "
        "cut off from that token. If dropping the weight changes nothing, it was a place to rest; "
        "if the loss moves when the weight is redistributed over other tokens, the rest was "
        "needed. The control cuts as many edges to other tokens.",
        tuple(blocks),
    )


def _one(item: Item) -> list[Block]:
    whole = _table(item)
    definitions = item.details.get("definitions") or {}
    terms = tuple(
        Term(str(name).replace("_", " "), str(text)) for name, text in definitions.items()
    )
    return [
        Prose(formats.summary(item.result.summary())),
        _map(item),
        whole
        if whole.n_rows <= _MOST_ROWS
        else Fold(f"All {whole.n_rows - 1} heads as a table", (whole,)),
        *(Prose(formats.summary(str(note))) for note in item.details.get("notes") or []),
        _stream(item),
        *_by_position(item),
        Fold("What each number measures", (Terms(terms),)),
    ]


def _map(item: Item) -> Figure:
    data = item.result.data
    mass, low, high = (
        np.asarray(data[name].transpose("layer", "head").values, dtype=np.float64)
        for name in ("sink_mass", "sink_mass_low", "sink_mass_high")
    )
    causal = data["effect_causal"].any("cut").transpose("layer", "head").values
    n_layers, n_heads = mass.shape
    chance = float(item.details["chance"])
    faint = {(i, j) for i, j in np.ndindex(mass.shape) if not low[i, j] > chance + 0.005}
    drawing = heatmap(
        mass.tolist(),
        rows=Axis("layer", tuple(map(str, range(n_layers)))),
        columns=Axis("head", tuple(map(str, range(n_heads)))),
        limit=1.0,
        unit="of the attention",
        hover=[
            [
                [
                    head_name(layer, head),
                    f"mass {formats.short(mass[layer, head])} "
                    + formats.interval(low[layer, head], high[layer, head]),
                    f"chance {formats.short(chance)}",
                ]
                for head in range(n_heads)
            ]
            for layer in range(n_layers)
        ],
        texts=[
            [
                formats.short(value) if n_heads <= 20 and (i, j) not in faint else ""
                for j, value in enumerate(row)
            ]
            for i, row in enumerate(mass)
        ],
        faint=sorted(faint),
        framed=[(i, j) for i, j in np.ndindex(mass.shape) if causal[i, j]],
    )
    top = np.unravel_index(int(np.nanargmax(mass)), mass.shape)
    return Figure(
        id=f"figure-{item.anchor}",
        name="Attention on the first token",
        alt=f"The largest mass on the first token is {formats.short(mass[top])}, of "
        f"{head_name(int(top[0]), int(top[1]))}; chance is {formats.short(chance)}.",
        caption=f"Mean attention of later queries to the first token, n = {item.details['n']} "
        f"sequences. Frame: cutting it moves the loss (CAUSAL). Stroke: the interval reaches down "
        f"to chance. {_rate_in_words(item)} at eps = {item.details['eps']:g}, "
        f"T = {item.details['T']}.",
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )


def _rate_in_words(item: Item) -> str:
    rate = item.details["rate"]
    if rate is None:
        return "No sink rate (see the notes)"
    return f"Sink rate of all heads: {float(rate):.1f}%"


def _table(item: Item) -> Table:
    data, details = item.result.data, item.details
    n, cuts = details["n"], [str(cut) for cut in data["cut"].values.tolist()]
    columns = (
        Column("head"),
        Column("mass", f"chance {formats.short(details['chance'])}", numeric=True),
        Column(
            "rate",
            f"eps\u00a0=\u00a0{details['eps']:g}, T\u00a0=\u00a0{details['T']}",
            numeric=True,
        ),
        Column("drain", "value; as written", numeric=True),
        *(
            column
            for cut in cuts
            for column in (
                Column(f"cut, {cut}", "nats, 95% interval", numeric=True),
                Column("evidence", f"of “{cut}”"),
            )
        ),
    )
    rows = []
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            at = data.sel(layer=layer, head=head)
            drain, written = float(at["value_drain"]), float(at["written_drain"])
            low, high = float(at["sink_mass_low"]), float(at["sink_mass_high"])
            rate = float(at["sink_rate"])
            rows.append(
                [
                    Cell(head_name(layer, head), code=True),
                    number_cell(float(at["sink_mass"]), low=low, high=high),
                    Cell(formats.share(rate), value=rate if math.isfinite(rate) else None),
                    Cell(
                        formats.short(drain),
                        note=formats.short(written),
                        value=drain if math.isfinite(drain) else None,
                    ),
                    *(cell for cut in cuts for cell in _cut_cells(at.sel(cut=cut), "effect")),
                ]
            )
    # A single head is all heads.
    if len(rows) > 1:
        rows.append(
            [
                Cell("all heads"),
                *(Cell("–") for _ in range(3)),
                *(cell for cut in cuts for cell in _cut_cells(data.sel(cut=cut), "together")),
            ]
        )
    caption = f"The first token, head by head, and the change of the loss when it is cut (n = {n})"
    return table(caption, columns, rows, sortable=False)


def _cut_cells(at: xr.Dataset, variable: str) -> list[Cell]:
    mean, low, high, p, control = (
        float(at[f"{variable}{end}"]) for end in ("", "_low", "_high", "_p", "_control")
    )
    causal = bool(at[f"{variable}_causal"])
    tested = f"p\u00a0{formats.probability(p)}" if math.isfinite(p) else "not tested"
    note = f"{tested}, control\u00a0{formats.number(control, sign=True)}"
    return [
        number_cell(mean, low=low, high=high, sign=True),
        Cell(evidence=Evidence.CAUSAL, note=note) if causal else Cell("not shown", note=note),
    ]


def _stream(item: Item) -> Terms:
    peaks = [float(value) for value in item.result.data["peak"].values.tolist()]
    words = ", ".join(f"layer {layer}: {formats.short(p)}" for layer, p in enumerate(peaks))
    return Terms((Term("Norm of the stream at the first token, over the others'", words),))


def _which(shown: int, of: int) -> str:
    if of == 1:
        return "The only head"
    if shown == of:
        return f"All {of} heads"
    return f"The {shown} heads with the largest mass"


def _by_position(item: Item) -> list[Block]:
    data = item.result.data
    mass = data["sink_mass"].transpose("layer", "head").values
    order = [np.unravel_index(i, mass.shape) for i in np.argsort(-mass, axis=None, kind="stable")]
    chosen = [(int(layer), int(head)) for layer, head in order[:_MOST_LINES]]
    positions = tuple(float(p) for p in data["position"].values.tolist()[1:])
    items = [
        Line(
            head_name(layer, head),
            positions,
            tuple(data["mass_by_position"].sel(layer=layer, head=head).values.tolist()[1:]),
            series,
        )
        for series, (layer, head) in enumerate(chosen)
    ]
    chance = tuple(data["chance_by_position"].values.tolist()[1:])
    items.append(Line("chance", positions, chance, len(chosen), control=True))
    drawing = lines(
        items, x_title="position of the query", y_title="attention to it", y_range=(-0.03, 1.03)
    )
    last = ", ".join(f"{line.name} {formats.short(line.ys[-1])}" for line in items)
    figure = Figure(
        id=f"figure-{item.anchor}-position",
        name="Attention on the first token, by position",
        alt=f"At the last position: {last}.",
        caption=f"{_which(len(chosen), mass.size)}; mean over sequences. Dotted: "
        "chance, one over the number of tokens that a query may read.",
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )
    columns = [Column("position"), *(Column(line.name, numeric=True) for line in items)]
    rows = [
        [Cell(f"{p:g}"), *(number_cell(line.ys[place]) for line in items)]
        for place, p in enumerate(positions)
    ]
    return [
        Heading("Along the text", f"{item.anchor}-position"),
        figure,
        Fold(
            "The same numbers as a table",
            (table("Attention to the first token by position", columns, rows, sortable=False),),
        ),
    ]
