"""Labels and intervals on models whose circuit is known; `benchmarks/calibration.py` has it all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from headstream.analyses.patching.inference import mean_interval, sign_flips
from headstream.analyses.patching.sweep_plan import SweepPlan
from headstream.analyses.patching.sweeps.sweep import run_sweep
from headstream.analyses.patching.task import Task
from headstream.models.store import load

POOL = 128
REPORTS = 200
# At 5% no more than so many reports hold a label, 999 times of 1,000.
MOST = int(stats.binom.ppf(0.999, REPORTS, 0.05))


def swapped(task: Task, coins: np.ndarray) -> Task:
    coin = torch.from_numpy(coins)[:, None]
    return Task(
        torch.where(coin, task.corrupted, task.clean),
        torch.where(coin, task.clean, task.corrupted),
        task.answer,
        task.wrong,
    )


def effects_of(task: Task, name: str, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """Of every head [head, pair], layer by layer, and the gap [pair]."""
    plan = SweepPlan(task, "z", direction=direction, second=False)
    swept = run_sweep(load(name), plan, progress=False)
    base = swept.base
    return swept.passes["effects"][0], base["clean"][0] - base["corrupted"][0]


@pytest.fixture(scope="module", params=["constructed-induction", "induction-2l"])
def pool(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    name = request.param
    task = Task.for_model(load(name), n=POOL, seed=1)
    denoise, gap = effects_of(task, name, "denoise")
    noise, _ = effects_of(task, name, "noise")
    return {"denoise": denoise, "noise": noise, "gap": gap}


@pytest.mark.parametrize("null", ["swapped pairs", "signs"])
def test_a_report_in_twenty_finds_something_where_there_is_nothing(
    pool: dict[str, np.ndarray], null: str
) -> None:
    """Swapping a pair, answers kept, turns its denoising effect into its noising one.

    The test alone, without the control that can only take labels away.
    """
    rng = np.random.default_rng(2)
    found = 0
    for seed in range(REPORTS):
        pairs = rng.choice(POOL, size=32, replace=False)
        coins = rng.integers(0, 2, size=32).astype(bool)
        denoise = pool["denoise"][:, pairs]
        other = pool["noise"][:, pairs] if null == "swapped pairs" else -denoise
        # The floor: rounding of float32 logits of tens, as `patch` has it.
        flipped = sign_flips(np.where(coins, other, denoise), n_flips=399, seed=seed, floor=1e-5)
        found += bool(np.nanmin(flipped.p_value) <= 0.05)
    assert found <= MOST


def test_a_swapped_pair_has_the_effect_of_the_other_direction() -> None:
    name = "induction-2l"
    task = Task.for_model(load(name), n=16, seed=3)
    coins = np.arange(16) % 3 == 0
    real, _ = effects_of(swapped(task, coins), name, "denoise")
    expected = np.where(
        coins, effects_of(task, name, "noise")[0], effects_of(task, name, "denoise")[0]
    )
    # Rows of another batch: rounding of float32 logits of tens.
    np.testing.assert_allclose(real, expected, atol=1e-4)


def test_intervals_hold_the_mean_of_every_circuit_head() -> None:
    """The mean over the pairs that prompts are drawn from, at n = 64."""
    name = "induction-2l"
    card = load(name).card
    assert card is not None
    effects, _ = effects_of(Task.for_model(load(name), n=512, seed=4), name, "denoise")
    heads = [4 * int(head[1]) + int(head[3]) for head in card["circuit"]["induction"]]
    rng = np.random.default_rng(5)
    for head in effects[heads]:
        low, high = mean_interval(head[rng.integers(0, 512, size=(200, 64))])
        covered = np.mean((low <= head.mean()) & (head.mean() <= high))
        # 92 to 97%, and three standard errors of a proportion over 200 draws.
        assert 0.92 - 0.05 <= covered <= 0.97 + 0.03
