"""Keys and values in the vocabulary, against dense products and the modules themselves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.folding import fold
from headstream.circuits.memory.tokens import neuron_key_tokens, neuron_value_tokens
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.hooks import capture

KINDS: dict[str, dict[str, Any]] = {
    "layernorm": {"d_mlp": 10, "mlp_bias": True},
    "layernorm gated": {"d_mlp": 10, "gated_mlp": True},
    "rmsnorm gated": {"d_mlp": 10, "norm": "rmsnorm", "gated_mlp": True, "activation": "silu"},
    "no norm tied": {"d_mlp": 10, "norm": "none", "tied_embeddings": True},
}


def fired_by(model: Decoder, layer: int, rows: Tensor) -> Tensor:
    """[d_vocab, neuron]: activations when these rows are the stream, by the modules."""
    block, kept = model.blocks[layer], []
    with (
        torch.no_grad(),
        model.hooks(
            fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", lambda t, hook: kept.append(t) or t)]
        ),
    ):
        block.mlp(block.ln2(rows[None]))
    return kept[0][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2**22, 30])
@pytest.mark.parametrize("lowest", [False, True])
def test_key_tokens(
    build: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    size: int,
    lowest: bool,
) -> None:
    monkeypatch.setattr("headstream.circuits.memory.running_top.BLOCK", size)
    model = build(KINDS[kind])
    found = neuron_key_tokens(model, 1, neurons=[7, 2], top=4, lowest=lowest)
    fired = fired_by(model, 1, model.W_E)
    expected = fired[:, [2, 7]].sort(0, descending=not lowest)
    np.testing.assert_allclose(found["activation"], expected.values[:4].T, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found["token"], expected.indices[:4].T)
    assert found["neuron"].values.tolist() == [2, 7]
    # What each key gave, put through the activation, is what the neuron did.
    act = torch.nn.functional.silu if kind == "rmsnorm gated" else torch.nn.functional.gelu
    match = torch.tensor(found["match"].values)
    again = act(match[0]) * match[1] if "gated" in kind else act(match[0])
    np.testing.assert_allclose(again, found["activation"], rtol=0, atol=1e-12)
    assert found["branch"].values.tolist() == (["gate", "in"] if "gated" in kind else ["in"])


def test_effective_embedding_of_later_layers(build: Callable[..., Decoder]) -> None:
    model = build(KINDS["layernorm"])
    block = model.blocks[0]
    with torch.no_grad():
        rows = model.W_E + block.mlp(block.ln2(model.W_E[None]))[0]
    found = neuron_key_tokens(model, 1, top=3, embedding="effective")
    expected = fired_by(model, 1, rows).sort(0, descending=True)
    np.testing.assert_array_equal(found["token"], expected.indices[:3].T)
    assert (neuron_key_tokens(model, 1, top=3)["token"] != found["token"]).any()


def test_a_one_token_prompt_without_attention_fires_as_said(
    build: Callable[..., Decoder],
) -> None:
    """The reading is a run's, where nothing but the token is in the stream."""
    model = build({"d_mlp": 10, "positions": "none"})
    with torch.no_grad():
        model.blocks[0].attn.W_O.zero_()
    found = neuron_key_tokens(model, 0, top=20)
    _, acts = capture(model, torch.arange(20)[:, None], "blocks.0.mlp.hook_post")
    post = acts["blocks.0.mlp.hook_post"][:, 0].numpy()
    for neuron in range(10):
        row = found.sel(neuron=neuron)
        np.testing.assert_allclose(row["activation"], post[row["token"], neuron], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2**22, 30])
def test_value_tokens(
    build: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    monkeypatch.setattr("headstream.circuits.memory.running_top.BLOCK", size)
    model = build(KINDS[kind])
    found = neuron_value_tokens(model, 1, neurons=[0, 3, 9], top=3)
    # Folded and centred, the final norm has nothing left to say.
    centre = "readers" if model.config.norm == "layernorm" else ()
    folded = fold(model, norms="final", centre=centre)
    effects = (folded.W_out[1][[0, 3, 9]] @ folded.W_U).detach()
    for direction, down in (("raises", False), ("lowers", True)):
        expected = effects.sort(1, descending=not down)
        one = found.sel(direction=direction)
        np.testing.assert_allclose(one["effect"], expected.values[:, :3], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(one["token"], expected.indices[:, :3])
    np.testing.assert_allclose(found["mean"], effects.mean(1), rtol=0, atol=1e-12)


def test_a_unit_of_activation_moves_the_logits_by_the_effects(
    build: Callable[..., Decoder], tokens: Tensor
) -> None:
    """Without a norm the reading is causal: add 1 to the neuron, and read the logits."""
    model = build(KINDS["no norm tied"])

    def more(post: Tensor, hook: object) -> Tensor:
        return post + torch.eye(10, dtype=post.dtype)[4]

    with torch.no_grad():
        after = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.mlp.hook_post", more)])
        moved = (after - model(tokens))[1, 2].numpy()
    found = neuron_value_tokens(model, 1, neurons=4, top=20).sel(direction="raises", neuron=4)
    np.testing.assert_allclose(found["effect"], moved[found["token"]], rtol=0, atol=1e-12)


def test_half_precision_is_widened(build: Callable[..., Decoder]) -> None:
    model = build(KINDS["layernorm"], dtype=torch.bfloat16)
    assert neuron_key_tokens(model, 0)["activation"].dtype == np.float64
    assert neuron_value_tokens(model, 0)["effect"].dtype == np.float64


@pytest.mark.parametrize("find", [neuron_key_tokens, neuron_value_tokens])
def test_refusals(build: Callable[..., Decoder], find: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="attention-only model has no MLP"):
        find(build({}), 0)
    model = build({"d_mlp": 10})
    with pytest.raises(ShapeError, match="there is no layer 5: the model has 2, 0 to 1"):
        find(model, 5)
    with pytest.raises(ShapeError, match="there is no neuron 10: the model has 10, 0 to 9"):
        find(model, 0, neurons=[1, 10])
    with pytest.raises(ShapeError, match=r"top must lie in \[1, 20\] = \[1, d_vocab\], got 21"):
        find(model, 0, top=21)
    with pytest.raises(ShapeError, match="top must be at least 1, got 0"):
        find(model, 0, top=0)
    with torch.no_grad():
        model.embed.W_E[0, 0] = float("inf")
    with pytest.raises(ShapeError, match=r"finite, but embed\.W_E holds NaN or infinity"):
        find(model, 0)


def test_embeddings_that_mean_nothing(build: Callable[..., Decoder]) -> None:
    model = build({"d_mlp": 10})
    with pytest.raises(ConfigError, match="embedding='effective' means nothing in layer 0"):
        neuron_key_tokens(model, 0, embedding="effective")
    with pytest.raises(ConfigError, match="embedding must be 'plain' or 'effective', got 'plan'"):
        neuron_key_tokens(model, 0, embedding="plan")
