"""Which path carries it: what one part hands to one reader alone, as a table, a map and totals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.patching.path_result import path_label, ranked_paths
from headstream.analyses.patching.result import Cell as Path
from headstream.reports import formats
from headstream.reports.blocks import Block, Bullets, Figure, Fold, Heading, Prose, Section
from headstream.reports.maps import Axis, heatmap, symmetric_limit
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, exact, number_cell, table

LOGITS = "logits"
_CHANNELS = {"q": "queries", "k": "keys", "v": "values"}
_MOST = 20  # paths in the first table: report-design.md 3.3
_MOST_ENDS = 24  # rows and columns of the map; of more the strongest are kept
_MOST_WRITTEN = 14  # cells of a wider map are too narrow for their number
_LONG_TABLE = 600  # a longer table shows effects alone
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

    Args:
        labels: what the census calls a head, by its name; said beside it.
    """
    found = Paths.of(item)
    inner = [path for path in found.cells.values() if found.receiver[path.label] != LOGITS]
    strongest = max(inner, key=lambda path: abs(path.mean), default=None)
    if strongest is None or strongest.mean == 0:
        return ""
    sender, _, receiver = strongest.label.partition("->")
    head, _, channel = receiver.partition(".")
    into = f"the {_CHANNELS[channel]} of {_named(head, labels)}" if channel else head
    refused = item.details["normalized_refused"] is not None or math.isnan(strongest.normalized)
    value, ends = (
        (f"{strongest.mean:+.2f}", strongest.interval)
        if refused
        else (f"{strongest.normalized:+.2f}", strongest.normalized_interval)
    )
    between = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if all(map(math.isfinite, ends)) else ""
    unit = item.unit if refused else "of the gap"
    label = Evidence.CAUSAL if strongest.causal else Evidence.UNKNOWN
    return formats.summary(
        f"Among {len(inner)} paths from one part to another the strongest leads from "
        f"{_named(sender, labels)} into {into}: {value}{between} {unit}, {label} (n = "
        f"{strongest.n})"
    )


def _named(name: str, labels: Mapping[str, str]) -> str:
    label = labels.get(name.partition("@")[0], "none")
    return name if label == "none" else f"{name} ({label})"


@dataclass(frozen=True)
class Paths:
    """The paths of one result by their labels, and the two ends in the order of the model.

    Attributes:
        cells: path by label, the largest effect first.
        senders: with their place, if the result tells places apart: `L0H1@query`.
        receivers: their names; `receiver` has that of each label.
        claims: by label, of what is claimed.
        alpha: level of the test.
    """

    cells: Mapping[str, Path]
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    receiver: Mapping[str, str]
    claims: Mapping[str, Claim]
    alpha: float

    @classmethod
    def of(cls, item: Item) -> Paths:
        """What a result of kind `paths` holds."""
        data = item.result.data
        names = [str(name) for name in data["sender"].values.tolist()]
        places = [dim for dim in ("role", "pos") if dim in data["mean"].dims]
        senders = tuple(
            _sender(path_label({"sender": name, "receiver": "", **dict(zip(places, [place]))}))
            for name in names
            for place in (data[places[0]].values.tolist() if places else [None])
        )
        receivers = tuple(str(name) for name in data["receiver"].values.tolist())
        cells = {path.label: path for path in ranked_paths(data)}
        return cls(
            cells=cells,
            senders=senders,
            receivers=receivers,
            receiver={label: label.partition("->")[2] for label in cells},
            claims={
                claim.id.removeprefix("path."): claim
                for claim in item.result.claims
                if claim.id.startswith("path.")
            },
            alpha=float(item.details.get("alpha", 0.05)),
        )

    def at(self, sender: str, receiver: str) -> Path | None:
        """The path between two ends; None where the sender does not come first."""
        return self.cells.get(f"{sender}->{receiver}")

    def struck(self, path: Path) -> bool:
        """Whether it was tested and cannot be told from no effect."""
        return math.isfinite(path.p_value) and path.p_value > self.alpha


def _sender(label: str) -> str:
    return label.removesuffix("->")


