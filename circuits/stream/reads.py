"""What a head reads: its query, key and value as sums over the writes before it.

    x = (c(stream) / scale) * w + b         c takes the mean off under LayerNorm
    q = x W_Q + b_Q  =  sum over writes of (c(write) / scale * w) W_Q   +   b W_Q   +   b_Q

Exact with the norm's scale frozen at its value in the run; k and v likewise, through the key/value
head. What the frozen scale hides is a number too: `HeadReads.remainder`. With positions rotary the
shares are those before the rotation; since a rotation is linear a score is still a sum, over pairs
of a write that the query reads and one that the key reads (`HeadReads.score_terms`):

    s[i, j] = sum over a, b of  config.scale * (R(i) q_a[i]) . (R(j) k_b[j])

Every share belongs to a position of the stream: k at j is what the writes at j gave. Which tokens
an earlier head fetched it from is `source_reads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.circuits.selection import indices
from headstream.circuits.stream.attribution import TokenIds, row_positions
from headstream.circuits.stream.decomposition import require_room
from headstream.circuits.stream.shares import ShareReader
from headstream.circuits.stream.writes import (
    Stream,
    WriteGroup,
    activations_of,
    has_visible_key,
    write_groups,
)
from headstream.circuits.undisturbed import undisturbed
from headstream.models.errors import ConfigError, ShapeError, nearest
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.names import head_name
from headstream.models.positions import RotaryTables, count_positions, rotary_tables, rotate

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

READS = ("q", "k", "v")
HOW = ("without", "alone")


@dataclass(frozen=True, eq=False, repr=False)
class HeadReads:
    """Shares of a head's query, key and value, each summing to the real one; float64.

    Attributes:
        q, k, v: [write, example, pos, d_head], before rotation. Rows as in `decompose_residual`,
            then what does not come from the stream: `ln1.b`, the norm's shift; `shortformer_pos`
            (q and k only); `b_Q`, `b_K`, `b_V`.
        layer, head, kv_head: whose they are; the keys and values are the key/value head's.
        scale: what the norm divided by in the run, [example, pos]; 1 without a norm.
        largest_error, bound: of the sums against the run, and what they were held to.
        norm: what was done about the norm's scale, in words.
        The rest is what the two methods need: how scores are scaled and rotated, keys that may be
        read, and the writes, unformed.
    """

    q: xr.DataArray
    k: xr.DataArray
    v: xr.DataArray
    layer: int
    head: int
    kv_head: int
    scale: xr.DataArray
    largest_error: float
    bound: float
    norm: str
    attn_scale: float
    tables: RotaryTables | None
    readable: Bool[Tensor, "example pos"]
    groups: tuple[WriteGroup, ...]
    stream: Stream
    centred: bool
    eps: float | None

    def __repr__(self) -> str:
        size = self.q.sizes
        return (
            f"<what {head_name(self.layer, self.head)} reads: q, k and v from {size['write']} "
            f"writes, {size['example']} examples x {size['pos']} positions; largest error "
            f"{self.largest_error:.1e}, bound {self.bound:.1e}>"
        )

    def score_terms(self, query_pos: TokenIds, key_pos: TokenIds) -> xr.DataArray:
        """One score by what the query read and what the key read.

        Args:
            query_pos, key_pos: a position, or one for each example; negative from the end.
        Returns:
            [query_write, key_write, example] float64, rotated where positions are rotary and
            scaled by `config.scale`. All of it sums to the score before the softmax.
        Raises:
            ShapeError: for a position that does not exist, or a key that the query may not read.
        """
        n, size = self.q.sizes["example"], self.q.sizes["pos"]
        asking = row_positions(query_pos, n, size, "query_pos")
        asked = row_positions(key_pos, n, size, "key_pos")
        readable = self.readable.cpu().numpy()[np.arange(n), asked]
        hidden = np.flatnonzero(~readable | (asked > asking))
        if hidden.size:
            row = int(hidden[0])
            why = "comes after it" if asked[row] > asking[row] else "is masked"
            raise ShapeError(
                f"in example {row} the query at {asking[row]} may not read the key at "
                f"{asked[row]}: it {why}"
            )
        query, key = self._turned(self.q, asking), self._turned(self.k, asked)
        terms = self.attn_scale * torch.einsum("eak,ebk->abe", query, key)
        return xr.DataArray(
            terms.numpy(),
            dims=("query_write", "key_write", "example"),
            coords={
                "query_write": self.q["write"].values,
                "key_write": self.k["write"].values,
                "example": np.arange(n),
                "query_pos": ("example", asking),
                "key_pos": ("example", asked),
            },
            name="score",
            attrs={"norm": self.norm},
        )

    def remainder(self, of: str, how: str = "without") -> xr.Dataset:
        """What the frozen scale hides: each write's share against the norm taken again.

        "without": the effect of a write is the real q minus the q of the stream without it, its
        norm recomputed. "alone": the effect is what is read of that write if it is all there is.

        Args:
            of: "q", "k" or "v".
            how: "without" or "alone".
        Returns:
            Euclidean norms [write, example, pos]: `share`, `effect`, and `remainder` of their
            difference; all remainders are 0 without a norm. Rows that the norm's scale does not
            touch are left out.
        Raises:
            ConfigError: for another `of` or `how`.
        """
        for name, given, known in (("of", of, READS), ("how", how, HOW)):
            if given not in known:
                raise ConfigError(
                    f"{name} must be one of {known}, got {given!r}", hint=nearest(str(given), known)
                )
        shares = torch.tensor({"q": self.q, "k": self.k, "v": self.v}[of].values)
        labels = [label for group in self.groups for label in group.labels]
        shares = shares[: len(labels)]
        effect = shares
        if self.eps is not None:
            own = torch.cat([self._scales(group, how) for group in self.groups]).cpu()
            ratio = (torch.tensor(self.scale.values) / own)[..., None]
            total = shares.sum(0)
            effect = total - (total - shares) * ratio if how == "without" else shares * ratio
        dims = ("write", "example", "pos")
        found = {"share": shares, "effect": effect, "remainder": effect - shares}
        coords = {name: self.q[name] for name in ("example", "pos")} | {"write": labels}
        return xr.Dataset(
            {name: (dims, value.norm(dim=-1).numpy()) for name, value in found.items()},
            coords=coords,
            attrs={"of": of, "how": how, "norm": self.norm},
        )

    def _scales(self, group: WriteGroup, how: str) -> Float[Tensor, "write example pos"]:
        """The norm's scale of the stream without each write, or of each write alone."""
        assert self.eps is not None
        parts = []
        for start in range(0, len(group.labels), 64):
            value = group.form(slice(start, start + 64)).double()
            if how == "without":
                value = self.stream.double() - value
            if self.centred:
                value = value - value.mean(-1, keepdim=True)
            parts.append((value.square().mean(-1) + self.eps).sqrt())
        return torch.cat(parts)

    def _turned(self, shares: xr.DataArray, place: np.ndarray) -> Float[Tensor, "e write d_head"]:
        """The shares [example, write, d_head] at one position each, rotated as the run does."""
        rows = np.arange(len(place))
        value = torch.tensor(shares.values[:, rows, place]).transpose(0, 1)
        if self.tables is None:
            return value
        index = torch.tensor(place)
        cos, sin = (table.cpu().double()[rows, index][:, None] for table in self.tables)
        turned: Tensor = rotate(value[:, None], (cos, sin))
        return turned[:, 0]


