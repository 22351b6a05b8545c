"""Biases of a head as terms beside its circuits, the effective embedding, and the caveats."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.qk_ov.left_out import circuit_caveats, ov_bias, qk_bias
from headstream.circuits.qk_ov.token_vectors import effective_embedding
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.hooks import capture

Build = Callable[..., Decoder]
# Products of a dozen float64 terms of order 10.
EXACT = 1e-11


def test_four_terms_by_hand(build: Build) -> None:
    """d_head 1: q = 2x + 3, k = 5y + 7 give qk = 10xy + 14x + 15y + 21."""
    model = build({"n_layers": 1, "n_heads": 1, "d_model": 1, "d_head": 1, "attn_bias": True})
    attn = model.blocks[0].attn
    with torch.no_grad():
        for name, value in {"W_Q": 2.0, "b_Q": 3.0, "W_K": 5.0, "b_K": 7.0}.items():
            getattr(attn, name).fill_(value)
    found = qk_bias(model, 0, 0, space="residual")
    assert qk_circuit(model, 0, 0, space="residual").AB.item() == 10
    assert (found["query_side"].item(), found["key_side"].item()) == (14, 15)
    assert found["constant"].item() == 21


@pytest.mark.parametrize("positions", ["none", "rotary", "shortformer"])
def test_circuit_and_bias_terms_are_the_score(build: Build, positions: str) -> None:
    """Grouped heads, layer 1, every head and distance; x is what q and k read."""
    model = build({"positions": positions, "n_kv_heads": 2, "attn_bias": True, "rotary_base": 50.0})
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    names = ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_attn_scores"]
    names += ["hook_shortformer_pos"] if positions == "shortformer" else []
    _, acts = capture(model, tokens, names, backend="naive")
    x = model.blocks[1].ln1(acts[names[0]])[0].detach()
    x = x + acts[names[2]][0] if positions == "shortformer" else x
    for head in range(4):
        for distance in range(7):
            lag = distance if positions == "rotary" else None
            circuit = qk_circuit(model, 1, head, distance=lag, space="residual").AB
            bias = qk_bias(model, 1, head, distance=lag, space="residual")
            score = x @ circuit @ x.T + (x @ torch.tensor(bias["query_side"].values))[:, None]
            score = score + x @ torch.tensor(bias["key_side"].values) + bias["constant"].item()
            real = acts[names[1]][0, head].diagonal(-distance)
            found = model.config.scale * score.diagonal(-distance)
            torch.testing.assert_close(found, real, rtol=0, atol=EXACT)


def test_vocabulary_terms_are_the_residual_ones_at_each_embedding(model_a: Decoder) -> None:
    residual, vocab = (qk_bias(model_a, 1, 2, space=s) for s in ("residual", "vocab"))
    embedding = model_a.W_E.detach().numpy()
    for side in ("query_side", "key_side"):
        assert vocab[side].shape == (20,)
        np.testing.assert_allclose(
            vocab[side], embedding @ residual[side].values, rtol=0, atol=EXACT
        )
    assert vocab["constant"] == residual["constant"]
    write = ov_bias(model_a, 1, 2, space="residual").values
    logits = ov_bias(model_a, 1, 2)
    np.testing.assert_allclose(logits, write @ model_a.W_U.detach().numpy(), rtol=0, atol=EXACT)


def test_value_bias_is_what_a_head_writes_beside_its_circuit(build: Build) -> None:
    """FR-53: y OV + b_V W_O is the head's result where it attends to one key alone."""
    model = build({"n_kv_heads": 2, "attn_bias": True})
    tokens = torch.tensor([[3, 1, 4]])
    names = ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_result"]
    _, acts = capture(model, tokens, names)
    y = model.blocks[1].ln1(acts[names[0]])[0, 0].detach()
    for head in range(4):
        bias = torch.tensor(ov_bias(model, 1, head, space="residual").values)
        write = y @ ov_circuit(model, 1, head, space="residual").AB + bias
        # The first query reads the first key alone.
        torch.testing.assert_close(write, acts[names[1]][0, 0, head], rtol=0, atol=EXACT)
        assert bias.abs().max() > 0.1


def test_without_biases_all_terms_are_zero(model_r: Decoder) -> None:
    bias = qk_bias(model_r, 0, 3, distance=2)
    assert not bias["query_side"].any()
    assert not bias["key_side"].any()
    assert bias["constant"] == 0
    assert not ov_bias(model_r, 0, 3).any()


