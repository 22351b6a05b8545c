"""Writes sum to the stream, attributions to the logit, over every kind of decoder."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.stream import decomposition, residual
from headstream.circuits.stream.attribution import FROZEN, NO_NORM, OWN
from headstream.circuits.stream.reads import residual_reads
from headstream.circuits.stream.residual import decompose_residual
from headstream.circuits.stream.writes import HeadWrites, PlainWrite
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError, HookError, ShapeError, TokenError
from headstream.models.hooks import capture
from headstream.models.zoo.constructed import constructed_induction

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "d_mlp": 10,
        "attn_bias": True,
        "mlp_bias": True,
        "unembed_bias": True,
        "n_kv_heads": 2,
    },
    "gated": {"d_mlp": 10, "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary"},
    "no norm": {"norm": "none", "positions": "sinusoidal", "unembed_bias": True},
    "shortformer": {"positions": "shortformer", "attn_bias": True},
    "tied": {"tied_embeddings": True, "positions": "none"},
}


def decoder(dtype: torch.dtype = torch.float64, **fields: Any) -> Decoder:
    """A small decoder in which no bias is zero and no gain is one."""
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 12, "d_head": 4, "d_vocab": 9, "n_ctx": 8}
    model = Decoder(DecoderConfig(**(sizes | fields)), seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b" in name.removeprefix("blocks") or name.endswith(".w"):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


def prompts(rows: int = 3, length: int = 6) -> Tensor:
    return torch.randint(0, 9, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_writes_sum_to_the_final_stream(kind: str) -> None:
    model = decoder(**KINDS[kind])
    found = decompose_residual(model, prompts())
    _, acts = capture(model, prompts(), "blocks.1.hook_resid_post")
    total = found.writes.sum("component").values
    np.testing.assert_allclose(total, acts["blocks.1.hook_resid_post"].numpy(), atol=1e-12)
    assert found.largest_error <= found.bound < 1e-11
    np.testing.assert_allclose(found.remainder, found.stream - total, atol=1e-14)


def test_components_in_order() -> None:
    found = decompose_residual(decoder(**KINDS["everything"]), prompts())
    kinds = ["H0", "H1", "H2", "H3", "bO", "MLP", "bout"]
    layers = [f"L{layer}{kind}" for layer in range(2) for kind in kinds]
    assert found.writes["component"].values.tolist() == ["embed", "pos_embed", *layers]
    found = decompose_residual(decoder(**KINDS["shortformer"]), prompts())
    assert "pos_embed" not in found.writes["component"]  # it never enters the stream


def test_heads_and_their_bias_make_attn_out() -> None:
    """FR-53: sum of results + b_O = attn_out, and our heads are the model's `hook_result`."""
    model = decoder(**KINDS["everything"])
    found = decompose_residual(model, prompts())
    names = ["blocks.1.hook_attn_out", "blocks.1.attn.hook_result"]
    _, acts = capture(model, prompts(), names)
    heads = [f"L1H{head}" for head in range(4)]
    total = found.writes.sel(component=[*heads, "L1bO"]).sum("component")
    np.testing.assert_allclose(total, acts[names[0]].numpy(), atol=1e-12)
    ours = found.writes.sel(component=heads).transpose("example", "pos", "component", "d_model")
    np.testing.assert_allclose(ours, acts[names[1]].numpy(), atol=1e-12)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("stage", ["pre", "mid", "post"])
def test_every_stream_can_be_taken_apart(layer: int, stage: str) -> None:
    name = f"blocks.{layer}.hook_resid_{stage}"
    model = decoder(**KINDS["everything"])
    found = decompose_residual(model, prompts(), at=name)
    _, acts = capture(model, prompts(), name)
    np.testing.assert_allclose(found.writes.sum("component"), acts[name].numpy(), atol=1e-12)
    count = 2 + 7 * layer + {"pre": 0, "mid": 5, "post": 7}[stage]
    assert found.writes.sizes["component"] == count


