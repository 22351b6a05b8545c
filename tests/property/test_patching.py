"""What holds of every patching sweep, whatever the task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headstream.analyses.patching.inference import (
    mean_over_prompts,
    partners,
    q_values,
    sign_flips,
)
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

N_TOKENS = 11

grids = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(6, 9)),
    elements=st.floats(-4, 4, allow_subnormal=False),
)


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = DecoderConfig(
        n_layers=2, n_heads=2, d_model=8, d_head=4, d_mlp=8, d_vocab=N_TOKENS, n_ctx=8
    )
    model = Decoder(config, seed=3)
    model.backend = "naive"
    return model


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    n, length = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(0, N_TOKENS, (n, length), generator=generator)
    corrupted = clean.clone()
    changed = draw(st.integers(0, length - 1))
    corrupted[:, changed] = (clean[:, changed] + draw(st.integers(1, N_TOKENS - 1))) % N_TOKENS
    answer = draw(st.integers(0, N_TOKENS - 2))
    return Task(
        clean,
        corrupted,
        answer,
        N_TOKENS - 1,
        answer_pos=draw(st.integers(changed, length - 1)),
        roles={"changed": changed},
    )


@settings(max_examples=5, deadline=None)
@given(task=tasks(), site=st.sampled_from(["resid_pre", "resid_mid", "z", "mlp_out"]))
def test_nothing_outside_the_cone_and_nothing_from_itself(
    model: Decoder, task: Task, site: str
) -> None:
    result = patch(model, task, site, positions="each", n_flips=1, engine="hooks")
    assert result.details["self_patch_max"] == 0.0
    changed, read = int(task.roles["changed"][0]), int(task.answer_pos[0])
    reaches = (result.effects["pos"] >= changed) & (result.effects["pos"] <= read)
    assert (result.effects.where(~reaches, 0.0) == 0).all()


@settings(max_examples=5, deadline=None)
@given(task=tasks(), order=st.randoms(use_true_random=False))
def test_the_order_of_pairs_is_irrelevant(model: Decoder, task: Task, order: object) -> None:
    shuffled = list(range(len(task)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert task.wrong is not None
    again = Task(
        task.clean[shuffled],
        task.corrupted[shuffled],
        task.answer[shuffled],
        task.wrong[shuffled],
        answer_pos=task.answer_pos[shuffled],
    )
    effects = patch(model, task, "z", n_flips=1).effects.values
    # Rows of one batch may fall into other lanes of the same product: float32 rounding.
    np.testing.assert_allclose(
        patch(model, again, "z", n_flips=1).effects.values, effects[..., shuffled], atol=1e-5
    )


@settings(max_examples=60, deadline=None)
@given(effects=grids, negated=st.booleans(), scale=st.sampled_from([0.25, 1.0, 8.0]))
def test_p_values_know_neither_sign_nor_unit(
    effects: np.ndarray, negated: bool, scale: float
) -> None:
    # Effects far smaller than the largest would fall under the tolerance for ties.
    effects = np.where(np.abs(effects) < 1e-3, 0.0, effects)
    flipped = sign_flips(effects)
    again = sign_flips(effects * (-scale if negated else scale))
    np.testing.assert_array_equal(again.p_value, flipped.p_value)
    np.testing.assert_array_equal(again.cell_p, flipped.cell_p)


@settings(max_examples=60, deadline=None)
@given(effects=grids)
def test_correcting_never_lowers_p(effects: np.ndarray) -> None:
    flipped = sign_flips(effects)
    tested = flipped.family
    assume(tested.any())
    n = effects.shape[1]
    assert (flipped.p_value[tested] >= flipped.cell_p[tested]).all()
    assert (flipped.cell_p[tested] >= 2 / 2**n).all()
    assert (flipped.p_value[tested] <= 1).all()
    # The largest mean is beaten by the fewest maxima.
    means = np.abs(mean_over_prompts(effects))
    order = np.argsort(-means[tested], kind="stable")
    assert (np.diff(flipped.p_value[tested][order]) >= 0).all()
    assert (q_values(flipped.cell_p)[tested] >= flipped.cell_p[tested] - 1e-12).all()


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(st.integers(0, 2), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_partners_are_derangements_within_groups(groups: list[int], seed: int) -> None:
    number = np.array(groups)
    other = partners(number, seed=seed)
    alone = np.array([groups.count(group) == 1 for group in groups])
    assert ((other == -1) == alone).all()
    found = other[~alone]
    assert len(set(found.tolist())) == len(found)
    assert (found != np.flatnonzero(~alone)).all()
    assert (number[found] == number[~alone]).all()
