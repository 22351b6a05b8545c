"""One layer's arithmetic on some positions of many patched runs.

Tensors are [run, pos, ...], a run being one pair with one patch. The formulas are those of
`headstream.models`, without hooks, with the three projections of a layer as one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import attend_naive
from headstream.models.block import Block
from headstream.models.decoder import Decoder
from headstream.models.norms import LayerNorm
from headstream.models.positions import RotaryTables, rotary_tables, rotate

# Up to this many edges, the mask of a suffix is written out: 1 MB of booleans.
MASK_ENTRIES = 2**20

# Rows that go through an MLP together: fewer make its products slower.
MLP_ROWS = 1024


# Activations that torch can write over what they read; functional.gelu has no such argument.
IN_PLACE: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    functional.gelu: torch.ops.aten.gelu_.default,
    functional.relu: torch.relu_,
}


class Scratch:
    """Memory that is used again and again, which is faster than asking for it again and again.

    For one thread at a time.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._kept: dict[str, Tensor] = {}

    def room(self, name: str, *shape: int) -> Tensor:
        """A tensor of that shape, of any content, valid until the same name is asked for again."""
        size = math.prod(shape)
        if name not in self._kept or len(self._kept[name]) < size:
            self._kept[name] = self._like.new_empty(size)
        return self._kept[name][:size].view(shape)


