"""A layer with one new key, by what its heads write: the same rows as `one_key`, in fewer products.

A head's row after the update is the unpatched row z, the old value v_p and the new one v, weighted:

    new row = z + g z - a v_p + b v        g = (w - b) / (1 - w)    a = w (1 - b) / (1 - w)

What it writes to the stream is linear in these three vectors, and so is what the MLP's neurons read
of that, but for the norm's one divisor a row. Both are formed once, for every row and head of the
unpatched run and for every new value; a patched row is then a sum of 3 vectors a head, where W_O
and W_in would have taken d_model. Rows with w > 1/2 of any head, for which 1 - w loses digits, and
the changed position itself are run by way of z.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.analyses.patching.suffix.band import Band, Changed
from headstream.analyses.patching.suffix.layers import Layer
from headstream.analyses.patching.suffix.one_key import HEAVY, new_key, new_weights, old_weights
from headstream.analyses.patching.suffix.state import BaseRun
from headstream.models.norms import LayerNorm, NoNorm, RMSNorm

# Entries of what the heads of an unpatched run write, up to which that is kept (256 MB).
KEPT_ENTRIES = 2**26
# Rows for each head from which on it pays to form what a new value writes.
ROWS_PER_HEAD = 2
# A sum of few vectors is bound by memory, not by products: d_model must be so many times n_heads.
VECTORS_PER_HEAD = 12


@dataclass(frozen=True)
class Reader:
    """What an MLP's neurons read of the stream, before the norm divides: linear.

    Attributes:
        weight: [d_model, read], with the norm's gain and, for LayerNorm, its centring; `read` is
            d_mlp, twice that for a gated MLP.
        bias: what is added after the division.
        of_heads: the same of what each head writes, [head, d_head, read].
    """

    norm: LayerNorm | RMSNorm | NoNorm
    weight: Float[Tensor, "d_model read"]
    bias: Float[Tensor, " read"]
    of_heads: Float[Tensor, "head d_head read"]

    def divisor(self, x: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row 1"]:
        """One over the norm's scale."""
        if isinstance(self.norm, LayerNorm):
            # Its pass is several times faster than x.var, and as exact.
            return torch.native_layer_norm(x, x.shape[-1:], None, None, self.norm.eps)[2]
        if isinstance(self.norm, RMSNorm):
            return (x.square().mean(-1, keepdim=True) + self.norm.eps).rsqrt()
        return x.new_ones(*x.shape[:-1], 1)


@dataclass(frozen=True)
class Writes:
    """What the heads of a layer write in the unpatched run, and below them the stream itself.

    Attributes:
        stream: [example, pos, head + 1, d_model]; the last is the stream after attention.
        read: the same as `reader` reads it.
    """

    reader: Reader
    stream: Float[Tensor, "example pos head_and_mid d_model"]
    read: Float[Tensor, "example pos head_and_mid read"]


def reader_of(layer: Layer) -> Reader:
    """What the MLP of a layer reads."""
    block = layer.block
    norm, mlp = block.ln2, block.mlp
    parts = [(mlp.W_in, mlp.b_in)] + ([(mlp.W_gate, None)] if mlp.gated else [])
    weights, biases = [], []
    for weight, bias in parts:
        # In the unit of what the norm gives: (x / scale * w + b) W = (x / scale) (w W) + b W.
        shift = norm.b if isinstance(norm, LayerNorm) else weight.new_zeros(len(weight))
        biases.append(shift @ weight if bias is None else shift @ weight + bias)
        weights.append(weight if isinstance(norm, NoNorm) else norm.w[:, None] * weight)
    joint = torch.cat(weights, 1)
    if isinstance(norm, LayerNorm):
        joint = joint - joint.mean(0)
    return Reader(norm, joint, torch.cat(biases), layer.W_O @ joint)


def writes_of(base: BaseRun, layer: Layer) -> Writes:
    """Formed once for all patches of what a layer reads."""
    z, mid = base.z[layer.index], base.mid[layer.index]
    assert z is not None
    assert mid is not None
    reader = reader_of(layer)
    centred = mid - mid.mean(-1, keepdim=True) if isinstance(reader.norm, LayerNorm) else mid
    stream = torch.cat((_by_head(z, layer.W_O), mid[:, :, None]), 2)
    read = torch.cat((_by_head(z, reader.of_heads), (centred @ reader.weight)[:, :, None]), 2)
    return Writes(reader, stream, read)


def pays(base: BaseRun, layer: Layer, units: int, rows: int) -> bool:
    """Whether `rows` rows in each of `units` runs make up for forming `writes_of` the layer.

    Half precision keeps to the way by z, which rounds where the model does.
    """
    z = base.z[layer.index]
    if layer.is_last or not layer.block.has_mlp or z is None:
        return False
    n, length, heads, d_head = z.shape
    d_model, read = layer.block.mlp.W_in.shape
    read *= 2 if layer.block.mlp.gated else 1
    if z.dtype not in (torch.float32, torch.float64) or VECTORS_PER_HEAD * heads > d_model:
        return False
    if n * length * (heads + 1) * (d_model + read) > KEPT_ENTRIES:
        return False
    saved = units * rows * d_model * (heads * d_head + read)
    return saved > 2 * n * length * (heads * d_head * (d_model + read) + d_model * read)


