"""Every write to the residual stream, from the activations of one run.

A head writes z_h W_O_h, a neuron its activation times its row of W_out, an output bias itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.models.block import Block
    from headstream.models.decoder import Decoder

Write = Float[Tensor, "example pos d_model"]


class Writes(NamedTuple):
    """Labels and values of the same order, half precision widened to float32."""

    labels: list[str]
    values: Float[Tensor, "component example pos d_model"]


def collect_writes(
    model: Decoder,
    acts: Mapping[str, Tensor],
    target: str,
    *,
    per_neuron: bool,
    visible: Bool[Tensor, "example pos"] | None,
) -> Writes:
    """The writes that make the stream `target`, in the order of the sum.

    Args:
        model: for its output weights and biases.
        acts: `hook_embed`, `hook_pos_embed`, `hook_z` and, where there is an MLP, `hook_mlp_out`
            or (per neuron) `mlp.hook_post` of the run.
        target: hook name of the stream.
        per_neuron: one write a neuron instead of one an MLP.
        visible: which queries may read a key; given, b_V's share becomes a write of its own.
    """
    labels: list[str] = []
    values: list[Tensor] = []
    wide = torch.promote_types(acts["hook_embed"].dtype, torch.float32)
    for label, value in _each_write(model, acts, target, per_neuron, visible):
        labels.append(label)
        values.append(value.to(wide))
    return Writes(labels, torch.stack(values))


def has_visible_key(stream: Write, attention_mask: Tensor | None) -> Bool[Tensor, "example pos"]:
    """Whether the query at each position may read any key: a real token at or before it."""
    shape = stream.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=stream.device)
    real = attention_mask.to(stream.device).bool().expand(shape)
    return real.cumsum(-1) > 0


def _each_write(
    model: Decoder,
    acts: Mapping[str, Tensor],
    target: str,
    per_neuron: bool,
    visible: Tensor | None,
) -> Iterator[tuple[str, Tensor]]:
    found = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|mid|post)", target)
    assert found is not None
    last, stage = int(found[1]), found[2]
    embed = acts["hook_embed"]
    yield "embed", embed
    if "hook_pos_embed" in acts:
        yield "pos_embed", acts["hook_pos_embed"].expand_as(embed)
    for layer in range(last + (stage != "pre")):
        block = model.blocks[layer]
        yield from _attention_writes(block, layer, acts, visible)
        if block.has_mlp and not (layer == last and stage == "mid"):
            yield from _mlp_writes(block, layer, acts, per_neuron)


def _attention_writes(
    block: Block, layer: int, acts: Mapping[str, Tensor], visible: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    attn = block.attn
    z = _wide(acts[f"blocks.{layer}.attn.hook_z"])
    share: Tensor | None = None
    if visible is not None and attn.b_V is not None:
        bias = _wide(cast(Tensor, attn.b_V))
        bias = bias.repeat_interleave(z.shape[2] // bias.shape[0], 0)
        share = visible[..., None, None] * bias
        z = z - share
    for head in range(z.shape[2]):
        yield head_name(layer, head), z[:, :, head] @ _wide(attn.W_O[head])
    if share is not None:
        yield f"L{layer}bV", torch.einsum("ephk,hkd->epd", share, _wide(attn.W_O))
    if attn.b_O is not None:
        yield f"L{layer}bO", _wide(cast(Tensor, attn.b_O)).expand(*z.shape[:2], -1)


def _mlp_writes(
    block: Block, layer: int, acts: Mapping[str, Tensor], per_neuron: bool
) -> Iterator[tuple[str, Tensor]]:
    mlp = block.mlp
    bias = None if mlp.b_out is None else _wide(mlp.b_out)
    if per_neuron:
        post, rows = _wide(acts[f"blocks.{layer}.mlp.hook_post"]), _wide(mlp.W_out)
        for neuron in range(post.shape[-1]):
            yield f"L{layer}N{neuron}", post[..., neuron, None] * rows[neuron]
        shape = post.shape[:2]
    else:
        out = _wide(acts[f"blocks.{layer}.hook_mlp_out"])
        yield f"L{layer}MLP", out if bias is None else out - bias
        shape = out.shape[:2]
    if bias is not None:
        yield f"L{layer}bout", bias.expand(*shape, -1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
