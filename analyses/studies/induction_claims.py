"""What an induction study says: of the set that was cut, and of each head that stands out."""

from __future__ import annotations

import math
from typing import Any

import xarray as xr

from headstream.analyses.evidence import Claim, Evidence, measured, unknown
from headstream.analyses.kinds import InductionResult
from headstream.models.names import head_name

HEAD, PATTERN, COPIER, FIXED = (
    "induction head",
    "induction pattern",
    "fixed-distance copier",
    "fixed-distance",
)


def claims_of(result: InductionResult) -> list[Claim]:
    """The set that was cut, then every head that follows content or a fixed distance."""
    data, details = result.data, result.details
    n, joint = int(details["n"]), details["joint"]
    claims: list[Claim] = []
    if joint is None:
        best = data["induction"].min("distance")
        claims.append(
            measured(
                "induction.none",
                "no head looks for what followed an earlier copy at every distance",
                value=float(best.max()),
                unit="attention mass, the best head's least",
                n=n,
                reason=f"chance {float(data['chance'].mean()):.3f}; loss on what repeats predict "
                f"{details['loss']['repeats']:.2f} nats",
                where="induction",
            )
        )
    else:
        claims.append(_set_claim(joint, n))
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            cell = data.sel(layer=layer, head=head)
            label, name = str(cell["label"].item()), head_name(layer, head)
            if label in (HEAD, PATTERN):
                claims.append(_head_claim(cell, name, joint, n, shown=label == HEAD))
            elif label in (COPIER, FIXED):
                claims.append(_fixed_claim(cell, name, n, copies=label == COPIER))
    return claims


def _set_claim(joint: dict[str, Any], n: int) -> Claim:
    names = ", ".join(joint["heads"])
    statement = f"continuing a repeat needs {names}"
    if joint["failed"]:
        return unknown(
            "induction.set", statement, reason="; ".join(joint["failed"]), where="induction"
        )
    random = joint["random"]
    beside = ""
    if random["sets"]:
        beside = f"; as many other heads {random['mean']:+.2f}"
    if random["sets"] > 1:
        beside += f", mean of {random['sets']} random sets, at most {random['largest']:+.2f}"
    return Claim(
        "induction.set",
        statement,
        Evidence.CAUSAL,
        joint["mean"],
        "nats",
        (joint["low"], joint["high"]),
        n,
        f"loss on what repeats predict when all are cut; p = {joint['p']:.2g}; where nothing "
        f"repeats {joint['control']:+.2f}{beside}",
        "induction",
    )


def _head_claim(
    cell: xr.Dataset, name: str, joint: dict[str, Any], n: int, *, shown: bool
) -> Claim:
    least = float(cell["induction"].min())
    pattern = (
        f"its score is {least:.2f} or more at every distance, {float(cell['gapped']):.2f} at "
        "random gaps"
    )
    share, alone = float(cell["restored"]), float(cell["alone"])
    effect = f"cut alone {alone:+.2f} nats"
    if math.isfinite(share):
        effect = f"restored alone it takes back {100 * share:.0f}% of the joint cut, {effect}"
    statement = f"{name} is an induction head"
    if not shown:
        why = "the joint cut has no label" if joint["failed"] else "too little hangs on it"
        return unknown(
            f"induction.{name}",
            statement,
            reason=f"{pattern}, but {why}: {effect}",
            where="induction",
        )
    return Claim(
        f"induction.{name}",
        statement,
        Evidence.CAUSAL,
        share,
        "of what the joint cut took",
        (float(cell["restored_low"]), float(cell["restored_high"])),
        n,
        f"{pattern}; {effect}",
        "induction",
    )


def _fixed_claim(cell: xr.Dataset, name: str, n: int, *, copies: bool) -> Claim:
    distance = int(cell["fixed_distance"])
    does = "copies" if copies else "looks"
    return measured(
        f"induction.{name}",
        f"{name} {does} from a fixed distance of {distance} tokens, whatever stands there: it is "
        "no induction head",
        value=float(cell["fixed"]),
        unit="attention mass above chance",
        n=n,
        interval=(float(cell["fixed_low"]), float(cell["fixed_high"])),
        reason=f"measured {distance - 1} tokens back, where nothing repeats; at random gaps its "
        f"score is {float(cell['gapped']):.2f}",
        where="induction",
    )