@pytest.mark.parametrize("kind", ["everything", "gated"])
def test_neurons_sum_to_their_mlp(kind: str) -> None:
    model = decoder(**KINDS[kind])
    whole = decompose_residual(model, prompts())
    found = decompose_residual(model, prompts(), per_neuron=True)
    neurons = [f"L0N{neuron}" for neuron in range(10)]
    total = found.writes.sel(component=neurons).sum("component")
    np.testing.assert_allclose(total, whole.writes.sel(component="L0MLP"), atol=1e-12)
    assert "L0MLP" not in found.writes["component"]


def test_value_bias_stands_apart_on_request_and_is_zero_where_no_key_is_visible() -> None:
    model = decoder(**KINDS["everything"])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1]])
    inside = decompose_residual(model, prompts(), attention_mask=mask)
    apart = decompose_residual(model, prompts(), attention_mask=mask, split_value_bias=True)
    assert (inside.value_bias, apart.value_bias) == ("inside", "separate")
    share = apart.writes.sel(component="L1bV")
    spread = model.b_V[1].repeat_interleave(2, 0)
    constant = torch.einsum("hk,hkd->d", spread, model.W_O[1]).detach().numpy()
    np.testing.assert_allclose(share[0, 0], constant, atol=1e-12)
    assert np.all(share[1, :2] == 0)
    assert np.all(share[2, 0] == 0)
    np.testing.assert_allclose(share[2, 2], constant, atol=1e-12)  # masked, but it sees key 1
    heads = [f"L1H{head}" for head in range(4)]
    np.testing.assert_allclose(
        apart.writes.sel(component=[*heads, "L1bV"]).sum("component"),
        inside.writes.sel(component=heads).sum("component"),
        atol=1e-12,
    )
    # A head that attends only to keys it may see writes z - b_V there: nothing is left of it.
    assert np.abs(apart.writes.sel(component="L1H0")[1, 0]).max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_attribution_sums_to_the_logit_and_to_the_difference(kind: str) -> None:
    model = decoder(**KINDS[kind])
    with torch.no_grad():
        logits = model(prompts()).numpy()
    found = decompose_residual(model, prompts())
    answer, wrong, place = [1, 8, 3], [0, 2, 3], [5, 2, 4]
    rows = np.arange(3)
    alone = found.logit_attribution(answer, pos=torch.tensor(place))
    np.testing.assert_allclose(alone.sum("component"), logits[rows, place, answer], atol=1e-12)
    apart = found.logit_attribution(torch.tensor(answer), wrong, pos=place)
    difference = logits[rows, place, answer] - logits[rows, place, wrong]
    np.testing.assert_allclose(apart.sum("component"), difference, atol=1e-12)
    shared = found.logit_attribution(4, 5)
    difference = logits[:, -1, 4] - logits[:, -1, 5]
    np.testing.assert_allclose(shared.sum("component"), difference, atol=1e-12)
    extra = apart["component"].values.tolist()[found.writes.sizes["component"] :]
    has_shift, has_bias = model.config.norm == "layernorm", model.config.unembed_bias
    assert extra == ["ln_final.b"] * has_shift + ["b_U"] * has_bias
    assert found.norm == apart.attrs["norm"] == (NO_NORM if kind == "no norm" else FROZEN)


def test_attribution_by_hand_without_norm() -> None:
    model = decoder(**KINDS["no norm"])
    found = decompose_residual(model, prompts())
    direction = (model.W_U[:, 1] - model.W_U[:, 2]).detach().numpy()
    expected = found.writes.sel(component="L0H3").values[:, -1] @ direction
    ours = found.logit_attribution(1, 2).sel(component="L0H3")
    np.testing.assert_allclose(ours, expected, atol=1e-13)


