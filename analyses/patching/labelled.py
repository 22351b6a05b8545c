"""Effects with their inference, as labelled arrays. Numpy and xarray only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from headstream.analyses.patching import inference

# A prompt's own ratio is left out of per-prompt shares when its gap is below this part of the mean.
SMALL_GAP = 0.1


def describe_gap(
    gap: Float[np.ndarray, " example"], unit: str, *, seed: int
) -> tuple[dict[str, Any], str | None]:
    """The clean-corrupted gap with its interval, and why normalisation is refused, if it is.

    Refused when the 95% interval of the mean gap holds 0: a share of something that may be nothing.
    """
    mean = float(gap.mean())
    low, high = (float(end) for end in inference.mean_interval(gap, seed=seed))
    floor = SMALL_GAP * abs(mean)
    small = int((np.abs(gap) < floor).sum())
    details = {"mean": mean, "low": low, "high": high, "floor": floor, "small": small}
    if mean == 0 or low <= 0 <= high:
        return details, (
            f"the mean gap between clean and corrupted, {mean:.3g} {unit}, is within its own noise "
            f"[{low:.3g}, {high:.3g}]"
        )
    return details, None


def _gaps(
    effects: Float[np.ndarray, "*cells example"], gap: Float[np.ndarray, " example"], *, seed: int
) -> Float[np.ndarray, "*cells"]:
    """What each cell's mean effect is divided by: the mean gap of the pairs that have the cell.

    NaN where those pairs' gap is within its own noise, though that of all pairs is not.
    """
    *shape, n = effects.shape
    patterns, group = np.unique(np.isfinite(effects).reshape(-1, n), axis=0, return_inverse=True)
    means = np.full(len(patterns), np.nan)
    for number, present in enumerate(patterns):
        if present.all() or (present.any() and not _within_noise(gap[present], seed=seed)):
            means[number] = gap[present].mean()
    return means[group.ravel()].reshape(shape)


def _within_noise(gap: Float[np.ndarray, " example"], *, seed: int) -> bool:
    low, high = (float(end) for end in inference.mean_interval(gap, seed=seed))
    return bool(gap.mean() == 0 or low <= 0 <= high)


def labelled(
    coords: Mapping[str, np.ndarray],
    effects: Float[np.ndarray, "*cells example"],
    *,
    second: Float[np.ndarray, "*cells example"],
    unrelated: Float[np.ndarray, "*cells example"],
    clean: Float[np.ndarray, " example"],
    corrupted: Float[np.ndarray, " example"],
    flips: inference.SignFlips,
    sign: float,
    refused: bool,
    seed: int,
) -> xr.Dataset:
    """The data of a `PatchingResult`, all but `causal`.

    Args:
        coords: names and labels of the cell axes, in order.
        effects: raw effects; NaN where a pair lacks the cell.
        second: the same in the second metric.
        unrelated: the same with an unrelated pair's values.
        clean, corrupted: metric of the two runs.
        sign: +1 for denoise, -1 for noise: the direction in which a patch closes the gap.
        refused: whether to leave `normalized` NaN. It is NaN too at a cell whose own pairs' gap is
            within its noise.
    """
    dims = tuple(coords)
    gap = clean - corrupted
    mean = inference.mean_over_prompts(effects)
    low, high = inference.mean_interval(effects, seed=seed)
    shares = share_low = share_high = np.full(mean.shape, np.nan)
    if not refused:
        gaps = _gaps(effects, gap, seed=seed)
        shares = sign * mean / gaps + 0.0  # no effect is +0, not -0
        ends = inference.ratio_interval(sign * effects, gap, seed=seed)
        share_low, share_high = (np.where(np.isnan(gaps), np.nan, end) for end in ends)
    return xr.Dataset(
        {
            "effects": ((*dims, "example"), effects),
            "clean": (("example",), clean),
            "corrupted": (("example",), corrupted),
            "mean": (dims, mean),
            "low": (dims, low),
            "high": (dims, high),
            "normalized": (dims, shares),
            "normalized_low": (dims, share_low),
            "normalized_high": (dims, share_high),
            "p_value": (dims, flips.p_value),
            "q_value": (dims, inference.q_values(flips.cell_p)),
            "unrelated": (dims, inference.mean_over_prompts(unrelated)),
            "second": (dims, inference.mean_over_prompts(second)),
        },
        coords={**coords, "example": np.arange(len(clean))},
    )
