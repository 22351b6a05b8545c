"""From the arrays of a sweep to its labels, its random-site control and its claims.

Labels are computed by the one rule in `inference.failed_conditions`; a site that fails a condition
is UNKNOWN and says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from headstream.analyses.evidence import Claim, Evidence, proven
from headstream.analyses.patching.inference import ALPHA, MIN_PAIRS, failed_conditions
from headstream.analyses.patching.result import Cell, least_notable, ranked_cells
from headstream.analyses.patching.words import all_zero, opposed, second_effect, sentence

# How many sites without the label are still named, the largest effects first.
NOTABLE = 3

# What the 95% intervals cover below a number of prompts, of lognormal effects and of normal ones
# (`benchmarks/calibration.py shapes`, at 6, 8, 16 and 32).
_COVERAGE = (
    (8, "0.81 to 0.95"),
    (16, "0.85 to 0.95"),
    (32, "0.89 to 0.95"),
    (64, "0.93 to 0.95"),
)


def causal_cells(data: xr.Dataset, details: Mapping[str, Any]) -> xr.DataArray:
    """Which cells carry the label CAUSAL; `data` holds mean, p_value, unrelated and effects."""
    counts = np.isfinite(data["effects"].values).sum(axis=-1)
    causal = np.zeros(data["mean"].shape, dtype=bool)
    for index in np.ndindex(causal.shape):
        mean = float(data["mean"].values[index])
        causal[index] = np.isfinite(mean) and not failed_conditions(
            mean=mean,
            p_value=float(data["p_value"].values[index]),
            unrelated=float(data["unrelated"].values[index]),
            n=int(counts[index]),
            unit=details["metric"]["unit"],
            self_patch_held=_self_patch_held(details),
        )
    return xr.DataArray(causal, dims=data["mean"].dims)


def random_sites_95(data: xr.Dataset) -> float | None:
    """95th percentile of |mean effect| over sites outside the claimed set; None if none is left.

    For the reader; it gates nothing.
    """
    mean = data["mean"].values
    outside = np.abs(mean[~data["causal"].values & np.isfinite(mean)])
    return float(np.quantile(outside, 0.95)) if outside.size else None


def claims_of(data: xr.Dataset, details: Mapping[str, Any]) -> tuple[Claim, ...]:
    """One claim for the self-patch control, one a CAUSAL site, and the largest few that are not.

    A site without the label is named only if its effect is notable: at least 5% of the gap. More
    pairs would settle nothing that matters about a smaller one.
    Sites stand in signed order, from most towards the other run to most against it.
    """
    held = proven(
        f"self_patch.{details['site']}",
        f"patching a run with its own {details['site']} changes nothing",
        error=details["self_patch_max"],
        bound=details["self_patch_bound"],
        reason=f"largest |effect| in {details['metric']['unit']} over the whole grid",
    )
    cells = named_cells(ranked_cells(data), data, details)
    return (held, *(_claim(cell, details) for cell in cells))


def named_cells(cells: Sequence[Cell], data: xr.Dataset, details: Mapping[str, Any]) -> list[Cell]:
    """Those that a claim is made about, in the order given: CAUSAL ones, the largest few others."""
    least = least_notable(data, details)
    tested = [
        cell
        for cell in cells
        if not cell.causal and abs(cell.mean) >= least and not _only_rounding(cell)
    ]
    notable = sorted(tested, key=lambda cell: -abs(cell.mean))[:NOTABLE]
    return [cell for cell in cells if cell.causal or cell in notable]


def share_of(cell: Cell, details: Mapping[str, Any]) -> float | None:
    """The share of the gap that a cell moved; None where it is refused or has no number."""
    refused = details["normalized_refused"] is not None or not np.isfinite(cell.normalized)
    return None if refused else cell.normalized


def claim_of(
    cell: Cell,
    details: Mapping[str, Any],
    *,
    id: str,
    statement: str,
    family: str,
    foreign: str,
    beside: str = "",
    beside_failed: str = "",
) -> Claim:
    """The claim about one cell: CAUSAL by the one rule, or UNKNOWN and which condition failed.

    Args:
        family, foreign: what the test is over, and what an unrelated prompt gave, in words.
        beside, beside_failed: what else the reason says, with the label and without it.
    """
    share, unit = share_of(cell, details), details["metric"]["unit"]
    value, ends = (cell.mean, cell.interval) if share is None else (share, cell.normalized_interval)
    failed = failed_conditions(
        mean=cell.mean,
        p_value=cell.p_value,
        unrelated=cell.unrelated,
        n=cell.n,
        unit=unit,
        self_patch_held=_self_patch_held(details),
    )
    if failed:
        reason = "; ".join(filter(None, [*failed, beside_failed]))
    else:
        over = f"{details['family']} {family if details['family'] != 1 else family.rstrip('s')}"
        reason = (
            f"p = {cell.p_value:.2g} (sign-flip, maximum over {over}); "
            f"{cell.mean:+.2f} {unit}, with an unrelated prompt's {foreign} {cell.unrelated:+.2f}"
            + (f"; {beside}" if beside else "")
        )
    return Claim(
        id,
        statement,
        Evidence.UNKNOWN if failed else Evidence.CAUSAL,
        value=value,
        unit=unit if share is None else "of the gap",
        interval=ends if np.isfinite(ends).all() else None,
        n=cell.n,
        reason=reason,
        where="patching",
    )


def _claim(cell: Cell, details: Mapping[str, Any]) -> Claim:
    second = second_effect(details, cell.mean, cell.second)
    return claim_of(
        cell,
        details,
        id=f"{details['site']}.{cell.label}",
        statement=sentence(details, cell.label, share_of(cell, details)),
        family="sites",
        foreign="values",
        beside=second,
        # Without the label what failed is reason enough, unless it says the opposite.
        beside_failed=second if opposed(details, cell.mean, cell.second) else "",
    )


def _only_rounding(cell: Cell) -> bool:
    """Zero, or so near it in every pair that there was nothing to test."""
    return cell.mean == 0 or (cell.n >= MIN_PAIRS and not np.isfinite(cell.p_value))


def warnings_of(data: xr.Dataset, details: Mapping[str, Any]) -> list[str]:
    """What the reader must know before believing the numbers."""
    n = data.sizes["example"]
    words = []
    if n == 1:
        words.append("one pair is a demonstration: no interval, no p-value, no label")
    elif n < MIN_PAIRS:
        words.append(
            f"{n} pairs: effects and their ranges only, no p-value and no label below {MIN_PAIRS}"
        )
    else:
        for below, coverage in _COVERAGE:
            if n < below:
                words.append(
                    f"{n} pairs: 95% intervals cover {coverage}, "
                    "less where few pairs carry the effect"
                )
                break
        words += _few_pairs(data)
        words += _coarse_p(details)
    if details["normalized_refused"] is not None:
        words.append(f"normalisation refused: {details['normalized_refused']}")
    if not _self_patch_held(details):
        words.append(
            f"the self-patch control failed: {details['self_patch_max']:.1e} is over "
            f"{details['self_patch_bound']:.1e}"
        )
    if details["gap"]["small"]:
        words.append(
            f"{details['gap']['small']} of {n} pairs have a gap under a tenth of the mean gap"
        )
    words += _second_disagrees(data, details)
    if not np.any(np.nan_to_num(data["effects"].values)):
        what = "one of these writes" if details["site"] == "path" else "one of these values"
        words.append(all_zero(details, data, f"no {what} moves the metric"))
    return words


def _few_pairs(data: xr.Dataset) -> list[str]:
    counts = np.isfinite(data["effects"].values).sum(axis=-1)
    few = int(((counts > 0) & (counts < MIN_PAIRS)).sum())
    if not few:
        return []
    lack = "site is" if few == 1 else "sites are"
    return [f"{few} {lack} in fewer than {MIN_PAIRS} pairs: a range, no p-value and no label"]


def _coarse_p(details: Mapping[str, Any]) -> list[str]:
    """Too few sign patterns for any p to be small enough."""
    flips = details["flips"]
    smallest = 2 / flips if details.get("flips_exact") else 1 / (1 + flips)
    if smallest <= ALPHA:
        return []
    patterns = "sign pattern" if flips == 1 else "sign patterns"
    return [f"{flips} {patterns}: the smallest p is {smallest:.2g}, so no label is possible"]


def _second_disagrees(data: xr.Dataset, details: Mapping[str, Any]) -> list[str]:
    metric = details.get("second_metric")
    if not metric or "second" not in data:
        return []
    causal = data["causal"].values
    pairs = zip(data["mean"].values[causal].tolist(), data["second"].values[causal].tolist())
    against = sum(opposed(details, mean, second) for mean, second in pairs)
    if not against:
        return []
    return [
        f"the second metric, {metric['name']}, moves the other way at {against} of "
        f"{int(causal.sum())} labelled sites"
    ]


def _self_patch_held(details: Mapping[str, Any]) -> bool:
    return bool(details["self_patch_max"] <= details["self_patch_bound"])
