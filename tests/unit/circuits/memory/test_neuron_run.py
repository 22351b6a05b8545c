"""A run's MLP, neuron by neuron: the sum, what each adds to a logit, and edits refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.interventions import cut_edges
from headstream.circuits.memory.keys_values import mlp_memory
from headstream.circuits.memory.neuron_run import neuron_activations
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError, HookError, ShapeError, TokenError
from headstream.models.hooks import capture

FULL = {"d_mlp": 10, "mlp_bias": True, "attn_bias": True, "unembed_bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "layernorm": FULL,
    "layernorm gated": FULL | {"gated_mlp": True, "activation": "silu"},
    "rmsnorm gated": {"d_mlp": 10, "norm": "rmsnorm", "gated_mlp": True, "activation": "silu"},
    "no norm": {"d_mlp": 10, "norm": "none", "activation": "relu", "positions": "rotary"},
}


def by_hand() -> Decoder:
    """One layer whose heads write nothing: token 0 is (1, 0), token 1 is (0, 2); no norm, ReLU.

    Neuron 0 has key (1, 1) and value (3, 0), neuron 1 key (1, -1) and value (0, 5).
    """
    sizes = {"n_layers": 1, "n_heads": 1, "d_model": 2, "d_head": 2, "d_vocab": 2, "n_ctx": 4}
    config = DecoderConfig(**sizes, d_mlp=2, norm="none", positions="none", activation="relu")
    model = Decoder(config, dtype=torch.float64)
    with torch.no_grad():
        model.blocks[0].attn.W_O.zero_()
        model.embed.W_E.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        model.blocks[0].mlp.W_in.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
        model.blocks[0].mlp.W_out.copy_(torch.tensor([[3.0, 0.0], [0.0, 5.0]]))
        model.unembed.W_U.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    return model


def test_by_hand() -> None:
    run = neuron_activations(by_hand(), torch.tensor([[0, 1]]), 0)
    # Token 0 matches both keys by 1; token 1 matches 2 and -2, and ReLU drops the latter.
    np.testing.assert_array_equal(run.activations, [[[1, 1], [2, 0]]])
    np.testing.assert_array_equal(run.output, [[[3, 5], [6, 0]]])
    np.testing.assert_array_equal(run.logit_attribution(1, pos=0)[:, 0], [0, 5])
    np.testing.assert_array_equal(run.logit_attribution(0, 1, pos=0)[:, 0], [3, -5])
    np.testing.assert_array_equal(run.logit_attribution(0, 1)[:, 0], [6, 0])
    assert run.largest_error == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_rebuild(
    build: Callable[..., Decoder], tokens: Tensor, kind: str, backend: str
) -> None:
    model = build(KINDS[kind])
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    run = neuron_activations(model, tokens, 1, attention_mask=mask, backend=backend)
    names = ["blocks.1.mlp.hook_post", "blocks.1.hook_mlp_out"]
    _, acts = capture(model, tokens, names, attention_mask=mask, backend=backend)
    np.testing.assert_allclose(run.activations, acts[names[0]], rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.output, acts[names[1]], rtol=0, atol=1e-12)
    # One neuron after the other, from the memory alone.
    memory = mlp_memory(model, 1)
    total = np.zeros_like(run.output) + memory.bias.values
    for neuron in range(10):
        total += run.activations.values[..., neuron, None] * memory.values.values[neuron]
    np.testing.assert_allclose(total, run.output, rtol=0, atol=1e-10)
    assert run.largest_error <= run.bound < 1e-11
    assert np.abs(run.remainder).max() == run.largest_error
    assert run.activations.dims == ("example", "pos", "neuron")
    assert "<10 neurons of layer 1, 3 examples x 6 positions; largest error" in repr(run)


@pytest.mark.parametrize("kind", KINDS)
def test_contributions_are_those_of_the_decomposition(
    build: Callable[..., Decoder], tokens: Tensor, kind: str
) -> None:
    model = build(KINDS[kind])
    run = neuron_activations(model, tokens, 0)
    answer, wrong, pos = [1, 2, 3], [4, 5, 6], [5, 3, -1]
    found = run.logit_attribution(answer, wrong, pos)
    whole = decompose_residual(model, tokens, per_neuron=True)
    expected = whole.logit_attribution(answer, wrong, pos)
    labels = found["component"].values.tolist()
    assert labels[:10] == [f"L0N{neuron}" for neuron in range(10)]
    assert labels[10:] == (["L0bout"] if model.config.mlp_bias else [])
    np.testing.assert_allclose(found, expected.sel(component=labels), rtol=0, atol=1e-10)
    layer = decompose_residual(model, tokens).logit_attribution(answer, wrong, pos)
    parts = [c for c in layer["component"].values if c in ("L0MLP", "L0bout")]
    np.testing.assert_allclose(
        found.sum("component"), layer.sel(component=parts).sum("component"), rtol=0, atol=1e-10
    )
    assert found.attrs["of"] == "logit difference"
    assert found.attrs["unit"] == "nats"
    assert found.attrs["norm"] == run.norm == whole.norm
    assert found["pos"].values.tolist() == [5, 3, 5]


def test_silencing_a_neuron_costs_what_it_contributed(
    build: Callable[..., Decoder], tokens: Tensor
) -> None:
    """In the last layer, without a final norm, the direct effect is the whole effect."""
    model = build(KINDS["no norm"])
    found = neuron_activations(model, tokens, 1).logit_attribution(7)
    before = model(tokens)[:, -1, 7]
    moved = []
    for neuron in range(10):

        def silence(post: Tensor, hook: object, neuron: int = neuron) -> Tensor:
            post = post.clone()
            post[..., neuron] = 0
            return post

        after = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.mlp.hook_post", silence)])
        moved.append((before - after[:, -1, 7]).detach().numpy())
    np.testing.assert_allclose(found.values, np.stack(moved), rtol=0, atol=1e-12)
    assert np.abs(moved).max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_stay_within_their_bounds(
    build: Callable[..., Decoder], tokens: Tensor, kind: str, dtype: torch.dtype
) -> None:
    run = neuron_activations(build(KINDS[kind], dtype=dtype), tokens, 1)
    assert 0 < run.largest_error <= run.bound
    # Outputs of order 10 are sums of terms of order 100.
    assert run.bound < 1000 * torch.finfo(dtype).eps


def test_an_mlp_that_is_no_sum_of_its_neurons_is_told(
    build: Callable[..., Decoder], tokens: Tensor
) -> None:
    model = build(FULL)
    model.blocks[1].mlp.act = torch.tanh
    neuron_activations(model, tokens, 0)
    with pytest.raises(
        ExactnessError,
        match=r"neurons of layer 1 do not sum to its MLP's output: off by .* at example \d, pos",
    ):
        neuron_activations(model, tokens, 1)


def halved(tensor: Tensor, hook: object) -> Tensor:
    return tensor / 2


@pytest.mark.parametrize(
    "name",
    [
        "hook_embed",
        "blocks.0.attn.hook_z",
        "blocks.0.ln2.hook_scale",
        "blocks.0.mlp.hook_post",
        "blocks.0.hook_mlp_out",
        "ln_final.hook_scale",
    ],
)
def test_an_edit_of_the_run_is_refused(
    build: Callable[..., Decoder], tokens: Tensor, name: str
) -> None:
    """Also where the sum would hold, as upstream: it would be another model's MLP."""
    model = build(FULL)
    with (
        model.hooks(fwd_hooks=[(name, halved)]),
        pytest.raises(HookError, match=f"cannot rebuild an MLP: a hook edits '{name}'"),
    ):
        neuron_activations(model, tokens, 0)
    with model.hooks(fwd_hooks=[(name, lambda tensor, hook: None)]):
        neuron_activations(model, tokens, 0)  # who only reads may stay


def test_interventions_are_refused(build: Callable[..., Decoder], tokens: Tensor) -> None:
    model = build(FULL)
    with cut_edges(model, 1, keys=[0], queries=[3]):
        model(tokens)
        with pytest.raises(HookError, match="cannot rebuild an MLP: attention of layer 1 is edit"):
            neuron_activations(model, tokens, 0)


def test_refusals(
    build: Callable[..., Decoder], tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="attention-only model has no MLP"):
        neuron_activations(build({}), tokens, 0)
    model = build(FULL)
    with pytest.raises(ShapeError, match="there is no layer 2: the model has 2, 0 to 1"):
        neuron_activations(model, tokens, 2)
    run = neuron_activations(model, tokens, 0)
    with pytest.raises(TokenError, match=r"answer must lie in \[0, 20\), got \[20, 20, 20\]"):
        run.logit_attribution(20)
    with pytest.raises(ShapeError, match=r"pos must lie in \[-6, 6\), got"):
        run.logit_attribution(1, pos=6)
    monkeypatch.setattr("headstream.circuits.memory.neuron_run._LIMIT", 100)
    with pytest.raises(ShapeError, match="of 10 neurons at 3 x 6 positions take 1,440 bytes, over"):
        neuron_activations(model, tokens, 0)
