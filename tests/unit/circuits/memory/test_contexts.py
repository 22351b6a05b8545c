"""Which positions of given text fire a neuron, streamed, against all activations at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.memory.contexts import neuron_key_contexts
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError, HookError, ShapeError, TokenError
from headstream.models.hooks import capture

POST = "blocks.1.mlp.hook_post"
KINDS: dict[str, dict[str, Any]] = {
    "layernorm": {"d_mlp": 10, "mlp_bias": True, "attn_bias": True},
    "rmsnorm gated": {"d_mlp": 10, "norm": "rmsnorm", "gated_mlp": True, "positions": "rotary"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("lowest", [False, True])
def test_against_all_activations_at_once(
    build: Callable[..., Decoder], tokens: Tensor, kind: str, batch: int, lowest: bool
) -> None:
    model = build(KINDS[kind])
    mask = torch.ones_like(tokens)
    mask[0, :2], mask[2, 4:] = 0, 0
    found = neuron_key_contexts(
        model, 1, tokens, top=5, batch=batch, lowest=lowest, attention_mask=mask
    )
    _, acts = capture(model, tokens, POST, attention_mask=mask)
    post = acts[POST].flatten(0, 1)
    post[~mask.flatten().bool()] = float("inf") if lowest else -float("inf")
    expected = post.sort(0, descending=not lowest)
    # Batches of another size multiply matrices in another order.
    np.testing.assert_allclose(found["activation"], expected.values[:5].T, rtol=0, atol=1e-12)
    place = found["example"] * 6 + found["pos"]
    np.testing.assert_array_equal(place, expected.indices[:5].T)
    np.testing.assert_array_equal(found["token"], tokens.flatten()[place.values])
    assert found.sizes == {"neuron": 10, "rank": 5}


def test_only_a_batch_is_held_and_only_the_layers_needed_are_run(
    build: Callable[..., Decoder], tokens: Tensor
) -> None:
    """A hook that only reads may stay, and sees it."""
    model = build(KINDS["layernorm"])
    seen: list[tuple[str, int]] = []

    def note(tensor: Tensor, hook: Any) -> None:
        seen.append((hook.name, len(tensor)))

    later = "blocks.1.hook_resid_pre"
    first = "blocks.0.mlp.hook_post"
    model.add_hook(first, note)
    model.add_hook(later, note)
    found = neuron_key_contexts(model, 0, tokens, batch=2, top=1, neurons=3)
    assert seen == [(first, 2), (first, 1)]
    assert found["neuron"].values.tolist() == [3]


def test_rows_of_padding_are_skipped(build: Callable[..., Decoder], tokens: Tensor) -> None:
    model = build(KINDS["layernorm"])
    mask = torch.ones_like(tokens)
    mask[1] = 0
    found = neuron_key_contexts(model, 1, tokens, top=12, batch=1, attention_mask=mask)
    assert set(found["example"].values.flatten()) == {0, 2}


def test_refusals(build: Callable[..., Decoder], tokens: Tensor) -> None:
    with pytest.raises(ConfigError, match="attention-only model has no MLP"):
        neuron_key_contexts(build({}), 0, tokens)
    model = build(KINDS["layernorm"])
    with pytest.raises(ShapeError, match="there is no layer 2: the model has 2, 0 to 1"):
        neuron_key_contexts(model, 2, tokens)
    with pytest.raises(ShapeError, match="there is no neuron -1: the model has 10, 0 to 9"):
        neuron_key_contexts(model, 0, tokens, neurons=-1)
    with pytest.raises(ShapeError, match=r"top must lie in \[1, 18\] = \[1, real positions\]"):
        neuron_key_contexts(model, 0, tokens, top=19)
    with pytest.raises(ShapeError, match="batch must be at least 1, got 0"):
        neuron_key_contexts(model, 0, tokens, batch=0)
    with pytest.raises(TokenError, match=r"outside|lie in"):
        neuron_key_contexts(model, 0, tokens + 20)
    with (
        model.hooks(fwd_hooks=[("hook_embed", lambda t, hook: 2 * t)]),
        pytest.raises(HookError, match="cannot say what fires a neuron: a hook edits 'hook_embed'"),
    ):
        neuron_key_contexts(model, 0, tokens)
    with torch.no_grad():
        model.blocks[0].mlp.W_in.mul_(1e300)
        model.blocks[0].mlp.b_in.mul_(1e300)
        model.blocks[0].ln2.w.mul_(1e300)
    with pytest.raises(ExactnessError, match="activations of layer 0 are NaN or infinite in rows"):
        neuron_key_contexts(model, 0, tokens)
