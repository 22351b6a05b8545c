"""Folding: another model, the same logits; and the recipes that would not be exact."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.circuits.centring import centre_readers, centre_writers
from headstream.circuits.folding import fold
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder, build
from headstream.models.errors import ConfigError, ExactnessError, ShapeError
from headstream.models.hooks import capture

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


def test_a_caller_with_left_padding_is_told() -> None:
    """FR-53: the mask is looked at, before a padded row is silently wrong."""
    model = decoder(n_kv_heads=2, attn_bias=True, norm="none")
    left = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    said = r"value_bias=True is not exact .*: in row 1 the first 2 queries may read no key.*b_V"
    for mask in (left, left.bool(), left[1:].expand(2, 6)):
        row = said if mask[0].all() else said.replace("row 1", "row 0")
        with pytest.raises(ExactnessError, match=row + ".*pad on the right"):
            fold(model, value_bias=True, attention_mask=mask)
    with pytest.raises(ExactnessError, match="in row 0 the first 2 queries"):
        fold(model, value_bias=True, attention_mask=left[1])
    fold(model, attention_mask=left)  # b_V stays where it is
    fold(decoder(norm="none"), value_bias=True, attention_mask=left)  # there is none
    right = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]])
    folded = fold(model, value_bias=True, attention_mask=right)
    ours, theirs = (m(prompts()[:2], attention_mask=right).detach() for m in (folded, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    with pytest.raises(ShapeError, match=r"attention_mask must be a tensor .*, got \[1, 2, 3\]"):
        fold(model, value_bias=True, attention_mask=torch.ones(1, 2, 3))
    with pytest.raises(ShapeError, match=r"must hold 0 .masked. and 1 .real. only"):
        fold(model, value_bias=True, attention_mask=torch.tensor([0, 2]))


def test_the_mask_says_where_the_fold_is_wrong() -> None:
    """Rows the check names are the rows that differ, at every layer's attn_out and nowhere else."""
    model = decoder(attn_bias=True)
    folded = fold(model, value_bias=True)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1]])
    name = "blocks.0.hook_attn_out"
    theirs = capture(model, prompts(), name, attention_mask=mask)[1][name]
    ours = capture(folded, prompts(), name, attention_mask=mask)[1][name]
    differs = (ours - theirs).abs().amax(-1) > 1e-6
    assert torch.equal(differs, mask.cumsum(-1) == 0)


CENTRED = {name: KINDS[name] for name in ("plain", "biases", "mlp", "tied")} | {
    "sinusoidal": {"d_mlp": 10, "positions": "sinusoidal"},
}


@pytest.mark.parametrize("kind", CENTRED)
def test_centring_readers_and_writers_changes_no_logit(kind: str) -> None:
    model = decoder(**CENTRED[kind])
    folded = fold(model, value_bias=True, centre=("readers", "writers"))
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-12, atol=1e-12)
    weights = folded.state_dict()
    for name, value in weights.items():
        part = name.rsplit(".", 1)[-1]
        if part in ("W_E", "W_pos", "W_O", "b_O", "W_out", "b_out"):
            axis = -1
        elif part in ("W_Q", "W_K", "W_V", "W_in", "W_U"):
            axis = -2
        else:
            continue
        assert value.mean(axis).abs().max() < 1e-15, name
    assert "unembed.W_U" in weights
    if kind != "sinusoidal":
        # Nothing writes the mean, so no stream has one; the model's own streams do.
        streams = capture(folded, prompts(), "blocks.*.hook_resid_*")[1].values()
        assert all(stream.mean(-1).abs().max() < 1e-14 for stream in streams)
        streams = capture(model, prompts(), "blocks.*.hook_resid_*")[1].values()
        assert all(stream.mean(-1).abs().max() > 0.01 for stream in streams)