def test_the_constructed_answer_is_written_by_the_induction_head_alone() -> None:
    """Its copied token has logit 10, and no other component writes what W_U reads."""
    model = constructed_induction()
    tokens = torch.tensor([[0, 7, 4, 9, 3, 4]])  # after 4 came 9
    found = decompose_residual(model, tokens).logit_attribution(9, 3)
    assert found.sel(component="L1H2").item() == pytest.approx(10.0, abs=1e-5)
    assert float(abs(found.drop_sel(component="L1H2")).max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_follows_the_dtype(dtype: torch.dtype) -> None:
    model = decoder(dtype, **KINDS["everything"])
    found = decompose_residual(model, prompts())
    scale = float(np.abs(found.writes).sum("component").max())
    assert 0 < found.largest_error <= found.bound
    # Twelve additions of the dtype's epsilon, and 16 float32 products: a few per cent in bfloat16.
    assert found.bound / scale < {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert found.writes.dtype == np.float32


@pytest.mark.parametrize("backend", ["naive", "flash"])
def test_backends_agree(backend: str) -> None:
    found = decompose_residual(decoder(), prompts(), backend=backend)
    default = decompose_residual(decoder(), prompts())
    np.testing.assert_allclose(found.writes, default.writes, atol=1e-12)


def test_one_row_of_tokens_is_one_example() -> None:
    found = decompose_residual(decoder(), prompts()[0])
    assert found.writes.sizes["example"] == 1


def forgetful(label: str, by: float = 0.0) -> Any:
    """`write_groups`, with the write of one label multiplied by `by`."""
    collect = residual.write_groups

    def without(*args: Any, **kwargs: Any) -> Any:
        for group in collect(*args, **kwargs):
            if group.labels == [label]:
                assert isinstance(group, PlainWrite)
                yield dataclasses.replace(group, value=group.value * by)
            else:
                yield group

    return without


def test_a_forgotten_bias_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(**KINDS["everything"])
    size = model.b_O[1].detach().abs()
    channel, largest = int(size.argmax()), re.escape(f"{float(size.max()):.1e}")
    monkeypatch.setattr(residual, "write_groups", forgetful("L1bO"))
    with pytest.raises(
        ExactnessError,
        match=rf"do not sum to 'blocks.1.hook_resid_post': largest error {largest} at "
        rf"example \d, pos \d, channel {channel}; the bound is \d.\de-1\d",
    ):
        decompose_residual(model, prompts())


def test_an_error_of_the_size_of_rounding_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "write_groups", forgetful("L1bO", 1 + 2**-52))
    found = decompose_residual(decoder(**KINDS["everything"]), prompts())
    assert found.largest_error > 0


def test_a_basis_in_which_a_head_cancels_is_no_inexact_sum() -> None:
    """(W_V G)(G^-1 W_O) is the same head: its rounding is that of the products, not of the sum."""
    model = decoder(**KINDS["everything"])
    plain = decompose_residual(model, prompts()).logit_attribution(3)
    draws = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    first, second = torch.linalg.qr(draws).Q
    basis = first @ torch.diag(torch.tensor([1e4, 1.0, 1.0, 1e-4]).double()) @ second
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_V.copy_(block.attn.W_V @ basis)
            assert block.attn.b_V is not None
            block.attn.b_V.copy_(block.attn.b_V @ basis)
            block.attn.W_O.copy_(torch.linalg.inv(basis) @ block.attn.W_O)
    other = decompose_residual(model, prompts())
    np.testing.assert_allclose(other.logit_attribution(3), plain, rtol=0, atol=1e-6)
    # Reading what such heads wrote, too.
    for head in range(4):
        residual_reads(model, prompts(), 1, head)


def test_not_a_number_is_no_sum() -> None:
    model = decoder()
    with torch.no_grad():
        model.embed.W_E[prompts()[2, 3]] = torch.nan
    with pytest.raises(ExactnessError, match="largest error nan at example"):
        decompose_residual(model, prompts())


def test_changed_weights_are_noticed_and_what_was_formed_stays() -> None:
    model = decoder(**KINDS["everything"])
    found = decompose_residual(model, prompts())
    formed, stream = found.writes, found.stream.values.copy()
    before = formed.values.copy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    np.testing.assert_array_equal(found.writes, before)
    np.testing.assert_array_equal(found.stream, stream)
    with pytest.raises(ExactnessError, match=r"'unembed.W_U' was changed after the run .*again"):
        found.logit_attribution(1, 2)
    with pytest.raises(ExactnessError, match=r"'blocks.0.attn.W_O' was changed after the run"):
        found.layer_writes(0)


def test_casting_the_model_leaves_the_run_as_it_was() -> None:
    model = decoder(**KINDS["everything"])
    found = decompose_residual(model, prompts())
    before = found.logit_attribution(1, 2)
    model.to(torch.bfloat16)
    assert found.logit_attribution(1, 2).identical(before)


def test_inference_mode_counts_no_versions_so_weights_are_copied() -> None:
    with torch.inference_mode():
        model = decoder(**KINDS["everything"])
        found = decompose_residual(model, prompts())
        before = found.logit_attribution(1, 2)
        for parameter in model.parameters():
            parameter.zero_()
        assert found.logit_attribution(1, 2).identical(before)


def test_streams_that_do_not_exist() -> None:
    with pytest.raises(HookError, match=r"at='blocks.0.hook_resid_mid' names no residual stream"):
        decompose_residual(decoder(), prompts(), at="blocks.0.hook_resid_mid")  # attention only
    with pytest.raises(HookError, match=r"at='resid_pre 1' .*'final' or a name like"):
        decompose_residual(decoder(), prompts(), at="resid_pre 1")


def test_attribution_needs_the_whole_stream() -> None:
    found = decompose_residual(decoder(), prompts(), at="blocks.1.hook_resid_pre")
    with pytest.raises(
        ExactnessError, match=r"these end at 'blocks.1.hook_resid_pre'; decompose with at='final'"
    ):
        found.logit_attribution(1)


def test_tokens_and_positions_that_do_not_exist() -> None:
    found = decompose_residual(decoder(), prompts())
    with pytest.raises(TokenError, match=r"answer must lie in \[0, 9\), got \[9, 9, 9\]"):
        found.logit_attribution(9)
    with pytest.raises(TokenError, match=r"wrong must lie in \[0, 9\)"):
        found.logit_attribution(1, -1)
    with pytest.raises(TokenError, match=r"answer must be one whole number, or one for each of 3"):
        found.logit_attribution([1, 2])
    with pytest.raises(ShapeError, match=r"pos must lie in \[-6, 6\), got \[6, 6, 6\]"):
        found.logit_attribution(1, pos=6)


def test_too_many_writes_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decompose_residual(decoder(), prompts())
    layer = found.layer_writes(1)
    monkeypatch.setattr(decomposition, "LIMIT", layer.nbytes)
    with pytest.raises(
        ShapeError, match=r"^10 writes for \[3, 6\] .*take 17,280 bytes, over the limit of 6,912; "
    ):
        _ = found.writes
    assert found.layer_writes(1).identical(layer)  # what fits is formed
    assert found.logit_attribution(1, 2).sizes["component"] == 11


def test_prints_as_a_line() -> None:
    words = repr(decompose_residual(decoder(), prompts()))
    assert words.startswith(
        "<10 writes to 'blocks.1.hook_resid_post', 3 examples x 6 positions; largest error"
    )


# Forms of the attribution.


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_at_once(kind: str) -> None:
    found = decompose_residual(decoder(**KINDS[kind]), prompts())
    everywhere = found.logit_attribution([1, 8, 3], [0, 2, 3], pos=None)
    assert everywhere.dims == ("component", "example", "pos")
    for pos in range(6):
        one = found.logit_attribution([1, 8, 3], [0, 2, 3], pos=pos)
        np.testing.assert_allclose(everywhere[..., pos], one, rtol=0, atol=1e-13)


def test_neurons_are_attributed_as_their_writes_are() -> None:
    model = decoder(**KINDS["no norm"] | {"d_mlp": 10})
    found = decompose_residual(model, prompts(), per_neuron=True)
    direction = (model.W_U[:, 1] - model.W_U[:, 2]).detach().numpy()
    expected = found.writes.values @ direction
    ours = found.logit_attribution(1, 2, pos=None)[: len(expected)]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-13)


