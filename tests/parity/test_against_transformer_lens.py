"""Our decoder against TransformerLens: its bridge on the same weights, its tools on our model.

Numbers of the tools are compared where ours are computed; here it is that they run, and that what
they read and write is what they think it is.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens import ActivationCache, patching
from transformer_lens.head_detector import detect_head
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.model_protocol import (
    TrainableTransformerLensModel,
    TransformerLensModel,
    TransformerLensModelWithWeights,
)
from transformer_lens.tools.analysis.attribution_patching import attribution_patch
from transformer_lens.tools.analysis.logit_lens import logit_lens

from headstream.models.decoder import Decoder
from headstream.models.hooks import capture

# float64 sums in another order; Llama's rotary tables are float32 in a float64 model.
BOUNDS = {"gpt2": 1e-10, "llama": 1e-5}
SHARED = [
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_pattern",
    "attn.hook_z",
    "ln1.hook_scale",
    "ln2.hook_scale",
    "mlp.hook_pre",
    "mlp.hook_post",
]
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])


def test_every_shared_activation_equals_the_bridges(pair: tuple[Any, Decoder, str]) -> None:
    """Same hook names, same shapes, same values: wrapped around the same weights."""
    theirs, ours, name = pair
    bridge = build_bridge_from_module(
        theirs, ARCHITECTURES[name], hf_config=theirs.config, dtype=torch.float64
    )
    with torch.no_grad():
        expected, cache = bridge.run_with_cache(TOKENS)
        logits, own = ours.run_with_cache(TOKENS)
    assert (logits - expected).abs().max() < BOUNDS[name]
    for layer in range(2):
        for hook in SHARED:
            key = f"blocks.{layer}.{hook}"
            if name == "llama" and key not in cache:
                continue
            reference = cache[key].reshape(own[key].shape)
            assert (own[key] - reference).abs().max() < BOUNDS[name], key
        # The bridge masks with a large finite number; what is allowed must agree.
        key = f"blocks.{layer}.attn.hook_attn_scores"
        allowed = torch.isfinite(own[key])
        assert torch.equal(allowed, torch.ones_like(allowed).tril())
        assert (own[key] - cache[key])[allowed].abs().max() < BOUNDS[name]


KINDS: dict[str, dict[str, Any]] = {
    "attention only": {"positions": "shortformer"},
    "with an MLP": {"d_mlp": 8, "attn_bias": True, "mlp_bias": True, "unembed_bias": True},
    "grouped heads": {
        "d_mlp": 8,
        "gated_mlp": True,
        "norm": "rmsnorm",
        "positions": "rotary",
        "n_kv_heads": 2,
    },
    "no norm": {"norm": "none", "positions": "sinusoidal"},
}


@pytest.fixture(params=KINDS)
def any_model(request: pytest.FixtureRequest, build: Callable[..., Decoder]) -> Decoder:
    return toy(build, request.param)


def toy(build: Callable[..., Decoder], kind: str) -> Decoder:
    model = build(KINDS[kind] | {"d_vocab": 12, "bos_token_id": 0}, dtype=torch.float32)
    model.vocab = ["<bos>", *"abcdefghijk"]
    return model


def test_the_protocols(any_model: Decoder) -> None:
    assert isinstance(any_model, TransformerLensModel)
    assert isinstance(any_model, TransformerLensModelWithWeights)
    assert isinstance(any_model, TrainableTransformerLensModel)
    assert isinstance(any_model.run_with_cache(TOKENS)[1], ActivationCache)


def test_logit_lens_ends_at_the_logits(any_model: Decoder) -> None:
    tokens = any_model.to_tokens("a b c d a b")
    with torch.no_grad():
        result = logit_lens(any_model, tokens, positions=None)
        logits = any_model(tokens)
    assert result.readout.values.shape == (3, 1, 7, 12)
    # float32 on logits of order 10.
    assert (result.readout.values[-1] - logits).abs().max() < 1e-4
    assert (result.readout.values[0] - logits).abs().max() > 0.1


def test_detect_head(any_model: Decoder) -> None:
    for kind in ("previous_token_head", "duplicate_token_head", "induction_head"):
        with torch.no_grad():
            scores = detect_head(any_model, "a b c d a b c d", kind)
        assert scores.shape == (2, 4)
        assert ((scores >= 0) & (scores <= 1)).all()
        assert scores.std() > 0


def metric(logits: Tensor) -> Tensor:
    """Between two answers at the last position, one number."""
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


PAIR = (torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 4, 3]]))
SWEEPS: dict[str, tuple[tuple[int, ...], str, tuple[Any, ...]]] = {
    "resid_pre": ((1, 2), "hook_resid_pre", (slice(None), 2)),
    "resid_mid": ((1, 2), "hook_resid_mid", (slice(None), 2)),
    "attn_out": ((1, 2), "hook_attn_out", (slice(None), 2)),
    "mlp_out": ((1, 2), "hook_mlp_out", (slice(None), 2)),
    "attn_head_out_by_pos": ((1, 3, 2), "attn.hook_z", (slice(None), 3, 2)),
    "attn_head_q_by_pos": ((1, 3, 2), "attn.hook_q", (slice(None), 3, 2)),
    "attn_head_out_all_pos": ((1, 2), "attn.hook_z", (slice(None), slice(None), 2)),
    "attn_head_q_all_pos": ((1, 2), "attn.hook_q", (slice(None), slice(None), 2)),
    "attn_head_pattern_all_pos": ((1, 2), "attn.hook_pattern", (slice(None), 2)),
}


@pytest.mark.parametrize("kind", ["with an MLP", "grouped heads"])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_patching_sweeps(build: Callable[..., Decoder], kind: str, sweep: str) -> None:
    """Each runs, moves something, and one of its cells is the edit made by hand."""
    model = toy(build, kind)
    cell, hook, index = SWEEPS[sweep]
    name = f"blocks.1.{hook}"
    clean, corrupted = PAIR
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
        grid = getattr(patching, f"get_act_patch_{sweep}")(model, corrupted, cache, metric)
        start = metric(model(corrupted))

        def patch(x: Tensor, hook: object) -> Tensor:
            x = x.clone()
            x[index] = cache[name][index]
            return x

        expected = metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)]))
    axes = (2, 4, 4) if len(cell) == 3 else (2, 4)
    assert grid.shape == axes
    assert (grid - start).abs().max() > 1e-3
    # float32 on logits of order 10.
    assert abs(grid[cell] - expected) < 1e-4
    assert model.hooks_active() == 0


def test_what_an_attention_only_model_has_not(build: Callable[..., Decoder]) -> None:
    """Tools that read a hook of the MLP say so; none reports a grid of zeros."""
    model = toy(build, "attention only")
    clean, corrupted = PAIR
    _, cache = model.run_with_cache(clean)
    for sweep in ("resid_mid", "mlp_out"):
        with pytest.raises(KeyError, match=f"hook_{sweep}"):
            getattr(patching, f"get_act_patch_{sweep}")(model, corrupted, cache, metric)
    with pytest.raises(ValueError, match="hook_mlp_out"):
        attribution_patch(model, clean, corrupted, metric)
    assert model.hooks_active() == 0


def test_sweeps_over_key_value_heads(build: Callable[..., Decoder]) -> None:
    """FR-44: k and v are counted by key/value heads."""
    clean, corrupted = PAIR
    for kind, heads in (("attention only", 4), ("grouped heads", 2)):
        model = toy(build, kind)
        with torch.no_grad():
            _, cache = model.run_with_cache(clean)
            for sweep in ("k", "v"):
                run = getattr(patching, f"get_act_patch_attn_head_{sweep}_all_pos")
                grid = run(model, corrupted, cache, metric)
                assert grid.shape == (2, heads)
                assert (grid - metric(model(corrupted))).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["with an MLP", "grouped heads"])
def test_attribution_patching_on_nodes(build: Callable[..., Decoder], kind: str) -> None:
    """Their gradient cache on our hooks gives what autograd gives on ours."""
    model = toy(build, kind)
    clean, corrupted = PAIR
    result = attribution_patch(model, clean, corrupted, metric)
    names = [f"blocks.{layer}.hook_mlp_out" for layer in range(2)]
    with torch.no_grad():
        _, acts = capture(model, clean, names)
    logits, kept = capture(model, corrupted, names, grads=True)
    grads = torch.autograd.grad(metric(logits), list(kept.values()))
    expected = {
        (layer, position): float(((acts[name] - kept[name]) * grad).detach()[0, position].sum())
        for layer, (name, grad) in enumerate(zip(names, grads, strict=True))
        for position in range(4)
    }
    found = {
        (node.layer, node.position): score
        for node, score in result.node_scores.items()
        if node.kind == "mlp_out"
    }
    assert found == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected.values())) > 1e-3
    assert model.hooks_active() == 0


def test_the_cache_knows_our_model(any_model: Decoder) -> None:
    """TransformerLens' own decompositions of a cache of ours sum to the stream."""
    tokens = any_model.to_tokens("a b c d a b")
    with torch.no_grad():
        _, cache = any_model.run_with_cache(tokens, names_filter="*")
        parts, labels = cache.decompose_resid(return_labels=True)
        heads = cache.stack_head_results(incl_remainder=True)
    resid = cache["blocks.1.hook_resid_post"]
    assert labels[0] == "embed"
    assert (parts.sum(0) - resid).abs().max() < 1e-4
    assert (heads.sum(0) - resid).abs().max() < 1e-4