def test_both_inputs_of_a_gated_mlp_are_folded_and_centred() -> None:
    """LayerNorm without shift, as gated models have it where they have it."""
    model = decoder(d_mlp=10, gated_mlp=True)
    with torch.no_grad():
        for block in model.blocks:
            block.ln2.b.zero_()
    folded = fold(model, centre=("readers", "writers"))
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-12, atol=1e-12)
    for ours, theirs in ((folded.W_gate, model.W_gate), (folded.W_in, model.W_in)):
        gained = torch.stack([block.ln2.w for block in model.blocks])[..., None] * theirs
        torch.testing.assert_close(ours, gained - gained.mean(1, keepdim=True), rtol=0, atol=1e-12)


def test_shortformer_writers_are_centred_and_their_vectors_are_no_writer() -> None:
    model = decoder(positions="shortformer", attn_bias=True)
    folded = fold(model, norms="final", centre=("readers", "writers"))
    torch.testing.assert_close(logits(folded), logits(model), rtol=1e-12, atol=1e-12)
    assert torch.equal(folded.W_pos, model.W_pos)
    assert torch.equal(folded.W_Q, model.W_Q)  # its norm is not folded
    assert folded.W_U.mean(0).abs().max() < 1e-15


@pytest.mark.parametrize("kind", KINDS)
def test_a_centred_unembedding_shifts_the_logits_of_a_position(kind: str) -> None:
    """Log-probabilities stay; logits lose their mean over the vocabulary, and nothing else."""
    model = decoder(**KINDS[kind])
    folded, before = logits(fold(model, centre="unembed")), logits(model)
    torch.testing.assert_close(folded.log_softmax(-1), before.log_softmax(-1), rtol=0, atol=1e-10)
    torch.testing.assert_close(folded, before - before.mean(-1, keepdim=True), rtol=0, atol=1e-12)
    assert before.mean(-1).abs().max() > 0.05
    tied = fold(decoder(**KINDS["no norm"], tied_embeddings=True), centre="unembed")
    assert not tied.config.tied_embeddings
    assert tied.W_E.mean(0).abs().max() > 0.01  # the embedding is not what was centred


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
def test_the_wrong_recipe_would_show(norm: str) -> None:
    """Centring the same weights without asking: 1e-12 under LayerNorm, a thousandth of a nat or
    more elsewhere."""
    folded = fold(decoder(norm=norm, d_mlp=10))
    for centre in (
        lambda weights: centre_writers(weights, folded.config),
        lambda weights: centre_readers(weights, folded.config, blocks=True),
    ):
        weights = dict(folded.state_dict())
        centre(weights)
        change = logits(build(folded.config, weights)) - logits(folded)
        if norm == "layernorm":
            assert change.abs().max() < 1e-12
        else:
            assert change.log_softmax(-1).abs().max() > 1e-3


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
    said = "readers and writers cannot be centred with norm='rmsnorm': only LayerNorm takes the"
    with pytest.raises(ExactnessError, match=said + ".*use centre='unembed'"):
        fold(decoder(norm="rmsnorm"), centre="all")
    with pytest.raises(ExactnessError, match="writers cannot be centred with norm='none'"):
        fold(decoder(norm="none"), centre=["unembed", "writers"])
    with pytest.raises(
        ConfigError, match=r"centre must be 'all' or some of 'readers', .*got 'reader'; nearest is"
    ):
        fold(decoder(), centre="reader")
    with pytest.raises(ConfigError, match=r"centre must be .* got 'all'"):
        fold(decoder(), centre=["all", "writers"])


def test_a_folded_weight_that_does_not_fit_its_dtype_is_refused(build: Any) -> None:
    model = build({}, dtype=torch.float16)
    with torch.no_grad():
        model.blocks[1].ln1.w.fill_(300.0)
        model.blocks[1].attn.W_K.fill_(300.0)
    with pytest.raises(
        ExactnessError,
        match=r"blocks\.1\.attn\.W_K is over 6\.55e\+04 after folding, more than torch\.float16 "
        "holds; fold the model in a wider dtype",
    ):
        fold(model)
    fold(model, norms="final")
