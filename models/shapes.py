"""Names and shapes of a decoder's weights, from its configuration alone.

Nothing is built: a configuration that asks for a billion layers is compared with a file as fast as
any other, before memory is taken for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from torch import Tensor

from headstream.models.config import DecoderConfig
from headstream.models.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]

# Names of a kind that an error lists before it says how many more there are.
_NAMED = 24


def outer_shapes(config: DecoderConfig) -> Shapes:
    """Weights that stand outside the layers."""
    shapes: Shapes = {"embed.W_E": (config.d_vocab, config.d_model)}
    if config.positions in ("learned", "shortformer"):
        shapes["pos_embed.W_pos"] = (config.n_ctx, config.d_model)
    shapes |= _norm("ln_final", config)
    if not config.tied_embeddings:
        shapes["unembed.W_U"] = (config.d_model, config.d_vocab)
    if config.unembed_bias:
        shapes["unembed.b_U"] = (config.d_vocab,)
    return shapes


def layer_shapes(config: DecoderConfig) -> Shapes:
    """Weights of any one layer; layer l calls them `blocks.l.<name>`."""
    heads, kv_heads, d_model, d_head = (
        config.n_heads,
        config.kv_heads,
        config.d_model,
        config.d_head,
    )
    shapes: Shapes = {
        "attn.W_Q": (heads, d_model, d_head),
        "attn.W_K": (kv_heads, d_model, d_head),
        "attn.W_V": (kv_heads, d_model, d_head),
        "attn.W_O": (heads, d_head, d_model),
    }
    if config.attn_bias:
        shapes |= {
            "attn.b_Q": (heads, d_head),
            "attn.b_K": (kv_heads, d_head),
            "attn.b_V": (kv_heads, d_head),
            "attn.b_O": (d_model,),
        }
    shapes |= _norm("ln1", config)
    if config.d_mlp is not None:
        shapes |= _norm("ln2", config)
        shapes |= {"mlp.W_in": (d_model, config.d_mlp), "mlp.W_out": (config.d_mlp, d_model)}
        if config.gated_mlp:
            shapes["mlp.W_gate"] = (d_model, config.d_mlp)
        if config.mlp_bias:
            shapes |= {"mlp.b_in": (config.d_mlp,), "mlp.b_out": (d_model,)}
    return shapes


def check_weights(config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless `weights` are those of the configuration, by name and shape."""
    outer, layer = outer_shapes(config), layer_shapes(config)
    expected = {name: _expected(name, config, outer, layer) for name in weights}
    unknown = sorted(name for name, shape in expected.items() if shape is None)
    n_missing = len(outer) + config.n_layers * len(layer) - (len(weights) - len(unknown))
    if n_missing or unknown:
        lacking = (name for name in _names(config, outer, layer) if name not in weights)
        missing = sorted(itertools.islice(lacking, _NAMED))
        parts = [f"missing {_some(missing, n_missing)}"] * bool(n_missing)
        parts += [f"unknown {_some(unknown, len(unknown))}"] * bool(unknown)
        raise ConfigError(f"weights do not fit the configuration: {'; '.join(parts)}")
    for name, tensor in sorted(weights.items()):
        shape = expected[name]
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"weight '{name}' has shape {list(tensor.shape)}, expected {list(shape or ())}"
            )


def _norm(name: str, config: DecoderConfig) -> Shapes:
    parts = {"layernorm": ("w", "b"), "rmsnorm": ("w",), "none": ()}[config.norm]
    return {f"{name}.{part}": (config.d_model,) for part in parts}


def _names(config: DecoderConfig, outer: Shapes, layer: Shapes) -> Iterator[str]:
    """Every expected name, lazily: there may be more than memory holds."""
    for index in range(config.n_layers):
        for name in sorted(layer):
            yield f"blocks.{index}.{name}"
    yield from sorted(outer)


def _expected(
    name: str, config: DecoderConfig, outer: Shapes, layer: Shapes
) -> tuple[int, ...] | None:
    """Shape of the weight of this name; None if there is none."""
    if name in outer:
        return outer[name]
    first, _, rest = name.partition(".")
    index, _, inner = rest.partition(".")
    # 18 digits: int() of more is refused by Python or slow, and no model has as many layers.
    if first != "blocks" or not (index.isascii() and index.isdigit()) or len(index) > 18:
        return None
    if str(int(index)) != index or int(index) >= config.n_layers:
        return None
    return layer.get(inner)


def _some(names: list[str], total: int) -> str:
    more = f" and {total - _NAMED} more" if total > _NAMED else ""
    return f"{names[:_NAMED]}{more}"
