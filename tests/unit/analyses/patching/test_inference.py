"""Inference on arrays whose answer is known by hand, by enumeration, or by simulation."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from scipy import stats

from headstream.analyses.patching import inference
from headstream.models.errors import TaskError

ONES = [1.0] * 6
ALTERNATING = [2.0, -2.0] * 3


class TestSignFlips:
    def test_one_cell_of_equal_effects_has_the_smallest_p(self) -> None:
        flipped = inference.sign_flips(np.array([ONES]))
        # Only all-plus and all-minus reach |mean| = 1: 2 of 2^6 patterns.
        assert flipped.p_value.tolist() == [2 / 64]
        assert (flipped.flips, flipped.exact) == (64, True)

    def test_the_maximum_is_over_the_whole_grid(self) -> None:
        flipped = inference.sign_flips(np.array([ONES, ALTERNATING]))
        # |mean| >= 1 in the first cell: 2 patterns. In the second: |sum of signs| >= 3 is 6 or 4,
        # 2 * (1 + 6) = 14 patterns, none of them shared. Its own mean is 0: every flip reaches it.
        assert flipped.p_value.tolist() == [16 / 64, 1.0]
        assert flipped.cell_p.tolist() == [2 / 64, 1.0]

    def test_all_cells_of_a_prompt_flip_together(self) -> None:
        """Two copies of one cell are one test; flipped apart they would give about twice the p."""
        rng = np.random.default_rng(0)
        cell = rng.normal(0.6, 1, size=10)
        alone = inference.sign_flips(cell[None])
        twice = inference.sign_flips(np.stack([cell, cell]))
        assert twice.p_value.tolist() == [alone.p_value[0]] * 2

    def test_exact_p_equals_a_loop_over_all_patterns(self) -> None:
        effects = np.random.default_rng(1).normal(0.4, 1, size=(2, 3, 8))
        flipped = inference.sign_flips(effects)
        observed = np.abs(effects.mean(-1))
        largest = np.array(
            [
                np.abs((effects * np.array(signs)).mean(-1)).max()
                for signs in itertools.product((1, -1), repeat=8)
            ]
        )
        expected = (largest[:, None, None] >= observed - 1e-12).mean(0)
        np.testing.assert_allclose(flipped.p_value, expected, rtol=0, atol=1e-15)
        assert flipped.p_value.shape == (2, 3)

    def test_a_random_sample_adds_the_observed_pattern(self) -> None:
        flipped = inference.sign_flips(np.ones((1, 40)), n_flips=999)
        # 2^-39 of the patterns reach it, none of 999 does: (1 + 0) / (1 + 999), never 0.
        assert flipped.p_value.tolist() == [1 / 1000]
        assert (flipped.flips, flipped.exact) == (999, False)

    def test_random_flips_approach_the_exact_p(self) -> None:
        effects = np.random.default_rng(2).normal(0.5, 1, size=(3, 12))
        exact = inference.sign_flips(effects, n_flips=4096)
        sampled = inference.sign_flips(effects, n_flips=4095)
        assert exact.exact
        assert not sampled.exact
        # Four standard errors of a proportion from 4,095 draws.
        np.testing.assert_allclose(sampled.p_value, exact.p_value, atol=4 * 0.5 / 4095**0.5)

    def test_the_sample_does_not_depend_on_its_blocks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        effects = np.random.default_rng(3).normal(0.3, 1, size=(5, 20))
        whole = inference.sign_flips(effects, n_flips=500, seed=4)
        monkeypatch.setattr(inference, "_SCRATCH", 35)
        blocks = inference.sign_flips(effects, n_flips=500, seed=4)
        assert blocks.p_value.tolist() == whole.p_value.tolist()
        assert blocks.cell_p.tolist() == whole.cell_p.tolist()

    @pytest.mark.parametrize(
        ("tenths", "ties_lost"),
        [
            ([-3, 6, 3, 6, 3, 2, 6], True),
            ([-6, 5, 4, 3, 6, 3, 3], True),
            ([6, 5, -4, 2, -3, 1, 1], True),
            ([1, 2, 4, 8, 16, 32, 64], False),  # all sums differ: no ties to lose
        ],
    )
    def test_ties_count_whatever_the_rounding(
        self, tenths: list[int], ties_lost: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """0.1 + 0.2 - 0.3 is not 0 in floating point; patterns with equal means are still ties."""
        whole = np.array([tenths], dtype=float)
        observed = abs(whole.sum())
        patterns = itertools.product((1.0, -1.0), repeat=7)
        expected = sum(abs(whole[0] @ signs) >= observed for signs in patterns) / 2**7
        assert inference.sign_flips(whole / 10).p_value.tolist() == [expected]
        monkeypatch.setattr(inference, "TIE", 0.0)
        assert (inference.sign_flips(whole / 10).p_value[0] < expected) == ties_lost

    def test_identically_zero_cells_are_not_in_the_family(self) -> None:
        effects = np.random.default_rng(4).normal(0.5, 1, size=(2, 10))
        alone = inference.sign_flips(effects)
        padded = inference.sign_flips(np.vstack([effects, np.zeros((3, 10))]))
        assert padded.p_value[:2].tolist() == alone.p_value.tolist()
        assert np.isnan(padded.p_value[2:]).all()
        assert padded.family.tolist() == [True, True, False, False, False]

    def test_the_floor_says_what_zero_is(self) -> None:
        flipped = inference.sign_flips(np.array([[1e-9] * 8, [*ONES, 1.0, 1.0]]), floor=1e-8)
        assert flipped.family.tolist() == [False, True]

    def test_below_six_prompts_there_is_no_p(self) -> None:
        flipped = inference.sign_flips(np.ones((2, 5)))
        assert np.isnan(flipped.p_value).all()
        assert not flipped.family.any()

    def test_a_cell_that_prompts_lack_is_tested_on_the_others(self) -> None:
        effects = np.array([[1.0] * 6 + [np.nan, np.nan]])
        assert inference.sign_flips(effects).p_value.tolist() == [2 / 64]
        assert np.isnan(inference.sign_flips(effects[:, 1:]).p_value).all()

    def test_no_flips_is_refused(self) -> None:
        with pytest.raises(TaskError, match="n_flips must be a whole number >= 1, got 0"):
            inference.sign_flips(np.ones((1, 8)), n_flips=0)


class TestCalibration:
    """Under the null the family-wise error is 5%, and the uncorrected one is not."""

    def test_reports_with_any_false_site(self) -> None:
        rng = np.random.default_rng(6)
        corrected, alone = [], []
        for seed in range(200):
            # Correlated, skewed effects of 12 sites in 16 prompts; the null swaps each pair by a
            # fair coin.
            shared = rng.exponential(size=(1, 16))
            effects = 0.7 * shared + rng.exponential(size=(12, 16))
            coin = rng.choice([-1.0, 1.0], size=16)
            flipped = inference.sign_flips(effects * coin, n_flips=400, seed=seed)
            corrected.append(flipped.p_value.min())
            alone.append(flipped.cell_p.min())
        # 5% plus three standard errors of a proportion over 200 reports.
        assert np.mean(np.array(corrected) <= 0.05) <= 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
        # p of the smallest is uniform: Kolmogorov-Smirnov would notice a shift of a tenth.
        assert stats.kstest(corrected, "uniform").pvalue > 0.01
        assert np.mean(np.array(alone) <= 0.05) > 0.15

    def test_a_true_effect_is_found(self) -> None:
        rng = np.random.default_rng(7)
        effects = rng.normal(size=(144, 64))
        effects[17] += 1.0
        flipped = inference.sign_flips(effects)
        assert np.flatnonzero(flipped.p_value <= 0.05).tolist() == [17]


class TestQValues:
    def test_by_hand(self) -> None:
        q = inference.q_values(np.array([[0.01, 0.02], [0.03, 0.5]]))
        # p * m / rank: 0.04, 0.04, 0.04, 0.5.
        np.testing.assert_allclose(q, [[0.04, 0.04], [0.04, 0.5]], rtol=1e-12)

    def test_untested_cells_do_not_count(self) -> None:
        q = inference.q_values(np.array([0.01, np.nan, 0.03]))
        np.testing.assert_allclose(q, [0.02, np.nan, 0.03], rtol=1e-12)
        assert np.isnan(inference.q_values(np.array([np.nan]))).all()


class TestIntervals:
    @pytest.mark.parametrize("with_gap", [False, True])
    def test_one_cell_is_the_wider_of_scipys_bca_and_students_t(self, with_gap: bool) -> None:
        """At each end; of the ratio, t by the delta method: effects - ratio * gap over mean gap."""
        rng = np.random.default_rng(8)
        effects = rng.exponential(size=20)
        gap = effects + rng.normal(2.0, 0.5, size=20)
        samples = (effects, gap) if with_gap else (effects,)
        bca = stats.bootstrap(
            samples,
            (lambda x, g, axis: x.mean(axis) / g.mean(axis)) if with_gap else np.mean,
            n_resamples=2000,
            method="BCa",
            paired=with_gap,
            rng=np.random.default_rng([3, 2]),
        ).confidence_interval
        if with_gap:
            low, high = inference.ratio_interval(effects[None], gap, seed=3)
            ratio = effects.mean() / gap.mean()
            around = stats.ttest_1samp((effects - ratio * gap) / gap.mean(), 0.0)
            t = around.confidence_interval(0.95)
            ends = (ratio + t.low, ratio + t.high)
        else:
            low, high = inference.mean_interval(effects[None], seed=3)
            t = stats.ttest_1samp(effects, 0.0).confidence_interval(0.95)
            ends = (t.low, t.high)
        expected = [min(bca.low, ends[0]), max(bca.high, ends[1])]
        np.testing.assert_allclose([low[0], high[0]], expected, rtol=1e-12)
        # Both kinds decide an end here, so that neither could be left out.
        assert (low[0] < bca.low) != (high[0] > bca.high)

    def test_few_prompts_of_heavy_tails_are_covered_better_than_by_bca(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """0.841 of 1,000 means against 0.803 by BCa alone; a share's standard error is 0.012, and
        both are of the same draws."""
        effects = np.random.default_rng(12).lognormal(size=(1000, 8))

        def covered() -> float:
            low, high = inference.mean_interval(effects)
            return float(np.mean((low <= np.exp(0.5)) & (high >= np.exp(0.5))))

        both = covered()
        monkeypatch.setattr(inference, "_around_t", lambda ends, values, gaps: ends)
        assert both >= covered() + 0.02
        assert 0.82 <= both <= 0.97

    def test_a_cell_has_the_same_interval_in_any_grid(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        effects = np.random.default_rng(9).normal(size=(7, 12))
        whole = inference.mean_interval(effects)
        monkeypatch.setattr(inference, "_SCRATCH", 2 * 2000 * 12)
        in_chunks = inference.mean_interval(effects)
        alone = inference.mean_interval(effects[4])
        for end in range(2):
            # Sums of another order: rounding only.
            np.testing.assert_allclose(in_chunks[end], whole[end], rtol=1e-12)
            np.testing.assert_allclose(alone[end], whole[end][4], rtol=1e-12)

    def test_coverage_at_64_prompts(self) -> None:
        """Science 4.8: 92 to 97% of 500 simulations."""
        effects = np.random.default_rng(10).normal(1.0, 1.0, size=(500, 64))
        low, high = inference.mean_interval(effects)
        assert 0.92 <= np.mean((low <= 1) & (high >= 1)) <= 0.97

    def test_equal_effects_fall_back_to_percentile(self) -> None:
        low, high = inference.mean_interval(np.array([[2.0] * 8, list(range(8))]))
        assert (low[0], high[0]) == (2.0, 2.0)
        assert low[1] < 3.5 < high[1]

    def test_few_prompts_give_their_range(self) -> None:
        low, high = inference.mean_interval(np.array([[3.0, 1.0, 2.0]]))
        assert (low[0], high[0]) == (1.0, 3.0)
        low, high = inference.mean_interval(np.array([[3.0]]))
        assert np.isnan([low[0], high[0]]).all()

    def test_missing_prompts_are_left_out(self) -> None:
        effects = np.random.default_rng(11).normal(size=(2, 9))
        effects[1, [2, 5]] = np.nan
        low, high = inference.mean_interval(effects)
        kept = effects[1][np.isfinite(effects[1])]
        assert (low[1], high[1]) == tuple(end[0] for end in inference.mean_interval(kept[None]))

    def test_ratio_resamples_effect_and_gap_together(self) -> None:
        gap = np.random.default_rng(12).exponential(size=32) + 0.5
        low, high = inference.ratio_interval(np.stack([0.25 * gap, 0.25 * np.roll(gap, 1)]), gap)
        # In proportion, prompt by prompt, there is nothing to be unsure of.
        np.testing.assert_allclose([low[0], high[0]], [0.25, 0.25], rtol=1e-12)
        assert high[1] - low[1] > 0.05

    def test_ratio_of_few_prompts_is_the_range_over_the_mean_gap(self) -> None:
        low, high = inference.ratio_interval(np.array([[1.0, 3.0]]), np.array([-1.0, -3.0]))
        assert (low[0], high[0]) == (-1.5, -0.5)


class TestMean:
    def test_is_over_the_prompts_that_have_the_cell(self) -> None:
        mean = inference.mean_over_prompts(np.array([[1.0, np.nan, 3.0], [np.nan] * 3]))
        assert mean[0] == 2.0
        assert np.isnan(mean[1])


class TestPartners:
    @pytest.mark.parametrize("seed", range(5))
    def test_nobody_meets_himself_and_all_are_used_once(self, seed: int) -> None:
        other = inference.partners(np.zeros(9, dtype=np.int64), seed=seed)
        assert sorted(other.tolist()) == list(range(9))
        assert (other != np.arange(9)).all()

    def test_stays_within_the_group(self) -> None:
        groups = np.array([4, 6, 4, 4, 6, 5])
        other = inference.partners(groups, seed=1)
        assert other[5] == -1
        assert (groups[other[:5]] == groups[:5]).all()

    def test_is_seeded(self) -> None:
        groups = np.zeros(30, dtype=np.int64)
        first = inference.partners(groups, seed=0)
        assert first.tolist() == inference.partners(groups, seed=0).tolist()
        assert first.tolist() != inference.partners(groups, seed=1).tolist()


class TestTheRule:
    GOOD = {"mean": 1.0, "p_value": 0.01, "unrelated": 0.2, "n": 16, "unit": "nats"}

    @pytest.mark.parametrize(
        "change",
        [{}, {"unrelated": -3.0}, {"mean": -1.0, "unrelated": -0.2}, {"p_value": 0.05}, {"n": 6}],
    )
    def test_met(self, change: dict[str, float]) -> None:
        assert inference.failed_conditions(**{**self.GOOD, **change}) == []

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"p_value": 0.051}, "p = 0.051 with the maximum over the grid is above 0.05"),
            ({"n": 5, "p_value": np.nan}, "n = 5, and at least 6 pairs are needed"),
            ({"p_value": np.nan}, "its effects are zero to rounding"),
            ({"unrelated": 1.0}, r"an unrelated prompt do as much: \+1.00 nats against \+1.00"),
            ({"mean": -1.0, "unrelated": -1.5}, r"do as much: -1.50 nats against -1.00"),
            ({"unrelated": np.nan}, "no other pair of equal length"),
            ({"self_patch_held": False}, "the self-patch control failed"),
        ],
    )
    def test_a_failed_condition_is_said(self, change: dict[str, float], words: str) -> None:
        failed = inference.failed_conditions(**{**self.GOOD, **change})
        assert len(failed) == 1
        assert re.search(words, failed[0])
