"""What a grid of per-prompt effects allows one to say.

    1. the unit is the prompt: effects [cell..., example], NaN where a prompt lacks the cell
    2. sign-flip permutation of the raw mean, with the maximum over the whole grid  -> p_value
    3. Benjamini-Hochberg on the per-cell sign-flip p                               -> q_value
    4. BCa bootstrap over prompts, of the mean and of the ratio of means, never
       narrower than Student's t                                                    -> intervals
    5. the one rule for CAUSAL: p <= 0.05, n >= 6, and an effect larger than the
       unrelated-prompt control's in the same direction; a failed condition is said in words

Numpy arrays in, numpy arrays out: no model, no labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from headstream.models.errors import TaskError

ALPHA = 0.05
MIN_PAIRS = 6  # the smallest two-sided sign-flip p is 2 / 2^n: 0.063 at n = 5, 0.031 at n = 6
N_RESAMPLES = 2000

# Two sign patterns can give the same mean by different sums, which then differ in the last bits.
# Such ties must count as "at least as large", or p comes out too small; 1e-10 of the mean absolute
# effect is far above float64 rounding and far below any difference of effects.
TIE = 1e-10

# Bound on the scratch arrays of one step, in float64 entries (128 MB).
_SCRATCH = 2**24

Array = np.ndarray


@dataclass(frozen=True)
class SignFlips:
    """Sign-flip permutation of a grid.

    Attributes:
        p_value: p with the maximum over the family, per cell; NaN outside the family.
        cell_p: p of each cell alone (for q-values); NaN outside the family.
        family: cells that were tested: n >= 6 and not identically zero.
        flips: sign patterns compared.
        exact: True if they are all 2^n, so that p is no estimate.
    """

    p_value: Float[Array, "*cells"]
    cell_p: Float[Array, "*cells"]
    family: Bool[Array, "*cells"]
    flips: int
    exact: bool


def sign_flips(
    effects: Float[Array, "*cells example"],
    *,
    n_flips: int = 5000,
    seed: int = 0,
    floor: float = 0.0,
) -> SignFlips:
    """Two-sided sign-flip permutation of each cell's mean, with the maximum over the grid.

    Under the null the sign of a prompt's effects is a coin. All cells of a prompt are flipped
    together, so the correlation between cells is kept; a cell's |mean| is compared with the largest
    |mean| over the family in each flip (single-step maxT). p = (1 + #{max >= observed}) /
    (1 + flips): never 0. If 2^n <= n_flips all sign patterns are enumerated, the observed one among
    them, and p is exact: its floor is 2 / 2^n.

    Swapping clean and corrupted of each pair by a coin is this null where a pair's noising effect
    is minus its denoising one. Redundant sites restore more than they are needed for: swapped so,
    their mean effect is not 0, and many pairs find that.

    Args:
        effects: raw effects in metric units; NaN where a prompt lacks the cell.
        n_flips: random sign patterns.
        seed: of the sign patterns.
        floor: a cell whose every |effect| is at most this is identically zero, and no test.
    Returns:
        p-values; NaN for cells outside the family, and for every cell below 6 prompts.
    Source:
        Westfall & Young 1993, single-step maxT. We take the raw mean, not a t statistic: cells of
        one grid share their unit, and a t statistic would promote tiny consistent effects.
    Example:
        >>> effects = np.array([[1.0] * 8, [0.0] * 8])
        >>> flipped = sign_flips(effects)
        >>> flipped.p_value.tolist(), flipped.exact
        ([0.0078125, nan], True)
    """
    check_flips(n_flips)
    *shape, n = effects.shape
    flat = effects.reshape(-1, n)
    present = np.isfinite(flat)
    count = present.sum(axis=1)
    values = np.where(present, flat, 0.0)
    family = (count >= MIN_PAIRS) & (np.abs(values).max(axis=1, initial=0.0) > floor)
    p_value = np.full(len(flat), np.nan)
    cell_p = np.full(len(flat), np.nan)
    exact = n < 63 and 2**n <= n_flips
    flips = 2**n if exact else n_flips
    if family.any():
        shares = values[family] / count[family][:, None]
        observed = np.abs(shares.sum(axis=1))
        tolerance = TIE * np.abs(shares).sum(axis=1)
        cell_hits = np.zeros(len(shares), dtype=np.int64)
        grid_hits = np.zeros(len(shares), dtype=np.int64)
        rng = np.random.default_rng([seed, 1])
        step = max(1, _SCRATCH // len(shares))
        for start in range(0, flips, step):
            index = np.arange(start, min(start + step, flips))
            signs = _all_signs(index, n) if exact else _coins(rng, len(index), n)
            means = np.abs(signs @ shares.T)
            cell_hits += (means >= observed - tolerance).sum(axis=0)
            largest = np.sort(means.max(axis=1))
            grid_hits += len(largest) - np.searchsorted(largest, observed - tolerance.max())
        # All 2^n patterns hold the observed one already; a random sample has it added.
        own = 0 if exact else 1
        p_value[family] = (own + grid_hits) / (own + flips)
        cell_p[family] = (own + cell_hits) / (own + flips)
    return SignFlips(
        p_value.reshape(shape), cell_p.reshape(shape), family.reshape(shape), flips, exact
    )


def check_flips(n_flips: object) -> None:
    """Refuse a number of sign patterns that gives no p-value."""
    if isinstance(n_flips, bool) or not isinstance(n_flips, int) or n_flips < 1:
        raise TaskError(f"n_flips must be a whole number >= 1, got {n_flips!r}")


def _all_signs(index: Int[Array, " flip"], n: int) -> Float[Array, "flip n"]:
    return 1.0 - 2.0 * ((index[:, None] >> np.arange(n)) & 1)


def _coins(rng: np.random.Generator, flips: int, n: int) -> Float[Array, "flips n"]:
    return 1.0 - 2.0 * rng.integers(0, 2, size=(flips, n))


def q_values(cell_p: Float[Array, "*cells"]) -> Float[Array, "*cells"]:
    """Benjamini-Hochberg q of each cell: the false-discovery rate at which it would be listed.

    NaN cells are not in the family and stay NaN. For the map as a whole; gates no label.
    """
    q = np.full(cell_p.shape, np.nan)
    tested = np.isfinite(cell_p)
    if tested.any():
        q[tested] = stats.false_discovery_control(cell_p[tested], method="bh")
    return q


def mean_interval(
    effects: Float[Array, "*cells example"], *, seed: int = 0
) -> tuple[Float[Array, "*cells"], Float[Array, "*cells"]]:
    """95% interval of each cell's mean over prompts: low and high.

    BCa with 2,000 resamples (percentile where BCa is undefined: all effects equal), each end moved
    out to that of Student's t interval where that reaches further. BCa alone covers 0.84 at n = 8,
    0.90 at 16 and 0.92 at 32, and with heavy tails 0.90 at 64; this covers normal effects 0.95 from
    n = 6 on, exponential ones 0.90 at 8, 0.93 at 16 and 0.95 at 64, lognormal ones 0.85, 0.89 and
    0.93 (`benchmarks/calibration.py shapes`). Below 6 prompts it is the range of the effects, and
    NaN for a single prompt.
    """
    return _by_prompts(effects, None, lambda values, axis: np.mean(values, axis=axis), seed)


def ratio_interval(
    effects: Float[Array, "*cells example"], gap: Float[Array, " example"], *, seed: int = 0
) -> tuple[Float[Array, "*cells"], Float[Array, "*cells"]]:
    """95% interval of mean(effects) / mean(gap), numerator and gap resampled together by prompt.

    As `mean_interval`; below 6 prompts the range of the effects over the mean gap.
    """

    def ratio(values: Array, gaps: Array, axis: int) -> Array:
        return np.asarray(np.mean(values, axis=axis) / np.mean(gaps, axis=axis))

    return _by_prompts(effects, gap, ratio, seed)


def _by_prompts(
    effects: Array, gap: Array | None, statistic: Callable[..., Any], seed: int
) -> tuple[Array, Array]:
    """Run the bootstrap for all cells that the same prompts have, group by group."""
    *shape, n = effects.shape
    flat = effects.reshape(-1, n)
    ends = np.full((2, len(flat)), np.nan)
    patterns, group = np.unique(np.isfinite(flat), axis=0, return_inverse=True)
    for number, present in enumerate(patterns):
        cells = np.flatnonzero(group.ravel() == number)
        gaps = None if gap is None else gap[present]
        # No more cells at once than the scratch bound allows; each chunk draws the same resamples.
        step = max(1, _SCRATCH // (N_RESAMPLES * n))
        for start in range(0, len(cells), step):
            chunk = cells[start : start + step]
            values = flat[np.ix_(chunk, np.flatnonzero(present))]
            ends[:, chunk] = _ends(values, gaps, statistic, seed)
    return ends[0].reshape(shape), ends[1].reshape(shape)


def _ends(values: Array, gaps: Array | None, statistic: Callable[..., Any], seed: int) -> Array:
    n = values.shape[1]
    if n < 2:
        return np.full((2, len(values)), np.nan)
    if n < MIN_PAIRS:
        scale = 1.0 if gaps is None else float(gaps.mean())
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.sort(np.stack([values.min(axis=1), values.max(axis=1)]) / scale, axis=0)
    ends = _bootstrap(values, gaps, statistic, seed, "BCa")
    undefined = ~np.isfinite(ends).all(axis=0)
    if undefined.any():
        ends[:, undefined] = _bootstrap(values[undefined], gaps, statistic, seed, "percentile")
    return _around_t(ends, values, gaps)


def _around_t(ends: Array, values: Array, gaps: Array | None) -> Array:
    """The interval, widened to hold Student's t interval of the mean or (linearised) of the ratio.

    BCa alone covers too little with few prompts, and with heavy tails even with many: its skewness
    is then itself mostly noise.
    """
    n = values.shape[1]
    divisor = np.ones(n) if gaps is None else gaps
    scale = float(divisor.mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = values.mean(axis=1) / scale
        error = (values - centre[:, None] * divisor).std(axis=1, ddof=1) / (n**0.5 * abs(scale))
    reach = float(stats.t.ppf(0.975, n - 1)) * error
    return np.stack([np.fmin(ends[0], centre - reach), np.fmax(ends[1], centre + reach)])


def _bootstrap(
    values: Array, gaps: Array | None, statistic: Callable[..., Any], seed: int, method: Any
) -> Array:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Constant effects have no BCa interval; the caller falls back, nothing to warn about.
        warnings.simplefilter("ignore")
        interval = stats.bootstrap(
            (values,) if gaps is None else (values, np.broadcast_to(gaps, values.shape)),
            statistic,
            n_resamples=N_RESAMPLES,
            paired=gaps is not None,
            vectorized=True,
            axis=-1,
            method=method,
            rng=np.random.default_rng([seed, 2]),
        ).confidence_interval
    return np.stack([np.atleast_1d(interval.low), np.atleast_1d(interval.high)])


def mean_over_prompts(effects: Float[Array, "*cells example"]) -> Float[Array, "*cells"]:
    """Mean over the prompts that have the cell; NaN where none has."""
    count = np.isfinite(effects).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(effects, axis=-1) / np.where(count, count, np.nan))


def partners(groups: Int[Array, " example"], *, seed: int = 0) -> Int[Array, " example"]:
    """For each prompt another one of its group: a random derangement; -1 where it is alone.

    Sattolo's shuffle: one random cycle through each group, so nobody meets himself.

    Args:
        groups: prompts with the same number may stand in for each other (equal lengths).
        seed: of the shuffle.
    """
    rng = np.random.default_rng([seed, 3])
    other = np.full(len(groups), -1, dtype=np.int64)
    for number in np.unique(groups):
        members = np.flatnonzero(groups == number)
        if len(members) > 1:
            cycle = rng.permutation(members)
            other[cycle] = np.roll(cycle, -1)
    return other


def failed_conditions(
    *,
    mean: float,
    p_value: float,
    unrelated: float,
    n: int,
    unit: str,
    self_patch_held: bool = True,
    alpha: float = ALPHA,
    examples: str = "pairs",
    control: str = "values of an unrelated prompt do as much",
) -> list[str]:
    """The conditions of the label CAUSAL that one cell fails, in words; empty means CAUSAL.

    The rule: sign-flip p with the maximum over the grid <= alpha, n >= 6, and a mean effect larger
    than the unrelated-prompt control's in the same direction; and the self-patch control held.

    Args:
        unrelated: the control's mean effect.
        examples, control: words for what is counted and for a control that does as much; studies
            with another control give their own.
    """
    failed = []
    if not self_patch_held:
        failed.append("the self-patch control failed, so no effect of this sweep can be trusted")
    if n < MIN_PAIRS:
        failed.append(
            f"n = {n}, and at least {MIN_PAIRS} {examples} are needed; more would settle it"
        )
    elif not np.isfinite(p_value):
        failed.append("its effects are zero to rounding")
    elif p_value > alpha:
        failed.append(
            f"p = {p_value:.2g} with the maximum over the grid is above {alpha}; "
            f"more {examples} would settle it"
        )
    if n >= MIN_PAIRS and not np.isfinite(unrelated):
        failed.append("no other pair of equal length to take unrelated values from")
    elif np.isfinite(unrelated) and not np.sign(mean) * (mean - unrelated) > 0:
        failed.append(f"{control}: {unrelated:+.2f} {unit} against {mean:+.2f}")
    return failed
