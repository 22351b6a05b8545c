"""Composition scores by hand, against the dense definition, and beside their chance level."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstream.circuits.composing.composition import composition_scores
from headstream.circuits.composing.strongest_pairs import (
    strongest_compositions,
    summarise_compositions,
)
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.store import load

# Float64 norms of products of a dozen terms.
EXACT = 1e-12
Build = Callable[..., Decoder]


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside had."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor):
                self.numel = max(self.numel, made.numel())
        return out


def one_head_each(earlier: dict[str, Tensor], later: dict[str, Tensor]) -> Decoder:
    """Two layers of one head, no norm, with the weights given and zeros elsewhere."""
    from headstream.models.config import DecoderConfig

    rows, columns = earlier["W_V"].shape
    config = DecoderConfig(
        n_layers=2, n_heads=1, d_model=rows, d_head=columns, d_vocab=3, n_ctx=4, norm="none"
    )
    model = Decoder(config, dtype=torch.float64)
    with torch.no_grad():
        for block, weights in zip(model.blocks, (earlier, later), strict=True):
            for name in ("W_Q", "W_K", "W_V", "W_O"):
                getattr(block.attn, name)[0] = weights.get(name, 0.0)
    return model


def score(scores: xr.Dataset, through: str) -> float:
    found = scores["score"].sel(through=through)
    return float(found.sel(earlier_layer=0, earlier_head=0, later_layer=1, later_head=0))


def test_factor_order_by_hand() -> None:
    """The published bug: factors that neither commute nor are symmetric tell every order apart.

    The earlier head moves e0 to e1. The later head's query reads e1 and its key e2; its value
    reads e0 and writes e2. So Q is a perfect rank-1 match, and K and V are none, although in each
    another order (or a transpose left out) would give 1.
    """
    e0, e1, e2 = torch.eye(3, dtype=torch.float64)[:, :, None]
    earlier = {"W_V": e0, "W_O": e1.T}
    scores = composition_scores(
        one_head_each(earlier, {"W_Q": e1, "W_K": e2, "W_V": e0, "W_O": e2.T})
    )
    assert [score(scores, kind) for kind in "QKV"] == [1.0, 0.0, 0.0]
    scores = composition_scores(
        one_head_each(earlier, {"W_Q": e0, "W_K": e1, "W_V": e2, "W_O": e0.T})
    )
    assert [score(scores, kind) for kind in "QKV"] == [0.0, 1.0, 0.0]
    scores = composition_scores(
        one_head_each(earlier, {"W_Q": e0, "W_K": e0, "W_V": e1, "W_O": e0.T})
    )
    assert [score(scores, kind) for kind in "QKV"] == [0.0, 0.0, 1.0]


def test_a_perfect_match_of_identities_scores_chance_and_not_one() -> None:
    eye = torch.eye(4, dtype=torch.float64)
    weights = {"W_Q": eye, "W_K": eye, "W_V": eye, "W_O": eye}
    scores = composition_scores(one_head_each(weights, weights))
    for kind in "QKV":
        assert score(scores, kind) == pytest.approx(1 / 2, abs=EXACT)  # 1 / sqrt(4)
    assert float(scores["expected"]) == 0.5


def dense(model: Decoder, distance: int | None) -> np.ndarray:
    """[through, earlier_layer, earlier_head, later_layer, later_head] by the definition."""
    config = model.config
    shape = (3, *(2 * (config.n_layers, config.n_heads)))
    found = np.full(shape, np.nan)
    for l1, h1, l2, h2 in np.ndindex(*shape[1:]):
        if l1 < l2:
            ov1 = ov_circuit(model, l1, h1, space="residual").AB
            ov2 = ov_circuit(model, l2, h2, space="residual").AB
            qk = qk_circuit(model, l2, h2, distance=distance, space="residual").AB
            for index, right in enumerate((qk, qk.mT, ov2)):
                size = ov1.norm() * right.norm()
                found[index, l1, h1, l2, h2] = (ov1 @ right).norm() / size
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"n_layers": 3},
        {"n_kv_heads": 2},  # heads 1 and 2 tell repeating key heads from tiling them
        {"d_head": 8, "n_kv_heads": 2, "positions": "rotary", "norm": "rmsnorm"},
        {"d_head": 24, "norm": "none"},  # wider than the stream
        {"d_mlp": 8, "attn_bias": True},
    ],
    ids=str,
)
def test_weights_as_they_are_against_the_dense_definition(
    build: Build, fields: dict[str, Any]
) -> None:
    model = build(fields)
    distance = 3 if "positions" in fields else None
    scores = composition_scores(model, distance=distance, norms="ignored")
    expected = dense(model, distance)
    np.testing.assert_allclose(scores["score"].values, expected, rtol=0, atol=EXACT)
    assert np.nanmin(expected) > 0.05
    assert np.isnan(scores["score"].values[:, 1, :, 0]).all()


def folded_by_hand(model: Decoder) -> Decoder:
    """Gain into the readers; under LayerNorm P on both sides, as a dense projector."""
    config = model.config
    copy = Decoder(config, dtype=torch.float64)
    copy.load_state_dict(model.state_dict())
    size = config.d_model
    project = torch.eye(size, dtype=torch.float64)
    if config.norm == "layernorm":
        project = project - torch.ones(size, size) / size
    with torch.no_grad():
        for block in copy.blocks:
            gain = torch.ones(size) if config.norm == "none" else block.ln1.w  # type: ignore[union-attr]
            for name in ("W_Q", "W_K", "W_V"):
                weight = getattr(block.attn, name)
                weight.copy_(project @ torch.diag(gain.double()) @ weight)
            block.attn.W_O.copy_(block.attn.W_O @ project)
    return copy


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
def test_folded_is_what_a_head_really_reads(build: Build, norm: str) -> None:
    model = build({"norm": norm, "n_kv_heads": 2})
    scores = composition_scores(model)
    expected = dense(folded_by_hand(model), None)
    np.testing.assert_allclose(scores["score"].values, expected, rtol=0, atol=EXACT)
    different = np.nanmax(np.abs(expected - dense(model, None)))
    assert different > 0.01 if norm != "none" else different < EXACT
    dims = 15 if norm == "layernorm" else 16
    assert float(scores["expected"]) == pytest.approx(1 / math.sqrt(dims), abs=EXACT)
    np.testing.assert_allclose(
        scores["excess"].values, expected - 1 / math.sqrt(dims), rtol=0, atol=EXACT
    )


def test_a_mean_that_nobody_reads_dominates_the_weights_as_they_are(build: Build) -> None:
    """Why the mean is taken off: the same function of the model, two very different scores."""
    model = build({})
    plain = composition_scores(model)["score"]
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O.add_(5.0)
            for name in ("W_Q", "W_K", "W_V"):
                weight = getattr(block.attn, name)
                weight.add_(5.0 / block.ln1.w[:, None])  # type: ignore[union-attr]
    np.testing.assert_allclose(composition_scores(model)["score"], plain, rtol=0, atol=1e-10)
    assert float(composition_scores(model, norms="ignored")["score"].min()) > 0.7
    assert float(plain.max()) < 0.7


def test_distance_moves_q_and_k_under_rotary_and_not_v(build: Build) -> None:
    model = build({"positions": "rotary", "rotary_base": 50.0, "norm": "none"})
    near, far = (composition_scores(model, distance=d)["score"] for d in (1, 9))
    moved = np.abs(near - far).max(["earlier_layer", "earlier_head", "later_layer", "later_head"])
    assert float(moved.sel(through="Q")) > 0.01
    assert float(moved.sel(through="K")) > 0.01
    assert float(moved.sel(through="V")) == 0.0


def test_constructed_induction_has_one_pair_by_hand() -> None:
    """OV_1 is the identity of 33 tokens; QK_2 has 60 on 33 of its entries and 30 on 33 others, so
    K = 60 sqrt(33) / (sqrt(33) sqrt(33 (60^2 + 30^2))) = 60 / sqrt(148500)."""
    model = load("constructed-induction")
    assert model.card is not None
    assert model.card["circuit"]["previous-token"] == ["L0H1"]
    assert model.card["circuit"]["induction"] == ["L1H2"]
    scores = composition_scores(model)
    finite = scores["score"].to_series().dropna()
    assert finite.to_dict() == pytest.approx(
        {
            ("Q", 0, 1, 1, 2): 0.0,
            ("K", 0, 1, 1, 2): 60 / math.sqrt(148500),
            ("V", 0, 1, 1, 2): 0.0,
        },
        abs=1e-7,  # float32 weights, all of them whole numbers
    )
    frame = strongest_compositions(scores)
    assert frame["stands_out"].tolist() == [True, False, False]
    assert frame.loc[0, ["through", "earlier", "later"]].tolist() == ["K", "L0H1", "L1H2"]
    words = summarise_compositions(scores)
    assert words.splitlines()[0].startswith("1 of 3 compositions are above 0.08")
    assert words.splitlines()[1:] == ["K: L0H1 -> L1H2  0.156"]


def test_trained_induction_composes_through_keys_with_the_previous_token_head() -> None:
    """Each of the four induction heads; the card names the heads."""
    model = load("induction-2l")
    assert model.card is not None
    assert model.card["circuit"]["previous-token"] == ["L0H0"]
    scores = composition_scores(model)
    keys = scores["score"].sel(through="K", earlier_layer=0, later_layer=1)
    assert float(keys.sel(earlier_head=0).min()) > 0.25 > 1 / math.sqrt(model.config.d_model)
    assert float(keys.sel(earlier_head=[1, 2, 3]).max()) < 0.18
    frame = strongest_compositions(scores, top=4)
    assert set(frame["through"]) == {"K"}
    assert set(frame["earlier"]) == {"L0H0"}
    assert set(frame["later"]) == {"L1H0", "L1H1", "L1H2", "L1H3"}
    assert frame["stands_out"].all()


@pytest.mark.parametrize(("size", "width"), [(64, 16), (16, 4)])
def test_random_models_score_the_expectation_and_seldom_stand_out(
    build: Build, size: int, width: int
) -> None:
    scores = [
        composition_scores(build({"d_model": size, "d_head": width, "norm": "none"}, seed=seed))
        for seed in range(40)
    ]
    first = scores[0]
    found = np.concatenate([s["score"].values[np.isfinite(s["score"].values)] for s in scores])
    assert len(found) == 40 * 48
    # 1920 draws of standard deviation 0.06 / sqrt(width), some shared: four standard errors.
    assert found.mean() == pytest.approx(float(first["random_mean"]), abs=0.015 / width)
    assert found.mean() == pytest.approx(1 / math.sqrt(size), rel=0.03)
    inside = (found > float(first["random_low"])) & (found < float(first["random_high"]))
    assert 0.93 < inside.mean() < 0.97
    above = [float(s["score"].max()) > float(s["random_largest"]) for s in scores]
    # 5% of 40 models are 2; a binomial passes 7 once in two thousand draws.
    assert sum(above) <= 7
    assert first.attrs["compared"] == 48


def test_null_is_seeded_and_leaves_the_global_state_alone(build: Build) -> None:
    model = build({})
    before = torch.random.get_rng_state()
    first, again = (composition_scores(model, seed=7, n_random=8) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.identical(again)
    other = composition_scores(model, seed=8, n_random=8)
    assert float(other["random_mean"]) != float(first["random_mean"])
    assert first["score"].identical(other["score"])


def test_scale_of_a_factor_is_no_matter_and_zero_heads_have_no_score(build: Build) -> None:
    model = build({})
    plain = composition_scores(model)["score"]
    with torch.no_grad():
        model.blocks[0].attn.W_O[2].zero_()
        model.blocks[0].attn.W_V[0].mul_(1e200)
        model.blocks[1].attn.W_K[1].mul_(1e-200)
        model.blocks[1].attn.W_V[3].fill_(0.0)
        model.blocks[0].attn.W_O[1] = torch.ones(4, 1) * torch.tensor(3.0)  # all mean
    found = composition_scores(model)["score"].sel(earlier_layer=0, later_layer=1)
    assert found.sel(earlier_head=[1, 2]).isnull().all()
    assert found.sel(through="V", later_head=3).isnull().all()
    rest = found.sel(earlier_head=[0, 3], later_head=[0, 1, 2])
    expected = plain.sel(earlier_layer=0, later_layer=1, earlier_head=[0, 3], later_head=[0, 1, 2])
    np.testing.assert_allclose(rest, expected, rtol=0, atol=EXACT)


def test_no_matrix_of_the_streams_size_squared_is_formed(build: Build) -> None:
    model = build({"d_model": 200, "d_head": 2, "n_heads": 2, "norm": "none"})
    with Largest() as largest:
        composition_scores(model)
    assert 48 * 200 * 2 <= largest.numel < 200 * 200


def test_one_layer_has_no_pair(build: Build) -> None:
    scores = composition_scores(build({"n_layers": 1}))
    assert scores["score"].isnull().all()
    assert math.isnan(float(scores["random_largest"]))
    assert strongest_compositions(scores).empty
    assert summarise_compositions(scores).startswith("no pair of heads to compare")


def test_a_stream_of_one_dimension(build: Build) -> None:
    """Two channels under LayerNorm: all heads read and write the one direction that is left."""
    scores = composition_scores(build({"d_model": 2}))
    assert float(scores["expected"]) == 1.0
    assert float(scores["random_largest"]) == pytest.approx(1.0, abs=EXACT)
    assert np.nanmin(scores["score"]) == pytest.approx(1.0, abs=EXACT)
    nothing = composition_scores(build({"d_model": 1}))
    assert nothing["score"].isnull().all()


def test_summary_counts_what_it_leaves_out() -> None:
    words = summarise_compositions(composition_scores(load("induction-2l")), top=2).splitlines()
    assert words[1].startswith("K: L0H0 -> L1H")
    assert len(words) == 4
    assert words[3].startswith("and ")


def test_errors_say_what_to_do(build: Build) -> None:
    model = build({})
    with pytest.raises(ConfigError, match=r"distance=1 was given, but .* leave distance out"):
        composition_scores(model, distance=1)
    with pytest.raises(ConfigError, match=r"depends on the distance, but distance is None; give"):
        composition_scores(build({"positions": "rotary"}))
    with pytest.raises(ConfigError, match=r"norms must be 'folded' or 'ignored', got 'fold'; near"):
        composition_scores(model, norms="fold")
    with pytest.raises(ShapeError, match="n_random must be at least 2, got 1"):
        composition_scores(model, n_random=1)
    with pytest.raises(ShapeError, match=r"seed must be a whole number in \[0, 2\*\*63\), got -1"):
        composition_scores(model, seed=-1)
    with pytest.raises(ShapeError, match="top must be at least 1, got 0"):
        strongest_compositions(composition_scores(model), top=0)
    with torch.no_grad():
        model.blocks[1].attn.W_K[0, 0, 0] = torch.nan
    with pytest.raises(ShapeError, match=r"must be finite, but blocks.1.attn.W_K holds NaN"):
        composition_scores(model)
