"""What heads do together: sets cut at once and one by one, a circuit against the rest, cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.patching.inference import mean_interval
from headstream.reports import formats
from headstream.reports.blocks import (
    Block,
    Bullets,
    Fold,
    Heading,
    Prose,
    Section,
    Term,
    Terms,
)
from headstream.reports.study import CUTS, Item, Study
from headstream.reports.tables import Cell, Column, Table, exact, number_cell, table

_MOST = 12  # cuts in the first table; a longer one is folded
_LIMITS = (
    (
        "A cut is not a smaller model.",
        "What is put in place of a head is a choice, and another one gives another number; which "
        "was made stands beside each result.",
    ),
    (
        "Sets that were asked about.",
        "Other sets of heads may do as much. The number of heads that are not in a set says "
        "nothing about them.",
    ),
)


def sets(study: Study) -> Section | None:
    """Every redundant set, circuit and ablation of the study; None without any."""
    items = [item for kind in CUTS for item in study.of_kind(kind)]
    if not items:
        return None
    drawn: dict[str, Callable[[Item], list[Block]]] = {
        "redundant_set": _redundant,
        "faithfulness": _faithful,
        "ablation": _cuts,
    }
    blocks: list[Block] = []
    for item in items:
        blocks += [
            Heading(item.result.title, item.anchor),
            Prose(formats.summary(item.result.summary())),
            *drawn[item.kind](item),
        ]
    blocks.append(Bullets(_LIMITS))
    return Section(
        "sets",
        "What heads do together",
        "A head is cut by putting something in place of what it computes: zeros, or its mean over "
        "the prompts. Heads can stand in for each other. Cutting one of them then shows nothing, "
        "and only cutting all of them together shows that they are needed; with all of them cut, "
        "putting a single one back shows what it can do alone.",
        tuple(blocks),
    )


def _redundant(item: Item) -> list[Block]:
    data, details = item.result.data, item.details
    joint, unit = details["joint"], item.unit
    claims = {claim.id: claim for claim in item.result.claims}
    names = [str(name) for name in data["head"].values.tolist()]
    alone = np.asarray(data["alone"].transpose("head", "example").values, dtype=np.float64)
    low, high = mean_interval(alone)
    columns = (
        Column("head"),
        Column("cut alone", f"{unit}, 95% interval", numeric=True),
        Column("p", f"over {details['family']} cuts", numeric=True),
        Column("put back alone", "share of what the joint cut took", numeric=True),
        Column("evidence", "all: needed; one: can stand in"),
    )
    together = [
        Cell(f"all {len(names)} cut together"),
        number_cell(joint["mean"], low=joint["low"], high=joint["high"], sign=True),
        _p(joint["p_value"]),
        Cell("–"),
        _evidence(claims.get("set")),
    ]
    rows = [
        [
            Cell(name, code=True),
            number_cell(
                float(data["alone_mean"].values[i]),
                low=float(low[i]),
                high=float(high[i]),
                sign=True,
            ),
            _p(float(data["alone_p"].values[i])),
            _share(
                *(
                    float(data[part].values[i])
                    for part in ("recovered", "recovered_low", "recovered_high")
                )
            ),
            _evidence(claims.get(f"set.{name}")),
        ]
        for i, name in enumerate(names)
    ]
    caption = (
        f"One head cut and all cut, in {unit} of {_metric(item)}; then all cut but one. A head "
        f"that gives back at least {formats.share(details['least'])} can stand in for the rest "
        f"(n = {details['n']})"
    )
    return [table(caption, columns, [together, *rows], sortable=False), _conditions(item)]


def _faithful(item: Item) -> list[Block]:
    details = item.details
    claims = {claim.id: claim for claim in item.result.claims}
    size, n_random = len(details["circuit"]), details["n_random"]
    columns = (
        Column("question"),
        Column("share of the model", "95% interval", numeric=True),
        Column(
            f"other sets of {size}",
            f"mean of {'all ' if details.get('all_sets') else ''}{n_random}",
            numeric=True,
        ),
        Column("beats", "percentile among them", numeric=True),
        Column("evidence"),
    )
    rows = []
    for part, claim, question, note in (
        (
            "faithfulness",
            "circuit.faithful",
            "Is it enough?",
            "all other heads cut: 1 is all of it",
        ),
        ("left", "circuit.complete", "Is it all?", "the circuit cut: 0 is nothing left"),
    ):
        found = details[part]
        rows.append(
            [
                Cell(question, note=note),
                number_cell(
                    _float(found["value"]), low=_float(found["low"]), high=_float(found["high"])
                ),
                number_cell(_float(found["random_mean"])),
                Cell(
                    formats.share(_float(found["percentile"])),
                    note=_as_good(found.get("at_least")),
                    value=_float(found["percentile"]),
                ),
                _evidence(claims.get(claim)),
            ]
        )
    choices = tuple(
        Term(str(name).capitalize(), formats.sentence(str(text)))
        for name, text in details["choices"].items()
    )
    members = ", ".join(str(name) for name in details["circuit"])
    return [
        table(
            f"The circuit {members} against other sets of {size} heads, n = {details['n']}",
            columns,
            rows,
            sortable=False,
        ),
        Prose("The number depends on six choices:"),
        Terms(choices),
    ]


def _as_good(sets: object) -> str:
    """How many of the other sets do no worse."""
    return f"{sets or 'none'} do as well" if isinstance(sets, int) else ""


def _cuts(item: Item) -> list[Block]:
    data = item.result.data
    claims = {claim.id: claim for claim in item.result.claims}
    mean = np.asarray(data["mean"].values, dtype=np.float64)
    order = np.argsort(-item.details["worse"] * mean, kind="stable").tolist()
    largest = set(np.argsort(-np.abs(mean), kind="stable")[:_MOST].tolist())
    whole = _cut_table(item, order, claims, f"All {len(order)} cuts")
    if len(order) <= _MOST:
        return [whole, _conditions(item)]
    top = [i for i in order if i in largest]
    first = _cut_table(item, top, claims, f"The {len(top)} cuts that move the metric most")
    return [first, Fold(f"All {len(order)} cuts as a table", (whole,)), _conditions(item)]


def _cut_table(item: Item, chosen: list[int], claims: Mapping[str, Claim], caption: str) -> Table:
    data, details = item.result.data, item.details
    shares = "lost" in data and bool(np.isfinite(data["lost"].values).any())
    columns = [
        Column("cut"),
        Column("effect", f"{item.unit}, 95% interval", numeric=True),
        *([Column("share of the gap lost", "95% interval", numeric=True)] if shares else []),
        Column("p", f"over {details['family']} cuts", numeric=True),
        Column("control", item.unit, numeric=True),
        Column("evidence"),
    ]
    rows = []
    for i in chosen:
        name = str(data["cut"].values[i])
        heads = [str(head) for head in details["cuts"].get(name, [name])]

        def at(part: str, i: int = i) -> float:
            return float(data[part].values[i])

        rows.append(
            [
                Cell(name, note="" if heads == [name] else formats.listing(heads), code=True),
                number_cell(at("mean"), low=at("low"), high=at("high"), sign=True),
                *(
                    [_share(*(at(part) for part in ("lost", "lost_low", "lost_high")))]
                    if shares
                    else []
                ),
                _p(at("p_value")),
                number_cell(at("control"), sign=True),
                _evidence(claims.get(f"cut.{name}")),
            ]
        )
    return table(f"{caption}, n = {details['n']}", columns, rows)


def _conditions(item: Item) -> Terms:
    """What was put in place of a head, and what else was held."""
    details = item.details
    preserving = details["how"] == "pattern_preserving"
    return Terms(
        (
            Term("In its place", str(details.get("values_in_words", details["values"]))),
            Term(
                "All that follows",
                "every head attends as in the uncut run: what is cut acts through values alone"
                if preserving
                else "reacts to the cut",
            ),
            Term("Metric", f"{_metric(item)}, {item.details['metric']['formula']}"),
            Term(
                "Controls",
                f"{_control(item)}heads cut to the values they have move it by "
                f"{formats.number(_float(details.get('self_cut_max')))} {item.unit} at most",
            ),
        )
    )


def _control(item: Item) -> str:
    """What the joint cut does where it should not matter; single cuts have it in their table."""
    joint = item.details.get("joint")
    if joint is None:
        return ""
    moved = formats.with_unit(_float(joint["control"]), item.unit)
    return (
        f"the same cut where it should not matter moves it by {moved} (no label if "
        f"{item.details['control']}); "
    )


def _metric(item: Item) -> str:
    return str(item.details["metric"]["name"]).replace("_", " ")


def _p(value: Any) -> Cell:
    p = _float(value)
    return Cell(formats.probability(p), value=exact(p))


def _share(value: float, low: float, high: float) -> Cell:
    bounded = math.isfinite(low) and math.isfinite(high)
    return Cell(
        formats.share(value),
        note=f"[{formats.share(low)}, {formats.share(high)}]" if bounded else "",
        value=exact(value),
    )


def _evidence(claim: Claim | None) -> Cell:
    """The label; where it is UNKNOWN with the condition that failed."""
    if claim is None:
        return Cell("no claim")
    failed = claim.evidence is Evidence.UNKNOWN
    return Cell(
        evidence=claim.evidence,
        note=formats.minus(claim.reason.partition("; values: ")[0]) if failed else "",
    )


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