def test_sums_by_layer_and_sublayer() -> None:
    found = decompose_residual(decoder(**KINDS["everything"]), prompts())
    each = found.logit_attribution(1, 2)
    sublayers = found.logit_attribution(1, 2, by="sublayer")
    layers = found.logit_attribution(1, 2, by="layer")
    ends = ["ln_final.b", "b_U"]
    names = ["L0attn_out", "L0mlp_out", "L1attn_out", "L1mlp_out"]
    assert sublayers["component"].values.tolist() == ["embed", "pos_embed", *names, *ends]
    assert layers["component"].values.tolist() == ["embed", "pos_embed", "L0", "L1", *ends]
    mlp = each.sel(component=["L1MLP", "L1bout"]).sum("component")
    np.testing.assert_allclose(sublayers.sel(component="L1mlp_out"), mlp, rtol=0, atol=1e-13)
    parts = [c for c in each["component"].values if c.startswith("L1")]
    whole = each.sel(component=parts).sum("component")
    np.testing.assert_allclose(layers.sel(component="L1"), whole, rtol=0, atol=1e-13)
    for form in (sublayers, layers):
        np.testing.assert_allclose(form.sum("component"), each.sum("component"), atol=1e-12)
    with pytest.raises(ConfigError, match=r"by must be one of .*, got 'layers'; nearest is 'layer"):
        found.logit_attribution(1, by="layers")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", ["frozen", "own"])
