"""Fold what is linear about a norm into the weights that read after it: another model, same logits.

    (n * w + b) W + c  =  n (diag(w) W) + (c + b W)          n the normalised stream

After folding, the norm has gain 1 and shift 0, and all that is left of it is the centring
(LayerNorm) and the division by the scale. Weights are then comparable across readers, and
attribution through the final norm needs the scale alone (Elhage et al. 2021; TransformerLens).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from headstream.models.decoder import build
from headstream.models.errors import ConfigError, ExactnessError, nearest

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder

Norms = Literal["all", "final"]
Weights = dict[str, Tensor]


def fold(model: Decoder, *, norms: str = "all", value_bias: bool = False) -> Decoder:
    """A new model with norm gains and shifts folded into their readers; logits unchanged.

    Biases that arise are switched on in the new configuration (`attn_bias`, `mlp_bias`,
    `unembed_bias`), tied embeddings become untied, and `model` is left as it is. Nothing is
    centred: centring W_U would move the logits, and centring a reader's input under LayerNorm
    changes nothing that the model computes.

    Args:
        model: the decoder.
        norms: "all", or "final" for ln_final into W_U alone. Norm "none" has nothing to fold.
        value_bias: also fold b_V W_O into b_O, so that a head's write has no constant part. Exact
            for every query that may read a key, since its pattern sums to 1; a query with no key
            (left padding, which nobody reads) gets the constant that it had not before.
    Returns:
        A decoder of the same dtype, device, vocabulary and card, named "... (folded)".
    Raises:
        ExactnessError: where folding is not exact: `norms="all"` with shortformer positions, whose
            vectors are added after the norm and would be scaled with it; a shift into a gated MLP,
            whose gate has no bias to take it.
        ConfigError: if `norms` is not one of the two.
    """
    if norms not in get_args(Norms):
        raise ConfigError(
            f"norms must be 'all' or 'final', got {norms!r}", hint=nearest(norms, get_args(Norms))
        )
    config = model.config
    # Products are taken in float64 and rounded once.
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    if norms == "all" and config.norm != "none":
        if config.positions == "shortformer":
            raise ExactnessError(
                "norms='all' cannot be folded with shortformer positions: their vectors are added "
                "to the input of q and k after the norm, and folding its gain would scale them",
                hint="use norms='final'",
            )
        for layer in range(config.n_layers):
            _fold_attention(weights, layer)
            if config.has_mlp:
                _fold_mlp(weights, layer)
    if config.norm != "none":
        _fold_final(weights)
    if value_bias:
        for layer in range(config.n_layers):
            _fold_value_bias(weights, layer, config.group_size)
    folded = build(
        _config_of(weights, config), {name: t.to(model.dtype) for name, t in weights.items()}
    )
    folded.to(model.device)
    folded.name = f"{model.name} (folded)"
    folded.vocab = model.vocab
    folded.backend = model.backend
    folded.naive_limit = model.naive_limit
    if model.card is not None:
        # The card's hash is that of the weights before.
        folded.card = {key: item for key, item in model.card.items() if key != "weights_sha256"}
    return folded


def _fold_attention(weights: Weights, layer: int) -> None:
    attn = f"blocks.{layer}.attn."
    gain, shift = _take_norm(weights, f"blocks.{layer}.ln1.")
    for letter in "QKV":
        weight = weights[f"{attn}W_{letter}"]
        _add(weights, f"{attn}b_{letter}", torch.einsum("d,hdk->hk", shift, weight))
        weights[f"{attn}W_{letter}"] = gain[:, None] * weight


def _fold_mlp(weights: Weights, layer: int) -> None:
    mlp = f"blocks.{layer}.mlp."
    gain, shift = _take_norm(weights, f"blocks.{layer}.ln2.")
    for name in ("W_in", "W_gate"):
        weight = weights.get(mlp + name)
        if weight is None:
            continue
        if name == "W_gate" and bool(shift.any()):
            raise ExactnessError(
                f"the shift of 'blocks.{layer}.ln2' cannot be folded into a gated MLP: its gate "
                "has no bias to take it",
                hint="use norms='final'",
            )
        if name == "W_in":
            _add(weights, f"{mlp}b_in", shift @ weight)
        weights[mlp + name] = gain[:, None] * weight


def _fold_final(weights: Weights) -> None:
    gain, shift = _take_norm(weights, "ln_final.")
    weight = weights.get("unembed.W_U", weights["embed.W_E"].T)
    _add(weights, "unembed.b_U", shift @ weight)
    weights["unembed.W_U"] = gain[:, None] * weight


def _fold_value_bias(weights: Weights, layer: int, group_size: int) -> None:
    attn = f"blocks.{layer}.attn."
    bias = weights.get(attn + "b_V")
    if bias is None:
        return
    spread = bias.repeat_interleave(group_size, 0)
    _add(weights, f"{attn}b_O", torch.einsum("hk,hkd->d", spread, weights[attn + "W_O"]))
    weights[attn + "b_V"] = torch.zeros_like(bias)


def _take_norm(weights: Weights, prefix: str) -> tuple[Tensor, Tensor]:
    """Gain and shift of a norm (RMSNorm has no shift), which are set to 1 and 0."""
    gain = weights[prefix + "w"]
    weights[prefix + "w"] = torch.ones_like(gain)
    shift = weights.get(prefix + "b")
    if shift is None:
        return gain, torch.zeros_like(gain)
    weights[prefix + "b"] = torch.zeros_like(shift)
    return gain, shift


def _add(weights: Weights, name: str, value: Tensor) -> None:
    """Add to a bias; one that is not there yet arises only if it is not zero."""
    if name in weights:
        weights[name] = weights[name] + value
    elif bool(value.any()):
        weights[name] = value


def _config_of(weights: Weights, config: DecoderConfig) -> DecoderConfig:
    """The configuration these weights have, with zeros put where a bias arose beside others."""
    attn_bias = any(".attn.b_" in name for name in weights)
    mlp_bias = any(".mlp.b_" in name for name in weights)
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        stream = weights["embed.W_E"].new_zeros(config.d_model)
        if attn_bias:
            for letter in "QKV":
                weight = weights[f"{block}attn.W_{letter}"]
                zeros = weight.new_zeros(weight.shape[0], weight.shape[2])
                weights.setdefault(f"{block}attn.b_{letter}", zeros)
            weights.setdefault(f"{block}attn.b_O", stream)
        if mlp_bias:
            weights.setdefault(f"{block}mlp.b_in", stream.new_zeros(config.d_mlp or 0))
            weights.setdefault(f"{block}mlp.b_out", stream)
    return dataclasses.replace(
        config,
        attn_bias=attn_bias,
        mlp_bias=mlp_bias,
        unembed_bias="unembed.b_U" in weights,
        tied_embeddings="unembed.W_U" not in weights,
    )
