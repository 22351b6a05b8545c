"""The logit lens: the last row is the model, and both scales are what they say."""

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from headstream.circuits.stream.lens import logit_lens
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.hooks import capture


def decoder(**fields: Any) -> Decoder:
    sizes = {"n_layers": 2, "n_heads": 2, "d_model": 8, "d_head": 4, "d_vocab": 7, "n_ctx": 8}
    fields = sizes | {"unembed_bias": True} | fields
    model = Decoder(DecoderConfig(**fields), seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".w", ".b", "b_U")):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


TOKENS = torch.tensor([[0, 3, 5, 1], [6, 6, 2, 4]])


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("scale", ["own", "frozen"])
def test_last_row_is_the_model(norm: str, scale: str) -> None:
    model = decoder(norm=norm)
    lens = logit_lens(model, TOKENS, scale=scale)
    assert isinstance(lens, xr.DataArray)
    assert lens.dims == ("layer", "example", "pos", "d_vocab")
    assert lens["layer"].values.tolist() == ["0_pre", "1_pre", "final_post"]
    with torch.no_grad():
        np.testing.assert_allclose(lens.sel(layer="final_post"), model(TOKENS), atol=1e-12)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_both_scales_by_hand(norm: str) -> None:
    """FR-55: an earlier layer has statistics of its own, or the label says frozen."""
    model = decoder(norm=norm)
    names = ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"]
    _, acts = capture(model, TOKENS, names)
    early, late = (acts[name].numpy() for name in names)
    if norm == "layernorm":
        early, late = (x - x.mean(-1, keepdims=True) for x in (early, late))
    gain, unembed = model.ln_final.w.detach().numpy(), model.W_U.detach().numpy()
    shift = model.ln_final.b.detach().numpy() if norm == "layernorm" else 0
    for scale, statistics in (("own", early), ("frozen", late)):
        size = np.sqrt((statistics**2).mean(-1, keepdims=True) + model.config.eps)
        expected = (early / size * gain + shift) @ unembed + model.b_U.detach().numpy()
        lens = logit_lens(model, TOKENS, scale=scale)
        np.testing.assert_allclose(lens.sel(layer="1_pre"), expected, atol=1e-12)
        assert lens.attrs["scale"] == scale
    own, frozen = logit_lens(model, TOKENS), logit_lens(model, TOKENS, scale="frozen")
    assert abs(own - frozen).sel(layer="1_pre").max() > 0.1


@pytest.mark.parametrize("scale", ["own", "frozen"])
def test_between_attention_and_mlp(scale: str) -> None:
    model = decoder(d_mlp=6, mlp_bias=True)
    lens = logit_lens(model, TOKENS, scale=scale, sublayers=True)
    labels = ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"]
    assert lens["layer"].values.tolist() == labels
    without = logit_lens(model, TOKENS, scale=scale)
    assert without.identical(lens.sel(layer=without["layer"].values))
    _, acts = capture(model, TOKENS, ["blocks.0.hook_resid_mid", "ln_final.hook_scale"])
    mid = acts["blocks.0.hook_resid_mid"]
    with torch.no_grad():
        if scale == "own":
            normalized = model.ln_final(mid)
        else:
            centred = mid - mid.mean(-1, keepdim=True)
            normalized = centred / acts["ln_final.hook_scale"] * model.ln_final.w + model.ln_final.b
        expected = normalized @ model.W_U + model.b_U
    np.testing.assert_allclose(lens.sel(layer="0_mid"), expected, rtol=0, atol=1e-12)
    attention_only = decoder()
    assert logit_lens(attention_only, TOKENS, sublayers=True).identical(
        logit_lens(attention_only, TOKENS)
    )


def test_without_a_norm_there_is_no_scale_to_choose() -> None:
    model = decoder(norm="none")
    own, frozen = logit_lens(model, TOKENS), logit_lens(model, TOKENS, scale="frozen")
    assert own.identical(frozen)
    assert own.attrs["scale"] == "none"


def test_top_entries_are_the_largest_logits() -> None:
    model = decoder()
    full, top = logit_lens(model, TOKENS), logit_lens(model, TOKENS, top=3)
    order = np.argsort(-full.values, -1)[..., :3]
    np.testing.assert_array_equal(top["token"], order)
    np.testing.assert_array_equal(top["logit"], np.take_along_axis(full.values, order, -1))


def test_a_mask_is_honoured() -> None:
    model = decoder()
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    lens = logit_lens(model, TOKENS, attention_mask=mask)
    alone = logit_lens(model, TOKENS[:1, 1:])
    np.testing.assert_allclose(lens[:, :1, 1:], alone, atol=1e-12)


def test_half_precision_is_widened_for_numpy() -> None:
    model = decoder().to(torch.bfloat16)
    lens = logit_lens(model, TOKENS, scale="frozen")
    assert lens.dtype == np.float32


def test_of_an_edited_run_the_edited_stream_and_no_hook_on_the_readings() -> None:
    model, calls = decoder(), []
    plain = logit_lens(model, TOKENS)

    def halve(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return tensor / 2

    def count(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        calls.append(hook.name)
        return tensor * 3

    with model.hooks(fwd_hooks=[("blocks.0.hook_attn_out", halve)]):
        edited = logit_lens(model, TOKENS)
        logits = model(TOKENS).detach()
    np.testing.assert_array_equal(edited.sel(layer="0_pre"), plain.sel(layer="0_pre"))
    assert float(np.abs(edited - plain).sel(layer="1_pre").max()) > 1e-3
    np.testing.assert_allclose(edited.sel(layer="final_post"), logits, rtol=0, atol=1e-12)
    with model.hooks(fwd_hooks=[("ln_final.hook_normalized", count)]):
        found = logit_lens(model, TOKENS)
    assert calls == ["ln_final.hook_normalized"]  # of the run itself
    np.testing.assert_array_equal(found, plain)


def test_unknown_scale_and_top() -> None:
    with pytest.raises(ConfigError, match="scale must be 'own' or 'frozen', got 'froze'; nearest"):
        logit_lens(decoder(), TOKENS, scale="froze")
    with pytest.raises(ShapeError, match=r"top must lie in \[1, 7\] = \[1, d_vocab\], got 8"):
        logit_lens(decoder(), TOKENS, top=8)
