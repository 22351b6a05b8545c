"""What an induction study says: of the set that was cut, and of each head that stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from headstream.analyses.evidence import Claim, Evidence, measured, unknown
from headstream.analyses.kinds import InductionResult
from headstream.models.names import head_name

HEAD, PART, PATTERN, COPIER, FIXED = (
    "induction head",
    "induction head of a set",
    "induction pattern",
    "fixed-distance copier",
    "fixed-distance",
)
_LISTED = 6  # heads without a label that are named one by one
_NEAR = 3  # heads that are named where none clears the margin


def claims_of(result: InductionResult) -> list[Claim]:
    """The set that was cut, then every head that follows content or a fixed distance."""
    data, details = result.data, result.details
    n, joint = int(details["n"]), details["joint"]
    claims: list[Claim] = []
    if joint is None:
        claims.append(_none_claim(result))
    else:
        claims.append(_set_claim(joint, n))
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            cell = data.sel(layer=layer, head=head)
            label, name = str(cell["label"].item()), head_name(layer, head)
            if label in (HEAD, PART, PATTERN):
                claims.append(_head_claim(cell, name, label, details))
            elif label in (COPIER, FIXED):
                claims.append(_fixed_claim(cell, name, details["scan"], copies=label == COPIER))
    return claims


def fixed_distances(result: InductionResult) -> dict[int, list[str]]:
    """Heads labelled by a fixed distance, by that distance in tokens, the nearest first."""
    site = ("layer", "head")
    labels = result.data["label"].transpose(*site).values
    distances = result.data["fixed_distance"].transpose(*site).values
    found: dict[int, list[str]] = {}
    for at in np.argwhere((labels == COPIER) | (labels == FIXED)):
        found.setdefault(int(distances[tuple(at)]), []).append(head_name(*map(int, at)))
    return dict(sorted(found.items()))


def other_heads(joint: dict[str, Any]) -> str:
    """What cutting other heads cost, how many and which; "" if there are none."""
    random, size = joint["random"], len(joint["heads"])
    if not random["sets"]:
        return ""
    count = random["size"]
    heads = "head" if count == 1 else "heads"
    if random["sets"] == 1:
        words = f"the only other {heads} {random['mean']:+.2f}"
        if count > 1:
            words = f"all {count} other {heads} {random['mean']:+.2f}"
    else:
        words = (
            f"{count} other {heads} at random {random['mean']:+.2f}, mean of {random['sets']} "
            f"sets, at most {random['largest']:+.2f}"
        )
    if count < size:
        words += f" ({count}, not {size} as in the set)"
    if random["largest"] >= joint["mean"]:
        named = [f"{name} ({label})" for name, label in random["heads"].items() if label != "none"]
        rest = [name for name, label in random["heads"].items() if label == "none"]
        shown = named + (rest if count <= _LISTED else [f"{len(rest)} without a label"])
        words += (
            f", no less than the set: {', '.join(shown)}, among which may be what the set reads"
        )
    return words


def _none_claim(result: InductionResult) -> Claim:
    """That no head clears the margin, which is all that was seen: some may come near."""
    details, cleared = result.details, _cleared(result)
    order = np.dstack(np.unravel_index(np.argsort(-cleared, axis=None), cleared.shape))[0]
    best = float(cleared[tuple(order[0])])
    # Near is what has a third of it; of heads that have nothing one is enough.
    near = [at for at in order[:_NEAR] if cleared[tuple(at)] >= details["margin"] / 3] or order[:1]
    least = result.data["induction"].min("distance")
    shown = ", ".join(
        f"{head_name(*map(int, at))} {float(least.values[tuple(at)]):.2f} "
        f"({float(result.data['gapped'].values[tuple(at)]):.2f} at random gaps)"
        for at in near
    )
    distances = details["distances"]
    both = len(distances) > 1
    controls = max(
        float(np.nanmax(result.data[f"{kind}_control"].sel(layer=int(at[0]), head=int(at[1]))))
        for at in near
        for kind in ("position", "content")
        if np.isfinite(result.data[f"{kind}_control"]).all()
    )
    return measured(
        "induction.none",
        f"no head clears chance and {'both controls' if both else 'the position control'} by "
        f"{details['margin']:g} {_where(distances)}, in attention to what followed an earlier copy",
        value=best,
        unit=f"attention mass above chance and control{'s' * both}, the best head's least",
        n=int(details["n"]),
        reason=f"nearest {shown}{', least of distances' * both}; chance "
        f"{float(result.data['chance'].mean()):.3f}, control{'s' * both} at most {controls:.3f}; "
        f"loss on what repeats predict {details['loss']['repeats']:.2f} nats, that of a uniform "
        f"guess {details['loss']['uniform']:.2f}",
        where="induction",
    )


def _where(distances: Sequence[int]) -> str:
    return "at every distance" if len(distances) > 1 else f"at the one distance of {distances[0]}"


def _cleared(result: InductionResult) -> np.ndarray:
    """[layer, head]: how far the score is above chance and controls, where it is least."""
    data = result.data
    site = ("layer", "head")
    score, gapped = data["induction"], data["gapped"].transpose(*site)
    gaps = [gapped - result.details["gapped"]["chance"], gapped - data["gapped_control"]]
    singles = [score - data["chance"], score - data["position_control"]]
    if bool(np.isfinite(data["content_control"]).all()):
        singles.append(score - data["content_control"])
    least = [each.min("distance").transpose(*site).values for each in singles]
    cleared: np.ndarray = np.minimum.reduce([*least, *(g.transpose(*site).values for g in gaps)])
    return cleared


def _set_claim(joint: dict[str, Any], n: int) -> Claim:
    names = ", ".join(joint["heads"])
    statement = f"continuing a repeat needs {names}"
    if joint["failed"]:
        return unknown(
            "induction.set", statement, reason="; ".join(joint["failed"]), where="induction"
        )
    beside = other_heads(joint)
    return Claim(
        "induction.set",
        statement,
        Evidence.CAUSAL,
        joint["mean"],
        "nats",
        (joint["low"], joint["high"]),
        n,
        f"loss on what repeats predict when all are cut; p = {joint['p']:.2g}; where nothing "
        f"repeats {joint['control']:+.2f}{beside and f'; {beside}'}",
        "induction",
    )


def _head_claim(cell: xr.Dataset, name: str, label: str, details: Mapping[str, Any]) -> Claim:
    joint, n = details["joint"], int(details["n"])
    least = float(cell["induction"].min())
    pattern = (
        f"its score is {least:.2f} or more {_where(details['distances'])}, "
        f"{float(cell['gapped']):.2f} at random gaps"
    )
    share, alone = float(cell["restored"]), float(cell["alone"])
    effect = f"cut alone {alone:+.2f} nats"
    if math.isfinite(share):
        effect = f"restored alone it takes back {100 * share:.0f}% of the joint cut, {effect}"
    low, high = details["copying_random"]
    copying = _copying(cell, low, high)
    statement = f"{name} is an induction head"
    if label == PATTERN:
        why = "too little hangs on it"
        if joint["failed"]:
            why = "the joint cut has no label"
        elif not bool(cell["copies"]):
            why = "nothing shows that it copies"
        return unknown(
            f"induction.{name}",
            statement,
            reason=f"{pattern}, but {why}: {effect}; {copying}",
            where="induction",
        )
    if label == PART:
        size = len(joint["heads"])
        statement += f", as one of a set of {size} that stand in for one another"
        effect = f"no head alone gives back a fifth; {effect}"
    return Claim(
        f"induction.{name}",
        statement,
        Evidence.CAUSAL,
        share,
        "of what the joint cut took",
        (float(cell["restored_low"]), float(cell["restored_high"])),
        n,
        f"{pattern}; {effect}; {copying}",
        "induction",
    )


def _copying(cell: xr.Dataset, low: float, high: float) -> str:
    """What its OV circuit shows, and what it writes where that was asked."""
    score = float(cell["copying"])
    raised = float(cell["raised"]) if "raised" in cell else math.nan
    random = f"random heads {low:+.2f} to {high:+.2f}" if math.isfinite(low) else "no random range"
    words = f"OV copying {score:+.2f}, {random}" if math.isfinite(score) else "no OV copying score"
    if math.isfinite(raised):
        words += f"; its write raises what it attends to {raised:+.2f} above other tokens"
    elif not bool(cell["copies"]):
        words += "; its write raises no token above others"
    return words


def _fixed_claim(cell: xr.Dataset, name: str, scan: Mapping[str, Any], *, copies: bool) -> Claim:
    distance = int(cell["fixed_distance"])
    does = "copies" if copies else "looks"
    return measured(
        f"induction.{name}",
        f"{name} {does} from a fixed distance of {distance} tokens, whatever stands there: it is "
        "no induction head",
        value=float(cell["fixed"]),
        unit="attention mass above chance",
        n=int(scan["sequences"]),
        interval=(float(cell["fixed_low"]), float(cell["fixed_high"])),
        reason=f"measured {distance - 1} tokens back in random tokens, at positions "
        f"{distance + scan['start']} to {scan['length'] - 1} ({float(cell['fixed_late']):.2f} in "
        f"the later half); at random gaps its score is {float(cell['gapped']):.2f}",
        where="induction",
    )
