"""Behavioural copying on heads whose ratio is known, and beside the eigenvalue score."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from headstream.circuits.folding import fold
from headstream.circuits.qk_ov.behavioural_copying import behavioural_copying_score
from headstream.circuits.qk_ov.copying import copying_score
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError, ShapeError, TokenError
from headstream.models.store import load

Build = Callable[..., Decoder]


def model_with_known_heads(build: Build, **fields: Any) -> Decoder:
    """One layer on one-hot tokens; head 0 copies, 1 suppresses, 2 is silent, 3 is constant.

    Head 3 writes token 0 whatever it reads; d_vocab 8 and the tokens 0 to 7.
    """
    model = build({"n_layers": 1, "d_model": 8, "d_head": 8, "d_vocab": 8, "norm": "none"} | fields)
    eye = torch.eye(8, dtype=torch.float64)
    with torch.no_grad():
        model.embed.W_E.copy_(eye)
        if "W_pos" in dict(model.pos_embed.named_parameters()):
            model.pos_embed.W_pos.zero_()
        model.unembed.W_U.copy_(eye)
        attn = model.blocks[0].attn
        attn.W_V.copy_(eye.expand(4, 8, 8))
        attn.W_O[0], attn.W_O[1], attn.W_O[2] = eye, -eye, 0
        attn.W_O[3] = torch.zeros(8, 8)
        attn.W_O[3, :, 0] = 1
    return model


def test_known_heads(build: Build) -> None:
    """All 8 tokens in the sample: copying raises the source alone, suppression the 7 others."""
    found = behavioural_copying_score(model_with_known_heads(build), n=4)
    assert found.attrs["length"] == 8
    copier, suppressor, silent, constant = found["mean"].values[0]
    assert copier == pytest.approx(1.0, abs=1e-12)
    assert suppressor == pytest.approx(-1.0, abs=1e-12)
    assert math.isnan(silent)
    # Token 0 alone is raised: r is 1/2 where it is the source and 0 elsewhere.
    values = found["value"].values[0, 3]
    assert ((values > -1) & (values < 1)).all()
    assert constant == pytest.approx(values.mean())
    # Some other token: 0 for the copier; 1/8 over 7 of raises each 1/7 for the suppressor.
    chance = found["chance"].values[0]
    assert chance[:2] == pytest.approx([-1.0, 4 / 8 - 1], abs=1e-12)


def test_ratio_is_weighted_by_the_pattern_of_each_query(build: Build) -> None:
    """A constant head: each query scores its attention to the one token that is raised."""
    model = model_with_known_heads(build)
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()  # uniform attention
    found = behavioural_copying_score(model, n=4, seed=3)["value"].values[0, 3]
    # The place p of token 0 gives the mean over queries i >= p of 1 / (2 (i + 1)).
    possible = [4 * sum(1 / (2 * (i + 1)) for i in range(place, 8)) / 8 - 1 for place in range(8)]
    for value in found:
        assert min(abs(value - one) for one in possible) < 1e-12
    assert len(set(found.round(9))) > 1


def test_bos_is_read_but_is_no_source(build: Build) -> None:
    """Head 0 attends to BOS almost entirely and still copies what else it reads."""
    model = model_with_known_heads(build, bos_token_id=5)
    with torch.no_grad():
        attn = model.blocks[0].attn
        attn.W_Q.fill_(1.0)
        attn.W_K.zero_()
        attn.W_K[:, 5] = 5.0
    found = behavioural_copying_score(model, n=3)
    assert found.attrs["length"] == 7
    assert found["mean"].values[0, 0] == pytest.approx(1.0, abs=1e-9)


def test_value_bias_and_folding_change_nothing(build: Build) -> None:
    """fold moves ln1's shift and b_V into b_O, the gains into W_V and W_U: the same model."""
    model = build({"attn_bias": True, "n_kv_heads": 2})
    found = behavioural_copying_score(model, n=3)
    folded = behavioural_copying_score(fold(model, value_bias=True), n=3)
    np.testing.assert_allclose(folded["value"], found["value"], rtol=0, atol=1e-10)
    with torch.no_grad():
        model.blocks[1].attn.b_V.zero_()
    again = behavioural_copying_score(model, n=3)
    np.testing.assert_allclose(again["value"], found["value"], rtol=0, atol=1e-10)