def after_new_key(
    base: BaseRun, layer: Layer, writes: Writes, new: Changed, band: Band
) -> Float[Tensor, "run row d_model"]:
    """The stream after a layer, its MLP too, at every row of the band.

    The numbers are those of `mid_after_new_key` and `Layer.after` to rounding.
    """
    pairs, units = new.mid.shape[:2]
    reader, mlp = writes.reader, layer.block.mlp
    rows, span = band.rows(layer), slice(band.start, band.end)
    n_rows = rows.shape[1]
    kept, given, heavy = _coefficients(base, layer, new, band)
    new_value = new.v.repeat_interleave(layer.group, -2)
    old_value = band.at_place(base.v[layer.index])[:, None].repeat_interleave(layer.group, -2)
    values = _both(new_value, old_value, layer.W_O)
    out = values.new_empty(pairs, units, n_rows, values.shape[-1])
    _summed(out, kept, writes.stream[:, span], given, values, band)
    assert new.post is not None
    exact = [(torch.arange(pairs, device=rows.device), band.at - band.start, new.mid, new.post)]
    if bool(heavy.any()):
        exact.append(_by_z(base, layer, new, band, heavy))
    for pair, row, mid, _ in exact:
        out[pair, :, row] = mid
    scale = reader.divisor(out)
    one = scale.new_ones(1).expand(pairs, units, n_rows, 1)
    seen = _both(new_value, old_value, reader.of_heads, reader.bias)
    read = layer.scratch.room("neurons", pairs, units, n_rows, seen.shape[-1])
    _summed(
        read, kept * scale, writes.read[:, span], torch.cat((given * scale, one), -1), seen, band
    )
    post = layer.activated(read)
    for pair, row, _, neurons in exact:
        post[pair, :, row] = neurons
    if mlp.b_out is not None:
        out.add_(mlp.b_out)
    flat = out.flatten(0, 2)
    torch.addmm(flat, post.flatten(0, 2), mlp.W_out, out=flat)
    return out.flatten(0, 1)


def _by_head(
    z: Float[Tensor, "*row head d_head"], weight: Float[Tensor, "head d_head width"]
) -> Float[Tensor, "*row head width"]:
    return torch.einsum("...hd,hde->...he", z, weight)


def _both(
    new: Float[Tensor, "pair unit head d_head"],
    old: Float[Tensor, "pair one head d_head"],
    weight: Float[Tensor, "head d_head width"],
    bias: Float[Tensor, " width"] | None = None,
) -> Float[Tensor, "pair unit given width"]:
    """What new and old values come to, head by head, and below them the bias."""
    pairs, units, heads, _ = new.shape
    out = new.new_empty(pairs, units, 2 * heads + (bias is not None), weight.shape[2])
    out[:, :, :heads] = _by_head(new, weight)
    out[:, :, heads : 2 * heads] = _by_head(old, weight)
    if bias is not None:
        out[:, :, -1] = bias
    return out


def _coefficients(
    base: BaseRun, layer: Layer, new: Changed, band: Band
) -> tuple[
    Float[Tensor, "pair unit row head_and_mid"],
    Float[Tensor, "pair unit row given"],
    Bool[Tensor, "pair row"],
]:
    """g of each head and 1 for the stream; b and -a of each head; and which rows [pair, row] are
    not to be had so."""
    rows = band.rows(layer)
    q = band.at_rows(base.q[layer.index], rows).unflatten(2, (-1, layer.group))
    old, lse = old_weights(base, layer, band, rows, q, 1)
    heavy = old > HEAVY
    old = old.masked_fill(heavy, 0.0)
    weight = new_weights(layer, band, rows, q, new.k, lse + torch.log1p(-old), 1).flatten(3)
    old = old.flatten(2)[:, None]
    rest = 1 - old
    kept = torch.cat(((old - weight) / rest, torch.ones_like(weight[..., :1])), -1)
    given = torch.cat((weight, old * (weight - 1) / rest), -1)
    return kept, given, heavy.flatten(2).any(2)


def _summed(
    out: Float[Tensor, "pair unit row width"],
    kept: Float[Tensor, "pair unit row head_and_mid"],
    of_rows: Float[Tensor, "example row head_and_mid width"],
    given: Float[Tensor, "pair unit row given"],
    of_values: Float[Tensor, "pair unit given width"],
    band: Band,
) -> None:
    """out = sum of `kept` vectors of each row and of `given` vectors of each run."""
    # Pairs of one example share the vectors of its rows.
    for start, end in _stretches(band.example.tolist()):
        by_row = kept[start:end].flatten(0, 1).transpose(0, 1)
        torch.bmm(
            by_row,
            of_rows[band.example[start]],
            out=out[start:end].flatten(0, 1).transpose(0, 1),
        )
    runs = out.flatten(0, 1)
    torch.baddbmm(runs, given.flatten(0, 1), of_values.flatten(0, 1), out=runs)


def _stretches(example: list[int]) -> list[tuple[int, int]]:
    starts = [i for i in range(len(example)) if i == 0 or example[i] != example[i - 1]]
    return list(zip(starts, [*starts[1:], len(example)]))


def _by_z(
    base: BaseRun, layer: Layer, new: Changed, band: Band, heavy: Bool[Tensor, "pair row"]
) -> tuple[Tensor, Tensor, Float[Tensor, "at unit d_model"], Float[Tensor, "at unit d_mlp"]]:
    """Pair and row of each `heavy` row, the stream after attention there, and its neurons."""
    which = heavy.any(1).nonzero()[:, 0]
    at, row = heavy[which].nonzero(as_tuple=True)
    some, rows = band.part(which), band.rows(layer)[which]
    z = new_key(base, layer, some, rows, new.k[which], new.v[which], after=1)
    chosen = z.flatten(3, 4)[at, :, row]
    resid = some.at_rows(base.resid[layer.index], rows)[at, row]
    mid = layer.attended_(resid[:, None].repeat(1, chosen.shape[1], 1), chosen)
    return which[at], row, mid, layer.neurons(mid)
