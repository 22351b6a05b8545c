"""Folding: another model, the same logits; and the recipes that would not be exact."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.circuits.folding import fold
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"d_mlp": 10, "attn_bias": True, "mlp_bias": True, "unembed_bias": True},
    "mlp": {"d_mlp": 10, "n_kv_heads": 2, "positions": "rotary"},
    "rms gated": {"d_mlp": 10, "gated_mlp": True, "norm": "rmsnorm", "positions": "sinusoidal"},
    "tied": {"tied_embeddings": True, "positions": "none"},
    "no norm": {"norm": "none"},
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


def prompts() -> Tensor:
    return torch.randint(0, 9, (3, 6), generator=torch.Generator().manual_seed(2))


def logits(model: Decoder, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(prompts(), **options)
    return out


def gains(model: Decoder) -> list[Tensor]:
    return [p for n, p in model.named_parameters() if n.endswith(".w")]


def shifts(model: Decoder) -> list[Tensor]:
    return [p for n, p in model.named_parameters() if n.endswith(("ln1.b", "ln2.b", "final.b"))]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_unchanged_and_the_norms_are_bare(kind: str) -> None:
    model = decoder(**KINDS[kind])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folded = fold(model)
    # FR-52: 1e-12 relative in float64.
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-12, atol=1e-12)
    assert all(bool((gain == 1).all()) for gain in gains(folded))
    assert all(bool((shift == 0).all()) for shift in shifts(folded))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str) -> None:
    model = decoder(torch.float32, **KINDS[kind])
    folded = fold(model)
    assert folded.dtype == torch.float32
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-5, atol=1e-5)


def test_forgetting_the_shift_would_show() -> None:
    """FR-52: the test has teeth; gains alone are off by more than half a nat on these weights."""
    model, bare = decoder(), decoder()
    with torch.no_grad():
        for shift in shifts(bare):
            shift.zero_()
    assert (logits(fold(bare)) - logits(model)).abs().max() > 0.5


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_centring_the_readers_is_wrong_under_rmsnorm_only(norm: str) -> None:
    folded = fold(decoder(norm=norm))
    before = logits(folded)
    with torch.no_grad():
        folded.unembed.W_U -= folded.unembed.W_U.mean(0)
    change = (logits(folded) - before).abs().max()
    assert change < 1e-12 if norm == "layernorm" else change > 0.1


def test_biases_that_arise_are_switched_on() -> None:
    folded = fold(decoder(**KINDS["mlp"])).config
    assert (folded.attn_bias, folded.mlp_bias, folded.unembed_bias) == (True, True, True)
    folded = fold(decoder(**KINDS["rms gated"])).config  # RMSNorm has no shift: none arises
    assert (folded.attn_bias, folded.mlp_bias, folded.unembed_bias) == (False, False, False)
    assert not fold(decoder(**KINDS["tied"])).config.tied_embeddings


def test_final_alone_leaves_the_blocks_as_they_are() -> None:
    model = decoder(positions="shortformer")
    folded = fold(model, norms="final")
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-12, atol=1e-12)
    assert bool((folded.ln_final.w == 1).all())
    assert torch.equal(folded.blocks[1].ln1.w, model.blocks[1].ln1.w)
    assert torch.equal(folded.W_Q, model.W_Q)


def test_value_bias_moves_to_the_output_but_not_for_rows_without_a_key() -> None:
    """FR-53: exact where a key is visible; a padded row gets a constant it had not."""
    model = decoder(n_kv_heads=2, attn_bias=True, norm="none")
    folded = fold(model, value_bias=True)
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-12, atol=1e-12)
    assert bool((folded.b_V == 0).all())
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] * 3)
    ours, theirs = logits(folded, attention_mask=mask), logits(model, attention_mask=mask)
    torch.testing.assert_close(ours[:, 2:], theirs[:, 2:], rtol=1e-12, atol=1e-12)
    assert (ours[:, :2] - theirs[:, :2]).abs().max() > 0.1


def test_value_bias_takes_in_the_one_that_the_norm_made() -> None:
    model = decoder()
    folded = fold(model, value_bias=True)
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-12, atol=1e-12)
    assert bool((folded.b_V == 0).all())
    assert bool((folded.b_O != 0).any())


def test_what_the_model_carries_comes_along() -> None:
    model = decoder()
    model.name, model.vocab, model.backend = "toy", list("abcdefghi"), "naive"
    model.card = {"task": "none", "weights_sha256": "of the weights before"}
    folded = fold(model)
    assert folded.name == "toy (folded)"
    assert (folded.vocab, folded.backend) == (model.vocab, "naive")
    assert folded.card == {"task": "none"}


def test_refusals() -> None:
    with pytest.raises(
        ExactnessError,
        match=r"cannot be folded with shortformer positions: .* after the norm.*use norms='final'",
    ):
        fold(decoder(positions="shortformer"))
    with pytest.raises(
        ExactnessError, match=r"shift of 'blocks.0.ln2' cannot be folded into a gated MLP: its gate"
    ):
        fold(decoder(d_mlp=10, gated_mlp=True))
    with pytest.raises(ConfigError, match="norms must be 'all' or 'final', got 'finale'; nearest"):
        fold(decoder(), norms="finale")