# Rotary positions (FR-17), against complex numbers.


def test_rotary_turns_complex_numbers(build: Callable[..., Decoder]) -> None:
    """Channel i and i + d_head/2 are one complex number, turned by exp(i position frequency)."""
    model = build({"positions": "rotary", "d_head": 8, "rotary_base": 30.0, "n_kv_heads": 2})
    positions = torch.tensor([[0, 1, 2, 7, 100, 3]])
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    _, acts = capture(model, tokens, ["*hook_q", "*hook_k", "*hook_rot_*"], position_ids=positions)
    speeds = torch.tensor([30.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    turn = torch.polar(torch.ones(6, 4, dtype=torch.float64), positions[0, :, None] * speeds)
    for layer in range(2):
        for letter in "qk":
            x = acts[f"blocks.{layer}.attn.hook_{letter}"]
            expected = torch.complex(x[..., :4], x[..., 4:]) * turn[None, :, None]
            turned = acts[f"blocks.{layer}.attn.hook_rot_{letter}"]
            assert (torch.complex(turned[..., :4], turned[..., 4:]) - expected).abs().max() < 1e-12
            assert (turned.norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-12
            # The other pairing of channels would differ by far: the choice is live.
            other = torch.complex(x[..., ::2], x[..., 1::2]) * turn[None, :, None]
            assert (torch.complex(turned[..., ::2], turned[..., 1::2]) - other).abs().max() > 0.5


def test_a_common_shift_of_rotary_positions_changes_nothing(
    build: Callable[..., Decoder], backend: str
) -> None:
    model = build({"positions": "rotary", "d_mlp": 8, "norm": "rmsnorm"})
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    place = torch.arange(6)[None]
    names = [n for n in model.hook_dict if "rot_" not in n and "pattern" not in n]
    names = [n for n in names if "scores" not in n or backend == "naive"]
    logits, acts = capture(model, tokens, names, backend=backend, position_ids=place)
    for shift in (7, 1000):
        moved, same = capture(model, tokens, names, backend=backend, position_ids=place + shift)
        # cos and sin of angles of about 1000 keep 13 digits.
        assert (moved - logits).abs().max() < 1e-9
        for name in names:
            assert torch.allclose(same[name], acts[name], rtol=0, atol=1e-9), name
    stretched = model(tokens, backend=backend, position_ids=2 * place)
    assert (stretched - logits).abs().max() > 0.1
