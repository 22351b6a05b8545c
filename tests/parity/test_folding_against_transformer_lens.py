"""Our folding against TransformerLens' ProcessWeights, on the same weights, tensor by tensor.

Its steps are called one by one, in float64: its `process_weights` goes through float32.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_lens.weight_processing import ProcessWeights

from headstream.circuits.folding import fold
from headstream.models.decoder import Decoder

BIASES = {"d_mlp": 10, "attn_bias": True, "mlp_bias": True, "unembed_bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "layernorm": BIASES,
    "attention only": {"attn_bias": True, "unembed_bias": True, "positions": "rotary"},
    "grouped": BIASES | {"n_kv_heads": 2, "positions": "rotary"},
    "rmsnorm gated": {"d_mlp": 10, "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary"},
}


def settings_of(model: Decoder) -> Any:
    """The configuration as ProcessWeights reads it."""
    config = model.config
    return SimpleNamespace(
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_key_value_heads=None if config.group_size == 1 else config.kv_heads,
        d_model=config.d_model,
        d_head=config.d_head,
        d_vocab=config.d_vocab,
        attn_only=not config.has_mlp,
        gated_mlp=config.gated_mlp,
        positional_embedding_type="rotary" if config.positions == "rotary" else "standard",
        normalization_type="LN" if config.norm == "layernorm" else "RMS",
        final_rms=config.norm == "rmsnorm",
    )


def theirs(model: Decoder, *, centre: bool) -> dict[str, Tensor]:
    """Norms folded, value bias folded, and with `centre` all that TransformerLens centres."""
    settings, layernorm = settings_of(model), model.config.norm == "layernorm"
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if settings.n_key_value_heads is not None:
        # Grouped keys and values carry an underscore there.
        weights = {renamed(name): value for name, value in weights.items()}
    weights = ProcessWeights.fold_layer_norm(
        weights, settings, fold_biases=layernorm, center_weights=centre and layernorm
    )
    weights = ProcessWeights.fold_value_biases(weights, settings)
    if centre and layernorm:
        weights = ProcessWeights.center_writing_weights(weights, settings)
    if centre:
        weights = ProcessWeights.center_unembed(weights, settings)
    return {name.replace("._", "."): value for name, value in weights.items()}


def renamed(name: str) -> str:
    for letter in "KV":
        for kind in "Wb":
            name = name.replace(f".{kind}_{letter}", f"._{kind}_{letter}")
    return name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("centre", [False, True], ids=["folded", "centred"])
def test_every_weight(build: Callable[..., Decoder], kind: str, centre: bool) -> None:
    model = build(KINDS[kind])
    everything = "all" if model.config.norm == "layernorm" else "unembed"
    ours = fold(model, value_bias=True, centre=everything if centre else ()).state_dict()
    expected = theirs(model, centre=centre)
    # A bias that is zero may exist on one side only.
    for name in expected.keys() - ours.keys():
        assert not expected.pop(name).any(), name
    for name, value in ours.items():
        if name in expected:
            # float64, one product and one mean in another order.
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=name)
        else:
            assert not value.any(), name
    moved = [n for n, v in model.state_dict().items() if (v - ours[n]).abs().max() > 1e-3]
    assert {"blocks.0.attn.W_Q", "blocks.1.attn.W_V", "unembed.W_U"} <= set(moved)
    if centre and model.config.norm == "layernorm":
        assert {"embed.W_E", "blocks.1.attn.W_O"} <= set(moved)
