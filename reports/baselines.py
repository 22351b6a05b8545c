"""The metric and what it reads without any intervention: an effect means nothing without these."""

from __future__ import annotations

import json
import math

import numpy as np
import numpy.typing as npt

from headstream.reports import formats
from headstream.reports.blocks import Block, Section, Term, Terms
from headstream.reports.cells import Cells
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, exact, number_cell, table


def baselines(study: Study) -> Section | None:
    """Metric, baselines and controls of the patching results; None without any."""
    maps = study.of_kind("patching")
    items = maps or study.of_kind("paths")
    if not items:
        return None
    metrics = {json.dumps(item.details["metric"], sort_keys=True): item for item in items}
    blocks: list[Block] = []
    for item in metrics.values():
        metric = item.details["metric"]
        blocks.append(
            Terms(
                (
                    Term("Metric", str(metric["name"])),
                    Term("Formula", str(metric["formula"]), code=True),
                    Term("Unit", str(metric["unit"])),
                )
            )
        )
    blocks.append(Terms(tuple(_directions(items))))
    blocks.append(_runs(items))
    if maps:
        blocks.append(_controls(maps))
    return Section(
        "metric",
        "Metric and baselines",
        "The metric is one number that says how much the model prefers the right answer. Its value "
        "on the clean and on the corrupted prompts are the two ends between which every effect "
        "below is read; the distance between them is the gap. The controls are things that should "
        "do nothing, or little: if they did much, the effects could not be trusted.",
        tuple(blocks),
    )


def _directions(items: tuple[Item, ...]) -> list[Term]:
    terms = []
    directions = {item.restores for item in items}
    if True in directions:
        terms.append(
            Term(
                "Denoising",
                "The corrupted prompt is run, and at one place the value from the clean run is put "
                "in. An effect above zero moves towards the clean answer: the place is enough to "
                "restore some of it.",
            )
        )
    if False in directions:
        terms.append(
            Term(
                "Noising",
                "The clean prompt is run, and at one place the value from the corrupted run is put "
                "in. An effect below zero moves away from the clean answer: the place is needed "
                "for some of it.",
            )
        )
    return terms


def _runs(items: tuple[Item, ...]) -> Block:
    """Clean, corrupted and gap: the same for results on the same prompts, then shown once."""
    rows: dict[str, list[Cell]] = {}
    sources: dict[str, list[str]] = {}
    for number, item in enumerate(items, 1):
        data, gap = item.result.data, item.details["gap"]
        unit = item.unit
        row = [Cell()]
        for name in ("clean", "corrupted"):
            values = np.asarray(data[name].values, dtype=np.float64)
            low, high = _interval(values)
            row.append(number_cell(float(values.mean()), low=low, high=high, sign=True))
        row.append(
            number_cell(
                _float(gap["mean"]), low=_float(gap["low"]), high=_float(gap["high"]), sign=True
            )
        )
        row.append(Cell(str(item.n), value=item.n))
        row.append(Cell(unit))
        key = json.dumps([cell.text + cell.note for cell in row[1:]])
        rows.setdefault(key, row)
        sources.setdefault(key, []).append(str(number))
    columns = (
        Column("of"),
        Column("clean", "mean, 95% interval", numeric=True),
        Column("corrupted", "mean, 95% interval", numeric=True),
        Column("gap", "clean − corrupted", numeric=True),
        Column("n", numeric=True),
        Column("unit"),
    )
    shown = list(rows.values())
    for row, numbers in zip(shown, sources.values(), strict=True):
        kind = "map" if items[0].kind == "patching" else "sweep"
        many = f"{kind}s" if len(numbers) > 1 else kind
        everything = len(shown) == 1
        row[0] = Cell(
            f"all {kind}s" if everything else f"{many} {formats.listing(numbers, most=12)}"
        )
    return table("The metric without any intervention", columns, shown, sortable=False)


def _controls(items: tuple[Item, ...]) -> Block:
    columns = (
        Column("result"),
        Column("own value put back", "must be 0", numeric=True),
        Column("unrelated prompt", "largest, and where", numeric=True),
        Column("random places", "95% are below", numeric=True),
        Column("effects tested together", numeric=True),
    )
    rows = []
    for item in items:
        details = item.details
        own, bound = _float(details["self_patch_max"]), _float(details["self_patch_bound"])
        held = own is not None and bound is not None and own <= bound
        cells = Cells.of(item)
        where = [cell for cell in cells.indices() if math.isfinite(cells.unrelated[cell])]
        worst = max(where, key=lambda cell: abs(float(cells.unrelated[cell])), default=None)
        random = _float(details.get("random_site_95"))
        rows.append(
            [
                Cell(item.name, href=f"#{item.anchor}"),
                Cell(
                    formats.number(own),
                    note=f"bound {formats.number(bound)}: {'held' if held else 'NOT HELD'}",
                    value=exact(own),
                ),
                Cell("–", note="no other pair of equal length")
                if worst is None
                else Cell(
                    formats.with_unit(float(cells.unrelated[worst]), cells.unit),
                    note=cells.names[worst[0]][worst[1]],
                    value=float(cells.unrelated[worst]),
                ),
                Cell("–", note="no place outside the claimed ones")
                if random is None
                else Cell(formats.with_unit(abs(random), cells.unit).lstrip("+"), value=random),
                Cell(
                    str(details["family"]),
                    note=f"{details['flips']} sign flips" if details.get("flips") else "not tested",
                    value=float(details["family"]),
                ),
            ]
        )
    return table("Controls: what should not move the metric", columns, rows, sortable=False)


def _interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95% interval of a mean over prompts, by the method used for the effects."""
    from headstream.analyses.patching.inference import mean_interval

    low, high = mean_interval(values)
    return float(low), float(high)


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
