"""Shares of the gap: what they are divided by, and when they are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from headstream.analyses.patching.inference import sign_flips
from headstream.analyses.patching.labelled import describe_gap, labelled

# Ten pairs whose gap is plainly 2, and four whose gaps cancel.
GAP = np.array([2.0, 2.1, 1.9, 2.2, 1.8, 2.0, 2.1, 1.9, 2.2, 1.8, 1.0, -1.1, 1.2, -1.0])
OWN = slice(10, 14)


def found(effects: np.ndarray, gap: np.ndarray = GAP, **changes: Any) -> xr.Dataset:
    arguments: dict[str, Any] = {
        "second": effects / 2,
        "unrelated": np.zeros_like(effects),
        "clean": gap + 1.0,
        "corrupted": np.ones_like(gap),
        "flips": sign_flips(effects, n_flips=99),
        "sign": 1.0,
        "refused": False,
        "seed": 0,
        **changes,
    }
    return labelled({"pos": np.arange(len(effects))}, effects, **arguments)


def test_a_share_is_a_ratio_of_means_over_the_pairs_that_have_the_cell() -> None:
    effects = np.stack([0.5 * GAP, 0.25 * GAP])
    effects[1, 3:] = np.nan
    data = found(effects)
    np.testing.assert_allclose(data["normalized"], [0.5, 0.25], rtol=1e-12)
    noise = found(-effects, sign=-1.0)
    np.testing.assert_allclose(noise["normalized"], [0.5, 0.25], rtol=1e-12)
    assert data["second"].values.tolist() == (data["mean"].values / 2).tolist()


def test_a_cell_whose_own_pairs_have_no_gap_has_no_share() -> None:
    """Their gaps cancel: 0.025 of anything would be divided by next to nothing."""
    effects = np.ones((2, len(GAP)))
    effects[1] = np.nan
    effects[1, OWN] = 1.0
    data = found(effects)
    assert np.isfinite(data["normalized"].values[0])
    for name in ("normalized", "normalized_low", "normalized_high"):
        assert np.isnan(data[name].values[1])
    assert data["mean"].values.tolist() == [1.0, 1.0]


def test_a_cell_that_one_pair_has_is_compared_with_that_pair() -> None:
    effects = np.full((2, len(GAP)), np.nan)
    effects[0] = 1.0
    effects[1, 3] = 1.1
    assert found(effects)["normalized"].values[1] == 1.1 / 2.2


def test_the_whole_gap_within_its_noise_is_refused() -> None:
    details, reason = describe_gap(GAP[OWN], "nats", seed=0)
    assert reason is not None
    assert reason.startswith("the mean gap between clean and corrupted, 0.025 nats, is within")
    # Below 6 pairs its interval is its range.
    assert (details["low"], details["high"]) == (-1.1, 1.2)
    _, reason = describe_gap(GAP, "nats", seed=0)
    assert reason is None
    data = found(np.ones((1, len(GAP))), refused=True)
    assert np.isnan(data["normalized"].values).all()


def test_a_gap_of_exactly_nothing_is_refused() -> None:
    _, reason = describe_gap(np.array([1.0, -1.0] * 4), "nats", seed=0)
    assert reason is not None


def test_small_gaps_are_counted() -> None:
    details, _ = describe_gap(np.array([2.0] * 9 + [0.1]), "nats", seed=0)
    # A tenth of the mean gap of 1.81.
    assert (round(details["floor"], 12), details["small"]) == (0.181, 1)
