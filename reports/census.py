"""The head census: how much each head behaves like each known kind, beside what chance gives."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import xarray as xr

from headstream.models.names import head_name
from headstream.reports import formats
from headstream.reports.blocks import Block, Figure, Fold, Heading, Prose, Section, Term, Terms
from headstream.reports.charts import Line, lines
from headstream.reports.maps import Axis, heatmap, symmetric_limit
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, exact, table

_MOST_LINES = 4
_FULL_TABLE = 24
Array = npt.NDArray[np.float64]


def census(study: Study) -> Section | None:
    """Scores of every head, one part a census; None without any."""
    items = study.of_kind("heads")
    if not items:
        return None
    blocks: list[Block] = []
    for number, item in enumerate(items, 1):
        several = f"Census {number}: " if len(items) > 1 else ""
        blocks.append(Heading(f"{several}{item.result.title}", item.anchor))
        # The induction study of the same weights draws these scores with one control more.
        weights = item.result.provenance.weights_sha256
        asked = study.of_kind("induction")
        # By the number that the section on induction gives them, if there are several.
        same = {
            f"induction study {order}" if len(asked) > 1 else "the induction study": other
            for order, other in enumerate(asked, 1)
            if other.result.provenance.weights_sha256 == weights
        }
        blocks += _one(item, same)
    return Section(
        "heads",
        "What each head looks at",
        "An attention head is a part of the model that, at each token, picks earlier tokens to "
        "look at and copies something from there. Each score says how much of a head's attention "
        "goes where a named kind of head would put it. The chance level is what a head scores that "
        "looks at everything alike; only what stands clear of it counts. A score describes where "
        "a head looks on these inputs; whether the answer depends on it is tested by patching.",
        tuple(blocks),
    )


def _one(item: Item, induction: Mapping[str, Item]) -> list[Block]:
    data = item.result.data
    values = _by_place(data, "value")
    kind = str(values.dims[0])
    scores = [str(name) for name in values[kind].values.tolist()]
    layers = [int(layer) for layer in values["layer"].values.tolist()]
    heads = [int(head) for head in values["head"].values.tolist()]
    places = [(layer, head) for layer in layers for head in heads]
    flat = np.asarray(values.values, dtype=np.float64).reshape(len(scores), len(places))
    low, high = (_flat(item, name, flat.shape) for name in ("low", "high"))
    chance = [float(value) for value in data["chance"].values.tolist()]
    labels = [str(data["label"].sel(layer=layer, head=head).item()) for layer, head in places]
    names = [head_name(*place) for place in places]
    above = [
        [_above(flat[s, h], low[s, h], chance[s]) for h in range(len(places))]
        for s in range(len(scores))
    ]
    blocks: list[Block] = [
        Prose(formats.summary(item.result.summary())),
        *(Prose(text) for text in _otherwise(item, induction)),
        _figure(item, scores, names, flat, low, high, chance, labels, above),
    ]
    whole = _table(item, scores, names, flat, low, high, chance, labels)
    if whole.n_rows > _FULL_TABLE:
        labelled = [index for index, text in enumerate(labels) if text != "none"]
        if labelled:
            keep = np.array(labelled)
            blocks.append(
                _table(
                    item,
                    scores,
                    [names[i] for i in labelled],
                    flat[:, keep],
                    low[:, keep],
                    high[:, keep],
                    chance,
                    [labels[i] for i in labelled],
                    "Heads with a label",
                )
            )
        blocks.append(Fold(f"All {whole.n_rows} heads as a table", (whole,)))
    else:
        blocks.append(whole)
    notes = [str(note) for note in item.details.get("notes") or []]
    blocks += [Prose(formats.summary(note)) for note in notes]
    definitions = item.details.get("definitions") or {}
    if definitions:
        terms = tuple(Term(_words(name), str(text)) for name, text in definitions.items())
        blocks.append(Fold("What each score measures", (Terms(terms),)))
    if not induction:
        blocks += _distance_figure(item, names, places, labels, flat, scores)
    return blocks


def _otherwise(item: Item, induction: Mapping[str, Item]) -> list[str]:
    """A sentence for each induction study that gives heads other labels than they have here.

    It has more to go by: further controls, a scan for far distances, and cuts.
    """
    here = item.result.data["label"]
    texts = []
    for which, study in induction.items():
        there = study.result.data["label"]
        calls: dict[tuple[str, str], list[str]] = {}
        for layer in here["layer"].values.tolist():
            for head in here["head"].values.tolist():
                at = {"layer": layer, "head": head}
                labels = str(there.sel(at).item()), str(here.sel(at).item())
                if labels[0] != labels[1]:
                    calls.setdefault(labels, []).append(head_name(layer, head))
        words = [
            f"calls {formats.listing(names)} {_article(other, len(names))} (here {_none(own)})"
            if other != "none"
            else f"has no label for {formats.listing(names)} (here {own})"
            for (other, own), names in calls.items()
        ]
        if words:
            texts.append(formats.sentence(f"{which} {'; '.join(words)}"))
    return texts


def _none(label: str) -> str:
    return "no label" if label == "none" else label


def _article(label: str, many: int) -> str:
    """A label that is a noun with its article or its plural: "a fixed-distance copier"."""
    for noun in ("copier", "head"):
        if noun in label.split():
            if many > 1:
                return label.replace(noun, f"{noun}s")
            return f"{'an' if label[0] in 'aeiou' else 'a'} {label}"
    return label


def _flat(item: Item, name: str, shape: tuple[int, int]) -> Array:
    data = item.result.data
    if name not in data:
        return np.full(shape, np.nan)
    return np.asarray(_by_place(data, name).values, dtype=np.float64).reshape(shape)


def _by_place(data: xr.Dataset, name: str) -> xr.DataArray:
    """An array of the census with the kind of score first, then layer, then head."""
    array = data[name]
    kinds = [dim for dim in array.dims if dim not in ("layer", "head")]
    return array.transpose(*kinds, "layer", "head")


def _above(value: float, low: float, chance: float) -> bool:
    """Whether a score stands clear of chance: the low end of its interval, or else itself.

    By half a unit of the last digit shown, so that rounding alone never looks like a finding.
    """
    floor = low if math.isfinite(low) else value
    return bool(floor > (chance if math.isfinite(chance) else 0.0) + 0.005)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _figure(
    item: Item,
    scores: list[str],
    names: list[str],
    flat: Array,
    low: Array,
    high: Array,
    chance: list[float],
    labels: list[str],
    above: list[list[bool]],
) -> Figure:
    limit = max(1.0, symmetric_limit([flat.tolist()]))
    n = len(names)
    hover = [
        [
            [
                f"{names[h]}, {_words(scores[s])}",
                f"score {formats.short(flat[s, h])} {_bounded(low[s, h], high[s, h])}",
                f"chance {formats.short(chance[s])}",
                f"label: {labels[h]}",
            ]
            for h in range(n)
        ]
        for s in range(len(scores))
    ]
    texts = [
        [formats.short(flat[s, h]) if n <= 20 and above[s][h] else "" for h in range(n)]
        for s in range(len(scores))
    ]
    faint = [
        (s, h)
        for s in range(len(scores))
        for h in range(n)
        if math.isfinite(flat[s, h]) and not above[s][h]
    ]
    drawing = heatmap(
        flat.tolist(),
        rows=Axis("", tuple(_words(name) for name in scores)),
        columns=Axis("head", tuple(names)),
        limit=limit,
        unit="score",
        hover=hover,
        texts=texts,
        faint=faint,
    )
    empty = sum(not math.isfinite(value) for value in flat.ravel().tolist())
    hidden = ["numbers, which are in the table"] if n > 20 else []
    if empty:
        hidden.append(f"{empty} scores that are not defined (grey)")
    heads = "1 head" if n == 1 else f"{n} heads"
    sizes = f"n = {item.details.get('n', 'not given')} sequences"
    return Figure(
        id=f"figure-{item.anchor}",
        name="Scores of every head",
        alt=_alt(scores, names, flat),
        caption=f"Scores of {heads}, {sizes}. Scale −{formats.short(limit)} to "
        f"+{formats.short(limit)}. Stroke: the interval reaches down to chance, or below. "
        + (f"Not shown: {'; '.join(hidden)}." if hidden else "Nothing is hidden."),
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )


def _alt(scores: list[str], names: list[str], flat: Array) -> str:
    parts = []
    for s, score in enumerate(scores):
        finite = [h for h in range(len(names)) if math.isfinite(flat[s, h])]
        if finite:
            best = max(finite, key=lambda h: float(flat[s, h]))
            parts.append(f"{_words(score)} {formats.short(flat[s, best])} at {names[best]}")
    return formats.sentence(f"Highest scores: {', '.join(parts)}" if parts else "No score is given")


def _bounded(low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)) or low == high:
        return ""
    return f"[{formats.short(low)}, {formats.short(high)}]"


def _score_cell(value: float, low: float = math.nan, high: float = math.nan) -> Cell:
    return Cell(formats.short(value), note=_bounded(low, high), value=exact(value))


def _table(
    item: Item,
    scores: list[str],
    names: list[str],
    flat: Array,
    low: Array,
    high: Array,
    chance: list[float],
    labels: list[str],
    caption: str = "Scores of every head",
) -> Table:
    columns = [
        Column("head"),
        Column("label"),
        *(
            Column(_words(score), f"chance {formats.short(chance[s])}", numeric=True)
            for s, score in enumerate(scores)
        ),
    ]
    rows = [
        [
            Cell(name, code=True),
            Cell(_words(labels[h]) if labels[h] != "none" else "–"),
            *(_score_cell(flat[s, h], low[s, h], high[s, h]) for s in range(len(scores))),
        ]
        for h, name in enumerate(names)
    ]
    return table(f"{caption}, with 95% intervals", columns, rows)


def _distance_figure(
    item: Item,
    names: list[str],
    places: list[tuple[int, int]],
    labels: list[str],
    flat: Array,
    scores: list[str],
) -> list[Block]:
    """Induction over the distance of the repeat, each head with its control."""
    data = item.result.data
    if "induction_by_distance" not in data or "induction" not in scores:
        return []
    order = np.argsort(-np.nan_to_num(flat[scores.index("induction")], nan=-np.inf), kind="stable")
    labelled = [h for h in order.tolist() if "induction" in labels[h]]
    chosen = (labelled or order.tolist())[:_MOST_LINES]
    distances = tuple(float(d) for d in data["distance"].values.tolist())
    items: list[Line] = []
    rows: list[list[Cell]] = []
    for series, h in enumerate(chosen):
        layer, head = places[h]
        found = []
        for name, suffix in (("induction_by_distance", ""), ("control_by_distance", " control")):
            if name in data:
                ys = data[name].sel(layer=layer, head=head).values.tolist()
                found.append(tuple(float(y) for y in ys))
                items.append(
                    Line(names[h] + suffix, distances, found[-1], series, control=bool(suffix))
                )
                rows.append(
                    [Cell(names[h] + suffix, code=True), *(_score_cell(y) for y in found[-1])]
                )
    values = [y for line in items for y in line.ys if math.isfinite(y)]
    drawing = lines(
        items,
        x_title="distance of the repeat, tokens",
        y_title="attention to the copy",
        y_range=(min(0.0, *values) - 0.03, max(1.0, *values) + 0.03),
    )
    lowest = min((y for line in items if not line.control for y in line.ys), default=math.nan)
    highest = max((y for line in items if line.control for y in line.ys), default=math.nan)
    what = "labelled induction" if labelled else "with the highest induction score"
    figure = Figure(
        id=f"figure-{item.anchor}-distance",
        name="Induction score by distance",
        alt=f"{formats.listing([names[h] for h in chosen])}: lowest score over all distances "
        f"{formats.short(lowest)}, highest control {formats.short(highest)}.",
        caption=f"Heads {what}, at {formats.count(len(distances), 'distance')}. A head that copies "
        "by content scores at every distance; one that has learnt a fixed distance scores at one. "
        "Dotted: the control, with the same distance but other content, which should stay low.",
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )
    columns = [Column("head")] + [Column(f"{d:g}", "tokens", numeric=True) for d in distances]
    return [
        Heading("Induction at each distance", f"{item.anchor}-distance"),
        figure,
        Fold(
            "The same numbers as a table",
            (table("Induction score by distance", columns, rows, sortable=False),),
        ),
    ]
