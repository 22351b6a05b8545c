"""Every write to the residual stream, from the activations of one run.

A head writes z_h W_O_h, a neuron its activation times its row of W_out, an output bias itself.
What is held is z and the activations, not the writes: all of them are n_heads times the stream.
They are formed when asked for, and read through a matrix without being formed at all:

    (z W_O) M = z (W_O M)
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.circuits.stream.held import HeldWeight
from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.models.block import Block
    from headstream.models.decoder import Decoder

Stream = Float[Tensor, "example pos d_model"]
Index = Int[Tensor, " example"]


@dataclass(frozen=True, eq=False)
class WriteGroup(ABC):
    """Writes that share a form.

    Attributes:
        labels: of the writes, in the order of the sum.
        layer: their layer; None before the first.
        module: "attn_out" or "mlp_out" within the layer, "" before the first.
    """

    labels: Sequence[str]
    layer: int | None
    module: str

    @abstractmethod
    def form(self, part: slice = slice(None)) -> Float[Tensor, "component example pos d_model"]:
        """The writes themselves, half precision widened to float32."""

    @abstractmethod
    def read(
        self, matrix: Float[Tensor, "rows d_model width"]
    ) -> Float[Tensor, "component example pos width"]:
        """Every write through a matrix, one for all examples or one each, in float64."""

    @abstractmethod
    def at(self, rows: Index, place: Index) -> WriteGroup:
        """The same writes at one position an example: `pos` becomes an axis of length 1."""

    def sums(self) -> tuple[Stream, Stream]:
        """The sum of the writes in float64, and of the moduli of all products they are made of."""
        values = self.form()
        return values.sum(0, dtype=torch.float64), values.abs().sum(0)


@dataclass(frozen=True, eq=False)
class PlainWrite(WriteGroup):
    """One write that is held as it is: embedding, positions, an MLP's output, a bias."""

    value: Stream

    def form(self, part: slice = slice(None)) -> Float[Tensor, "component example pos d_model"]:
        return _wide(self.value)[None][part]

    def read(
        self, matrix: Float[Tensor, "rows d_model width"]
    ) -> Float[Tensor, "component example pos width"]:
        return torch.einsum("epd,edw->epw", self.value.double(), matrix.double())[None]

    def at(self, rows: Index, place: Index) -> PlainWrite:
        return replace(self, value=self.value[rows, place][:, None])


@dataclass(frozen=True, eq=False)
class HeadWrites(WriteGroup):
    """The heads of one layer: z_h W_O_h each."""

    z: Float[Tensor, "example pos head d_head"]
    W_O: HeldWeight

    def form(self, part: slice = slice(None)) -> Float[Tensor, "component example pos d_model"]:
        z, out = self.z[:, :, part], self.W_O.value[part]
        return torch.einsum("ephk,hkd->hepd", _wide(z), _wide(out))

    def read(
        self, matrix: Float[Tensor, "rows d_model width"]
    ) -> Float[Tensor, "component example pos width"]:
        through = torch.einsum("hkd,edw->ehkw", self.W_O.value.double(), matrix.double())
        return torch.einsum("ephk,ehkw->hepw", self.z.double(), through)

    def sums(self) -> tuple[Stream, Stream]:
        # Not |write|: in an ill-conditioned basis of the head large products cancel within it.
        z, out = _wide(self.z).abs(), _wide(self.W_O.value).abs()
        return self.form().sum(0, dtype=torch.float64), z.flatten(2) @ out.flatten(0, 1)

    def at(self, rows: Index, place: Index) -> HeadWrites:
        return replace(self, z=self.z[rows, place][:, None])


@dataclass(frozen=True, eq=False)
class NeuronWrites(WriteGroup):
    """The neurons of one layer: activation times row of W_out each."""

    post: Float[Tensor, "example pos d_mlp"]
    W_out: HeldWeight

    def form(self, part: slice = slice(None)) -> Float[Tensor, "component example pos d_model"]:
        post, rows = _wide(self.post[..., part]), _wide(self.W_out.value[part])
        return post.movedim(-1, 0)[..., None] * rows[:, None, None]

    def read(
        self, matrix: Float[Tensor, "rows d_model width"]
    ) -> Float[Tensor, "component example pos width"]:
        through = torch.einsum("md,edw->emw", self.W_out.value.double(), matrix.double())
        return torch.einsum("epm,emw->mepw", self.post.double(), through)

    def at(self, rows: Index, place: Index) -> NeuronWrites:
        return replace(self, post=self.post[rows, place][:, None])

    def sums(self) -> tuple[Stream, Stream]:
        # [d_mlp, example, pos, d_model] is never formed for this.
        rows = self.W_out.value
        return self.post.double() @ rows.double(), _wide(self.post).abs() @ _wide(rows).abs()


