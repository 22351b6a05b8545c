"""From a patched site to the stream after its layer, at the positions that it changes.

One position: attn_out, mlp_out, mlp_post, z, q, and a row or an edge of the pattern change the
layer's output there only; k and v change the rows that read them. Whole rows change every position.
Each writes its change into the unpatched run's sums, so a site costs what follows it and no more.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstream.analyses.patching.sites import Site
from headstream.analyses.patching.suffix.band import Band
from headstream.analyses.patching.suffix.layers import Layer
from headstream.analyses.patching.suffix.one_key import new_key
from headstream.analyses.patching.suffix.spread import Spread
from headstream.models.attend_naive import widen

# Sites whose change stays at its position until the next layer.
STAYS = {"resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", "z", "q", "pattern"}


def entered(
    spread: Spread,
    site: Site,
    index: int,
    values: Float[Tensor, "pair unit width"],
    old: Tensor | None,
    units: Int[Tensor, " unit"],
    band: Band,
) -> tuple[int, Float[Tensor, "pair unit d_model"]]:
    """The layer whose `resid_pre` differs at the place first, and what it is there.

    Args:
        values: of a site in `STAYS`, or of `resid_pre`, at one position of layer `index`; for
            `pattern`, the z that the head then has.
        old: what the units of `mlp_post` had, [pair, unit, 1].
        units: heads or neurons; of a site without, one.
    """
    base, layer = spread.base, spread.layer(index)
    name = site.name
    if name == "resid_pre":
        return index, values
    if name == "resid_post":
        return index + 1, values
    if name == "mlp_out":
        return index + 1, band.at_place(base.mid[index])[:, None] + values
    if name == "mlp_post":
        assert old is not None
        change = (values - old) * layer.block.mlp.W_out[units]
        return index + 1, band.at_place(base.resid[index + 1])[:, None] + change
    if name == "resid_mid":
        mid = values
    elif name == "attn_out":
        mid = band.at_place(base.resid[index])[:, None] + values
    else:
        z = _query(layer, spread, values, units, band) if name == "q" else values
        change = z - band.at_place(base.z[index])[:, units]
        written = torch.einsum("pud,ude->pue", change, layer.W_O[units])
        mid = band.at_place(base.mid[index])[:, None] + written
    return index + 1, layer.after(mid)


def enter_key_or_value(
    spread: Spread,
    site: Site,
    index: int,
    values: Float[Tensor, "pair unit d_head"],
    units: Int[Tensor, " unit"],
    band: Band,
) -> Float[Tensor, "pair unit d_model"]:
    """The stream after the last attention where it is read, with one new key or value a unit."""
    layer = spread.layer(index)
    mid = _keys_and_values(spread, layer, site.name, values, units, band)
    if layer.is_last:
        return mid[:, :, 0]
    out = layer.after(mid.flatten(0, 1)).unflatten(0, mid.shape[:2])
    return spread.mid_from_rows(index + 1, out, band)


def enter_rows(
    spread: Spread,
    site: Site,
    index: int,
    values: Float[Tensor, "pair unit pos width"],
    old: Tensor | None,
    units: Int[Tensor, " unit"],
    band: Band,
) -> Float[Tensor, "pair unit d_model"]:
    """The same after `values` at every position of whole rows, from the first one to `band.end`.

    In the last layer sites but `resid_pre` give the last stream itself.

    Args:
        values: for q, k, v and pattern, the z of each unit's heads, width (head, d_head) flat.
    """
    base, layer = spread.base, spread.layer(index)
    name = site.name
    if name == "resid_pre":
        return spread.mid_from_rows(index, values, band)
    rows = band.rows(layer)
    if layer.is_last:
        values = values.gather(
            2, rows[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
        )
    if name == "resid_post":
        out = values
    elif name == "mlp_out":
        out = band.at_rows(base.mid[index], rows)[:, None] + values
    elif name == "mlp_post":
        assert old is not None
        was = band.at_rows(old, rows)[..., units].transpose(1, 2)[..., None]
        change = (values - was) * layer.block.mlp.W_out[units][:, None]
        out = band.at_rows(base.resid[index + 1], rows)[:, None] + change
    else:
        if name == "resid_mid":
            mid = values
        elif name == "attn_out":
            mid = band.at_rows(base.resid[index], rows)[:, None] + values
        else:
            was = band.at_rows(base.z[index], rows)
            weight = layer.W_O
            if name in ("k", "v"):
                was, weight = was.unflatten(2, (layer.kv_heads, -1)).flatten(3), _grouped(layer)
            change = values - was[:, :, units].transpose(1, 2)
            written = torch.einsum("purd,ude->pure", change, weight[units])
            mid = band.at_rows(base.mid[index], rows)[:, None] + written
        out = layer.after(mid.flatten(0, 1)).unflatten(0, mid.shape[:2])
    return out[:, :, 0] if layer.is_last else spread.mid_from_rows(index + 1, out, band)


def _query(
    layer: Layer, spread: Spread, q: Tensor, units: Tensor, band: Band
) -> Float[Tensor, "pair unit d_head"]:
    """z of each head at the place, with its new (unrotated) query over the unpatched keys."""
    base, last = spread.base, int(band.at.max()) + 1
    query = layer.turned_at(q, band.at)
    kv = units // layer.group
    keys, values = (widen(band.of(kept[layer.index])[:, :last, kv]) for kept in (base.k, base.v))
    score = torch.einsum("pud,pjud->puj", widen(query), keys) * layer.scale
    later = torch.arange(last, device=q.device) > band.at[:, None]
    pattern = torch.softmax(score.masked_fill(later[:, None], -torch.inf), -1)
    return torch.einsum("puj,pjud->pud", pattern, values).to(q.dtype)


def _keys_and_values(
    spread: Spread, layer: Layer, name: str, values: Tensor, units: Tensor, band: Band
) -> Float[Tensor, "pair unit row d_model"]:
    """The stream after attention at `band.rows`, with one key or value of each unit's head new."""
    base, index = spread.base, layer.index
    rows = band.rows(layer)
    mid = band.at_rows(base.mid[index], rows)[:, None]
    weight = layer.W_O.unflatten(0, (layer.kv_heads, -1))[units]
    if name == "v":
        q = widen(band.at_rows(base.q[index], rows)).unflatten(2, (layer.kv_heads, -1))
        lse = base.lse[index]
        assert lse is not None
        lse = lse[band.example[:, None], :, rows].unflatten(2, (layer.kv_heads, -1))
        key = widen(band.at_place(base.k[index]))
        score = torch.einsum("prkxd,pkd->prkx", q, key) * layer.scale
        before = (rows < band.at[:, None])[:, :, None, None]
        share = torch.exp(score - lse).masked_fill(before, 0.0).to(values.dtype)[:, :, units]
        change = values - band.at_place(base.v[index])[:, units]
        written = torch.einsum("pud,uxde->puxe", change, weight)
        return torch.einsum("prux,puxe->pure", share, written).add_(mid)
    # Every head's key is new here; of each run only the unit's own heads are then looked at.
    new = layer.turned_at(values, band.at)
    z = _new_key_of_units(spread, layer, band, rows, new, units)
    was = band.at_rows(base.z[index], rows).unflatten(2, (layer.kv_heads, -1))[:, :, units]
    change = (z - was).transpose(1, 2)
    return torch.einsum("purxd,uxde->pure", change, weight).add_(mid)


def _new_key_of_units(
    spread: Spread, layer: Layer, band: Band, rows: Tensor, new: Tensor, units: Tensor
) -> Float[Tensor, "pair row unit group d_head"]:
    key = band.at_place(spread.base.k[layer.index]).clone()
    key[:, units] = new
    value = band.at_place(spread.base.v[layer.index])
    z = new_key(spread.base, layer, band, rows, key[:, None], value[:, None], after=0)
    return z[:, 0][:, :, units]


def _grouped(layer: Layer) -> Float[Tensor, "kv_head group_d_head d_model"]:
    weight: Tensor = layer.W_O.unflatten(0, (layer.kv_heads, -1))
    return weight.flatten(1, 2)