def _one(item: Item) -> list[Block]:
    found = Paths.of(item)
    if not found.cells:
        return [Prose("No path was computed.")]
    return [
        Prose(_arrows(formats.summary(item.result.summary()))),
        Prose(_held(item)),
        _table(item, found),
        *_map_blocks(item, found),
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
        Column("p", f"over all {item.details['family']} paths", numeric=True),
        Column("unrelated prompt", item.unit, numeric=True),
        Column("evidence"),
    ]
    rows = [
        [
            Cell(_arrows(path.label), note=_into(found.receiver[path.label]), code=True),
            number_cell(path.mean, low=path.interval[0], high=path.interval[1], sign=True),
            *([] if refused else [_share(path)]),
            Cell(formats.probability(path.p_value), value=exact(path.p_value)),
            number_cell(path.unrelated, sign=True),
            _evidence(path, found.claims),
        ]
        for path in chosen
    ]
    which = (
        f"The {len(chosen)} paths that stand out"
        if claimed and len(chosen) == len(claimed)
        else f"The {len(chosen)} largest of {len(claimed) or len(everything)} paths"
        if len(chosen) < len(claimed or everything)
        else f"All {len(chosen)} paths"
    )
    return table(f"{which}, {item.manner}, n = {item.n}", columns, rows)


def _arrows(text: str) -> str:
    return text.replace("->", " → ")


def _into(receiver: str) -> str:
    """In words, what the receiver is."""
    name, _, channel = receiver.partition(".")
    if name == LOGITS:
        return "straight to the answer"
    return f"into the {_CHANNELS[channel]} of {name}" if channel else f"into {name}"


def _share(path: Path) -> Cell:
    low, high = path.normalized_interval
    bounded = math.isfinite(low) and math.isfinite(high)
    return Cell(
        formats.share(path.normalized),
        note=f"[{formats.share(low)}, {formats.share(high)}]" if bounded else "",
        value=exact(path.normalized),
    )


def _evidence(path: Path, claims: Mapping[str, Claim]) -> Cell:
    """The label, and where it is UNKNOWN the condition that failed."""
    claim = claims.get(path.label)
    if path.causal:
        return Cell(evidence=Evidence.CAUSAL)
    if claim is None:
        return Cell("no claim")
    return Cell(evidence=claim.evidence, note=formats.minus(claim.reason))


def _map_blocks(item: Item, found: Paths) -> list[Block]:
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
        rows=Axis("", tuple(_row_label(receiver) for receiver in receivers)),
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
        alt=f"{len(inner)} paths from one part to another: the strongest is "
        f"{top.label.replace('->', ' to ')}, {formats.with_unit(top.mean, item.unit)}; {faint} are "
        "not distinguishable from no effect.",
        caption=f"Mean effect of handing what the sender (across) wrote to one receiver (down) "
        f"alone, {item.manner}, n = {item.n} prompt pairs, in {item.unit}; the scale runs from "
        f"−{formats.number(limit)} to +{formats.number(limit)}. Frame: CAUSAL. Stroke: "
        f"p > {found.alpha:g} by sign flips with the maximum over all {item.details['family']} "
        "paths that are not exactly zero. "
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


def _row_label(receiver: str) -> str:
    name, _, channel = receiver.partition(".")
    return f"{name} {_CHANNELS[channel]}" if channel else name


def _hover(item: Item, path: Path) -> list[str]:
    lines = [
        _arrows(path.label),
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
        cells = [Cell(_row_label(receiver))]
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


def _totals(item: Item, found: Paths) -> Table:
    """What each sender does straight to the answer, and through everything that follows it."""
    data = item.result.data
    total, low, high = (
        data[name].values.ravel().tolist() for name in ("total", "total_low", "total_high")
    )
    direct = LOGITS in found.receivers
    claimed = any(found.receiver[label] == LOGITS for label in found.claims)
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
                    _row_label(name), note=formats.number(best.mean, sign=True), value=best.mean
                ),
                *(
                    [Cell("–") if path is None else _evidence(path, found.claims)]
                    if claimed
                    else []
                ),
            ]
        )
    rows.sort(key=lambda row: -abs(row[2 if direct else 1].value or 0.0))
    return table(
        "What each sender does straight to the answer, and in all: through everything that "
        "follows it",
        columns,
        rows[:_MOST_ENDS],
    )


def _direct(path: Path | None) -> Cell:
    if path is None:
        return Cell("–")
    return number_cell(path.mean, low=path.interval[0], high=path.interval[1], sign=True)
