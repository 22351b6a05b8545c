"""How a change at one position spreads: the layers after a patched site.

layer l      the site: its output differs at position p only              (`entry`)
layer l+1    p alone has a new query, key and value; later rows see one key change (`one_key`,
             or `writes` where that pays)
from l+2 on  every position from p on differs: the suffix is recomputed, and reads the
             unpatched run's keys and values before it
last layer   keys and values on the suffix, the rest only where the metric reads
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.analyses.patching.suffix.band import Band, Changed
from headstream.analyses.patching.suffix.layers import Layer, normed
from headstream.analyses.patching.suffix.one_key import mid_after_new_key, own_row
from headstream.analyses.patching.suffix.state import BaseRun
from headstream.analyses.patching.suffix.writes import (
    ROWS_PER_HEAD,
    Writes,
    after_new_key,
    pays,
    writes_of,
)
from headstream.models.attend_naive import widen

# Scores of a head that are formed together where a changed position reads the ones before it.
OWN_SCORES = 2**16


@dataclass(frozen=True)
class Spread:
    """The layers of a model and the unpatched run that patches start from.

    Attributes:
        kept: what the heads of a layer write in that run, for the layer last asked for.
    """

    layers: list[Layer | None]
    base: BaseRun
    kept: dict[int, Writes] = field(default_factory=dict)

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
            z = own_row(self.base, layer, q, k, v, part)
            found.append(
                (k, v, layer.attended_(new.clone(memory_format=torch.contiguous_format), z))
            )
        k, v, mid = (torch.cat(kind) for kind in zip(*found))
        rows = int((band.read + 1 - band.at).sum())
        if not pays(self.base, layer, units, rows):
            return Changed(k, v, mid)
        return Changed(k, v, mid, self._writes(layer), layer.neurons(mid))

    def _writes(self, layer: Layer) -> Writes:
        """Of one layer at a time: sweeps go layer by layer."""
        if layer.index not in self.kept:
            self.kept.clear()
            self.kept[layer.index] = writes_of(self.base, layer)
        return self.kept[layer.index]

    def mid_from_place(
        self, index: int, new: Changed, band: Band
    ) -> Float[Tensor, "pair unit d_model"]:
        """The stream after the last attention where it is read, when `resid_pre` of a layer
        differs at `at`.

        What follows, the last MLP and the unembedding, meets so few rows a band that the caller
        does it for many bands at once.
        """
        layer = self.layer(index)
        if new.writes is not None and band.end - band.start >= ROWS_PER_HEAD * layer.n_heads:
            out = after_new_key(self.base, layer, new.writes, new, band)
        else:
            mid = mid_after_new_key(self.base, layer, new, band)
            if layer.is_last:
                return mid[:, :, 0]
            out = layer.after_(mid.flatten(0, 1))
        return self.mid_from_rows(index + 1, out.unflatten(0, new.mid.shape[:2]), band)

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