@takes_model
def residual_reads(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    head: int,
    *,
    per_neuron: bool = False,
    split_value_bias: bool = False,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> HeadReads:
    """What the query, key and value of a head take from each earlier write.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        layer, head: which query head.
        per_neuron, split_value_bias: as in `decompose_residual`.
        attention_mask: [example, pos], 1 on real tokens.
        backend: as for the model.
    Raises:
        ShapeError: for a layer or head that does not exist, or over 8 GiB.
        ExactnessError: if shares do not sum to the real q, k or v within the bound.
        HookError: if the run is edited, as in `decompose_residual`.
    Note:
        The norm's scale is held at its value in the run. Rotary: shares are before the rotation.
        The bound is that of `decompose_residual`, through the head's matrix.
    Source:
        Elhage et al. 2021 (composition), with the norm kept in instead of folded away.
    """
    config = model.config
    (layer,) = indices([layer], "layer", config.n_layers)
    (head,) = indices([head], "head", config.n_heads)
    target, stem = f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.attn.hook_"
    names = activations_of(
        target, positions=config.positions, has_mlp=config.has_mlp, per_neuron=per_neuron
    )
    names += [target, *(stem + letter for letter in READS)]
    if config.norm != "none":
        names.append(f"blocks.{layer}.ln1.hook_scale")
    if config.positions == "shortformer":
        names.append("hook_shortformer_pos")
    with torch.no_grad():
        with undisturbed(model, "say what a head reads"):
            _, acts = capture(
                model,
                tokens,
                names,
                attention_mask=attention_mask,
                backend=backend,
                stop_at_layer=layer + 1,
            )
        stream = acts[target]
        real = torch.ones(stream.shape[:2], dtype=torch.bool, device=stream.device)
        if attention_mask is not None:
            real = attention_mask.to(stream.device).bool().expand_as(real)
        seen = has_visible_key(stream, attention_mask) if split_value_bias else None
        groups = tuple(write_groups(model, acts, target, per_neuron=per_neuron, visible=seen))
        count = sum(len(group.labels) for group in groups)
        require_room(3 * count * real.numel() * config.d_head * 8, f"reads of {count} writes")
        reader = ShareReader(model, layer, groups, stream, acts)
        kv_head = head // config.group_size
        q, k, v = shares = [
            reader.shares(letter, head if letter == "q" else kv_head, acts[stem + letter])
            for letter in READS
        ]
        tables = None
        if config.positions == "rotary":
            none_before = torch.zeros(len(real), dtype=torch.long, device=real.device)
            places = count_positions(real, none_before)
            tables = rotary_tables(places, config.d_head, config.rotary_base, model.dtype)
        return HeadReads(
            q=_labelled(q.values, q.labels),
            k=_labelled(k.values, k.labels),
            v=_labelled(v.values, v.labels),
            layer=layer,
            head=head,
            kv_head=kv_head,
            scale=_labelled(reader.scale[..., 0]),
            largest_error=max(share.error for share in shares),
            bound=max(share.bound for share in shares),
            norm="no norm"
            if config.norm == "none"
            else f"scale of blocks.{layer}.ln1 held fixed at its value in the run",
            attn_scale=model.blocks[layer].attn.scale,
            tables=tables,
            readable=real,
            groups=groups,
            stream=stream,
            centred=reader.centred,
            eps=None if config.norm == "none" else config.eps,
        )


def _labelled(values: Tensor, writes: Sequence[str] | None = None) -> xr.DataArray:
    dims: tuple[str, ...] = ("example", "pos")
    shape = values.shape[-3:-1] if writes is not None else values.shape
    coords: dict[str, object] = {"example": np.arange(shape[0]), "pos": np.arange(shape[1])}
    if writes is not None:
        coords["write"] = list(writes)
        dims = ("write", *dims, "d_head")
    return xr.DataArray(values.cpu().numpy(), dims=dims, coords=coords)
