"""Scores so large that exp(score - lse) loses its digits, or that are no numbers at all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstream.circuits.long_census import score_long_heads
from headstream.circuits.measuring.flash_rows import FlashRows
from headstream.circuits.measuring.masses import Offset, SinkMass, SinkRate
from headstream.circuits.measuring.matches import DuplicateMass, InductionMass
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.measuring.second_pass import Layer, precise
from headstream.circuits.measuring.spread import Collision, EffectiveKeys, Entropy
from headstream.circuits.measuring.statistic import Statistic
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.attend_flash import attend_flash
from headstream.models.decoder import Decoder
from headstream.models.errors import BackendError, ShapeError

Build = Callable[..., Decoder]
FIELDS = {"positions": "rotary", "n_kv_heads": 2, "d_head": 8, "bos_token_id": 0}


def statistics() -> list[Statistic]:
    return [SinkMass(), Offset(1), SinkRate(T=8), Entropy(), Collision(), EffectiveKeys()]


def scaled(build: Build, factor: float, dtype: torch.dtype) -> Decoder:
    """Scores of about factor squared."""
    model = build(FIELDS, dtype=dtype)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(factor)
            block.attn.W_K.mul_(factor)
    return model


def tokens() -> Tensor:
    return torch.randint(6, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("factor", [300.0, 1e4, 1e5])
def test_scores_of_any_size_give_the_pattern_of_their_queries_and_keys(
    build: Build, factor: float
) -> None:
    """At scores of 10^10 in float32 the log-sum-exp alone would be off by 10^3."""
    model = scaled(build, factor, torch.float32)
    found = measure_attention(
        model, tokens(), [*statistics(), InductionMass(), DuplicateMass()], per_position=False
    )
    # The same float32 queries and keys, and the definition in float64 on them.
    naive = measure_attention(model, tokens(), [*statistics()], backend="naive")
    for name in naive:
        assert found[name].dtype == "float32"
        # Rows of one key each, but for ties within the rounding of a score in float32.
        assert abs(found[name] - naive[name]).max() <= 1e-3 * max(1, abs(naive[name]).max()), name
    for name in ("sink_mass_1", "offset_1", "induction_mass", "duplicate_mass"):
        assert found[name].max() <= 1


def test_a_layer_is_read_in_float64_when_float32_would_not_do() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 9, 2, 4, generator=generator) for _ in range(2))
    batch = TokenBatch(torch.ones(1, 9, dtype=torch.bool))

    def layer(factor: float) -> Layer:
        _, lse = attend_flash(factor * q, k, k, scale=1.0)
        return Layer(factor * q, k, lse, scale=1.0, batch=batch)

    small = layer(100.0)
    assert precise(small) is small
    large = precise(layer(1e6))
    assert large.lse.dtype == torch.float64
    _, exact = attend_flash((1e6 * q).double(), k.double(), k.double(), scale=1.0)
    assert torch.equal(large.lse, exact)
    with pytest.raises(BackendError, match=r"leave nothing of exp.* use backend='naive'"):
        precise(layer(1e15))


def test_gradients_pass_through_the_float64_reading() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 9, 2, 4, generator=generator) for _ in range(2))
    # Far from zero, but not far from each other: no row has one key alone.
    q, k = (1e3 * q[:, :1] + q).requires_grad_(), 1e3 * k[:, :1] + k / 100
    batch = TokenBatch(torch.ones(1, 9, dtype=torch.bool))
    found = []
    for query in (q, q.double()):
        key = k.to(query.dtype)
        _, lse = attend_flash(query, key, key, scale=1.0, need_lse_grad=True)
        rows = FlashRows(precise(Layer(query, key, lse, scale=1.0, batch=batch)))
        value = (SinkMass().of(rows) + Entropy().of(rows)).sum()
        found.append(torch.autograd.grad(value, q)[0])
    assert torch.equal(*found)
    assert found[0].abs().max() > 1e-4


@pytest.mark.parametrize("backend", ["flash", "naive"])
def test_scores_that_are_no_numbers_are_not_called_inapplicable(build: Build, backend: str) -> None:
    model = scaled(build, 1e20, torch.float32)  # products overflow
    with pytest.raises(BackendError, match="attention scores of layer 0 are not finite: its quer"):
        measure_attention(model, tokens(), SinkMass(), backend=backend)
    model = build(FIELDS)
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", lambda q, hook: q * torch.nan)]),
        pytest.raises(BackendError, match="attention scores of layer 1 are not finite"),
    ):
        measure_attention(model, tokens(), SinkMass(), backend=backend)


def test_the_long_census_names_the_weight_that_is_not_finite(build: Build) -> None:
    model = build(FIELDS)
    with torch.no_grad():
        model.blocks[1].attn.W_V[0, 0, 0] = torch.inf
    with pytest.raises(ShapeError, match=r"but blocks\.1\.attn\.W_V holds NaN or infinity"):
        score_long_heads(model, length=12, n=2)
