"""The closing sections: the checks that were made, what was not, and the data itself."""

from __future__ import annotations

from typing import Any

from headstream.analyses.evidence import Claim, Evidence
from headstream.reports import formats
from headstream.reports.blocks import (
    Block,
    Bullets,
    Command,
    Fold,
    Prose,
    SaveButton,
    Section,
    Term,
    Terms,
)
from headstream.reports.headline import FEWEST
from headstream.reports.prompts import MOST_PAIRS
from headstream.reports.study import CUTS, PAIRED, Item, Study
from headstream.reports.tables import Cell, Column, exact, table

ENOUGH = 64  # report-design.md 3.2: from here on the intervals hold what they promise
_MOST_UNKNOWN = 20


def audit(study: Study) -> Section | None:
    """Every identity that was checked, failures first, and what was measured beside them.

    None if no identity was checked.
    """
    rows = [_row(row) for item in study.of_kind("audit") for row in item.details.get("rows", [])]
    known = {row[0].text for row in rows}
    rows += [
        _row(
            {
                "id": claim.id,
                "statement": claim.statement,
                "largest_error": claim.value,
                "passed": claim.evidence is Evidence.PROVEN,
                "bound": _own_bound(claim, item),
                "reason": item.name if _own_bound(claim, item) is not None else claim.reason,
            }
        )
        for claim, item in study.claims()
        if claim.evidence in (Evidence.PROVEN, Evidence.FAILED) and claim.id not in known
    ]
    if not rows:
        return None
    order = {"FAILED": 0, "passed": 1, "does not apply": 2}
    rows.sort(key=lambda row: order[row[-1].text])
    columns = (
        Column("id"),
        Column("must hold", "where the error is largest"),
        Column("largest error", numeric=True),
        Column("bound", numeric=True),
        Column("why this bound"),
        Column("outcome"),
    )
    return Section(
        "audit",
        "Checks of the arithmetic",
        "These statements must hold in any model of this kind, whatever it has learnt. Each was "
        "computed in two ways on this model, and the largest difference is shown beside the bound "
        "it must stay under. A check over its bound means that the numbers above cannot be relied "
        "on; the head of the page then says so. Errors are relative to the largest entry compared, "
        "where that is over 1.",
        (table("Checks", columns, rows), *_measured(study)),
    )


def _measured(study: Study) -> list[Block]:
    """What stands beside the checks because algebra stops there; nothing if nothing does."""
    claims = [
        claim
        for item in study.of_kind("audit")
        for claim in item.result.claims
        if claim.evidence is Evidence.MEASURED
    ]
    if not claims:
        return []
    columns = (
        Column("id"),
        Column("measured beside the checks", "on what"),
        Column("value", "95% interval, n", numeric=True),
    )
    rows = []
    for claim in claims:
        interval = [] if claim.interval is None else [formats.interval(*claim.interval)]
        rows.append(
            (
                Cell(claim.id, code=True),
                Cell(formats.sentence(claim.statement), note=claim.reason),
                Cell(
                    formats.with_unit(claim.value, claim.unit),
                    note=", ".join([*interval, f"n = {claim.n}"]),
                    value=exact(claim.value),
                ),
            )
        )
    return [table("Measured on this model, where algebra stops", columns, rows)]


def _own_bound(claim: Claim, item: Item) -> float | None:
    """The bound of a sweep's control with own values, which its result holds as a number."""
    if item.kind in PAIRED and claim.id == f"self_patch.{item.site}":
        return float(item.details["self_patch_bound"])
    if item.kind in CUTS and claim.id == "self_cut.z":
        return float(item.details["self_cut_bound"])
    return None


def _row(row: dict[str, Any]) -> list[Cell]:
    applies = row.get("applies", True)
    outcome = "does not apply" if not applies else "passed" if row.get("passed") else "FAILED"
    error, bound = (
        value if isinstance(value := row.get(name), (int, float)) and applies else None
        for name in ("largest_error", "bound")
    )
    worst = row.get("worst")
    return [
        Cell(str(row["id"]), code=True),
        Cell(
            formats.sentence(str(row["statement"])),
            note="" if worst in (None, "") or not applies else str(worst),
        ),
        Cell(formats.number(error), value=exact(error)),
        Cell(formats.number(bound), value=exact(bound)),
        Cell(str(row.get("reason") or "–")),
        Cell(outcome),
    ]


def limits(study: Study, broken: list[Section]) -> Section:
    """What this page cannot say: what was not run, what was cut, what is unknown."""
    items = [
        *_broken(broken),
        *_missing(study),
        *_left_out(study),
        *_sizes(study),
        *_warnings(study),
        (
            "Meaning.",
            "What a head means is not settled by where it looks or by what it writes. Only the "
            "statements labelled CAUSAL rest on an intervention, and they hold for prompts of the "
            "kind shown here.",
        ),
    ]
    return Section(
        "limits",
        "Limits",
        "What was not done, what was left out, and what nobody should read into the numbers above.",
        (Bullets(tuple(items)), *_unknown(study)),
    )


def _broken(broken: list[Section]) -> list[tuple[str, str]]:
    return [(f"“{part.title}” is missing.", formats.sentence(part.broken)) for part in broken]


