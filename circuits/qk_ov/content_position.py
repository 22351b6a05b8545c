"""The scores of a head split by content and position, exactly.

With the norm's scale frozen at its value in the run, the input of a query or key is a sum of parts,
each read by W_Q or W_K:

    q_i = content_i W_Q + position_i W_Q + (b_ln W_Q + b_Q)          and k_j alike
    s_ij = scale * sum over the parts a of q_i and b of k_j of a . b

`position` is the position vector as the head reads it: learned and sinusoidal vectors centred where
the norm centres, divided by its scale and multiplied by its gain; shortformer vectors, which are
added after the norm, as they are. `content` is everything else in the stream: in layer 0 the
token's embedding, later also what earlier layers wrote, which may itself have come from positions.
`bias` is what every query or key has in common: the norm's shift and b_Q or b_K.

The four terms of content and position are those that Transformer-XL starts from (Dai et al. 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.qk_ov.score_split import ScoreSplit, checked_split, run_scores
from headstream.circuits.qk_ov.weights import check_head
from headstream.models.arguments import check_mask, token_positions
from headstream.models.given_model import takes_model
from headstream.models.positions import RotaryTables, rotary_tables, rotate

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

_VECTORS = {
    "learned": "hook_pos_embed",
    "sinusoidal": "hook_pos_embed",
    "shortformer": "hook_shortformer_pos",
}
Inputs = dict[str, Float[Tensor, "batch pos d_model"]]


@takes_model
def score_terms(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    head: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> ScoreSplit:
    """Run the model and split a head's scores into content, position and bias terms.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        layer, head: which query head.
        attention_mask, position_ids: as for the model.
    Returns:
        Terms over query_part x key_part, each of "content", "position" (learned, sinusoidal and
        shortformer positions) and "bias" (models with attention biases or LayerNorm). With rotary
        positions all parts are turned: there is no position part, `score_frequencies` splits those.
    Raises:
        ShapeError: if layer or head is out of range, or the terms would take more than 8 GiB.
        HookError: if the run is edited: by a hook that changes an activation, by edges cut or a
            pattern frozen, in this layer or before it.
        ExactnessError: if the terms do not sum to the score within the bound.
    Note:
        The bound is what rounding in the model's dtype can do: its epsilon times
        2 (sqrt(d_model) + sqrt(d_head) + 4) times the largest sum of the moduli of all products.
    """
    config = model.config
    layer, head = check_head(config, layer, head)
    names = [f"blocks.{layer}.hook_resid_pre"]
    if config.norm != "none":
        names = [f"blocks.{layer}.ln1.{what}" for what in ("hook_normalized", "hook_scale")]
    if config.positions in _VECTORS:
        names.append(_VECTORS[config.positions])
    shifted = config.attn_bias or config.norm == "layernorm"
    n_parts = 1 + (config.positions in _VECTORS) + shifted
    acts, score = run_scores(
        model,
        tokens,
        layer,
        head,
        names,
        n_terms=n_parts**2,
        attention_mask=attention_mask,
        position_ids=position_ids,
    )
    inputs = _inputs(model, layer, [acts[name].double() for name in names])
    tables = _tables(model, score, attention_mask, position_ids)
    attn, kv_head = model.blocks[layer].attn, head // config.group_size
    shift = _constants(model, layer) if shifted else None
    query, q_size = _side(inputs, shift, attn.W_Q[head], _one(attn.b_Q, head), tables)
    key, k_size = _side(inputs, shift, attn.W_K[kv_head], _one(attn.b_K, kv_head), tables)
    labels = [*inputs, *(["bias"] if shifted else [])]
    terms = config.scale * torch.einsum("abik,cbjk->acbij", query, key)
    return checked_split(
        model,
        layer,
        head,
        terms,
        score,
        size=float(config.scale * (q_size @ k_size.mT).max()),
        labels={"query_part": labels, "key_part": labels},
        attention_mask=attention_mask,
    )


def _inputs(model: Decoder, layer: int, acts: list[Tensor]) -> Inputs:
    """What the heads of a layer read, as parts that sum to it, the norm's shift apart."""
    config = model.config
    norm = model.blocks[layer].ln1
    normed = config.norm != "none"
    gain = cast(Tensor, norm.w).detach().double() if normed else 1.0
    content = acts[0] * gain
    if config.positions not in _VECTORS:
        return {"content": content}
    place = acts[-1].expand_as(content)
    if config.positions == "shortformer":
        return {"content": content, "position": place}
    if config.norm == "layernorm":
        place = place - place.mean(-1, keepdim=True)
    if normed:
        place = place / acts[1] * gain
    return {"content": content - place, "position": place}


def _constants(model: Decoder, layer: int) -> Float[Tensor, " d_model"]:
    """The norm's shift, zero where it has none."""
    shift = getattr(model.blocks[layer].ln1, "b", None)
    if shift is None:
        return torch.zeros(model.config.d_model, dtype=torch.float64, device=model.device)
    return shift.detach().double()


def _one(bias: Tensor | None, index: int) -> Tensor | None:
    return None if bias is None else bias[index].detach().double()


def _side(
    inputs: Mapping[str, Tensor],
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    tables: RotaryTables | None,
) -> tuple[Float[Tensor, "part batch pos d_head"], Float[Tensor, "batch pos d_head"]]:
    """Queries (or keys) by part, and the sum of the moduli that went into each channel."""
    weight = weight.detach().double()
    parts = [value @ weight for value in inputs.values()]
    size = torch.stack([value.abs() for value in inputs.values()]).sum(0) @ weight.abs()
    if shift is not None:
        row = shift @ weight
        size = size + shift.abs() @ weight.abs()
        if bias is not None:
            row, size = row + bias, size + bias.abs()
        parts.append(row.expand_as(parts[0]))
    if tables is not None:
        # A turned channel holds a part of both channels of its pair.
        first, second = size.chunk(2, -1)
        size = torch.cat((first + second, first + second), -1)
        parts = [rotate(part[:, :, None], tables)[:, :, 0] for part in parts]
    return torch.stack(parts), size


def _tables(
    model: Decoder, score: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> RotaryTables | None:
    """The rotations of the run, with the values that the model's dtype gives them."""
    config = model.config
    if config.positions != "rotary":
        return None
    batch, length = score.shape[:2]
    places = token_positions(
        position_ids,
        check_mask(attention_mask, batch, length, model.device),
        batch=batch,
        length=length,
        kv_cache=None,
        config=config,
        device=model.device,
    )
    cos, sin = rotary_tables(places, config.d_head, config.rotary_base, model.dtype)
    return cos.double(), sin.double()