@pytest.mark.parametrize("fields", [{}, {"gated_mlp": True, "norm": "rmsnorm"}])
def test_effective_embedding_is_the_stream_after_layer_0_without_its_attention(
    build: Build, fields: dict[str, Any]
) -> None:
    model = build({"d_mlp": 7, "mlp_bias": True, "positions": "none"} | fields)
    with torch.no_grad():
        model.blocks[0].attn.W_O.zero_()
    tokens = torch.arange(16)[None]
    _, acts = capture(model, tokens, "blocks.1.hook_resid_pre")
    found = effective_embedding(model)
    assert found.shape == (20, 16)
    torch.testing.assert_close(found[:16], acts["blocks.1.hook_resid_pre"][0], rtol=0, atol=EXACT)
    circuit = ov_circuit(model, 1, 0, embedding="effective").AB
    expected = found @ ov_circuit(model, 1, 0, space="residual").AB @ model.W_U
    torch.testing.assert_close(circuit, expected, rtol=0, atol=EXACT)


def test_effective_embedding_is_of_the_weights_whatever_hooks_are_attached(
    model_a: Decoder,
) -> None:
    expected = effective_embedding(model_a)

    def zero(tensor: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(tensor)

    with model_a.hooks(fwd_hooks=[("blocks.0.mlp.hook_post", zero)]):
        assert torch.equal(effective_embedding(model_a), expected)
        model_a(torch.tensor([[1, 2]]))
    assert (expected - model_a.W_E).abs().max() > 0.1


def test_an_embedding_that_does_not_apply_is_refused(build: Build, model_a: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"needs an MLP in layer 0, but d_mlp is None .*'plain'"):
        ov_circuit(build({}), 1, 0, embedding="effective")
    with pytest.raises(ConfigError, match="in layer 0: its heads read before its MLP writes"):
        qk_circuit(model_a, 0, 0, embedding="effective")
    with pytest.raises(ConfigError, match="'effective' was given, but with space='residual' no"):
        qk_circuit(model_a, 1, 0, embedding="effective", space="residual")
    words = "embedding must be 'plain' or 'effective', got 'efective'; nearest is 'effective'"
    with pytest.raises(ConfigError, match=words):
        qk_bias(model_a, 1, 0, embedding="efective")


def test_without_a_caveat_the_circuits_are_exact(build: Build) -> None:
    model = build({"n_layers": 1, "norm": "none", "positions": "none"})
    assert circuit_caveats(model, 0) == circuit_caveats(model, 0, circuit="ov") == ()
    tokens = torch.tensor([[3, 1, 4, 1]])
    _, acts = capture(model, tokens, "*attn_scores", backend="naive")
    found = model.config.scale * qk_circuit(model, 0, 2).AB[tokens[0]][:, tokens[0]]
    real = acts["blocks.0.attn.hook_attn_scores"][0, 2]
    seen = torch.isfinite(real)
    torch.testing.assert_close(found[seen], real[seen], rtol=0, atol=EXACT)


def test_caveats_name_what_applies(build: Build, model_a: Decoder, model_r: Decoder) -> None:
    assert circuit_caveats(model_a, 1) == (
        "b_Q and b_K add terms of one side alone: qk_bias",
        "position vectors are left out: score_terms gives their three terms",
        "a token's embedding stands for all that earlier layers wrote about it",
        "the gain and shift of 'blocks.1.ln1' are left out: fold(model) puts them in",
        "the centring and division of 'blocks.1.ln1' are left out: they differ by position",
    )
    assert circuit_caveats(model_r, 0) == (
        "the gain of 'blocks.0.ln1' is left out: fold(model) puts it in",
        "the division of 'blocks.0.ln1' is left out: it differs by position",
    )
    said = circuit_caveats(model_a, 0, circuit="ov")
    assert "b_V adds a constant write: ov_bias" in said
    assert said[-1] == "only the direct path to the logits: later readers of the write are left out"
    assert any("'ln_final'" in sentence for sentence in said)
    short = build({"positions": "shortformer"})
    assert any("no folding beside shortformer" in said for said in circuit_caveats(short, 0))
    assert circuit_caveats(model_a, 1, space="residual") == circuit_caveats(model_a, 1)[:1]
    assert circuit_caveats(model_r, 1, space="residual") == ()


def test_bad_arguments(model_a: Decoder, model_r: Decoder) -> None:
    with pytest.raises(ShapeError, match=r"layer must be a whole number in \[0, 2\)"):
        circuit_caveats(model_a, 2)
    with pytest.raises(ShapeError, match=r"head must be a whole number in \[0, 4\)"):
        ov_bias(model_a, 0, 4)
    with pytest.raises(ConfigError, match="circuit must be 'qk' or 'ov', got 'kq'"):
        circuit_caveats(model_a, 0, circuit="kq")
    with pytest.raises(ConfigError, match="distance is None; give"):
        qk_bias(model_r, 0, 0)
    with pytest.raises(ConfigError, match="distance=2 was given, but with positions='learned'"):
        qk_bias(model_a, 0, 0, distance=2)