def activations_of(target: str, *, positions: str, has_mlp: bool, per_neuron: bool) -> list[str]:
    """Names of the hooks that `write_groups` needs for the stream `target`."""
    last, stage = stream_place(target)
    names = ["hook_embed"]
    if positions in ("learned", "sinusoidal"):
        names.append("hook_pos_embed")
    for layer in range(last + (stage != "pre")):
        names.append(f"blocks.{layer}.attn.hook_z")
        if has_mlp and not (layer == last and stage == "mid"):
            kind = "mlp.hook_post" if per_neuron else "hook_mlp_out"
            names.append(f"blocks.{layer}.{kind}")
    return names


def write_groups(
    model: Decoder,
    acts: Mapping[str, Tensor],
    target: str,
    *,
    per_neuron: bool,
    visible: Bool[Tensor, "example pos"] | None,
) -> Iterator[WriteGroup]:
    """The writes that make the stream `target`, in the order of the sum.

    Args:
        model: for its output weights, which are held by reference, and biases.
        acts: of the run, `activations_of` the same stream.
        target: hook name of the stream.
        per_neuron: one write a neuron instead of one an MLP.
        visible: which queries may read a key; given, b_V's share becomes a write of its own.
    """
    last, stage = stream_place(target)
    embed = acts["hook_embed"]
    yield PlainWrite(["embed"], None, "", embed)
    if "hook_pos_embed" in acts:
        yield PlainWrite(["pos_embed"], None, "", acts["hook_pos_embed"].expand_as(embed))
    for layer in range(last + (stage != "pre")):
        block = model.blocks[layer]
        yield from _attention_writes(block, layer, acts, visible)
        if block.has_mlp and not (layer == last and stage == "mid"):
            yield from _mlp_writes(block, layer, acts, per_neuron)


def stream_place(target: str) -> tuple[int, str]:
    """Layer and stage ("pre", "mid", "post") of the stream with this hook name."""
    found = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|mid|post)", target)
    assert found is not None
    return int(found[1]), found[2]


def has_visible_key(stream: Stream, attention_mask: Tensor | None) -> Bool[Tensor, "example pos"]:
    """Whether the query at each position may read any key: a real token at or before it."""
    shape = stream.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=stream.device)
    real = attention_mask.to(stream.device).bool().expand(shape)
    return real.cumsum(-1) > 0


def _attention_writes(
    block: Block, layer: int, acts: Mapping[str, Tensor], visible: Tensor | None
) -> Iterator[WriteGroup]:
    attn, place = block.attn, (layer, "attn_out")
    z = acts[f"blocks.{layer}.attn.hook_z"]
    heads = z.shape[2]
    constant: Tensor | None = None
    if visible is not None and attn.b_V is not None:
        bias = _wide(cast(Tensor, attn.b_V)).repeat_interleave(heads // attn.b_V.shape[0], 0)
        z = _wide(z) - visible[..., None, None] * bias
        constant = torch.einsum("hk,hkd->d", bias, _wide(attn.W_O))
    labels = [head_name(layer, head) for head in range(heads)]
    yield HeadWrites(labels, *place, z, HeldWeight(attn.W_O, f"blocks.{layer}.attn.W_O"))
    if visible is not None and constant is not None:
        yield PlainWrite([f"L{layer}bV"], *place, visible[..., None] * constant)
    if attn.b_O is not None:
        yield PlainWrite([f"L{layer}bO"], *place, _spread(attn.b_O, z))


def _mlp_writes(
    block: Block, layer: int, acts: Mapping[str, Tensor], per_neuron: bool
) -> Iterator[WriteGroup]:
    mlp, place = block.mlp, (layer, "mlp_out")
    if per_neuron:
        post = acts[f"blocks.{layer}.mlp.hook_post"]
        labels = [f"L{layer}N{neuron}" for neuron in range(post.shape[-1])]
        yield NeuronWrites(labels, *place, post, HeldWeight(mlp.W_out, f"blocks.{layer}.mlp.W_out"))
        shaped = post
    else:
        out = shaped = acts[f"blocks.{layer}.hook_mlp_out"]
        if mlp.b_out is not None:
            out = _wide(out) - _wide(mlp.b_out)
        yield PlainWrite([f"L{layer}MLP"], *place, out)
    if mlp.b_out is not None:
        yield PlainWrite([f"L{layer}bout"], *place, _spread(mlp.b_out, shaped))


def _spread(bias: Tensor, like: Tensor) -> Stream:
    """A copy of the bias, seen at every example and position."""
    return bias.detach().clone().expand(*like.shape[:2], -1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
