"""Fold what is linear about a norm into the weights that read after it: another model, same output.

    (n * w + b) W + c  =  n (diag(w) W) + (c + b W)          n the normalised stream

After folding, the norm has gain 1 and shift 0, and all that is left of it is the centring
(LayerNorm) and the division by the scale. Weights are then comparable across readers, and
attribution through the final norm needs the scale alone (Elhage et al. 2021; TransformerLens).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from headstream.circuits.centring import (
    Weights,
    centre_readers,
    centre_unembed,
    centre_writers,
    check_parts,
)
from headstream.models.arguments import check_mask
from headstream.models.decoder import build
from headstream.models.errors import ConfigError, ExactnessError, ShapeError, nearest
from headstream.models.given_model import takes_model

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder

Norms = Literal["all", "final"]


@takes_model
def fold(
    model: Decoder,
    *,
    norms: str = "all",
    value_bias: bool = False,
    centre: str | Sequence[str] = (),
    attention_mask: Tensor | None = None,
) -> Decoder:
    """A new model with norm gains and shifts folded into their readers; same log-probabilities.

    The logits are the same too, unless the unembedding is centred. Biases that arise are switched
    on in the new configuration (`attn_bias`, `mlp_bias`, `unembed_bias`), tied embeddings become
    untied, and `model` is left as it is.

    Args:
        model: the decoder.
        norms: "all", or "final" for ln_final into W_U alone. Norm "none" has nothing to fold.
        value_bias: also fold b_V W_O into b_O, so that a head's write has no constant part. Exact
            for a query whose pattern sums to 1, which is one that may read a key. A query with no
            key (left padding) gets a constant that it had not before: logits and stream there
            differ, and no real token reads them. The same holds inside a block that takes weight
            off a row (`cut_edges(..., renormalise=False)`, a hook on the pattern).
        centre: "all", or some of:
            "readers", the mean over the input axis off what reads a folded norm (all of W_Q W_K
            W_V W_in W_gate W_U; with `norms="final"` W_U alone). Logits unchanged. LayerNorm only.
            "writers", the mean over d_model off what is added to the stream (W_E, learned W_pos,
            W_O, b_O, W_out, b_out), whose mean is then 0; sinusoidal vectors are computed and
            keep theirs. Logits unchanged. LayerNorm only.
            "unembed", the mean over the vocabulary off W_U and b_U: logits change by one constant
            a position, to mean 0 over the vocabulary; log-probabilities do not.
        attention_mask: [batch, pos] or [pos], a mask that the model will be run with, 1 on real
            tokens: `value_bias` is refused if it leaves a query without a key.
    Returns:
        A decoder of the same dtype, device, vocabulary and card, named "... (folded)".
    Raises:
        ExactnessError: where folding is not exact: `norms="all"` with shortformer positions, whose
            vectors are added after the norm and would be scaled with it; a shift into a gated MLP,
            whose gate has no bias to take it; readers or writers to be centred with another norm
            than LayerNorm, which does not remove the mean; `value_bias` with a mask that leaves
            a query without a key; a folded weight that the model's dtype cannot hold.
        ConfigError: if `norms` or `centre` is not one of those named.
        ShapeError: if the mask is none.
    Source:
        Elhage et al. 2021; TransformerLens (`ProcessWeights`), which folds and centres the same
        and skips in silence what it cannot centre.
    Example:
        >>> import torch
        >>> from headstream.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=5, n_ctx=9)
        >>> model, tokens = Decoder(config), torch.tensor([[0, 1, 2]])
        >>> folded = fold(model, centre="all")
        >>> bool((folded(tokens).mean(-1).abs() < 1e-6).all())
        True
        >>> change = folded(tokens).log_softmax(-1) - model(tokens).log_softmax(-1)
        >>> bool((change.abs() < 1e-5).all())
        True
    """
    if norms not in get_args(Norms):
        raise ConfigError(
            f"norms must be 'all' or 'final', got {norms!r}",
            hint=nearest(str(norms), get_args(Norms)),
        )
    config = model.config
    parts = check_parts(centre, config.norm)
    # Products are taken in float64 and rounded once.
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    if norms == "all" and config.norm != "none":
        _fold_blocks(weights, config)
    if config.norm != "none":
        _fold_final(weights)
    if value_bias:
        if attention_mask is not None and _has_value_bias(weights):
            _require_keys(attention_mask)
        for layer in range(config.n_layers):
            _fold_value_bias(weights, layer, config.group_size)
    if "readers" in parts:
        centre_readers(weights, config, blocks=norms == "all")
    if "writers" in parts:
        centre_writers(weights, config)
    if "unembed" in parts:
        centre_unembed(weights)
    return _rebuilt(model, weights)


def _rebuilt(model: Decoder, weights: Weights) -> Decoder:
    """A model of these weights with all that `model` carries beside its own."""
    config = _config_of(weights, model.config)
    narrow = {name: tensor.to(model.dtype) for name, tensor in weights.items()}
    for name, tensor in narrow.items():
        if bool((weights[name].isfinite() & ~tensor.isfinite()).any()):
            raise ExactnessError(
                f"{name} is over {torch.finfo(model.dtype).max:.3g} after folding, more than "
                f"{model.dtype} holds",
                hint="fold the model in a wider dtype",
            )
    folded = build(config, narrow)
    folded.to(model.device)
    folded.name = f"{model.name} (folded)"
    folded.vocab = model.vocab
    folded.backend = model.backend
    folded.naive_limit = model.naive_limit
    if model.card is not None:
        # The card's hash is that of the weights before.
        folded.card = {key: item for key, item in model.card.items() if key != "weights_sha256"}
    return folded


def _has_value_bias(weights: Weights) -> bool:
    return any(bool(t.any()) for name, t in weights.items() if name.endswith("attn.b_V"))


def _require_keys(attention_mask: Tensor) -> None:
    """Raise ExactnessError if a query may read no key under this mask."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim not in (1, 2):
        given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise ShapeError(f"attention_mask must be a tensor [batch, pos] or [pos], got {given!r}")
    rows = attention_mask if attention_mask.ndim == 2 else attention_mask[None]
    real = check_mask(rows, rows.shape[0], rows.shape[1], rows.device)
    if real is None:
        return
    blind = real.cumsum(-1) == 0
    if bool(blind.any()):
        row = int(blind.any(-1).nonzero()[0, 0])
        raise ExactnessError(
            f"value_bias=True is not exact with this attention_mask: in row {row} the first "
            f"{int(blind[row].sum())} queries may read no key, so their pattern does not sum to 1 "
            "and b_V adds nothing there",
            hint="pad on the right, or leave value_bias off",
        )


def _fold_blocks(weights: Weights, config: DecoderConfig) -> None:
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
