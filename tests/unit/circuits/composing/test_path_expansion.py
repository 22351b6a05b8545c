"""Paths sum to the logits, each is what it says, and what cannot be expanded is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.composing.path_expansion import expand_paths
from headstream.circuits.composing.virtual_heads import virtual_head
from headstream.circuits.interventions import cut_edges
from headstream.circuits.qk_ov.weights import ov_circuit
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ExactnessError, HookError, ShapeError, TokenError
from headstream.models.hooks import capture
from headstream.models.store import load

# Float64 sums over 25 to 125 paths, magnified by gains and 1/scale.
EXACT = 1e-10
Build = Callable[..., Decoder]

KINDS: list[dict[str, Any]] = [
    {"norm": "none"},
    {"norm": "none", "attn_bias": True, "unembed_bias": True},
    {"attn_bias": True, "unembed_bias": True, "n_kv_heads": 2},
    {"norm": "rmsnorm", "positions": "rotary", "attn_bias": True, "tied_embeddings": True},
    {"positions": "shortformer", "n_layers": 3},
    {"positions": "sinusoidal", "d_head": 24, "n_heads": 2},
    {"n_layers": 1},
]


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_all_paths_sum_to_every_logit(build: Build, tokens: Tensor, fields: dict[str, Any]) -> None:
    """At every position and for every token, with padding on the left."""
    model = build(fields)
    config = model.config
    mask = torch.ones_like(tokens)
    mask[2, :2] = 0
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).numpy()
    for pos in range(6):
        for answer in (0, 19):
            found = expand_paths(model, tokens, answer, pos=pos, attention_mask=mask)
            sums = found["contribution"].sum("path") + found["constant"].sum("source")
            np.testing.assert_allclose(sums, logits[:, pos, answer], rtol=0, atol=EXACT)
            assert float(np.abs(found["remainder"]).max()) <= EXACT
    assert found.sizes["path"] == (1 + config.n_heads) ** config.n_layers
    assert found.attrs["paths"] == found.attrs["of_paths"] == found.sizes["path"]


def test_two_layers_of_four_heads_are_25_paths(build: Build, tokens: Tensor) -> None:
    found = expand_paths(build({"attn_bias": True}), tokens, 3, 5)
    assert found.sizes["path"] == 25
    names = found["path"].values.tolist()
    assert names[:3] == ["direct", "L0H0", "L0H1"]
    assert names[9:11] == ["L0H0 -> L1H0", "L0H0 -> L1H1"]
    assert np.bincount(found["order"]).tolist() == [1, 8, 16]
    sources = ["L0ln1.b", "L0bV", "L0bO", "L1ln1.b", "L1bV", "L1bO", "ln_final.b"]
    assert found["source"].values.tolist() == sources
    assert found["contribution"].dims == ("path", "example")
    assert found.attrs["of"] == "logit difference"
    assert "Q- and K-composition" in found.attrs["note"]


def test_a_logit_difference_is_the_difference_of_two_expansions(
    build: Build, tokens: Tensor
) -> None:
    """One answer, position and wrong token for each example."""
    model = build({"unembed_bias": True})
    answer, wrong, pos = [1, 2, 3], torch.tensor([4, 5, 6]), [5, 2, -2]
    both = expand_paths(model, tokens, answer, wrong, pos=pos)
    one, other = (expand_paths(model, tokens, ids, pos=pos) for ids in (answer, wrong))
    for name in ("contribution", "constant", "total"):
        np.testing.assert_allclose(both[name], one[name] - other[name], rtol=0, atol=EXACT)
    assert both["pos"].values.tolist() == [5, 2, 4]


def test_each_path_is_its_pattern_times_its_matrix(build: Build, tokens: Tensor) -> None:
    """Without norm, against the dense products of Elhage et al."""
    model = build({"norm": "none", "n_kv_heads": 2})
    names = ["blocks.*.attn.hook_pattern", "blocks.0.hook_resid_pre"]
    _, acts = capture(model, tokens, names, backend="naive")
    stream = acts["blocks.0.hook_resid_pre"]
    found = expand_paths(model, tokens, 7, pos=4)["contribution"]
    direction = model.W_U[:, 7].detach()
    direct = stream[:, 4] @ direction
    np.testing.assert_allclose(found.sel(path="direct"), direct, rtol=0, atol=EXACT)
    for layer, head in [(0, 1), (1, 2), (1, 3)]:
        pattern = acts[f"blocks.{layer}.attn.hook_pattern"][:, head]
        write = pattern @ stream @ ov_circuit(model, layer, head, space="residual").AB
        expected = write[:, 4] @ direction
        np.testing.assert_allclose(found.sel(path=f"L{layer}H{head}"), expected, atol=EXACT)
    pair = virtual_head(model, tokens, [(0, 3), (1, 1)])
    expected = (pair.pattern @ stream @ pair.ov.AB)[:, 4] @ direction
    np.testing.assert_allclose(found.sel(path=pair.name), expected, rtol=0, atol=EXACT)


def test_with_norms_a_virtual_head_is_its_path(build: Build, tokens: Tensor) -> None:
    """`weights` of the virtual head, the final norm's gain, centring and scale after it."""
    model = build({})
    _, acts = capture(model, tokens, ["blocks.0.hook_resid_pre", "ln_final.hook_scale"])
    pair = virtual_head(model, tokens, [(0, 3), (1, 1)])
    write = (pair.weights @ acts["blocks.0.hook_resid_pre"] @ pair.ov.AB)[:, -1]
    read = write / acts["ln_final.hook_scale"][:, -1] * model.ln_final.w.detach()  # type: ignore[union-attr]
    found = expand_paths(model, tokens, 7)["contribution"].sel(path=pair.name)
    np.testing.assert_allclose(found, read @ model.W_U[:, 7].detach(), rtol=0, atol=EXACT)


