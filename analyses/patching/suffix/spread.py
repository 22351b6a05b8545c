"""How a change at one position spreads: the layers after a patched site.

    layer l      the site: its output differs at position p only              (`entry`)
    layer l+1    p alone has a new query, key and value; later rows see one key change
    from l+2 on  every position from p on differs: the suffix is recomputed, and reads the
                 unpatched run's keys and values before it
    last layer   keys and values on the suffix, the rest only where the metric reads

The one-key update of row i > p, with the unpatched row's z and lse and old key's weight w:

    z without the old key  = (z - w v_p) / (1 - w)        lse without = lse + log(1 - w)
    new key's weight       b = sigmoid(new score - lse without)
    new row                (1 - b) (z without) + b (new v)

1 - w loses digits where the old key held most of the row (1e-4 at w = 0.99 in float32): rows with
w > 1/2 are recomputed without that key instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstream.analyses.patching.suffix.layers import Layer, normed
from headstream.analyses.patching.suffix.state import BaseRun
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import widen

# Scores of a head that are formed together where a changed position reads the ones before it.
OWN_SCORES = 2**16

# The largest weight of a key that is taken out by subtraction.
HEAVY = 0.5


@dataclass(frozen=True)
class Band:
    """Pairs at a place each, run together, with the same units of a site patched at each.

    Attributes:
        example, at: the row and the patched position of each pair (the first one of whole rows).
        read: the position where the metric reads.
        start, end: the positions that are run; every `at` and `read` lies in [start, end).
    """

    example: Int[Tensor, " pair"]
    at: Int[Tensor, " pair"]
    read: Int[Tensor, " pair"]
    start: int
    end: int

    def part(self, which: slice) -> Band:
        """Some of the pairs."""
        return Band(self.example[which], self.at[which], self.read[which], self.start, self.end)

    @property
    def span(self) -> Int[Tensor, " pos"]:
        return torch.arange(self.start, self.end, device=self.at.device)

    def rows(self, layer: Layer) -> Int[Tensor, "pair row"]:
        """The positions whose output matters: in the last layer only those that are read."""
        return self.read[:, None] if layer.is_last else self.span.expand(len(self.at), -1)

    def of(self, kept: Tensor | None) -> Tensor:
        """An activation of the unpatched run, by pair: [pair, pos, ...]."""
        assert kept is not None, "the engine records every layer that a patch reaches"
        return kept.expand(len(self.at), *kept.shape[1:]) if len(kept) == 1 else kept[self.example]

    def at_rows(self, kept: Tensor | None, rows: Int[Tensor, "pair row"]) -> Tensor:
        """The same at some positions: [pair, row, ...]."""
        assert kept is not None, "the engine records every layer that a patch reaches"
        return kept[self.example[:, None], rows]

    def at_place(self, kept: Tensor | None) -> Tensor:
        """The same at the patched position: [pair, ...]."""
        return self.at_rows(kept, self.at[:, None])[:, 0]


@dataclass(frozen=True)
class Changed:
    """Positions whose `resid_pre` is new in a layer, and what the layer makes of them.

    Attributes:
        resid: [pair, unit, d_model].
        k, v: [pair, unit, kv_head, d_head], k rotated where positions are.
        z: of the position's own row, [pair, unit, head, d_head].
    """

    resid: Tensor
    k: Tensor
    v: Tensor
    z: Tensor

    def part(self, pairs: slice, units: slice) -> Changed:
        return Changed(*(x[pairs, units] for x in (self.resid, self.k, self.v, self.z)))


@dataclass(frozen=True)
class Spread:
    """The layers of a model and the unpatched run that patches start from."""

    layers: list[Layer | None]
    base: BaseRun

    def layer(self, index: int) -> Layer:
        layer = self.layers[index]
        assert layer is not None, "a patch never reaches back before its layer"
        return layer

    def changed(self, index: int, resid: Float[Tensor, "pair unit d_model"], band: Band) -> Changed:
        """What a layer makes of a new `resid_pre` at `at`; pairs need not be at close places."""
        layer, units = self.layer(index), resid.shape[1]
        found = []
        for some in torch.arange(len(band.at)).split(max(1, OWN_SCORES // (units * band.end))):
            part = band.part(slice(int(some[0]), int(some[-1]) + 1))
            new = resid[some[0] : some[-1] + 1]
            place = part.at.repeat_interleave(units)[:, None]
            projected = layer.projected(new.flatten(0, 1)[:, None], place)
            q, k, v = (x[:, 0].unflatten(0, new.shape[:2]) for x in projected)
            found.append((k, v, self._own_row(layer, q, k, v, part)))
        return Changed(resid, *(torch.cat(kind) for kind in zip(*found)))

    def mid_from_place(
        self, index: int, new: Changed, band: Band
    ) -> Float[Tensor, "pair unit d_model"]:
        """The stream after the last attention where it is read, when `resid_pre` of a layer
        differs at `at`.

        What follows, the last MLP and the unembedding, meets so few rows a band that the caller
        does it for many bands at once.
        """
        layer = self.layer(index)
        mid = self._one_key(layer, new, band)
        if layer.is_last:
            return mid[:, :, 0]
        out = layer.after_(mid.flatten(0, 1)).unflatten(0, mid.shape[:2])
        return self.mid_from_rows(index + 1, out, band)

    def mid_from_rows(
        self, index: int, resid: Float[Tensor, "pair unit row d_model"], band: Band
    ) -> Float[Tensor, "pair unit d_model"]:
        """The same when it differs anywhere in [start, end); `resid` is overwritten."""
        pairs, units = resid.shape[:2]
        stream = resid.flatten(0, 1).contiguous()
        for layer in map(self.layer, range(index, len(self.layers) - 1)):
            q, k, v = layer.projected(stream, band.span)
            keys, values = self._with_prefix(layer, k, v, band, units)
            mid = layer.attended_(stream, layer.attend(q, keys, values))
            stream = layer.after_(mid)
        out = self._read_row(self.layer(len(self.layers) - 1), stream, band, units)
        found: Tensor = out.unflatten(0, (pairs, units))
        return found

    def from_rows(
        self, index: int, resid: Float[Tensor, "pair unit row d_model"], band: Band
    ) -> Float[Tensor, "pair unit d_model"]:
        """The last stream where it is read, when `resid_pre` differs anywhere in [start, end)."""
        mid = self.mid_from_rows(index, resid, band)
        return self.layer(len(self.layers) - 1).after(mid)

    def _read_row(
        self, layer: Layer, stream: Float[Tensor, "run pos d_model"], band: Band, units: int
    ) -> Float[Tensor, "run d_model"]:
        """The stream after the last layer's attention at `read`.

        One query needs no keys and values of its own suffix: with x the normalised stream, its
        scores are q . (x_j W_K + b_K) = (W_K q) . x_j + q . b_K and what it reads is
        sum_j A_j (x_j W_V + b_V) = (sum_j A_j x_j) W_V + (sum_j A_j) b_V. Rotated keys are not
        linear in x alone, and take the way of the other layers.
        """
        read = band.read.repeat_interleave(units)
        runs = torch.arange(len(stream), device=read.device)
        own = stream[runs, read - band.start][:, None]
        q, _, _ = layer.projected(own, read[:, None], "q")
        later = None
        if bool((band.read < band.end - 1).any()):
            later = torch.arange(band.end, device=read.device) > read[:, None]
        if layer.rotary is None:
            z = self._unprojected(layer, stream, q[:, 0], later, band, units)
        else:
            _, k, v = layer.projected(stream, band.span, "kv")
            keys, values = self._with_prefix(layer, k, v, band, units)
            allowed = None if later is None else ~later[:, None, None]
            z = layer.attend_where(q, keys, values, allowed)
        return layer.attended_(own, z)[:, 0]

    def _unprojected(
        self,
        layer: Layer,
        stream: Float[Tensor, "run pos d_model"],
        q: Float[Tensor, "run head d_head"],
        later: Tensor | None,
        band: Band,
        units: int,
    ) -> Float[Tensor, "run 1 head d_head"]:
        """z of one query a run, over the unpatched prefix and its own suffix."""
        attn, index = layer.block.attn, layer.index
        x = widen(normed(layer.block.ln1, stream))
        addressed = x if layer.shortformer is None else x + layer.shortformer[band.span]
        query = widen(q).unflatten(1, (layer.kv_heads, -1))
        asked = torch.einsum("rkxd,ked->rkxe", query, widen(attn.W_K)).flatten(1, 2)
        suffix = (asked @ addressed.mT).unflatten(1, query.shape[1:3])
        if attn.b_K is not None:
            suffix = suffix + torch.einsum("rkxd,kd->rkx", query, widen(attn.b_K))[..., None]
        by_pair = query.unflatten(0, (-1, units))
        keys, values = (
            widen(band.of(kept[index])[:, : band.start]) for kept in (self.base.k, self.base.v)
        )
        prefix = torch.einsum("pukxd,pjkd->pukxj", by_pair, keys).flatten(0, 1)
        score = torch.cat((prefix, suffix), -1) * layer.scale
        if later is not None:
            score = score.masked_fill(later[:, None, None], -torch.inf)
        pattern = torch.softmax(score, -1)
        before, after = pattern[..., : band.start], pattern[..., band.start :]
        met = (after.flatten(1, 2) @ x).unflatten(1, query.shape[1:3])
        z = torch.einsum("rkxe,ked->rkxd", met, widen(attn.W_V))
        if attn.b_V is not None:
            z = z + after.sum(-1, keepdim=True) * widen(attn.b_V)[:, None]
        of_prefix = torch.einsum("pukxj,pjkd->pukxd", before.unflatten(0, (-1, units)), values)
        return (z + of_prefix.flatten(0, 1)).flatten(1, 2)[:, None].to(q.dtype)

    def _with_prefix(
        self, layer: Layer, k: Tensor, v: Tensor, band: Band, units: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [run, end, ...]: the unpatched run's before the suffix, then these."""
        if band.start == 0:
            return k, v
        out = []
        for what, kept, own in (("keys", self.base.k, k), ("values", self.base.v, v)):
            whole = layer.scratch.room(what, len(own), band.end, *own.shape[2:])
            prefix = band.of(kept[layer.index])[:, None, : band.start]
            whole.unflatten(0, (-1, units))[:, :, : band.start] = prefix
            whole[:, band.start :] = own
            out.append(whole)
        return out[0], out[1]

    def _one_key(
        self, layer: Layer, new: Changed, band: Band
    ) -> Float[Tensor, "pair unit row d_model"]:
        """The stream after the layer's attention at `band.rows` when its input differs at `at`."""
        pairs, units = new.resid.shape[:2]
        rows = band.rows(layer)
        z = self.new_key(layer, band, rows, new.k, new.v, after=1).flatten(3, 4)
        stream = band.at_rows(self.base.resid[layer.index], rows)[:, None].repeat(1, units, 1, 1)
        # Rows before the place keep their z, and are run along only where places differ.
        here = (rows == band.at[:, None]).nonzero(as_tuple=True)
        z[here[0], :, here[1]] = new.z[here[0]]
        stream[here[0], :, here[1]] = new.resid[here[0]]
        mid: Tensor = layer.attended_(stream.flatten(0, 1), z.flatten(0, 1))
        return mid.unflatten(0, (pairs, units))

    def new_key(
        self,
        layer: Layer,
        band: Band,
        rows: Int[Tensor, "pair row"],
        k: Float[Tensor, "pair unit kv_head d_head"],
        v: Float[Tensor, "pair unit kv_head d_head"],
        *,
        after: int,
    ) -> Float[Tensor, "pair unit row kv_head group d_head"]:
        """z of `rows` once the key and value at `at` are new, for rows >= at + `after`."""
        base, index, group = self.base, layer.index, layer.group
        q = band.at_rows(base.q[index], rows).unflatten(2, (-1, group))
        z, lse = self._without_key(layer, band, rows, q, after)
        score = torch.einsum("prkxd,pukd->purkx", widen(q), widen(k)) * layer.scale
        before = rows < band.at[:, None] + after
        score = score.masked_fill(before[:, None, :, None, None], -torch.inf)
        weight = torch.sigmoid(score - lse[:, None])
        new = torch.lerp(z[:, None], widen(v)[:, :, None, :, None], weight[..., None])
        return new.to(v.dtype)

    def _without_key(
        self, layer: Layer, band: Band, rows: Tensor, q: Tensor, after: int
    ) -> tuple[Tensor, Tensor]:
        """z [pair, row, kv_head, group, d_head] and lse of the rows without the key at `at`."""
        base, index, group = self.base, layer.index, layer.group
        z = widen(band.at_rows(base.z[index], rows)).unflatten(2, (-1, group))
        lse = base.lse[index]
        assert lse is not None
        lse = lse[band.example[:, None], :, rows].unflatten(2, (-1, group))
        key, value = (widen(band.at_place(kept[index])) for kept in (base.k, base.v))
        score = torch.einsum("prkxd,pkd->prkx", widen(q), key) * layer.scale
        before = rows < band.at[:, None] + after
        score = score.masked_fill(before[:, :, None, None], -torch.inf)
        weight = torch.exp(score - lse)
        heavy = weight > HEAVY
        weight = weight.masked_fill(heavy, 0.0)[..., None]
        rest = torch.addcmul(z, weight, value[:, None, :, None], value=-1).div_(1 - weight)
        rest_lse = lse + torch.log1p(-weight[..., 0])
        if bool(heavy.any()):
            which = heavy.flatten(1).any(1).nonzero()[:, 0]
            exact, exact_lse = self._recomputed(layer, band, rows, q, which)
            mask = heavy[which]
            rest[which] = torch.where(mask[..., None], exact, rest[which])
            rest_lse[which] = torch.where(mask, exact_lse, rest_lse[which])
        return rest, rest_lse

    def _recomputed(
        self, layer: Layer, band: Band, rows: Tensor, q: Tensor, which: Tensor
    ) -> tuple[Tensor, Tensor]:
        """z and lse of the rows of some pairs, by attention to every key but the one at `at`."""
        key_pos = torch.arange(band.end, device=rows.device)
        allowed = key_pos != band.at[which][:, None]
        if rows.shape[1] == 1:
            # Attention takes the last position as the query's.
            allowed &= key_pos <= rows[which]
        k, v = (
            band.of(kept[layer.index])[which][:, : band.end] for kept in (self.base.k, self.base.v)
        )
        z, lse = attend_flash(
            widen(q[which]).flatten(2, 3), widen(k), widen(v), scale=layer.scale, key_mask=allowed
        )
        return z.unflatten(2, (-1, layer.group)), lse.transpose(1, 2).unflatten(
            2, (-1, layer.group)
        )

    def _own_row(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Float[Tensor, "pair unit head d_head"]:
        """z of the row at `at` itself: the new query over the unpatched keys before it, then its
        own key."""
        index, last = layer.index, int(band.at.max())
        query = widen(q).unflatten(2, (-1, layer.group))
        keys, values = (
            widen(band.of(kept[index])[:, :last]) for kept in (self.base.k, self.base.v)
        )
        score = torch.einsum("pukxd,pjkd->pukxj", query, keys)
        later = torch.arange(last, device=q.device) >= band.at[:, None]
        score = score.masked_fill(later[:, None, None, None], -torch.inf)
        own = (query * widen(k)[:, :, :, None]).sum(-1, keepdim=True)
        pattern = torch.softmax(torch.cat((score, own), -1) * layer.scale, -1)
        z = torch.einsum("pukxj,pjkd->pukxd", pattern[..., :-1], values)
        z = z + pattern[..., -1:] * widen(v)[:, :, :, None]
        return z.flatten(2, 3).to(q.dtype)
