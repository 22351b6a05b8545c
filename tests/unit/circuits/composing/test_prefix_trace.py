"""The prefix-matching trace by hand, and against the eigenvalues of the full matrix."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.composing.prefix_trace import prefix_matching_trace
from headstream.circuits.measuring.masses import Offset
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.qk_ov.head_factors import ov_factors, qk_factors
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, HookError, ShapeError
from headstream.models.store import load

# Float64 eigenvalues of a 20 x 20 matrix of order 1.
EXACT = 1e-10
Build = Callable[..., Decoder]


def test_constructed_induction_by_hand() -> None:
    """L0H1 attends to the token before with weight 1; L1H2 scores 60 where the key's token before
    is its own, for each of 33 tokens."""
    found = prefix_matching_trace(load("constructed-induction"), torch.arange(12))
    expected = np.full((2, 4), np.nan)
    expected[1] = [0, 0, 33 * 60, 0]
    np.testing.assert_allclose(found["trace"], expected, rtol=1e-6)
    assert float(found["part"].sel(earlier_layer=0, earlier_head=1, later_head=2)[1]) > 1979
    assert float(found["previous_token"][0, 1]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("norms", ["folded", "ignored"])
@pytest.mark.parametrize(
    "fields",
    [
        {"n_layers": 3, "n_kv_heads": 2},
        {"positions": "rotary", "norm": "rmsnorm", "d_mlp": 8},
        {"norm": "none", "d_model": 24},
    ],
    ids=str,
)
def test_trace_is_the_sum_of_the_eigenvalues_of_the_full_matrix(
    build: Build, tokens: Tensor, fields: dict[str, Any], norms: str
) -> None:
    model = build(fields)
    distance = 4 if fields.get("positions") == "rotary" else None
    found = prefix_matching_trace(model, tokens, distance=distance, norms=norms)
    weight = measure_attention(model, tokens, Offset(1), backend="naive")["offset_1"].mean(
        "example"
    )
    np.testing.assert_allclose(found["previous_token"], weight, rtol=0, atol=EXACT)
    embedding = model.W_E.detach()
    for layer in range(1, model.config.n_layers):
        query, key = qk_factors(model, layer, distance=distance, norms=norms)
        for head in range(4):
            total = torch.zeros(20, 20, dtype=torch.float64)
            for earlier in range(layer):
                value, out = ov_factors(model, earlier, norms=norms)
                for h1 in range(4):
                    ov = value[h1] @ out[h1]
                    form = embedding @ query[head] @ key[head].T @ ov.T @ embedding.T
                    total += float(weight[earlier, h1]) * form
            eigenvalues = torch.linalg.eigvals(total).sum()
            assert abs(float(eigenvalues.imag)) < EXACT
            value_found = float(found["trace"].sel(layer=layer, head=head))
            assert value_found == pytest.approx(float(eigenvalues.real), abs=EXACT)
    assert found["trace"].sel(layer=0).isnull().all()
    parts = found["part"].sum(["earlier_layer", "earlier_head"])
    np.testing.assert_allclose(parts[1:], found["trace"][1:], rtol=0, atol=EXACT)


def test_trained_induction_heads_have_large_positive_traces() -> None:
    model = load("induction-2l")
    tokens = torch.stack(
        [torch.randperm(40, generator=torch.Generator().manual_seed(s)) + 1 for s in range(4)]
    )
    found = prefix_matching_trace(model, tokens)
    through = found["part"].sel(earlier_layer=0, later_layer=1)
    assert float(through.sel(earlier_head=0).min()) > 10 * float(
        np.abs(through.sel(earlier_head=[1, 2, 3])).max()
    )


def test_errors_say_what_to_do(build: Build, tokens: Tensor) -> None:
    model = build({})
    with pytest.raises(ConfigError, match="distance=2 was given, but with positions='learned'"):
        prefix_matching_trace(model, tokens, distance=2)
    with pytest.raises(ConfigError, match="depends on the distance, but distance is None"):
        prefix_matching_trace(build({"positions": "rotary"}), tokens)
    with pytest.raises(ConfigError, match="norms must be 'folded' or 'ignored', got 'fold'"):
        prefix_matching_trace(model, tokens, norms="fold")
    with pytest.raises(ShapeError, match=r"no token has a real one before it, .* two or more"):
        prefix_matching_trace(model, tokens[:, :1])
    with (
        model.hooks(fwd_hooks=[("hook_embed", lambda x, hook: 2 * x)]),
        pytest.raises(HookError, match="cannot measure attention to the token before: a hook edi"),
    ):
        prefix_matching_trace(model, tokens)
    with torch.no_grad():
        model.embed.W_E[3, 3] = torch.inf
    with pytest.raises(ShapeError, match=r"must be finite, but embed.W_E holds NaN or infinity"):
        prefix_matching_trace(model, tokens)