def test_pruned_by_order_the_remainder_is_what_longer_paths_add(
    build: Build, tokens: Tensor
) -> None:
    model = build({"n_layers": 3, "n_heads": 2, "attn_bias": True})
    whole = expand_paths(model, tokens, 3, 5)
    for order in range(4):
        part = expand_paths(model, tokens, 3, 5, max_order=order)
        kept = whole["contribution"][(whole["order"] <= order).values]
        np.testing.assert_allclose(part["contribution"], kept, rtol=0, atol=EXACT)
        assert part["path"].values.tolist() == kept["path"].values.tolist()
        sums = part["contribution"].sum("path") + part["constant"].sum("source")
        np.testing.assert_allclose(part["remainder"], part["total"] - sums, rtol=0, atol=EXACT)
        assert (float(np.abs(part["remainder"]).max()) > 1e-3) == (order < 3)
    assert part.attrs["of_paths"] == 27


def test_constructed_induction_says_the_answer_through_the_induction_head_alone() -> None:
    """By hand: L1H2 attends to the answer with weight 1 and adds 10 to its logit; what L0H1 wrote
    is no value that L1H2 reads."""
    model = load("constructed-induction")
    tokens = torch.tensor([[0, 5, 6, 7, 8, 5, 6]])
    found = expand_paths(model, tokens, 7, 5)
    values = found["contribution"].sel(example=0).to_series()
    assert values.pop("L1H2") == pytest.approx(10.0, abs=1e-6)
    assert values.abs().max() < 1e-6
    assert found.sizes["source"] == 0