def test_constructed_induction_is_told_by_both_scores() -> None:
    model = load("constructed-induction")
    found, weights = behavioural_copying_score(model, n=4), copying_score(model)
    assert found["mean"].sel(layer=1, head=2) == pytest.approx(1.0, abs=1e-6)
    assert weights["score"].sel(layer=1, head=2) == pytest.approx(1.0, abs=1e-6)
    # Idle heads write nothing, and L0H1's write reaches no logit directly.
    others = np.ones((2, 4), dtype=bool)
    others[1, 2] = False
    assert np.isnan(found["mean"].values[others]).all()
    assert np.isnan(weights["score"].values[others]).all()


def test_agrees_with_the_eigenvalue_score_on_a_trained_model() -> None:
    """Order over heads; and every head that copies by its weights is above chance on tokens."""
    model = load("induction-2l")
    found, weights = behavioural_copying_score(model, n=16), copying_score(model, n_random=32)
    order = spearmanr(found["mean"].values.ravel(), weights["score"].values.ravel()).statistic
    # Measured 0.93 (8 heads: 0.74 has p = 0.05); two heads of layer 0 with 0.41 and 0.42 swap.
    assert order > 0.8
    above = (found["low"] > found["chance"]).values
    assert (above == (weights["score"] > weights["random_high"]).values).all()
    # The induction heads of layer 1 copy more than any head of layer 0, by either.
    for score in (found["mean"], weights["score"]):
        assert score.sel(layer=1).min() > score.sel(layer=0).max()


def test_seeded_and_leaves_the_random_state_alone(model_a: Decoder) -> None:
    before = torch.random.get_rng_state()
    first, again = (behavioural_copying_score(model_a, n=3, seed=1) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.identical(again)
    assert not first.identical(behavioural_copying_score(model_a, n=3, seed=2))
    mean, low, high = (first[name].values for name in ("mean", "low", "high"))
    assert ((low <= mean) & (mean <= high)).all()


def test_many_sequences_are_those_of_each_batch(
    model_a: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = behavioural_copying_score(model_a, n=5)
    monkeypatch.setattr("headstream.circuits.qk_ov.behavioural_copying._BATCH", 2)
    parts = behavioural_copying_score(model_a, n=5)
    np.testing.assert_allclose(parts["value"], whole["value"], rtol=0, atol=1e-12)


def test_bad_arguments(build: Build, model_a: Decoder) -> None:
    with pytest.raises(ShapeError, match="n must be at least 2 sequences, got 1"):
        behavioural_copying_score(model_a, n=1)
    with pytest.raises(ShapeError, match="length must be at least 4 tokens, got 3"):
        behavioural_copying_score(model_a, length=3)
    with pytest.raises(ShapeError, match=r"seed must be a whole number in \[0, 2\*\*63\)"):
        behavioural_copying_score(model_a, seed=-1)
    with pytest.raises(TokenError, match="3 content tokens are too few for a sample: the smallest"):
        behavioural_copying_score(build({"d_vocab": 4, "bos_token_id": 0}))
    with pytest.raises(ShapeError, match="n_ctx=3 is too short for a sample: the smallest takes 4"):
        behavioural_copying_score(build({"n_ctx": 3}))
    with torch.no_grad():
        model_a.blocks[0].attn.W_V[0, 0, 0] = float("inf")
    with pytest.raises(ShapeError, match=r"weights must be finite, but blocks\.0\.attn\.W_V holds"):
        behavioural_copying_score(model_a)


def test_an_edited_run_is_refused(model_a: Decoder) -> None:
    def double(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return 2 * tensor

    words = "cannot measure copying: a hook edits 'hook_embed' in this run"
    hooks = model_a.hooks(fwd_hooks=[("hook_embed", double)])
    with hooks, pytest.raises(HookError, match=words):
        behavioural_copying_score(model_a, n=4)
