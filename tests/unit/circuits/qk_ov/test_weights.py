"""QK and OV circuits against the scores and writes that a model really computes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.hooks import capture

# Products of a dozen float64 terms of order 1: rounding is below 1e-13.
EXACT = 1e-12


def decoder(**fields: Any) -> Decoder:
    sizes: dict[str, Any] = {"n_layers": 2, "n_heads": 4, "d_model": 12, "d_head": 6}
    sizes |= {"d_vocab": 17, "n_ctx": 16, "positions": "none"}
    return Decoder(DecoderConfig(**(sizes | fields)), seed=1, dtype=torch.float64)


def tokens(length: int = 9) -> Tensor:
    return torch.randint(0, 17, (1, length), generator=torch.Generator().manual_seed(2))


def scores_and_input(model: Decoder, layer: int) -> tuple[Tensor, Tensor]:
    """Scores [head, query_pos, key_pos] of a layer, and the normalised input it read."""
    name = f"blocks.{layer}."
    wanted = [name + "attn.hook_attn_scores", name + "hook_resid_pre"]
    _, acts = capture(model, tokens(), wanted, backend="naive")
    stream = model.blocks[layer].ln1(acts[name + "hook_resid_pre"])
    return acts[wanted[0]][0], stream[0].detach()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("head", range(4))
def test_qk_of_grouped_heads_rebuilds_the_scores(layer: int, head: int) -> None:
    """FR-49: heads 1 and 2 tell repeating key heads from tiling them."""
    model = decoder(n_kv_heads=2)
    scores, x = scores_and_input(model, layer)
    circuit = qk_circuit(model, layer, head, space="residual")
    assert circuit.A.shape == (12, 6)
    rebuilt = model.config.scale * x @ circuit.AB @ x.T
    visible = torch.ones(9, 9).tril().bool()
    torch.testing.assert_close(rebuilt[visible], scores[head][visible], rtol=0, atol=EXACT)


@pytest.mark.parametrize("distance", range(9))
@pytest.mark.parametrize("head", [0, 2, 3])
def test_rotary_qk_rebuilds_the_scores_at_its_distance(distance: int, head: int) -> None:
    """D-1: s[i, i - d] for every i, and not with the circuit of another distance."""
    model = decoder(positions="rotary", n_kv_heads=2, rotary_base=100.0)
    scores, x = scores_and_input(model, 1)
    circuit = qk_circuit(model, 1, head, distance=distance, space="residual")
    rebuilt = (model.config.scale * x @ circuit.AB @ x.T).diagonal(-distance)
    real = scores[head].diagonal(-distance)
    torch.testing.assert_close(rebuilt, real, rtol=0, atol=EXACT)
    if 0 < distance < 4:  # of many pairs, some is far off
        free = qk_circuit(model, 1, head, distance=0, space="residual")
        wrong = (model.config.scale * x @ free.AB @ x.T).diagonal(-distance)
        assert (wrong - real).abs().max() > 0.05


def test_rotary_qk_uses_half_split_pairs_and_the_stated_frequencies() -> None:
    """By hand: d_head 4 pairs (0, 2) and (1, 3); W_Q picks channel 0 and 1, W_K is the identity."""
    model = decoder(positions="rotary", d_model=4, d_head=4, n_heads=1, rotary_base=16.0)
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0] = torch.eye(4)
        model.blocks[0].attn.W_K[0] = torch.eye(4)
    angle = torch.tensor([3.0, 3.0 * 16.0**-0.5], dtype=torch.float64)
    circuit = qk_circuit(model, 0, 0, distance=3, space="residual").AB
    torch.testing.assert_close(circuit[[0, 1], [0, 1]], angle.cos(), rtol=0, atol=EXACT)
    # A query on channel 0 turned by +angle leans towards channel 2.
    torch.testing.assert_close(circuit[[0, 1], [2, 3]], angle.sin(), rtol=0, atol=EXACT)
    assert circuit[0, 1] == circuit[0, 3] == 0


def test_vocabulary_circuits_are_the_residual_ones_between_embeddings() -> None:
    model = decoder(n_kv_heads=2, tied_embeddings=True)
    for head in range(4):
        qk, ov = qk_circuit(model, 1, head), ov_circuit(model, 1, head)
        assert qk.shape == ov.shape == (17, 17)
        assert qk.mdim == ov.mdim == 6
        inner = qk_circuit(model, 1, head, space="residual").AB
        expected = model.W_E @ inner @ model.W_E.T
        torch.testing.assert_close(qk.AB, expected, rtol=0, atol=EXACT)
        inner = ov_circuit(model, 1, head, space="residual").AB
        expected = model.W_E @ inner @ model.W_U
        torch.testing.assert_close(ov.AB, expected, rtol=0, atol=EXACT)


def test_ov_row_is_the_logit_change_of_attending_to_that_token_alone() -> None:
    """Attention only, no norm: force the pattern onto one key, against cutting the head."""
    model = decoder(n_layers=1, norm="none", n_kv_heads=2)
    ids, head, key = tokens(), 2, 3

    def forced(weight: float) -> Tensor:
        def edit(pattern: Tensor, hook: Any) -> Tensor:
            new = pattern.clone()
            new[:, head, -1] = 0
            new[:, head, -1, key] = weight
            return new

        with torch.no_grad():
            return model.run_with_hooks(
                ids, fwd_hooks=[("blocks.0.attn.hook_pattern", edit)], backend="naive"
            )[0, -1]

    change = forced(1.0) - forced(0.0)
    row = ov_circuit(model, 0, head).AB[ids[0, key]]
    torch.testing.assert_close(change, row, rtol=0, atol=EXACT)


def test_svd_rebuilds_the_product_with_d_head_singular_values() -> None:
    """FR-50."""
    circuit = ov_circuit(decoder(), 0, 1)
    left, values, right = circuit.svd()
    assert values.shape == (6,)
    torch.testing.assert_close(left * values @ right.mT, circuit.AB, rtol=0, atol=EXACT)
    identity = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(left.mT @ left, identity, rtol=0, atol=EXACT)


def test_factors_are_detached_copies_of_nothing_that_trains() -> None:
    circuit = ov_circuit(decoder(), 0, 0)
    assert not circuit.A.requires_grad
    assert not circuit.B.requires_grad


@pytest.mark.parametrize("function", [qk_circuit, ov_circuit])
def test_layer_and_head_out_of_range_name_the_range(function: Any) -> None:
    with pytest.raises(
        ShapeError, match=r"layer must be a whole number in \[0, 2\) = \[0, n_layers\), got 2"
    ):
        function(decoder(), 2, 0)
    with pytest.raises(
        ShapeError, match=r"head must be a whole number in \[0, 4\) = \[0, n_heads\), got -1"
    ):
        function(decoder(), 0, -1)


@pytest.mark.usefixtures("unchecked")
def test_heads_may_be_numpy_integers_and_nothing_else() -> None:
    model = decoder()
    layer, head = np.argwhere(np.array([[0, 0, 0], [0, 0, 1]]))[0]
    assert torch.equal(ov_circuit(model, layer, head).AB, ov_circuit(model, 1, 2).AB)
    for bad in (True, 1.0, "1", None):
        with pytest.raises(ShapeError, match="head must be a whole number in"):
            ov_circuit(model, 0, bad)  # type: ignore[arg-type]


def test_distance_and_rotary_go_together() -> None:
    with pytest.raises(
        ConfigError, match=r"distance=1 was given, but with positions='none' .* leave distance out"
    ):
        qk_circuit(decoder(), 0, 0, distance=1)
    rotary = decoder(positions="rotary")
    with pytest.raises(ConfigError, match=r"depends on the distance, but distance is None; give"):
        qk_circuit(rotary, 0, 0)
    with pytest.raises(ConfigError, match="distance must be a whole number of tokens, got True"):
        qk_circuit(rotary, 0, 0, distance=True)


def test_unknown_space() -> None:
    with pytest.raises(ConfigError, match=r"space must be 'vocab' or 'residual', got 'vocabulary'"):
        ov_circuit(decoder(), 0, 0, space="vocabulary")
