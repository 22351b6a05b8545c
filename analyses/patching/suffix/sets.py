"""Sets of sites patched together: one pass over the suffix, with every member replaced in it.

Layer by layer from the set's first layer and first position on. Members of one layer are written in
the order in which the model computes them, and in the order given where they overlap, as hooks
would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.sites import Cell, Edit
from headstream.analyses.patching.suffix.band import Band
from headstream.analyses.patching.suffix.layers import Layer
from headstream.analyses.patching.suffix.spread import Spread
from headstream.analyses.patching.suffix.state import positions_of, unembedded
from headstream.analyses.patching.suffix.values import Values
from headstream.analyses.patching.task import Task
from headstream.models.attend_naive import widen
from headstream.models.decoder import Decoder

# Queries of one head whose rows of the pattern are formed at once.
_QUERIES = 256


@dataclass(frozen=True)
class _Write:
    """One member, in real positions.

    Attributes:
        at, present: the positions of each row that it replaces, [example, slot].
        keys: for an edge of the pattern, the key's position, [example, slot].
    """

    edit: Edit
    at: Int[Tensor, "example slot"]
    present: Bool[Tensor, "example slot"]
    keys: Int[Tensor, "example slot"] | None


def run_set(
    model: Decoder, spread: Spread, cell: Cell, values: Values, task: Task, *, rows: int
) -> tuple[Float[Tensor, "example d_vocab"], Bool[Tensor, " example"]]:
    """Logits with every member of the set replaced, and which rows were patched at all.

    Args:
        rows: how many positions to run together.
    """
    base = spread.base
    device = base.logits.device
    writes = [_write(edit, values, task, device) for edit in cell]
    patched = torch.stack([write.present.any(1) for write in writes]).any(0)
    logits = base.logits.clone()
    pairs = patched.nonzero()[:, 0]
    read = task.answer_pos.to(device)
    starts = torch.stack(
        [write.at.masked_fill(~write.present, task.columns.shape[1]).amin(1) for write in writes]
    ).amin(0)
    pairs = pairs[starts[pairs] <= read[pairs]]
    if not len(pairs):
        return logits, patched
    first = min(edit.layer for edit in cell)
    step = max(1, rows // task.columns.shape[1])
    for pair in pairs.split(step):
        band = Band(pair, starts[pair], read[pair], int(starts[pair].min()), int(read.max()) + 1)
        resid = band.of(base.resid[first])[:, band.start : band.end].clone()
        for layer in map(spread.layer, range(first, len(spread.layers))):
            here = [write for write in writes if write.edit.layer == layer.index]
            resid = _layer(spread, layer, resid, here, values, band)
        at = torch.arange(len(pair), device=device), band.read - band.start
        logits[pair] = unembedded(model, resid[at])
    return logits, patched


def _write(edit: Edit, values: Values, task: Task, device: torch.device) -> _Write:
    at = positions_of(task, edit.place.columns).to(device)
    keys = None
    if edit.place.keys is not None:
        keys = positions_of(task, edit.place.keys).to(device)
    return _Write(edit, at, values.present(at), keys)


def _layer(
    spread: Spread,
    layer: Layer,
    resid: Tensor,
    writes: Sequence[_Write],
    values: Values,
    band: Band,
) -> Tensor:
    """One layer on the suffix, with this layer's members replaced."""

    def put(name: str, x: Tensor) -> Tensor:
        for write in writes:
            if write.edit.site.name == name:
                x = _put(x, write, _given(write, values, layer, band), band)
        return x

    resid = put("resid_pre", resid)
    q, k, v = layer.projected(resid, band.span)
    q, k = (_turned(layer, writes, values, band, name, x) for name, x in (("q", q), ("k", k)))
    keys, read = spread._with_prefix(layer, k, put("v", v), band, 1)
    z = layer.attend(q, keys, read)
    z = _patterns(layer, z, q, keys, read, writes, values, band)
    mid = resid + put("attn_out", layer.mixed(put("z", z)))
    if not layer.block.has_mlp:
        return put("resid_post", mid)
    mid = put("resid_mid", mid)
    post = put("mlp_post", layer.neurons(mid))
    written = put("mlp_out", layer.written(torch.zeros_like(mid), post))
    return put("resid_post", mid + written)


