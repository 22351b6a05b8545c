"""Copying scores against matrices whose eigenvalues are known."""

import math
from collections.abc import Callable

import pytest
import torch

from headstream.circuits.qk_ov.copying import copying_score, eigenvalue_score, top_share
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError


def identity(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


def test_identity_negative_identity_and_rotation() -> None:
    assert eigenvalue_score(identity(5), identity(5)) == pytest.approx(1.0, abs=1e-12)
    assert eigenvalue_score(identity(5), -identity(5)) == pytest.approx(-1.0, abs=1e-12)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)  # eigenvalues i and -i
    assert eigenvalue_score(turn, identity(2)) == pytest.approx(0.0, abs=1e-12)


def test_small_route_has_the_eigenvalues_of_the_large_product() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    right = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    dense = torch.linalg.eigvals(left @ right)
    expected = float(dense.real.sum() / dense.abs().sum())
    assert eigenvalue_score(left, right) == pytest.approx(expected, abs=1e-10)


def test_a_large_gaussian_matrix_neither_copies_nor_anti_copies() -> None:
    scores = [
        eigenvalue_score(
            torch.randn(64, 64, generator=torch.Generator().manual_seed(s)).double(), identity(64)
        )
        for s in range(20)
    ]
    # One draw spreads by 1.5 / 64 = 0.023 (circular law); the mean of 20 by 0.005.
    assert sum(scores) / 20 == pytest.approx(0.0, abs=0.02)


def test_a_nilpotent_circuit_has_no_score() -> None:
    shift = torch.diag(torch.ones(4, dtype=torch.float64), 1)
    assert math.isnan(eigenvalue_score(shift, identity(5)))
    assert math.isnan(eigenvalue_score(0 * identity(5), identity(5)))


def test_top_share_counts_rows_and_ties_do_not_win() -> None:
    rows = torch.tensor([[3.0, 2, 1], [3, 2, 1], [3, 2, 1]], dtype=torch.float64)
    assert top_share(rows, identity(3), (1, 2, 3)) == pytest.approx([1 / 3, 2 / 3, 1])
    assert top_share(torch.ones_like(rows), identity(3), (1, 2)) == [0.0, 0.0]


