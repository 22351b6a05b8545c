"""Induction: scores against distance with both controls, and what cutting the heads costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.studies.induction_claims import other_heads
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
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, exact, table

_MOST_ROWS = 24
_MOST_HEADS = 2  # in the figure: three lines each
_LIMITS = (
    (
        "Random tokens.",
        "Scores and cuts are on blocks of random tokens that recur. What such a head does in text, "
        "where much else predicts the next token, is another question.",
    ),
    (
        "As far as the sequences go.",
        "Distances that do not fit the vocabulary without drawing a token twice, or the context, "
        "were not looked at.",
    ),
)
# Labels that the figure shows first, in this order.
_FIRST = (
    "induction head",
    "induction head of a set",
    "induction pattern",
    "fixed-distance copier",
    "fixed-distance",
)


def induction(study: Study) -> Section | None:
    """Figure and table of every induction study; None without any."""
    items = study.of_kind("induction")
    if not items:
        return None
    blocks: list[Block] = []
    for number, item in enumerate(items, 1):
        several = f"Study {number}: " if len(items) > 1 else ""
        blocks.append(Heading(f"{several}{item.result.title}", item.anchor))
        blocks += _one(item)
    blocks.append(Bullets(_LIMITS))
    return Section(
        "induction",
        "Which heads continue repeats",
        "An induction head finds where the current token stood before and copies what came next. "
        "A head that always copies from the same distance looks the same if text repeats at that "
        "distance. So each score is taken at several distances and beside two controls: the same "
        "positions with other content, and the same distance with the content elsewhere. A head "
        "that follows content scores high and both controls stay low. The name is given only if "
        "cutting such heads together also costs the model its continuation.",
        tuple(blocks),
    )


def _one(item: Item) -> list[Block]:
    labels = _labels(item)
    everything = list(labels)
    named = [place for place in everything if labels[place] != "none"]
    blocks: list[Block] = [
        Prose(formats.summary(item.result.summary())),
        _figure(item, labels),
    ]
    if len(everything) <= _MOST_ROWS:
        blocks.append(_table(item, labels, everything))
    else:
        if named:
            blocks.append(_table(item, labels, named))
        whole = _table(item, labels, everything)
        blocks.append(Fold(f"All {whole.n_rows} heads as a table", (whole,)))
    blocks.append(Terms(_terms(item)))
    blocks += [Prose(formats.summary(str(note))) for note in item.details.get("notes") or []]
    definitions = item.details.get("definitions") or {}
    terms = tuple(Term(str(name), str(text)) for name, text in definitions.items())
    return [*blocks, Fold("What each number measures", (Terms(terms),))]


def _labels(item: Item) -> dict[tuple[int, int], str]:
    data = item.result.data
    return {
        (layer, head): str(data["label"].sel(layer=layer, head=head).item())
        for layer in data["layer"].values.tolist()
        for head in data["head"].values.tolist()
    }


def _shown(item: Item, labels: dict[tuple[int, int], str]) -> list[tuple[int, int]]:
    """Heads of the figure: the best of each label that is about induction."""
    data = item.result.data

    def rank(place: tuple[int, int]) -> tuple[int, float]:
        label = labels[place]
        order = _FIRST.index(label) if label in _FIRST else len(_FIRST)
        at = data["induction"].sel(layer=place[0], head=place[1])
        return order, -float(at.max())

    ordered = sorted(labels, key=rank)
    best = {labels[place]: place for place in reversed(ordered)}
    # A head of another kind is shown only where there is none of these.
    return [best[label] for label in _FIRST if label in best][:_MOST_HEADS] or ordered[:1]


def _figure(item: Item, labels: dict[tuple[int, int], str]) -> Figure:
    data = item.result.data
    distances = tuple(float(d) for d in data["distance"].values.tolist())
    chosen = _shown(item, labels)
    items: list[Line] = []
    for series, (layer, head) in enumerate(chosen):
        name = head_name(layer, head)
        for variable, suffix in (
            ("induction", ""),
            ("position_control", ", other content"),
            ("content_control", ", content elsewhere"),
        ):
            ys = tuple(data[variable].sel(layer=layer, head=head).values.tolist())
            if all(map(math.isfinite, ys)):
                items.append(Line(f"{name}{suffix}", distances, ys, series, control=bool(suffix)))
    chance = tuple(data["chance"].values.tolist())
    items.append(Line("chance", distances, chance, len(chosen), control=True))
    drawing = lines(
        items,
        x_title="distance of the repeat, in tokens",
        y_title="attention to what followed",
        y_range=(-0.03, 1.03),
    )
    ends = ", ".join(
        f"{line.name} {formats.short(min(line.ys))} to {formats.short(max(line.ys))}"
        for line in items
    )
    words = [f"{head_name(*place)}: {labels[place]}" for place in chosen]
    return Figure(
        id=f"figure-{item.anchor}",
        name="Attention to what followed the earlier copy, by distance",
        alt=f"Over distances: {ends}.",
        caption=f"{'; '.join(words)}. Mean over {item.details['n']} sequences a distance. Dotted: "
        f"{_controls(item)}; and chance. All heads stand in the table.",
        spec=drawing.spec,
        height=drawing.height,
        width=drawing.width,
    )


def _controls(item: Item) -> str:
    if len(item.details["distances"]) < 2:
        return "the control, the same positions when the block is other tokens"
    return (
        "the controls, the same positions when the block is other tokens, and as far back when it "
        "recurs elsewhere"
    )


def _table(
    item: Item, labels: dict[tuple[int, int], str], places: Sequence[tuple[int, int]]
) -> Table:
    data, claims = item.result.data, {claim.id: claim for claim in item.result.claims}
    shown = ", ".join(map(str, item.details["distances"]))
    chance = formats.short(float(data["chance"].mean()))
    several = len(item.details["distances"]) > 1
    columns = (
        Column("head"),
        Column("label"),
        Column("score, least", f"of distances {shown}; chance {chance}", numeric=True)
        if several
        else Column("score", f"at distance {shown}; chance {chance}", numeric=True),
        Column("at random gaps", "95% interval", numeric=True),
        Column("controls, most", "other content; content elsewhere", numeric=True)
        if several
        else Column("control", "other content", numeric=True),
        Column("fixed distance", "above chance where nothing repeats", numeric=True),
        Column("copying", "weights alone", numeric=True),
        Column("cut alone", "nats, 95% interval", numeric=True),
        Column("restored alone", "of the joint cut, 95% interval", numeric=True),
    )
    rows = []
    for place in places:
        at = data.sel(layer=place[0], head=place[1])
        name = head_name(*place)
        controls = [float(at[f"{kind}_control"].max()) for kind in ("position", "content")]
        rows.append(
            [
                Cell(name, code=True),
                _label(labels[place], claims.get(f"induction.{name}")),
                _short(float(at["induction"].min())),
                _bounded(at, "gapped"),
                _short(controls[0], note=formats.short(controls[1]) if several else ""),
                # Of a head that looks everywhere alike the best distance is an accident.
                _short(
                    float(at["fixed"]),
                    note=f"{int(at['fixed_distance'])} tokens" if "fixed" in labels[place] else "",
                    sign=True,
                ),
                _short(float(at["copying"])),
                _bounded(at, "alone", sign=True),
                _bounded(at, "restored"),
            ]
        )
    caption = f"Content or distance, head by head (n = {item.details['n']})"
    return table(caption, columns, rows, sortable=False)


def _short(value: float, *, note: str = "", sign: bool = False) -> Cell:
    return Cell(formats.short(value, sign=sign), note=note, value=exact(value))


def _bounded(at: Any, name: str, *, sign: bool = False) -> Cell:
    """A value over its interval; a dash where there is none."""
    value, low, high = (float(at[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if not math.isfinite(value):
        return Cell("–")
    ends = f"[{formats.short(low, sign=sign)}, {formats.short(high, sign=sign)}]"
    return _short(value, note=ends, sign=sign)


def _label(label: str, claim: Claim | None) -> Cell:
    """The label, with the badge of what it rests on where this study claims it."""
    if claim is None or claim.evidence is Evidence.UNKNOWN:
        return Cell(label, note="" if claim is None else "not shown")
    return Cell(evidence=claim.evidence, note=label)


def _terms(item: Item) -> tuple[Term, ...]:
    loss, joint = item.details["loss"], item.details["joint"]
    terms = [
        Term(
            "Loss on what repeats predict",
            f"{formats.number(float(loss['repeats']))} nats; at the same positions when the block "
            f"is other tokens {formats.number(float(loss['control']))}; that of a uniform guess "
            f"{formats.number(float(loss['uniform']))}",
        )
    ]
    scan = item.details["scan"]
    terms.append(
        Term(
            "Fixed distances",
            f"looked for from {scan['nearest']} to {scan['farthest']} tokens, in "
            f"{scan['sequences']} random sequences of {scan['length']}",
        )
    )
    if joint is None:
        margin = formats.short(float(item.details["margin"]))
        return (
            *terms,
            Term(
                "Cut together",
                f"no head clears the margin of {margin}, so nothing was cut",
            ),
        )
    tested = f"p {formats.probability(joint['p'])}" if joint["p"] is not None else "not tested"
    text = (
        f"{', '.join(joint['heads'])}: {formats.number(joint['mean'], sign=True)} nats "
        f"{formats.interval(joint['low'], joint['high'], sign=True)}, {tested}; where nothing "
        f"repeats {formats.number(joint['control'], sign=True)}"
    )
    if joint["failed"]:
        text += f"; no label: {'; '.join(map(str, joint['failed']))}"
    terms.append(Term("Cut together", formats.summary(text)))
    others = other_heads(joint)
    if others:
        terms.append(
            Term("Other heads", f"{formats.summary(others)} This decides nothing."),
        )
    return tuple(terms)
