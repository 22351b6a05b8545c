"""One new key: the rows of a layer after its input has changed at one position.

The one-key update of row i > p, with the unpatched row's z and lse and the old key's weight w:

    z without the old key  = (z - w v_p) / (1 - w)        lse without = lse + log(1 - w)
    new key's weight       b = sigmoid(new score - lse without)
    new row                (1 - b) (z without) + b (new v)

1 - w loses digits where the old key held most of the row (1e-4 at w = 0.99 in float32): rows with
w > 1/2 are recomputed without that key instead.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstream.analyses.patching.suffix.band import Band, Changed
from headstream.analyses.patching.suffix.layers import Layer
from headstream.analyses.patching.suffix.state import BaseRun
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import widen

# The largest weight of a key that is taken out by subtraction.
HEAVY = 0.5


def mid_after_new_key(
    base: BaseRun, layer: Layer, new: Changed, band: Band
) -> Float[Tensor, "pair unit row d_model"]:
    """The stream after the layer's attention at `band.rows` when its input differs at `at`."""
    pairs, units = new.mid.shape[:2]
    rows = band.rows(layer)
    # Rows before the place keep their z, and are run along only where places differ.
    z = new_key(base, layer, band, rows, new.k, new.v, after=1).flatten(3, 4)
    stream = band.at_rows(base.resid[layer.index], rows)[:, None].repeat(1, units, 1, 1)
    runs = layer.attended_(stream.flatten(0, 1), z.flatten(0, 1))
    mid: Tensor = runs.unflatten(0, (pairs, units))
    pair, row = (rows == band.at[:, None]).nonzero(as_tuple=True)
    mid[pair, :, row] = new.mid[pair]
    return mid


def new_key(
    base: BaseRun,
    layer: Layer,
    band: Band,
    rows: Int[Tensor, "pair row"],
    k: Float[Tensor, "pair unit kv_head d_head"],
    v: Float[Tensor, "pair unit kv_head d_head"],
    *,
    after: int,
) -> Float[Tensor, "pair unit row kv_head group d_head"]:
    """z of `rows` once the key and value at `at` are new, for rows >= at + `after`."""
    index, group = layer.index, layer.group
    q = band.at_rows(base.q[index], rows).unflatten(2, (-1, group))
    z, lse = without_key(base, layer, band, rows, q, after)
    weight = new_weights(layer, band, rows, q, k, lse, after)
    new = torch.lerp(z[:, None], widen(v)[:, :, None, :, None], weight[..., None])
    return new.to(v.dtype)


def old_weights(
    base: BaseRun, layer: Layer, band: Band, rows: Tensor, q: Tensor, after: int
) -> tuple[Float[Tensor, "pair row kv_head group"], Float[Tensor, "pair row kv_head group"]]:
    """What the unpatched rows give to the key at `at`, and their lse."""
    lse = base.lse[layer.index]
    assert lse is not None
    lse = lse[band.example[:, None], :, rows].unflatten(2, (-1, layer.group))
    key = widen(band.at_place(base.k[layer.index]))
    score = torch.einsum("prkxd,pkd->prkx", widen(q), key) * layer.scale
    before = rows < band.at[:, None] + after
    return torch.exp(score - lse).masked_fill(before[:, :, None, None], 0.0), lse


def new_weights(
    layer: Layer, band: Band, rows: Tensor, q: Tensor, k: Tensor, lse: Tensor, after: int
) -> Float[Tensor, "pair unit row kv_head group"]:
    """What rows give to each unit's new key, with `lse` over the other keys."""
    score = torch.einsum("prkxd,pukd->purkx", widen(q), widen(k)) * layer.scale
    before = rows < band.at[:, None] + after
    weight = torch.sigmoid(score - lse[:, None])
    return weight.masked_fill_(before[:, None, :, None, None], 0.0)


def without_key(
    base: BaseRun, layer: Layer, band: Band, rows: Tensor, q: Tensor, after: int
) -> tuple[Tensor, Tensor]:
    """z [pair, row, kv_head, group, d_head] and lse of the rows without the key at `at`."""
    z = widen(band.at_rows(base.z[layer.index], rows)).unflatten(2, (-1, layer.group))
    value = widen(band.at_place(base.v[layer.index]))
    weight, lse = old_weights(base, layer, band, rows, q, after)
    heavy = weight > HEAVY
    weight = weight.masked_fill(heavy, 0.0)[..., None]
    rest = torch.addcmul(z, weight, value[:, None, :, None], value=-1).div_(1 - weight)
    rest_lse = lse + torch.log1p(-weight[..., 0])
    if bool(heavy.any()):
        which = heavy.flatten(1).any(1).nonzero()[:, 0]
        exact, exact_lse = _recomputed(base, layer, band, rows, q, which)
        mask = heavy[which]
        rest[which] = torch.where(mask[..., None], exact, rest[which])
        rest_lse[which] = torch.where(mask, exact_lse, rest_lse[which])
    return rest, rest_lse


def _recomputed(
    base: BaseRun, layer: Layer, band: Band, rows: Tensor, q: Tensor, which: Tensor
) -> tuple[Tensor, Tensor]:
    """z and lse of the rows of some pairs, by attention to every key but the one at `at`."""
    key_pos = torch.arange(band.end, device=rows.device)
    allowed = key_pos != band.at[which][:, None]
    if rows.shape[1] == 1:
        # Attention takes the last position as the query's.
        allowed &= key_pos <= rows[which]
    k, v = (band.of(kept[layer.index])[which][:, : band.end] for kept in (base.k, base.v))
    z, lse = attend_flash(
        widen(q[which]).flatten(2, 3), widen(k), widen(v), scale=layer.scale, key_mask=allowed
    )
    return z.unflatten(2, (-1, layer.group)), lse.transpose(1, 2).unflatten(2, (-1, layer.group))


def own_row(
    base: BaseRun, layer: Layer, q: Tensor, k: Tensor, v: Tensor, band: Band
) -> Float[Tensor, "pair unit head d_head"]:
    """z of the row at `at` itself: the new query over the unpatched keys before it, then its
    own key."""
    index, last = layer.index, int(band.at.max())
    query = widen(q).unflatten(2, (-1, layer.group))
    keys, values = (widen(band.of(kept[index])[:, :last]) for kept in (base.k, base.v))
    score = torch.einsum("pukxd,pjkd->pukxj", query, keys)
    later = torch.arange(last, device=q.device) >= band.at[:, None]
    score = score.masked_fill(later[:, None, None, None], -torch.inf)
    own = (query * widen(k)[:, :, :, None]).sum(-1, keepdim=True)
    pattern = torch.softmax(torch.cat((score, own), -1) * layer.scale, -1)
    z = torch.einsum("pukxj,pjkd->pukxd", pattern[..., :-1], values)
    z = z + pattern[..., -1:] * widen(v)[:, :, :, None]
    return z.flatten(2, 3).to(q.dtype)
