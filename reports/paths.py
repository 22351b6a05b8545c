"""Which path carries it: what one part hands to one reader alone, as a table, a map and totals."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.result import Cell as Path
from headstream.reports import formats
from headstream.reports.blocks import Block, Bullets, Heading, Prose, Section
from headstream.reports.path_cells import LOGITS, Paths, arrows, into, row_label
from headstream.reports.path_map import map_blocks
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, exact, number_cell, table

_MOST = 20  # rows of a table: report-design.md 3.3
_WORTH_A_HEADLINE = 0.1  # of the gap, for or against
_LIMITS = (
    (
        "One path at a time.",
        "Paths that can stand in for each other may each show little, and the shares of paths need "
        "not add up to the whole.",
    ),
    (
        "One step.",
        "A path ends at its receiver: what the receiver then does with it, and through whom, is "
        "another path.",
    ),
)


def paths(study: Study) -> Section | None:
    """The paths that stand out, a map of all of them, and direct beside total effects."""
    items = study.of_kind("paths")
    if not items:
        return None
    blocks: list[Block] = []
    for number, item in enumerate(items, 1):
        several = f"Sweep {number}: " if len(items) > 1 else ""
        blocks.append(Heading(f"{several}{item.result.title}", item.anchor))
        blocks += _one(item)
    blocks.append(Bullets(_LIMITS))
    return Section(
        "paths",
        "Which path carries it",
        "A part of the model acts by adding what it writes to the stream, from which everything "
        "later reads. Here what one part (the sender) wrote in the other run is handed to a single "
        "reader (the receiver) and to nobody else: to the queries of one later head, which decide "
        "what it asks for, to its keys, by which it finds a token, to its values, which it hands "
        "on, or straight to the logits, which are the answer. If the answer moves, this one path "
        "carries some of it.",
        tuple(blocks),
    )


def dominant(item: Item, labels: Mapping[str, str]) -> str:
    """The strongest path that does not end at the logits, as a sentence; "" if there is none.

    One that carries less than a tenth of the gap is not named, whatever its label.

    Args:
        labels: what the census calls a head, by its name; said beside it.
    """
    found = Paths.of(item)
    inner = [path for path in found.cells.values() if found.receiver[path.label] != LOGITS]
    strongest = max(inner, key=lambda path: abs(path.mean), default=None)
    if strongest is None or strongest.mean == 0:
        return ""
    sender, _, receiver = strongest.label.partition("->")
    head = receiver.rpartition(".")[0] or receiver
    where = into(receiver).replace(head, _named(head, labels))
    refused = item.details["normalized_refused"] is not None or math.isnan(strongest.normalized)
    if not refused and abs(strongest.normalized) < _WORTH_A_HEADLINE:
        return formats.summary(
            f"No path of {len(inner)} from one part to another carries a tenth of the gap (n = "
            f"{strongest.n})"
        )
    value, ends = (
        (f"{strongest.mean:+.2f}", strongest.interval)
        if refused
        else (f"{strongest.normalized:+.2f}", strongest.normalized_interval)
    )
    between = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if all(map(math.isfinite, ends)) else ""
    unit = item.unit if refused else "of the gap"
    among = (
        f"Among {len(inner)} paths from one part to another the strongest"
        if len(inner) > 1
        else "The only path from one part to another"
    )
    label = Evidence.CAUSAL if strongest.causal else Evidence.UNKNOWN
    return formats.summary(
        f"{among} leads from "
        f"{_named(sender, labels)} {where}: {value}{between} {unit}, {label} (n = "
        f"{strongest.n})"
    )


def _named(name: str, labels: Mapping[str, str]) -> str:
    label = labels.get(name.partition("@")[0], "none")
    return name if label == "none" else f"{name} ({label})"


def _one(item: Item) -> list[Block]:
    found = Paths.of(item)
    if not found.cells:
        return [Prose("No path was computed.")]
    return [
        Prose(arrows(formats.summary(item.result.summary()))),
        Prose(_held(item)),
        _table(item, found),
        *map_blocks(item, found),
        _totals(item, found),
    ]


def _held(item: Item) -> str:
    """What stays fixed while a path is patched: said once, for all numbers below."""
    run = "corrupted" if item.restores else "clean"
    mlps = (
        ""
        if not item.result.provenance.config.get("d_mlp")
        else " So does every other MLP."
        if item.details["freeze_mlps"]
        else " MLPs between the two are recomputed, so a path may lead through them too."
    )
    control = float(item.details["self_patch_max"])
    return (
        f"Held fixed: between sender and receiver every other head stays at what it wrote in the "
        f"{run} run.{mlps} After the receiver all is computed anew. Sending a run its own writes "
        f"moves the metric by {formats.number(control)} {item.unit} at most (bound "
        f"{formats.number(float(item.details['self_patch_bound']))})."
    )


def _table(item: Item, found: Paths) -> Table:
    everything = sorted(found.cells.values(), key=lambda path: -abs(path.mean))
    claimed = [path for path in everything if path.label in found.claims]
    chosen = (claimed or everything)[:_MOST]
    refused = bool(item.details["normalized_refused"])
    columns = [
        Column("path", "from, to"),
        Column("effect", f"{item.unit}, 95% interval", numeric=True),
        *([] if refused else [Column("share of the gap", "95% interval", numeric=True)]),
        Column("p", _family(item), numeric=True),
        Column("unrelated prompt", item.unit, numeric=True),
        Column("evidence"),
    ]
    rows = [
        [
            Cell(arrows(path.label), note=into(found.receiver[path.label]), code=True),
            number_cell(path.mean, low=path.interval[0], high=path.interval[1], sign=True),
            *([] if refused else [_share(path)]),
            Cell(formats.probability(path.p_value), value=exact(path.p_value)),
            number_cell(path.unrelated, sign=True),
            _evidence(path, found),
        ]
        for path in chosen
    ]
    which = (
        "The one path that stands out"
        if len(claimed) == 1
        else "The only path"
        if len(everything) == 1
        else f"The {len(chosen)} paths that stand out"
        if claimed and len(chosen) == len(claimed)
        else f"The {len(chosen)} largest of {len(claimed) or len(everything)} paths"
        if len(chosen) < len(claimed or everything)
        else f"All {len(chosen)} paths"
    )
    return table(f"{which}, {item.manner}, n = {item.n}", columns, rows)


def _family(item: Item) -> str:
    """What the maximum of the test is over."""
    family = item.details["family"]
    return "of the only path" if family == 1 else f"over all {family} paths"


def _share(path: Path) -> Cell:
    low, high = path.normalized_interval
    bounded = math.isfinite(low) and math.isfinite(high)
    return Cell(
        formats.share(path.normalized),
        note=f"[{formats.share(low)}, {formats.share(high)}]" if bounded else "",
        value=exact(path.normalized),
    )


def _evidence(path: Path, found: Paths) -> Cell:
    """The label, and where it is UNKNOWN the condition that failed."""
    claim = found.claims.get(path.label)
    if path.causal:
        return Cell(evidence=Evidence.CAUSAL)
    if claim is None:
        return Cell("no claim")
    return Cell(evidence=claim.evidence, note=formats.minus(claim.reason))


def _totals(item: Item, found: Paths) -> Table:
    """What each sender does straight to the answer, and through everything that follows it."""
    data = item.result.data
    total, low, high = (
        data[name].values.ravel().tolist() for name in ("total", "total_low", "total_high")
    )
    direct = LOGITS in found.receivers
    claimed = any(found.receiver.get(label) == LOGITS for label in found.claims)
    columns = [
        Column("sender"),
        *(
            [Column("straight to the answer", f"{item.unit}, 95% interval", numeric=True)]
            if direct
            else []
        ),
        Column("in all", f"{item.unit}, 95% interval", numeric=True),
        Column("strongest reader", f"effect of that path, {item.unit}"),
        *([Column("evidence", "of “straight to the answer”")] if claimed else []),
    ]
    rows = []
    for place, sender in enumerate(found.senders):
        path = found.at(sender, LOGITS)
        readers = [
            (found.at(sender, receiver), receiver)
            for receiver in found.receivers
            if receiver != LOGITS
        ]
        known = [(reader, name) for reader, name in readers if reader is not None and reader.mean]
        best, name = max(known, key=lambda pair: abs(pair[0].mean), default=(None, ""))
        rows.append(
            [
                Cell(sender, code=True),
                *([_direct(path)] if direct else []),
                number_cell(total[place], low=low[place], high=high[place], sign=True),
                Cell("–")
                if best is None
                else Cell(
                    row_label(name), note=formats.number(best.mean, sign=True), value=best.mean
                ),
                *([Cell("–") if path is None else _evidence(path, found)] if claimed else []),
            ]
        )
    rows.sort(key=lambda row: -abs(row[2 if direct else 1].value or 0.0))
    return table(
        "What each sender does straight to the answer, and in all: through everything that "
        "follows it",
        columns,
        rows[:_MOST],
    )


def _direct(path: Path | None) -> Cell:
    if path is None:
        return Cell("–")
    return number_cell(path.mean, low=path.interval[0], high=path.interval[1], sign=True)
