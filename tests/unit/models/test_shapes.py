"""Names and shapes written down from a configuration are those of the decoder it builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError
from headstream.models.shapes import check_weights, layer_shapes, outer_shapes

SIZES = {"n_layers": 2, "n_heads": 4, "d_model": 6, "d_head": 2, "d_vocab": 7, "n_ctx": 5}


@pytest.mark.parametrize("positions", ["learned", "shortformer", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n_kv_heads": 2, "attn_bias": True, "tied_embeddings": True},
        {"d_mlp": 3, "unembed_bias": True},
        {"d_mlp": 3, "gated_mlp": True, "mlp_bias": True},
    ],
)
def test_shapes_are_those_of_the_built_decoder(
    positions: Any, norm: Any, more: dict[str, Any]
) -> None:
    config = DecoderConfig(**SIZES, positions=positions, norm=norm, **more)
    expected = {name: tuple(value.shape) for name, value in Decoder(config).state_dict().items()}
    shapes = outer_shapes(config)
    for layer in range(config.n_layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    assert shapes == expected
    check_weights(config, Decoder(config).state_dict())


@pytest.mark.parametrize(
    "name", ["blocks.2.attn.W_Q", "blocks.01.attn.W_Q", "blocks.x.attn.W_Q", "blocks.1", "blocks"]
)
def test_names_that_are_nearly_right_are_unknown(name: str) -> None:
    config = DecoderConfig(**SIZES)
    weights = {**Decoder(config).state_dict(), name: torch.zeros(1)}
    with pytest.raises(ConfigError, match=rf"configuration: unknown \['{name}'\]$"):
        check_weights(config, weights)
