"""Writes, attributions and lenses against TransformerLens' cache, of our models and its own.

Twice: its tools on a cache of ours (every kind of decoder, float64), and its bridge around GPT-2
and Llama of transformers with the same weights as ours. Ours and theirs add the same float64
numbers in another order: 1e-10. Llama's rotary tables and norm are float32 in any model of
transformers, which costs 1e-5.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from headstream.circuits.folding import fold
from headstream.circuits.stream.lens import logit_lens
from headstream.circuits.stream.reads import residual_reads
from headstream.circuits.stream.residual import decompose_residual
from headstream.circuits.stream.sources import source_attribution
from headstream.models.decoder import Decoder

BOUNDS = {"gpt2": 1e-10, "llama": 1e-5}
EXACT = 1e-10
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
ANSWER, WRONG = torch.tensor([1, 8]), torch.tensor([4, 2])
HEADS = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
KINDS: dict[str, dict[str, Any]] = {
    "attention only": {},
    "layernorm": {"d_mlp": 20, "attn_bias": True, "mlp_bias": True, "unembed_bias": True},
    "rmsnorm": {
        "d_mlp": 20,
        "gated_mlp": True,
        "norm": "rmsnorm",
        "positions": "rotary",
        "n_kv_heads": 2,
    },
    "no norm": {"norm": "none", "positions": "shortformer"},
    "tied": {"tied_embeddings": True, "positions": "sinusoidal"},
}
# TransformerLens' name of a part, and which of our components it is the sum of.
PARTS = {"attn_out": ("H", "bO"), "mlp_out": ("MLP", "bout")}


def parts_of(label: str, components: list[str]) -> list[str]:
    if label in ("embed", "pos_embed"):
        return [label]
    layer, kind = label.split("_", 1)
    starts = tuple(f"L{layer}{part}" for part in PARTS[kind])
    return [name for name in components if name.startswith(starts)]


@pytest.mark.parametrize("kind", KINDS)
def test_their_decompositions_of_our_cache(build: Any, kind: str) -> None:
    """`decompose_resid`, `stack_head_results` and, with neurons, the full decomposition."""
    model = build(KINDS[kind])
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        parts, labels = cache.decompose_resid(return_labels=True)
        heads, names = cache.stack_head_results(return_labels=True)
        full, rows = cache.get_full_resid_decomposition(return_labels=True)
    found = decompose_residual(model, TOKENS)
    for label, part in zip(labels, parts, strict=True):
        mine = found.writes.sel(component=parts_of(label, found.components)).sum("component")
        np.testing.assert_allclose(mine, part, rtol=0, atol=EXACT)
    assert names == HEADS
    np.testing.assert_allclose(found.writes.sel(component=HEADS), heads, rtol=0, atol=EXACT)
    each = decompose_residual(model, TOKENS, per_neuron=True)
    biases = [name for name in each.components if name.endswith(("bO", "bout"))]
    for label, row in zip(rows, full, strict=True):
        wanted = biases if label == "bias" else [label]
        mine = each.writes.sel(component=wanted).sum("component")
        np.testing.assert_allclose(mine, row, rtol=0, atol=EXACT)
    assert len(rows) == len(each.components) - len(biases) + 1  # every row was compared


@pytest.mark.parametrize("kind", KINDS)
def test_logit_attrs_of_our_cache(build: Any, kind: str) -> None:
    """Of heads and of parts, at every position. Theirs needs the final norm's gain folded."""
    model = fold(build(KINDS[kind]), norms="final")
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        options: dict[str, Any] = {"tokens": ANSWER, "incorrect_tokens": WRONG}
        heads = cache.logit_attrs(cache.stack_head_results(), **options)
        parts, labels = cache.decompose_resid(return_labels=True)
        theirs = cache.logit_attrs(parts, **options)
    found = decompose_residual(model, TOKENS)
    mine = found.logit_attribution(ANSWER, WRONG, pos=None)
    np.testing.assert_allclose(mine.sel(component=HEADS), heads, rtol=0, atol=EXACT)
    sublayers = found.logit_attribution(ANSWER, WRONG, pos=None, by="sublayer")
    for label, values in zip(labels, theirs, strict=True):
        name = label if label.endswith("embed") else f"L{label.replace('_', '', 1)}"
        np.testing.assert_allclose(sublayers.sel(component=name), values, rtol=0, atol=EXACT)
    by_source = source_attribution(model, TOKENS, ANSWER, WRONG, pos=None).sum("source")
    total = by_source.values.reshape(8, 2, 7)
    np.testing.assert_allclose(total, heads, rtol=0, atol=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_streams_of_our_cache(build: Any, kind: str) -> None:
    """Streams before and between sublayers: read with their own scale, and with the run's."""
    model = build(KINDS[kind])
    sublayers = model.config.has_mlp  # their `incl_mid` reads a resid_mid that is not there
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        own, labels = cache.accumulated_resid(incl_mid=sublayers, apply_ln=True, return_labels=True)
        plain = cache.accumulated_resid(incl_mid=sublayers)
        frozen = cache.apply_ln_to_stack(plain)
        if model.config.norm != "none":
            frozen = frozen * model.ln_final.w
        if model.config.norm == "layernorm":
            frozen = frozen + model.ln_final.b
        expected = {
            "own": (own if model.config.norm != "none" else plain) @ model.W_U + model.b_U,
            "frozen": frozen @ model.W_U + model.b_U,
        }
    for scale, values in expected.items():
        lens = logit_lens(model, TOKENS, scale=scale, sublayers=sublayers)
        assert lens["layer"].values.tolist() == labels
        np.testing.assert_allclose(lens, values, rtol=0, atol=EXACT)
        # The same streams are partial sums of writes: those that end where a layer begins.
        after = decompose_residual(model, TOKENS).accumulated_logits(3, pos=None, scale=scale)
        ends = [name for name in after["component"].values if not name.startswith("L1")]
        np.testing.assert_allclose(
            after.sel(component=ends[-1]), lens.sel(layer="1_pre")[..., 3], rtol=0, atol=EXACT
        )


@pytest.fixture(scope="module")
def bridged(pair: tuple[Any, Decoder, str]) -> tuple[Any, Any, Decoder, float]:
    """The bridge, its cache of TOKENS, our decoder, and the bound."""
    theirs, ours, name = pair
    wrapped = copy.deepcopy(theirs)  # the bridge replaces submodules of what it wraps
    bridge = build_bridge_from_module(wrapped, type(theirs).__name__, hf_config=theirs.config)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    return bridge, cache, ours, BOUNDS[name]


def test_writes_of_huggingface_models(bridged: tuple[Any, Any, Decoder, float]) -> None:
    _, cache, ours, bound = bridged
    found = decompose_residual(ours, TOKENS)
    parts, labels = cache.decompose_resid(return_labels=True)
    for label, part in zip(labels, parts, strict=True):
        mine = found.writes.sel(component=parts_of(label, found.components)).sum("component")
        np.testing.assert_allclose(mine, part.expand(2, -1, -1).detach(), rtol=0, atol=bound)
    heads = cache.stack_head_results().detach()
    np.testing.assert_allclose(found.writes.sel(component=HEADS), heads, rtol=0, atol=bound)


def test_attributions_of_huggingface_models(
    bridged: tuple[Any, Any, Decoder, float], pair: tuple[Any, Decoder, str]
) -> None:
    """Of heads, by their frozen scale with the gain that they leave out; and all sum to the logit
    difference of transformers' own forward pass."""
    bridge, cache, ours, bound = bridged
    with torch.no_grad():
        direction = bridge.W_U[:, ANSWER] - bridge.W_U[:, WRONG]
        scaled = cache.apply_ln_to_stack(cache.stack_head_results())
        heads = torch.einsum("cepd,de->cep", scaled * ours.ln_final.w, direction)
        logits = pair[0](TOKENS).logits
    rows = torch.arange(2)
    difference = logits[rows, :, ANSWER] - logits[rows, :, WRONG]
    mine = decompose_residual(ours, TOKENS).logit_attribution(ANSWER, WRONG, pos=None)
    # LayerNorm also takes the mean off the direction; the gain stands before it for both.
    np.testing.assert_allclose(mine.sel(component=HEADS), heads, rtol=0, atol=bound)
    np.testing.assert_allclose(mine.sum("component"), difference, rtol=0, atol=bound)


@pytest.mark.parametrize("scale", ["own", "frozen"])
def test_lens_of_huggingface_models(bridged: tuple[Any, Any, Decoder, float], scale: str) -> None:
    bridge, cache, ours, bound = bridged
    with torch.no_grad():
        if scale == "own":
            stack = cache.accumulated_resid(incl_mid=True, apply_ln=True)
        else:
            norm = ours.ln_final
            stack = cache.apply_ln_to_stack(cache.accumulated_resid(incl_mid=True)) * norm.w
            stack = stack + norm.b if ours.config.norm == "layernorm" else stack
        expected: Tensor = stack @ bridge.W_U
    lens = logit_lens(ours, TOKENS, scale=scale, sublayers=True)
    np.testing.assert_allclose(lens, expected, rtol=0, atol=bound)


def test_reads_of_huggingface_models(bridged: tuple[Any, Any, Decoder, float]) -> None:
    """Their q, k and v, and their stack of heads through our reading, row by row."""
    _, cache, ours, bound = bridged
    stack = cache.stack_head_results(layer=1).detach()
    centred = ours.config.norm == "layernorm"
    norm, attn = ours.blocks[1].ln1, ours.blocks[1].attn
    with torch.no_grad():
        stream = cache["blocks.1.hook_resid_pre"]
        spread = stream - stream.mean(-1, keepdim=True) if centred else stream
        scale = (spread.square().mean(-1, keepdim=True) + ours.config.eps).sqrt()
        stack = stack - stack.mean(-1, keepdim=True) if centred else stack
        normalized = stack / scale * norm.w
        found = residual_reads(ours, TOKENS, 1, 3)
        for letter in "qkv":
            own = 3 if letter == "q" else found.kv_head
            weight = getattr(attn, f"W_{letter.upper()}")[own]
            mine = getattr(found, letter)
            expected = normalized @ weight
            np.testing.assert_allclose(mine.sel(write=HEADS[:4]), expected, rtol=0, atol=bound)
            theirs = cache[f"blocks.1.attn.hook_{letter}"]
            if theirs.ndim == 3:
                theirs = theirs.unflatten(-1, (-1, ours.config.d_head))
            np.testing.assert_allclose(mine.sum("write"), theirs[:, :, own], rtol=0, atol=bound)