def _missing(study: Study) -> list[tuple[str, str]]:
    items = []
    patchings = study.of_kinds(*PAIRED)
    cut = study.cutting
    if not patchings and cut:
        items.append(("No patching.", "Heads were cut; nothing was restored from another run."))
    elif not patchings and study.of_kind("sinks"):
        items.append(("No patching.", "Only edges to the first token were cut."))
    elif not patchings:
        items.append(("No intervention.", "Nothing was patched, so nothing here is about cause."))
    elif all(item.restores for item in patchings):
        items.append(
            (
                "Denoising only.",
                "It shows which places are enough to restore the answer, not which are needed: two "
                "places that can stand in for each other are both found.",
            )
        )
    elif not any(item.restores for item in patchings):
        items.append(
            (
                "Noising only.",
                "It shows which places are needed for the answer, not which are enough: two places "
                "that can stand in for each other are both missed.",
            )
        )
    untested = [
        *([] if study.of_kind("paths") else ["which head feeds which"]),
        *([] if cut else ["what sets of heads do together"]),
    ]
    if patchings and untested:
        both = formats.sentence(f"{' and '.join(untested)} was not tested")
        items.append(("Single places.", f"Each effect is that of one place alone. {both}"))
    for kind, lead, text in (
        ("heads", "No census.", "Heads were not scored against the known kinds."),
        ("decomposition", "No decomposition.", "What each part adds directly was not measured."),
        ("audit", "No audit.", "The identities of the forward pass were not checked."),
    ):
        if not study.of_kind(kind):
            items.append((lead, text))
    return items


def _left_out(study: Study) -> list[tuple[str, str]]:
    """What a study of several sections could not run, each reason once."""
    reasons = [str(why) for item in study.items for why in item.details.get("left_out") or []]
    return [("Left out.", formats.sentence(why)) for why in dict.fromkeys(reasons)]


def _sizes(study: Study) -> list[tuple[str, str]]:
    items = []
    counts = sorted({item.n for item in study.of_kinds(*PAIRED) if item.n is not None})
    if counts and counts[0] < FEWEST:
        items.append(
            (
                f"n = {counts[0]}.",
                "Below six pairs no p-value can reach 0.05; ranges of the effects stand in place "
                "of intervals, and no place gets the label CAUSAL.",
            )
        )
    elif counts and counts[0] < ENOUGH:
        items.append(
            (
                f"n = {counts[0]}.",
                "With fewer than 64 prompt pairs the 95% intervals are too narrow: in simulations "
                "they hold the true value in 84% of cases at 8 pairs, 90% at 16, 92% at 32.",
            )
        )
    longest = max(
        (len(item.details.get("prompts") or []) for item in study.of_kinds(*PAIRED)), default=0
    )
    if longest > MOST_PAIRS:
        items.append(
            ("Prompts.", f"The table of prompts stops at {MOST_PAIRS} of {longest} pairs.")
        )
    return items


def _warnings(study: Study) -> list[tuple[str, str]]:
    """What the analyses themselves warn of; the same words from several results stand once."""
    sources: dict[str, list[str]] = {}
    for item in study.items:
        texts = [str(text) for text in item.details.get("warnings") or []]
        refused = item.details.get("normalized_refused")
        if refused and not any(str(refused) in text for text in texts):
            texts.append(f"no shares of the gap: {refused}")
        for text in texts:
            sources.setdefault(text, []).append(item.name)
    return [
        (formats.sentence(text), f"Said of: {formats.listing(names, most=3)}.")
        for text, names in sources.items()
    ]


def _unknown(study: Study) -> list[Block]:
    """The statements that are not established, each with what would settle it."""
    found = [claim for claim, _ in study.claims() if claim.evidence is Evidence.UNKNOWN]
    if not found:
        return []
    items = [
        (f"{claim.id}.", f"{formats.sentence(claim.statement)} {formats.sentence(claim.reason)}")
        for claim in found[:_MOST_UNKNOWN]
    ]
    if len(found) > _MOST_UNKNOWN:
        items.append(("More.", f"{len(found) - _MOST_UNKNOWN} further rows of the claims table."))
    one = (
        "One statement is unknown" if len(found) == 1 else (f"{len(found)} statements are unknown")
    )
    return [Fold(f"{one}, and what would settle it", (Bullets(tuple(items)),))]


def data(study: Study, *, sha256: str, size: int, schema: str, plotly_version: str) -> Section:
    """The page's JSON: what it is, its fingerprint, how to save it and draw it again."""
    run = sha256[:8]
    name = f"headstream-{run}.json"
    blocks: tuple[Block, ...] = (
        Terms(
            (
                Term("Run", run, code=True),
                Term("SHA-256 of the JSON", sha256, code=True),
                Term("Schema", schema, code=True),
                Term("Results", "; ".join(item.name for item in study.items)),
                Term("Drawn with", f"plotly.js {plotly_version}, which is inside this file"),
            )
        ),
        SaveButton(name, size),
        Prose("To draw this page again from results saved as JSON, without the model:"),
        Command("headstream report RESULT.json ... -o report.html"),
    )
    return Section(
        "data",
        "Data",
        "Everything on this page is drawn from one JSON text inside it. The button saves exactly "
        "the bytes whose SHA-256 is shown. The page loads nothing and sends nothing: its security "
        "policy forbids every request.",
        blocks,
    )