def _given(write: _Write, values: Values, layer: Layer, band: Band) -> Tensor:
    """Values [pair, slot, width] of a member, at its own positions."""
    slots = write.at.shape[1]
    pair = band.example.repeat_interleave(slots)
    slot = torch.arange(slots, device=pair.device).repeat(len(band.example))
    present = write.present[band.example].flatten()
    found = values.at_places(write.edit.site, layer.index, write.at, pair[present], slot[present])[
        :, write.edit.head or 0
    ]
    out = found.new_zeros(len(pair), found.shape[-1])
    out[present] = found
    new: Tensor = out.unflatten(0, (-1, slots))
    return new


def _turned(
    layer: Layer,
    writes: Sequence[_Write],
    values: Values,
    band: Band,
    name: str,
    x: Tensor,
) -> Tensor:
    """Members on q and k are given before rotation, and x is rotated."""
    for write in writes:
        if write.edit.site.name == name:
            new = _given(write, values, layer, band)
            at = write.at[band.example].clamp(min=0)
            x = _put(x, write, layer.turned(new[:, :, None], at)[:, :, 0], band)
    return x


def _put(x: Tensor, write: _Write, new: Tensor, band: Band) -> Tensor:
    """`x` [pair, pos, ...] with the member's values [pair, slot, width] in their positions."""
    # Behind the last position that is read nothing matters.
    at = write.at[band.example]
    pair, slot = (write.present[band.example] & (at < band.end)).nonzero(as_tuple=True)
    pos = at[pair, slot] - band.start
    out = x.clone()
    if write.edit.head is None:
        out[pair, pos] = new[pair, slot]
    elif write.edit.site.one_wide:
        out[pair, pos, write.edit.head] = new[pair, slot, 0]
    else:
        out[pair, pos, write.edit.head] = new[pair, slot]
    return out


def _patterns(
    layer: Layer,
    z: Tensor,
    q: Tensor,
    keys: Tensor,
    read: Tensor,
    writes: Sequence[_Write],
    values: Values,
    band: Band,
) -> Tensor:
    """z with the rows formed, edited and weighed anew of every head whose pattern is patched."""
    by_head: dict[int, list[_Write]] = {}
    for write in writes:
        if write.edit.site.name == "pattern":
            assert write.edit.head is not None
            by_head.setdefault(write.edit.head, []).append(write)
    for head, members in by_head.items():
        kv = head // layer.group
        for start in range(0, q.shape[1], _QUERIES):
            span = band.span[start : start + _QUERIES]
            rows = slice(start, start + len(span))
            score = torch.einsum("prd,pjd->prj", widen(q[:, rows, head]), widen(keys[:, :, kv]))
            later = torch.arange(band.end, device=q.device) > span[:, None]
            pattern = (score * layer.scale).masked_fill(later, -torch.inf).softmax(-1)
            touched = torch.zeros(pattern.shape[:2], dtype=torch.bool, device=q.device)
            for write in members:
                pattern, here = _edited_rows(pattern, write, values, layer, band, span, head)
                touched |= here
            new = torch.einsum("prj,pjd->prd", pattern, widen(read[:, :, kv])).to(z.dtype)
            z = z.clone()
            z[:, rows, head] = torch.where(touched[..., None], new, z[:, rows, head])
    return z


def _edited_rows(
    pattern: Float[Tensor, "pair row key"],
    write: _Write,
    values: Values,
    layer: Layer,
    band: Band,
    span: Int[Tensor, " row"],
    head: int,
) -> tuple[Tensor, Bool[Tensor, "pair row"]]:
    """The rows with one member's values, and which rows it touches."""
    at = write.at[band.example]
    inside = write.present[band.example] & (at >= span[0]) & (at <= span[-1])
    pair, slot = inside.nonzero(as_tuple=True)
    touched = torch.zeros(pattern.shape[:2], dtype=torch.bool, device=pattern.device)
    if not len(pair):
        return pattern, touched
    row = at[pair, slot] - span[0]
    touched[pair, row] = True
    example = band.example[pair]
    out = pattern.clone()
    if write.keys is None:
        given = values.pattern_rows(layer.index, write.at, example, slot)[:, head, : band.end]
        later = torch.arange(band.end, device=given.device) > at[pair, slot][:, None]
        out[pair, row] = given.masked_fill(later, 0.0).to(out.dtype)
    else:
        weights = values.edges(layer.index, write.at, write.keys, example, slot)[:, head]
        out[pair, row, write.keys[example, slot]] = weights.to(out.dtype)
    return out, touched
