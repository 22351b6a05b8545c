"""Orders of paths: the losses are those of the truncated sums, and the last is the model's."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.composing.path_expansion import expand_paths
from headstream.circuits.composing.term_importance import importance_by_order
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError, HookError, ShapeError
from headstream.models.store import load

# Float64 losses from logits of order 10.
EXACT = 1e-10
Build = Callable[..., Decoder]


def left_padded(tokens: Tensor) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[2, :2] = 0
    return mask


@pytest.mark.parametrize("scale", ["frozen", "own"])
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_bias": True, "unembed_bias": True, "n_layers": 3, "n_kv_heads": 2},
        {"norm": "rmsnorm", "positions": "rotary", "tied_embeddings": True},
        {"norm": "none", "positions": "shortformer"},
    ],
    ids=str,
)
def test_the_last_order_is_the_model(
    build: Build, tokens: Tensor, fields: dict[str, Any], scale: str
) -> None:
    model = build(fields)
    mask = left_padded(tokens)
    found = importance_by_order(model, tokens, scale=scale, attention_mask=mask)
    with torch.no_grad():
        own = model(tokens, attention_mask=mask, return_type="loss_per_token").nanmean(1).numpy()
    np.testing.assert_allclose(found["model_loss"], own, rtol=0, atol=EXACT)
    np.testing.assert_allclose(found["loss"][-1], own, rtol=0, atol=EXACT)
    assert float(np.abs(found["loss"][0] - own).max()) > 1e-3
    assert found.sizes["order"] == model.config.n_layers + 1
    # The marginal effects telescope from the uniform guess to the model.
    total = found["marginal"].sum("order")
    np.testing.assert_allclose(total, math.log(20) - own, rtol=0, atol=EXACT)
    np.testing.assert_allclose(found["mean"], found["marginal"].mean("example"), atol=EXACT)
    assert (found["low"] <= found["mean"]).all()
    assert (found["mean"] <= found["high"]).all()


@pytest.mark.parametrize("norm", ["layernorm", "none"])
def test_order_n_is_the_sum_of_paths_up_to_n_heads(build: Build, norm: str) -> None:
    """Logits rebuilt token by token from `expand_paths`, another algorithm altogether."""
    fields = {"norm": norm, "attn_bias": True, "unembed_bias": True, "n_heads": 2, "d_vocab": 4}
    model = build(fields)
    tokens = torch.tensor([[0, 3, 1], [2, 2, 0]])
    found = importance_by_order(model, tokens)
    for order in range(3):
        logits = torch.zeros(2, 3, 4, dtype=torch.float64)
        for pos, token in np.ndindex(3, 4):
            part = expand_paths(model, tokens, token, pos=pos, max_order=order)
            value = part["contribution"].sum("path") + part["constant"].sum("source")
            logits[:, pos, token] = torch.tensor(value.values)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
        ).mean(1)
        np.testing.assert_allclose(found["loss"].sel(order=order), loss, rtol=0, atol=EXACT)


def test_constructed_induction_owes_all_to_single_heads() -> None:
    """Its two heads meet in the keys alone: no path through both does anything."""
    model = load("constructed-induction")
    block = torch.randperm(32, generator=torch.Generator().manual_seed(0))[:12] + 1
    tokens = torch.cat([torch.tensor([0]), block, block])[None]
    found = importance_by_order(model, tokens)
    assert float(found["marginal"].sel(order=0)[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(found["marginal"].sel(order=1)[0]) > 1.0
    assert float(found["marginal"].sel(order=2)[0]) == pytest.approx(0.0, abs=1e-6)
    assert found["low"].isnull().all()  # one example has no interval


def test_targets_choose_the_tokens_whose_prediction_counts(build: Build, tokens: Tensor) -> None:
    model, mask = build({}), left_padded(tokens)
    targets = torch.zeros_like(tokens, dtype=torch.bool)
    targets[0, [2, 5]] = True
    targets[1, 4] = True
    targets[2, 0] = True  # padding: nobody predicts it
    found = importance_by_order(model, tokens, targets=targets, attention_mask=mask)
    with torch.no_grad():
        each = model(tokens, attention_mask=mask, return_type="loss_per_token")
    expected = [float(each[0, [1, 4]].mean()), float(each[1, 3]), math.nan]
    assert found["model_loss"].values == pytest.approx(expected, abs=EXACT, nan_ok=True)
    assert found["loss"].values[-1] == pytest.approx(expected, abs=EXACT, nan_ok=True)
    kept = found["marginal"].values[:, :2].mean(1)
    np.testing.assert_allclose(found["mean"], kept, rtol=0, atol=EXACT)


def test_trained_induction_owes_its_repeats_to_single_heads() -> None:
    """The induction heads read the copied token's embedding; K-composition with the previous-token
    head decides where, and is in the patterns."""
    model = load("induction-2l")
    draws = torch.Generator().manual_seed(0)
    block = torch.stack([torch.randperm(48, generator=draws)[:16] + 1 for _ in range(8)])
    tokens = torch.cat([torch.zeros(8, 1, dtype=torch.long), block, block], 1)
    repeats = torch.zeros_like(tokens, dtype=torch.bool)
    repeats[:, 18:] = True
    found = importance_by_order(model, tokens, targets=repeats)
    assert float(found["low"][1]) > 3.5
    assert np.abs(found["mean"].values[[0, 2]]) == pytest.approx([0.0, 0.0], abs=0.2)
    assert float(found["model_loss"].max()) < 0.1


def test_examples_in_pieces_give_the_same(
    build: Build, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mask = build({"attn_bias": True}), left_padded(tokens)
    whole = importance_by_order(model, tokens, attention_mask=mask)
    monkeypatch.setattr("headstream.circuits.composing.term_importance._BYTES", 1)
    pieces = importance_by_order(model, tokens, attention_mask=mask)
    np.testing.assert_allclose(whole["loss"], pieces["loss"], rtol=0, atol=EXACT)


def test_errors_say_what_to_do(build: Build, tokens: Tensor) -> None:
    with pytest.raises(
        ExactnessError, match=r"weigh the orders of paths of 'unnamed': it has an MLP \(d_mlp=4\)"
    ):
        importance_by_order(build({"d_mlp": 4}), tokens)
    model = build({})
    with pytest.raises(ConfigError, match="scale must be 'frozen' or 'own', got 'froze'; nearest"):
        importance_by_order(model, tokens, scale="froze")
    with pytest.raises(
        ShapeError, match=r"targets must be bool \[batch, pos\] = \[3, 6\], got int"
    ):
        importance_by_order(model, tokens, targets=torch.ones_like(tokens))
    none = torch.zeros_like(tokens, dtype=torch.bool)
    with pytest.raises(ShapeError, match="loss has no target: none of `targets` follows another"):
        importance_by_order(model, tokens, targets=none)
    with pytest.raises(ShapeError, match="loss has no target"):
        importance_by_order(model, tokens[:, :1])
    with pytest.raises(ShapeError, match=r"attention_mask must be \[batch, pos\] = \[3, 6\]"):
        importance_by_order(model, tokens, attention_mask=torch.ones(3, 5, dtype=torch.long))
    with (
        model.hooks(fwd_hooks=[("blocks.0.attn.hook_k", lambda k, hook: -k)]),
        pytest.raises(HookError, match="cannot weigh the orders of paths: a hook edits"),
    ):
        importance_by_order(model, tokens)