def test_a_head_that_ignores_its_source_is_at_the_stated_chance() -> None:
    """More rows than one block holds, every row the same: exactly k / n."""
    n = 600
    row = torch.randn(1, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = top_share(torch.ones(n, 1, dtype=torch.float64), row, (1, 5))
    assert share == pytest.approx([1 / n, 5 / n], abs=1e-12)


def model_with_known_heads() -> Decoder:
    """Head 0 copies, head 1 does the opposite, head 2 writes nothing, head 3 is as drawn."""
    config = DecoderConfig(
        n_layers=1, n_heads=4, d_model=8, d_head=8, d_vocab=8, n_ctx=4, norm="none"
    )
    model = Decoder(config, seed=3)
    with torch.no_grad():
        model.embed.W_E.copy_(torch.eye(8))
        model.unembed.W_U.copy_(torch.eye(8))
        attn = model.blocks[0].attn
        attn.W_V[:3] = torch.eye(8)
        attn.W_O[0], attn.W_O[1], attn.W_O[2] = torch.eye(8), -torch.eye(8), 0
    return model


def test_copying_score_of_known_heads() -> None:
    scores = copying_score(model_with_known_heads())
    copier, opposite, silent, drawn = scores["score"].values[0]
    assert (copier, opposite) == pytest.approx((1.0, -1.0), abs=1e-12)
    assert math.isnan(silent)
    assert float(scores["random_low"]) < drawn < float(scores["random_high"])
    assert scores["top"].sel(k=1).values[0, :3].tolist() == [1.0, 0.0, 0.0]
    assert scores["top_chance"].values.tolist() == [1 / 8, 5 / 8]


def test_null_is_seeded_symmetric_and_narrower_than_a_copier() -> None:
    model = model_with_known_heads()
    before = torch.random.get_rng_state()
    first, again = copying_score(model, seed=1), copying_score(model, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.identical(again)
    assert float(first["expected"]) == 0.0
    low, high = float(first["random_low"]), float(first["random_high"])
    assert -0.9 < low < -0.1 < 0.1 < high < 0.9


def test_k_out_of_range() -> None:
    with pytest.raises(ShapeError, match=r"top holds 9, expected values in \[1, 8\]"):
        copying_score(model_with_known_heads(), top=(1, 9))
    with pytest.raises(ShapeError, match="top must be at least 1, got 0"):
        copying_score(model_with_known_heads(), top=(0,))
    with pytest.raises(ShapeError, match="n_random must be at least 1 heads, got 0"):
        copying_score(model_with_known_heads(), n_random=0)


def test_a_head_whose_halves_do_not_meet_has_no_score_in_any_basis() -> None:
    """W_V writes channels that W_O does not read; rounding in another basis must not lend one."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(30, 6, generator=generator), torch.randn(6, 30, generator=generator)
    left, right = left.double(), right.double()
    left[:, 3:], right[:3] = 0, 0
    gauge = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    turned = left @ gauge, torch.linalg.inv(gauge) @ right
    assert 0 < (turned[0] @ turned[1]).abs().max() < 1e-12
    assert math.isnan(eigenvalue_score(left, right))
    assert math.isnan(eigenvalue_score(*turned))


def test_a_weak_head_keeps_its_score_in_a_stretched_basis() -> None:
    """The factors' norms grow with the basis, the product does not: no score turns into NaN."""
    eye = torch.eye(4, dtype=torch.float64)
    stretch = torch.diag(torch.tensor([1e6, 1e-6, 1e6, 1e-6], dtype=torch.float64))
    left, right = eye[:, :2] * 1e-3, eye[:2] * 1e-3
    assert eigenvalue_score(left, right) == pytest.approx(1.0, abs=1e-12)
    left, right = left @ stretch[:2, :2], torch.linalg.inv(stretch[:2, :2]) @ right
    assert eigenvalue_score(left, right) == pytest.approx(1.0, abs=1e-12)


def test_effective_embedding_stands_for_the_token_in_later_layers(
    build: Callable[..., Decoder],
) -> None:
    """L1H0 copies what layer 0's MLP writes for a token, and W_E says nothing about it."""
    model = build({"d_mlp": 20, "d_model": 40, "d_head": 20, "norm": "none", "activation": "relu"})
    eye, zero = torch.eye(20, dtype=torch.float64), torch.zeros(20, 20, dtype=torch.float64)
    with torch.no_grad():
        model.embed.W_E.copy_(torch.cat((eye, zero), 1))
        model.blocks[0].mlp.W_in.copy_(torch.cat((eye, zero)))
        model.blocks[0].mlp.W_out.copy_(torch.cat((zero, eye), 1))
        attn = model.blocks[1].attn
        attn.W_V[0], attn.W_O[0] = torch.cat((zero, eye)), torch.cat((zero, eye), 1)
        model.unembed.W_U.copy_(torch.cat((zero, eye)))
    plain, found = copying_score(model), copying_score(model, embedding="effective")
    assert math.isnan(plain["score"].sel(layer=1, head=0))
    assert float(found["score"].sel(layer=1, head=0)) == pytest.approx(1.0, abs=1e-12)
    assert found["top"].sel(layer=1, head=0).values.tolist() == [1, 1]
    assert found["score"].sel(layer=0).isnull().all()
    assert found["top"].sel(layer=0).isnull().all()
    assert found["score"].sel(layer=1).notnull().all()
    assert float(found["random_low"]) < 0 < float(found["random_high"])
    with pytest.raises(ConfigError, match="needs an MLP in layer 0, but d_mlp is None"):
        copying_score(build({}), embedding="effective")
    with pytest.raises(ConfigError, match="embedding must be 'plain' or 'effective', got 'mlp'"):
        copying_score(model, embedding="mlp")


def test_weights_that_are_not_finite_are_named_before_lapack_sees_them() -> None:
    model = model_with_known_heads()
    with torch.no_grad():
        model.blocks[0].attn.W_V[0, 0, 0] = float("nan")
    words = r"weights must be finite, but blocks.0.attn.W_V holds NaN or infinity"
    with pytest.raises(ShapeError, match=words):
        copying_score(model)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ShapeError, match="an eigenvalue score needs a finite circuit"):
            eigenvalue_score(identity(3) * value, identity(3))


def test_a_product_that_overflows_is_not_finite_either() -> None:
    with pytest.raises(ShapeError, match="the product of its factors holds NaN or infinity"):
        eigenvalue_score(identity(3) * 1e200, identity(3) * 1e200)


def test_a_seed_out_of_range() -> None:
    with pytest.raises(ShapeError, match=r"seed must be a whole number in \[0, 2\*\*63\), got -1"):
        copying_score(model_with_known_heads(), seed=-1)


def test_a_model_that_writes_nothing_has_no_random_interval_and_no_warning(
    build: Callable[..., Decoder],
) -> None:
    model = build({})
    with torch.no_grad():
        model.W_U.zero_()
    found = copying_score(model)
    assert found["score"].isnull().all()
    assert math.isnan(float(found["random_low"]))
