"""A receiver with another input: the layer's output, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.suffix.band import Band
from headstream.analyses.patching.suffix.layers import Layer
from headstream.analyses.patching.suffix.spread import Spread


@dataclass(frozen=True)
class Receiver:
    """Receivers of one kind in one layer, each patched in a run of its own.

    Attributes:
        kind, layer: as of `End`.
        units: their heads, or key/value heads; one 0 where there are none.
    """

    kind: str
    layer: int
    units: Int[Tensor, " unit"]


def received(
    spread: Spread, receiver: Receiver, change: Float[Tensor, "run pos d_model"], band: Band
) -> tuple[Float[Tensor, "run unit d_model"], Bool[Tensor, "run unit"]]:
    """The last stream where it is read, after a change of what the receivers read.

    Args:
        change: of the stream, at the positions of the band.
    Returns:
        The stream, and where the change left the receiver's input as it was.
    """
    base = spread.base
    if receiver.kind == "logits":
        at = band.read - band.start
        moved = change[torch.arange(len(at), device=at.device), at]
        out = band.at_rows(base.resid[receiver.layer], band.read[:, None])[:, 0] + moved
        return out[:, None], (moved == 0).all(-1)[:, None]
    layer = spread.layer(receiver.layer)
    rows = band.rows(layer)
    if receiver.kind == "mlp input":
        out, same = _by_mlp(spread, layer, change, band, rows)
    else:
        z, same = _by_channel(spread, layer, receiver.kind, change, band, rows)
        out = _written(spread, layer, receiver, z, band, rows)
        same = same[:, receiver.units]
    if layer.is_last:
        return out[:, :, 0], same
    return spread.from_rows(layer.index + 1, out, band), same


def _by_mlp(
    spread: Spread, layer: Layer, change: Tensor, band: Band, rows: Int[Tensor, "run row"]
) -> tuple[Float[Tensor, "run one row d_model"], Bool[Tensor, "run one"]]:
    """The layer's output with the MLP alone reading the changed stream."""
    mid = band.at_rows(spread.base.mid[layer.index], rows)
    new = layer.neurons(mid + _at(change, rows - band.start))
    same = (new == layer.neurons(mid)).flatten(1).all(1)
    return layer.written(mid, new)[:, None], same[:, None]


def _by_channel(
    spread: Spread, layer: Layer, channel: str, change: Tensor, band: Band, rows: Tensor
) -> tuple[Float[Tensor, "run row head d_head"], Bool[Tensor, "run unit"]]:
    """z of every head, each with its own queries, keys or values from the changed stream.

    Heads do not meet before W_O, so one pass changes them all.
    """
    base, index = spread.base, layer.index
    whole = torch.arange(band.start, band.end, device=rows.device).expand(len(rows), -1)
    at = rows if channel == "q" else whole
    stream = band.at_rows(base.resid[index], at) + _at(change, at - band.start)
    found = layer.projected(stream, at, channel)["qkv".index(channel)]
    assert found is not None
    new: Tensor = found
    kept = {"q": base.q, "k": base.k, "v": base.v}
    same = (new == band.at_rows(kept[channel][index], at)).all(-1).all(1)
    q = new if channel == "q" else band.at_rows(base.q[index], rows)
    k, v = (band.of(kept[name][index])[:, : band.end] for name in "kv")
    if channel != "q":
        joined = torch.cat((band.of(kept[channel][index])[:, : band.start], new), 1)
        k, v = (joined, v) if channel == "k" else (k, joined)
    if not layer.is_last:
        return layer.attend(q, k, v), same
    allowed = torch.arange(band.end, device=rows.device) <= band.read[:, None]
    return layer.attend_where(q, k, v, allowed[:, None, None]), same


def _written(
    spread: Spread, layer: Layer, receiver: Receiver, z: Tensor, band: Band, rows: Tensor
) -> Float[Tensor, "run unit row d_model"]:
    """The layer's output with one receiver's z new in each run."""
    index = layer.index
    change, weight = z - band.at_rows(spread.base.z[index], rows), layer.W_O
    if receiver.kind != "q":
        change = change.unflatten(2, (layer.kv_heads, -1)).flatten(3)
        weight = weight.unflatten(0, (layer.kv_heads, -1)).flatten(1, 2)
    chosen, units = change[:, :, receiver.units], weight[receiver.units]
    written = torch.einsum("prud,ude->pure", chosen, units)
    mid = band.at_rows(spread.base.mid[index], rows)[:, None] + written
    out: Tensor = layer.after(mid.flatten(0, 1)).unflatten(0, mid.shape[:2])
    return out


def _at(change: Tensor, rows: Int[Tensor, "run row"]) -> Float[Tensor, "run row d_model"]:
    return change.gather(1, rows[..., None].expand(-1, -1, change.shape[2]))
