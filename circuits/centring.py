"""Centring: taking off a weight the mean that nobody reads.

    readers   n W = n (W - mean of W over its input axis)    n has mean zero: LayerNorm, gain folded
    writers   n(x) = n(x - mean(x))                          every reader is a LayerNorm
    unembed   softmax(l) = softmax(l - mean(l))              whatever the norm

The first two hold for LayerNorm alone: RMSNorm, and a reader without a norm, see the mean of the
stream. `headstream.circuits.folding.fold` refuses them there; the functions here only subtract.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from headstream.models.errors import ConfigError, ExactnessError, nearest

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig

Part = Literal["readers", "writers", "unembed"]
Weights = dict[str, Tensor]

PARTS: tuple[str, ...] = get_args(Part)


def check_parts(centre: str | Sequence[str], norm: str) -> frozenset[str]:
    """What is to be centred: "all", one of `PARTS`, or several.

    Raises:
        ConfigError: for a part that does not exist.
        ExactnessError: for readers or writers, unless the norm is LayerNorm.
    """
    given = [centre] if isinstance(centre, str) or not isinstance(centre, Iterable) else [*centre]
    parts = set(PARTS) if given == ["all"] else set(given)
    for part in given:
        if given != ["all"] and part not in PARTS:
            raise ConfigError(
                f"centre must be 'all' or some of {', '.join(map(repr, PARTS))}, got {part!r}",
                hint=nearest(str(part), (*PARTS, "all")),
            )
    refused = [part for part in PARTS[:2] if part in parts]
    if refused and norm != "layernorm":
        raise ExactnessError(
            f"{' and '.join(refused)} cannot be centred with norm='{norm}': only LayerNorm takes "
            "the mean of the stream off, here it is read",
            hint="use centre='unembed', or no centring",
        )
    return frozenset(parts)


def centre_readers(weights: Weights, config: DecoderConfig, *, blocks: bool) -> None:
    """Mean over the input axis off every matrix that reads a LayerNorm whose gain is folded.

    Args:
        weights: changed.
        blocks: whether the blocks' norms are folded, and not the final one alone.
    """
    names = ["unembed.W_U"]
    for layer in range(config.n_layers if blocks else 0):
        names += [f"blocks.{layer}.attn.W_{letter}" for letter in "QKV"]
        names += [f"blocks.{layer}.mlp.{name}" for name in ("W_in", "W_gate")]
    _centre(weights, names, axis=-2)


def centre_writers(weights: Weights, config: DecoderConfig) -> None:
    """Mean over d_model off everything that is added to the stream and is stored.

    Shortformer vectors are no write; sinusoidal ones are, but they are computed and keep their
    mean.
    """
    names = ["embed.W_E"]
    if config.positions == "learned":
        names.append("pos_embed.W_pos")
    for layer in range(config.n_layers):
        names += [f"blocks.{layer}.attn.{name}" for name in ("W_O", "b_O")]
        names += [f"blocks.{layer}.mlp.{name}" for name in ("W_out", "b_out")]
    _centre(weights, names, axis=-1)


def centre_unembed(weights: Weights) -> None:
    """Mean over the vocabulary off W_U and b_U. Tied embeddings become untied."""
    # W_E stays: it is another weight from here on.
    weights.setdefault("unembed.W_U", weights["embed.W_E"].T)
    _centre(weights, ["unembed.W_U", "unembed.b_U"], axis=-1)


def _centre(weights: Weights, names: Iterable[str], axis: int) -> None:
    for name in names:
        if name in weights:
            weights[name] = weights[name] - weights[name].mean(axis, keepdim=True)