def test_examples_are_expanded_a_few_at_a_time(
    build: Build, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build({"attn_bias": True})
    whole = expand_paths(model, tokens, 3, 5)
    monkeypatch.setattr("headstream.circuits.composing.path_expansion._BYTES", 1)
    one_by_one = expand_paths(model, tokens, 3, 5)
    np.testing.assert_allclose(whole["contribution"], one_by_one["contribution"], atol=EXACT)
    np.testing.assert_allclose(whole["constant"], one_by_one["constant"], atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_is_that_of_the_dtype(build: Build, tokens: Tensor, dtype: torch.dtype) -> None:
    """Narrow models sum within the bound of their own rounding, which is not idle."""
    model = build({"attn_bias": True, "n_layers": 3}, dtype=dtype)
    found = expand_paths(model, tokens, 3, 5)
    assert 0 < float(np.abs(found["remainder"]).max()) < 2e3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("size", [50.0, 1e4])
def test_large_biases_round_like_themselves(build: Build, tokens: Tensor, size: float) -> None:
    """The logits are as exact as the largest terms in them, which a bias may be."""
    for seed in range(3):
        model = build({"attn_bias": True, "unembed_bias": True}, seed=seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.rsplit(".", 1)[-1].startswith("b"):
                    parameter.mul_(size)
        for wrong in (None, 5):
            found = expand_paths(model, tokens, 3, wrong)
            assert float(np.abs(found["remainder"]).max()) < 1e-11 * size


def test_a_basis_in_which_a_head_cancels_is_no_inexact_sum(build: Build, tokens: Tensor) -> None:
    """(W_V G)(G^-1 W_O) is the same head: its rounding is that of the products, not of the sum."""
    model = build({})
    plain = expand_paths(model, tokens, 3)
    draws = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    first, second = torch.linalg.qr(draws).Q
    basis = first @ torch.diag(torch.tensor([1e4, 1.0, 1.0, 1e-4]).double()) @ second
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_V.copy_(block.attn.W_V @ basis)
            block.attn.W_O.copy_(torch.linalg.inv(basis) @ block.attn.W_O)
    found = expand_paths(model, tokens, 3)
    np.testing.assert_allclose(found["contribution"], plain["contribution"], rtol=0, atol=1e-6)


def test_a_run_that_is_not_the_weights_is_noticed(
    build: Build, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build({})
    attn = model.blocks[1].attn
    plain = attn._project_out
    monkeypatch.setattr(attn, "_project_out", lambda z: plain(z) * (1 + 1e-6))
    with pytest.raises(ExactnessError, match=r"the paths do not sum to the logit: they miss it by"):
        expand_paths(model, tokens, 3, 5)


def test_an_mlp_is_refused_by_name(build: Build, tokens: Tensor) -> None:
    model = build({"d_mlp": 8})
    model.name = "with-mlp"
    with pytest.raises(
        ExactnessError, match=r"cannot expand the paths of 'with-mlp': it has an MLP \(d_mlp=8\)"
    ):
        expand_paths(model, tokens, 1)


def test_too_many_paths_are_refused_with_the_number(tokens: Tensor) -> None:
    deep = DecoderConfig(n_layers=12, n_heads=12, d_model=12, d_head=1, d_vocab=20, n_ctx=8)
    model = Decoder(deep)
    with pytest.raises(
        ShapeError,
        match=r"there are 23,298,085,122,481 paths of up to 12 heads \(of \(1 \+ 12\)\^12 = "
        r"23,298,085,122,481 in all\), over the limit of 4,096; max_order=1 keeps 145; or raise",
    ):
        expand_paths(model, tokens, 1)
    found = expand_paths(model, tokens, 1, max_order=1)
    assert found.sizes["path"] == 145
    assert found.attrs["of_paths"] == 13**12


def test_other_errors(build: Build, tokens: Tensor) -> None:
    model = build({})
    with pytest.raises(ShapeError, match=r"max_order must lie in \[0, 2\] = \[0, n_layers\], got"):
        expand_paths(model, tokens, 1, max_order=3)
    with pytest.raises(ShapeError, match="max_order must be at least 0, got -1"):
        expand_paths(model, tokens, 1, max_order=-1)
    with pytest.raises(ShapeError, match="limit must be at least 1, got 0"):
        expand_paths(model, tokens, 1, limit=0)
    with pytest.raises(TokenError, match=r"answer must lie in \[0, 20\), got \[20"):
        expand_paths(model, tokens, 20)
    with pytest.raises(ShapeError, match=r"pos must lie in \[-6, 6\), got \[6"):
        expand_paths(model, tokens, 1, pos=6)
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_v", lambda v, hook: v + 1)]),
        pytest.raises(HookError, match=r"cannot expand paths: a hook edits 'blocks.1.attn.hook_v'"),
    ):
        expand_paths(model, tokens, 1)
    with cut_edges(model, 1, keys=[0], queries=[2]):
        with pytest.raises(HookError, match="cannot expand paths: attention of layer 1 is edited"):
            expand_paths(model, tokens, 1)
        with torch.no_grad():
            model(tokens)