@dataclass(frozen=True)
class Layer:
    """A block, its projections side by side, and what its positions need.

    Attributes:
        index: of the layer.
        is_last: whether only the positions that are read go on from here.
        qkv: [d_model, (head + 2 kv_head) d_head], `qkv_bias` likewise or None.
        rotary: cos and sin of every position, or None.
        shortformer: vectors added to the inputs of q and k [pos, d_model], or None.
        backend: of the attention.
        scratch: memory for what is not kept, one for all layers.
    """

    index: int
    is_last: bool
    block: Block
    n_heads: int
    kv_heads: int
    qkv: Tensor
    qkv_bias: Tensor | None
    rotary: RotaryTables | None
    shortformer: Tensor | None
    backend: str
    scratch: Scratch

    @property
    def scale(self) -> float:
        return self.block.attn.scale

    @property
    def group(self) -> int:
        return self.n_heads // self.kv_heads

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        return self.block.attn.W_O

    def projected(
        self, resid: Float[Tensor, "run pos d_model"], at: Tensor, what: str = "qkv"
    ) -> tuple[Any, Any, Any]:
        """q, k and v (None where not asked for) at the positions `at`, [pos] or [run, pos]."""
        x = normed(self.block.ln1, resid)
        d_head = self.W_O.shape[1]
        widths = {"q": self.n_heads, "k": self.kv_heads, "v": self.kv_heads}
        ends, total = {}, 0
        for name, heads in widths.items():
            ends[name] = (total, total + heads * d_head)
            total += heads * d_head
        found: dict[str, Tensor | None] = dict.fromkeys("qkv")
        if self.shortformer is None:
            first, last = ends[what[0]][0], ends[what[-1]][1]
            joint = _linear(x, self.qkv[:, first:last], _part(self.qkv_bias, first, last))
            for name in what:
                start, end = ends[name]
                found[name] = joint[..., start - first : end - first]
        else:
            addressed = x + self.shortformer[at]
            for name in what:
                start, end = ends[name]
                reads = x if name == "v" else addressed
                found[name] = _linear(
                    reads, self.qkv[:, start:end], _part(self.qkv_bias, start, end)
                )
        for name, value in found.items():
            if value is not None:
                value = value.unflatten(-1, (widths[name], d_head))
                found[name] = value if name == "v" else self.turned(value, at)
        return found["q"], found["k"], found["v"]

    def turned(self, x: Float[Tensor, "run pos head d_head"], at: Tensor) -> Tensor:
        """Rotated to the positions `at`, [pos] or [run, pos], where positions are rotary."""
        if self.rotary is None:
            return x
        cos, sin = (table[0, at].expand(len(x), -1, -1, -1) for table in self.rotary)
        return rotate(x, (cos, sin))

    def turned_at(
        self, x: Float[Tensor, "run head d_head"], at: Int[Tensor, " run"]
    ) -> Float[Tensor, "run head d_head"]:
        """Each run's one position, rotated to where it stands."""
        return self.turned(x[:, None], at[:, None])[:, 0]

    def mixed(self, z: Float[Tensor, "run pos head d_head"]) -> Float[Tensor, "run pos d_model"]:
        """What attention writes."""
        return _linear(z.flatten(2), self.W_O.flatten(0, 1), self.block.attn.b_O)

    def attended_(
        self, resid: Float[Tensor, "run pos d_model"], z: Float[Tensor, "run pos head d_head"]
    ) -> Float[Tensor, "run pos d_model"]:
        """The stream after attention has written, in the memory of the stream before it."""
        if self.block.attn.b_O is not None:
            resid.add_(self.block.attn.b_O)
        rows = resid.view(-1, resid.shape[-1])
        torch.addmm(rows, z.reshape(len(rows), -1), self.W_O.flatten(0, 1), out=rows)
        return resid

    def after(self, mid: Float[Tensor, "run pos d_model"]) -> Float[Tensor, "run pos d_model"]:
        """The layer's output from the stream after its attention."""
        return self.after_(mid.clone(memory_format=torch.contiguous_format))

    def after_(self, mid: Float[Tensor, "run pos d_model"]) -> Float[Tensor, "run pos d_model"]:
        """The same in the memory of the stream after attention."""
        if not self.block.has_mlp:
            return mid
        mlp = self.block.mlp
        # Some rows at a time, whose neurons need not be kept.
        for rows in mid.view(-1, 1, mid.shape[-1]).split(MLP_ROWS):
            post = self.neurons(rows, self.scratch)
            if mlp.b_out is not None:
                rows.add_(mlp.b_out)
            torch.addmm(rows[:, 0], post[:, 0], mlp.W_out, out=rows[:, 0])
        return mid

    def neurons(
        self, mid: Float[Tensor, "run pos d_model"], scratch: Scratch | None = None
    ) -> Float[Tensor, "run pos d_mlp"]:
        """The MLP's neurons after the activation; in `scratch` they last until the next call."""
        mlp = self.block.mlp
        x = normed(self.block.ln2, mid)
        room = (
            None if scratch is None else scratch.room("neurons", *mid.shape[:2], mlp.W_in.shape[1])
        )
        linear = _linear(x, mlp.W_in, mlp.b_in, room)
        if mlp.gated:
            return mlp.act(x @ mlp.W_gate).mul_(linear)
        return _activated(mlp.act, linear) if scratch else mlp.act(linear)

    def activated(self, read: Float[Tensor, "*row read"]) -> Float[Tensor, "*row d_mlp"]:
        """The neurons from what W_in (and beside it, W_gate) read; `read` is overwritten."""
        mlp = self.block.mlp
        if not mlp.gated:
            return _activated(mlp.act, read)
        linear, gate = read.chunk(2, -1)
        return mlp.act(gate) * linear

    def written(
        self, mid: Float[Tensor, "run pos d_model"], post: Float[Tensor, "run pos d_mlp"]
    ) -> Float[Tensor, "run pos d_model"]:
        """The stream after the MLP has written what these neurons say."""
        mlp = self.block.mlp
        return _linear(post, mlp.W_out, mlp.b_out).add_(mid)

    def attend(
        self,
        q: Float[Tensor, "run query head d_head"],
        k: Float[Tensor, "run key kv_head d_head"],
        v: Float[Tensor, "run key kv_head d_value"],
    ) -> Float[Tensor, "run query head d_value"]:
        """Causal attention of the last `query` of the `key` positions."""
        if self.backend == "naive":
            return attend_naive(q, k, v, scale=self.scale)[0]
        n_queries, n_keys = q.shape[1], k.shape[1]
        half = q.dtype in (torch.float16, torch.bfloat16)
        if n_queries == n_keys or half or n_queries * n_keys > MASK_ENTRIES:
            return attend_flash(q, k, v, scale=self.scale)[0]
        # One call with a small mask costs a third of two calls and a merge.
        own = torch.arange(n_keys - n_queries, n_keys, device=q.device)
        allowed = torch.arange(n_keys, device=q.device) <= own[:, None]
        return self.attend_where(q, k, v, allowed)

    def attend_where(
        self,
        q: Float[Tensor, "run query head d_head"],
        k: Float[Tensor, "run key kv_head d_head"],
        v: Float[Tensor, "run key kv_head d_value"],
        allowed: Tensor | None,
    ) -> Float[Tensor, "run query head d_value"]:
        """Attention where `allowed`, boolean and broadcast to [run, head, query, key]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        query, key, value = (x.to(wide).transpose(1, 2) for x in (q, k, v))
        z = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            scale=self.scale,
            enable_gqa=self.group > 1,
        )
        return z.transpose(1, 2).to(v.dtype)


def layers_of(model: Decoder, first: int, length: int, backend: str | None) -> list[Layer | None]:
    """Every layer from `first` on; None before."""
    config = model.config
    positions = torch.arange(length, device=model.device)
    rotary = None
    if config.positions == "rotary":
        rotary = rotary_tables(positions[None], config.d_head, config.rotary_base, model.dtype)
    shortformer = model.pos_embed(positions[None])[0] if config.positions == "shortformer" else None
    layers: list[Layer | None] = [None] * first
    scratch = Scratch(model.W_E)
    for index in range(first, config.n_layers):
        block = model.blocks[index]
        attn = block.attn
        weights = [w.transpose(0, 1).flatten(1) for w in (attn.W_Q, attn.W_K, attn.W_V)]
        biases = [b.flatten() for b in (attn.b_Q, attn.b_K, attn.b_V) if b is not None]
        layers.append(
            Layer(
                index,
                index == config.n_layers - 1,
                block,
                config.n_heads,
                config.kv_heads,
                torch.cat(weights, 1),
                torch.cat(biases) if biases else None,
                rotary,
                shortformer,
                backend or model.backend,
                scratch,
            )
        )
    return layers


def normed(norm: object, x: Float[Tensor, "run pos d_model"]) -> Float[Tensor, "run pos d_model"]:
    """The norm, for LayerNorm by torch's one pass where that is the same to rounding."""
    if isinstance(norm, LayerNorm) and x.dtype in (torch.float32, torch.float64):
        return functional.layer_norm(x, x.shape[-1:], norm.w, norm.b, norm.eps)
    out: Tensor = norm(x)  # type: ignore[operator]
    return out


def _activated(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The activation of x, in its memory where torch does that."""
    in_place = IN_PLACE.get(act)
    return act(x) if in_place is None else in_place(x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> Tensor:
    """x W (+ b) as one product of matrices, in `room` where that is given."""
    rows = x.reshape(-1, x.shape[-1])
    out = None if room is None else room.view(len(rows), -1)
    if bias is None:
        out = torch.mm(rows, weight, out=out)
    else:
        out = torch.addmm(bias, rows, weight, out=out)
    return out.view(*x.shape[:-1], weight.shape[1])


def _part(bias: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if bias is None else bias[start:end]
