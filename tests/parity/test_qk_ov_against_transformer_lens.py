"""QK and OV circuits against TransformerLens' bridge around GPT-2 and Llama of transformers.

The models are tiny, random and built in memory; the bridge takes its weights and runs from them,
our decoder has the converted ones. GPT-2 agrees to float64; Llama's rotary tables and norm are
float32 in any model of transformers, which costs 1e-5.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from headstream.circuits.qk_ov.content_position import score_terms
from headstream.circuits.qk_ov.copying import copying_score
from headstream.circuits.qk_ov.left_out import qk_bias
from headstream.circuits.qk_ov.rotary_profile import distance_profile, score_frequencies
from headstream.circuits.qk_ov.top_entries import top_pairs
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError

BOUNDS = {"gpt2": 1e-10, "llama": 1e-5}
# The same products of the same float64 weights.
EXACT = 1e-12
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
SITES = [(layer, head) for layer in range(2) for head in range(4)]
SEEN = np.tri(7, dtype=bool)


@pytest.fixture(scope="module")
def bridged(pair: tuple[Any, Decoder, str]) -> tuple[Any, Decoder, str]:
    theirs, ours, name = pair
    # The bridge replaces submodules of what it wraps.
    wrapped = copy.deepcopy(theirs)
    bridge = build_bridge_from_module(wrapped, type(theirs).__name__, hf_config=theirs.config)
    return bridge, ours, name


def test_factored_circuits(bridged: tuple[Any, Decoder, str]) -> None:
    """Grouped heads of Llama among them; without rotation where positions are rotary."""
    bridge, ours, name = bridged
    distance = {"distance": 0} if name == "llama" else {}
    for layer, head in SITES:
        for theirs, mine in (
            (bridge.QK, qk_circuit(ours, layer, head, space="residual", **distance)),
            (bridge.OV, ov_circuit(ours, layer, head, space="residual")),
        ):
            expected = theirs[layer, head]
            torch.testing.assert_close(mine.AB, expected.AB, rtol=0, atol=EXACT)
            torch.testing.assert_close(mine.S, expected.S, rtol=0, atol=EXACT)
            torch.testing.assert_close(mine.norm(), expected.norm(), rtol=0, atol=EXACT)


def test_vocabulary_circuits_and_the_copying_score(bridged: tuple[Any, Decoder, str]) -> None:
    bridge, ours, name = bridged
    distance = {"distance": 0} if name == "llama" else {}
    copying = copying_score(ours, n_random=2)
    full = bridge.W_E @ bridge.OV @ bridge.W_U
    for layer, head in SITES:
        values = full[layer, head].eigenvalues
        expected = (values.sum() / values.abs().sum()).real.item()
        assert copying["score"].values[layer, head] == pytest.approx(expected, abs=1e-10)
        dense = bridge.W_E @ bridge.QK[layer, head].AB @ bridge.W_E.T
        found = top_pairs(qk_circuit(ours, layer, head, **distance), 5)
        best = dense.flatten().topk(5)
        place = found["row"].values * dense.shape[1] + found["column"].values
        assert place.tolist() == best.indices.tolist()
        np.testing.assert_allclose(found["value"], best.values.detach(), rtol=0, atol=1e-11)


def test_scores_of_their_runs(bridged: tuple[Any, Decoder, str]) -> None:
    """Their inputs through our circuits, distance by distance; and our splits, summed."""
    bridge, ours, name = bridged
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    for layer, head in SITES:
        x = cache[f"blocks.{layer}.ln1.hook_out"]
        real = cache[f"blocks.{layer}.attn.hook_attn_scores"][:, head]
        for distance in range(7):
            lag = distance if name == "llama" else None
            circuit = qk_circuit(ours, layer, head, distance=lag, space="residual").AB
            bias = qk_bias(ours, layer, head, distance=lag, space="residual")
            sides = [torch.tensor(bias[side].values) for side in ("query_side", "key_side")]
            rebuilt = x @ circuit @ x.mT + (x @ sides[0])[..., None] + (x @ sides[1])[:, None]
            found = ours.config.scale * (rebuilt + bias["constant"].item())
            torch.testing.assert_close(
                found.diagonal(-distance, 1, 2),
                real.diagonal(-distance, 1, 2),
                rtol=0,
                atol=BOUNDS[name],
            )
        split = (score_terms if name == "gpt2" else score_frequencies)(ours, TOKENS, layer, head)
        total = split.terms.sum(split.term_dims).values
        np.testing.assert_allclose(total[:, SEEN], real.numpy()[:, SEEN], rtol=0, atol=BOUNDS[name])


def test_distance_profile_is_their_score(bridged: tuple[Any, Decoder, str]) -> None:
    bridge, ours, name = bridged
    if name == "gpt2":
        with pytest.raises(ConfigError, match="positions='learned': no rotary pairs"):
            distance_profile(ours, 0, 0, query=1, key=2)
        return
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS[:1])
    for head in range(4):
        real = cache["blocks.0.attn.hook_attn_scores"][0, head]
        score = distance_profile(ours, 0, head, query=TOKENS[0], key=TOKENS[0])["score"].values
        for i in range(7):
            found = [score[i, j, i - j] for j in range(i + 1)]
            np.testing.assert_allclose(found, real[i, : i + 1], rtol=0, atol=BOUNDS[name])