def test_accumulated_logits_end_at_the_model(kind: str, scale: str) -> None:
    model = decoder(**KINDS[kind])
    with torch.no_grad():
        logits = model(prompts()).numpy()
    found = decompose_residual(model, prompts())
    after = found.accumulated_logits(1, 2, pos=None, scale=scale)
    np.testing.assert_allclose(after[-1], logits[..., 1] - logits[..., 2], rtol=0, atol=1e-12)
    assert after["component"].values.tolist() == found.components
    one = found.accumulated_logits(1, 2, pos=4, scale=scale)
    np.testing.assert_allclose(after[..., 4], one, rtol=0, atol=1e-13)


def test_accumulated_logits_by_hand() -> None:
    """After L0H1: frozen steps are attributions; own is the final norm on the partial stream."""
    model = decoder(**KINDS["everything"])
    found = decompose_residual(model, prompts())
    frozen = found.accumulated_logits(3)
    steps = found.logit_attribution(3)[: len(frozen)]
    np.testing.assert_allclose(frozen.diff("component"), steps[1:], rtol=0, atol=1e-12)
    own = found.accumulated_logits(3, scale="own")
    partial = torch.tensor(found.writes.cumsum("component").sel(component="L0H1").values)
    with torch.no_grad():
        expected = (model.ln_final(partial) @ model.W_U + model.b_U)[:, -1, 3].numpy()
    np.testing.assert_allclose(own.sel(component="L0H1"), expected, rtol=0, atol=1e-12)
    assert abs(own - frozen).sel(component="L0H1").max() > 0.1
    assert (frozen.attrs["norm"], own.attrs["norm"]) == (FROZEN, OWN)
    with pytest.raises(ConfigError, match="scale must be 'own' or 'frozen', got 'fozen'; nearest"):
        found.accumulated_logits(3, scale="fozen")


def test_a_layer_and_the_norms_of_writes() -> None:
    found = decompose_residual(decoder(**KINDS["everything"]), prompts(), per_neuron=True)
    assert found.layer_writes(None)["component"].values.tolist() == ["embed", "pos_embed"]
    layer = found.layer_writes(1)
    assert layer.identical(found.writes.sel(component=layer["component"].values))
    norms = found.write_norms()
    assert norms["component"].values.tolist() == found.components
    np.testing.assert_allclose(norms, np.linalg.norm(found.writes.values, axis=-1), atol=1e-13)
    with pytest.raises(ShapeError, match=r"no writes of layer 2 to .*layers 0 to 1; None gives"):
        found.layer_writes(2)


def test_what_is_kept_does_not_grow_with_the_heads() -> None:
    """z is d_model wide here, the writes are four times that; W_O is not copied."""
    model = decoder(d_head=3)
    found = decompose_residual(model, prompts())
    heads = [group for group in found.groups if isinstance(group, HeadWrites)]
    assert [group.z.shape for group in heads] == [(3, 6, 4, 3)] * 2
    assert heads[0].W_O.value.data_ptr() == model.blocks[0].attn.W_O.data_ptr()
    assert "writes" not in vars(found)
    assert found.writes is found.writes
