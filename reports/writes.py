"""The residual decomposition: what each part of the model adds to the answer, as a waterfall."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headstream.reports import formats
from headstream.reports.blocks import Block, Figure, Fold, Heading, Prose, Section, Term, Terms
from headstream.reports.charts import waterfall
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, number_cell, table

_MOST_BARS = 14
_FULL_TABLE = 16
_BIAS = "b_U"  # what the residual decomposition calls the output bias


def writes(study: Study) -> Section | None:
    """One waterfall a decomposition; None without any."""
    items = study.of_kind("decomposition")
    if not items:
        return None
    blocks: list[Block] = []
    for number, item in enumerate(items, 1):
        several = f"Decomposition {number}: " if len(items) > 1 else ""
        blocks.append(Heading(f"{several}{item.result.title}", item.anchor))
        blocks += _one(item)
    return Section(
        "writes",
        "Who writes the answer",
        "The model's answer is read from a sum: the embedding, each head and each other part add "
        "one vector to a shared stream. Each bar is what one part adds, directly, to the metric: "
        "red for the right answer, blue against it. The bars start at zero and end at the value "
        "that was measured. A part can also matter by feeding a later one; that is not seen here.",
        tuple(blocks),
    )


def _one(item: Item) -> list[Block]:
    data = item.result.data
    names = [str(name) for name in data["component"].values.tolist()]
    mean, low, high = (
        np.asarray(data[name].values, dtype=np.float64) for name in ("mean", "low", "high")
    )
    total = float(data["total"].mean())
    shown = sorted(
        np.argsort(-np.abs(mean), kind="stable")[
            : len(names) if len(names) <= _MOST_BARS + 1 else _MOST_BARS
        ].tolist()
    )
    rest = [index for index in range(len(names)) if index not in set(shown)]
    unit, quantity = _measured(item)
    bars: list[tuple[str, float, float, float, str]] = [
        (names[i], float(mean[i]), float(low[i]), float(high[i]), "write") for i in shown
    ]
    if rest:
        bars.append((f"{len(rest)} others", float(mean[rest].sum()), math.nan, math.nan, "rest"))
    starts = np.concatenate([[0.0], np.cumsum([bar[1] for bar in bars])]).tolist()
    bars.append(("measured", total, math.nan, math.nan, "total"))
    starts[-1] = 0.0
    drawing = waterfall(
        [bar[0] for bar in bars],
        starts=starts,
        steps=[bar[1] for bar in bars],
        kinds=[bar[4] for bar in bars],
        lows=[bar[2] for bar in bars],
        highs=[bar[3] for bar in bars],
        hover=[
            [
                bar[0],
                f"{formats.number(bar[1], sign=True)} {unit} "
                + (formats.interval(bar[2], bar[3], sign=True) if math.isfinite(bar[2]) else ""),
            ]
            for bar in bars
        ],
        unit=f"{quantity}, {unit}",
    )
    ranked = sorted(range(len(names)), key=lambda index: -mean[index])
    best, worst = ranked[0], ranked[-1]
    figure = Figure(
        id=f"figure-{item.anchor}",
        name="What each part adds to the answer",
        alt=f"{names[best]} adds most, {formats.with_unit(float(mean[best]), unit)}; "
        f"{names[worst]} least, {formats.with_unit(float(mean[worst]), unit)}; all parts add up to "
        f"{formats.with_unit(total, unit)}.",
        caption=_caption(item, rest, unit),
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )
    terms = [Term("Final norm", formats.sentence(str(item.details.get("norm", "not stated"))))]
    if isinstance(item.details.get("largest_error"), (int, float)):
        terms.append(
            Term(
                "Adds up",
                f"to the measured value within {formats.number(item.details['largest_error'])} "
                f"on every prompt (bound {formats.number(item.details.get('bound'))})",
            )
        )
    whole = _table(item, names, mean, low, high, ranked, unit)
    tables: list[Block] = (
        [whole]
        if whole.n_rows <= _FULL_TABLE
        else [Fold(f"All {whole.n_rows} parts as a table", (whole,))]
    )
    return [
        Prose(formats.summary(item.result.summary())),
        figure,
        Terms(tuple(terms)),
        *tables,
    ]


def _measured(item: Item) -> tuple[str, str]:
    """Unit and name of what the parts add up to."""
    metric = item.details.get("metric") or {}
    unit = item.details.get("unit") or metric.get("unit") or "nats"
    quantity = item.details.get("of") or metric.get("name") or "logit difference"
    return str(unit), str(quantity).replace("_", " ")


def _caption(item: Item, rest: list[int], unit: str) -> str:
    sentences = [
        f"Mean over {formats.count(item.n or 0, 'prompt')} (n = {item.n}) in {unit}, in the order "
        "in which the parts write",
        "Thin lines at the ends of bars are 95% intervals over prompts",
        _last_bar(item),
        f"Not shown: the {len(rest)} smallest parts, which are added into one bar"
        if rest
        else "Nothing is hidden",
    ]
    return " ".join(formats.sentence(text) for text in sentences)


def _last_bar(item: Item) -> str:
    """What the last bar holds: all that was measured, unless the output bias is no part."""
    names = [str(name) for name in item.result.data["component"].values.tolist()]
    if _BIAS in names:
        return (
            f"The last bar is the whole measured value; {_BIAS}, the output bias, is a part of it"
        )
    if item.result.provenance.config.get("unembed_bias"):
        return "The last bar is the measured value, less the part that the output bias alone gives"
    return "The last bar is the whole measured value"


def _table(
    item: Item,
    names: list[str],
    mean: npt.NDArray[np.float64],
    low: npt.NDArray[np.float64],
    high: npt.NDArray[np.float64],
    ranked: list[int],
    unit: str,
) -> Table:
    total = float(item.result.data["total"].mean())
    columns = (
        Column("part"),
        Column("adds", f"{unit}, 95% interval", numeric=True),
        Column("of the whole", numeric=True),
    )
    rows = [
        [
            Cell(names[i], code=True),
            number_cell(float(mean[i]), low=float(low[i]), high=float(high[i]), sign=True),
            Cell(
                formats.share(float(mean[i]) / total if total else None),
                value=float(mean[i]) / total if total else None,
            ),
        ]
        for i in ranked
    ]
    return table("What each part adds to the answer", columns, rows)
