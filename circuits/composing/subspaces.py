"""Do a later head's readers look where an earlier head writes? Principal angles say.

A head writes into the row space of W_O and reads, through queries, keys and values, from the
column spaces of W_Q, W_K and W_V: subspaces of the stream of dimension <= d_head. Between two
subspaces with orthonormal bases A and B, the singular values of A^T B are the cosines of their
principal angles (Bjorck and Golub 1973): 1 for a shared direction, 0 for one that the other side
cannot see.

Unlike a composition score the overlap does not ask how strongly a direction is written or read,
only whether it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from headstream.circuits.composing.composition import PAIR, THROUGH
from headstream.circuits.qk_ov.copying import require_finite
from headstream.circuits.qk_ov.head_factors import (
    check_norms,
    layer_norm,
    ov_factors,
    stream_dims,
    treatment,
)
from headstream.circuits.selection import heads_by_layer
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


class Subspaces(NamedTuple):
    """Orthonormal bases, one a head; columns beyond a head's rank are zero."""

    basis: Float[Tensor, "head d_model width"]
    rank: Int[Tensor, " head"]


@takes_model
def subspace_overlap(model: Decoder, *, norms: str = "folded") -> xr.Dataset:
    """Mean squared cosine between what each head writes and what each later head reads.

    Args:
        model: the decoder.
        norms: "folded" or "ignored", as in `composition_scores`.
    Returns:
        Dataset with `overlap` (through, earlier_layer, earlier_head, later_layer, later_head),
        through in Q K V: the mean of the squared cosines over the principal angles, as many as
        the smaller of the two ranks. In [0, 1]; NaN where the first layer is not before the
        second, or a side is zero. `chance`, of the same shape: what two random subspaces of those
        ranks have, the larger rank over the dimensions of the stream that are read (d_head /
        d_model for full ranks without centring). `write_rank` (layer, head), `read_rank`
        (through, layer, head).
    Raises:
        ConfigError: if `norms` is unknown.
        ShapeError: if a weight is NaN or infinite.
    Source:
        Bjorck and Golub 1973, "Numerical Methods for Computing Angles Between Linear Subspaces".
        The mean of squared cosines is the trace of the product of the two projectors over the
        rank. Chance: E tr(P_A P_B) = rank(A) rank(B) / d.
    Note:
        A rotary distance plays no part: turning queries leaves the column space of W_Q alone.
    """
    check_norms(norms)
    require_finite(model)
    config = model.config
    shape = (len(THROUGH), *(2 * (config.n_layers, config.n_heads)))
    overlap, chance = np.full(shape, np.nan), np.full(shape, np.nan)
    write_rank = np.zeros(shape[1:3], dtype=np.int64)
    read_rank = np.zeros(shape[:3], dtype=np.int64)
    dims = stream_dims(model, norms)
    writers: list[Subspaces] = []
    for layer in range(config.n_layers):
        readers = _readers(model, layer, norms)
        for index, reader in enumerate(readers):
            read_rank[index, layer] = reader.rank.cpu().numpy()
            for earlier, writer in enumerate(writers):
                place = (index, earlier, slice(None), layer)
                mean, level = _mean_squared(writer, reader, dims)
                overlap[place], chance[place] = mean.cpu().numpy(), level.cpu().numpy()
        writers.append(_writers(model, layer, norms))
        write_rank[layer] = writers[-1].rank.cpu().numpy()
    heads, layers = list(range(config.n_heads)), list(range(config.n_layers))
    return xr.Dataset(
        {
            "overlap": (("through", *PAIR), overlap),
            "chance": (("through", *PAIR), chance),
            "write_rank": (("layer", "head"), write_rank),
            "read_rank": (("through", "layer", "head"), read_rank),
        },
        coords={
            "through": list(THROUGH),
            "layer": layers,
            "head": heads,
            **{axis: layers if axis.endswith("layer") else heads for axis in PAIR},
        },
        attrs={"norms": treatment(model, norms)},
    )


@takes_model
def principal_cosines(
    model: Decoder, earlier: Sequence[int], later: Sequence[int], *, norms: str = "folded"
) -> xr.DataArray:
    """Cosines of the principal angles between what one head writes and what a later one reads.

    Args:
        model: the decoder.
        earlier, later: heads as pairs (layer, head).
        norms: "folded" or "ignored", as in `composition_scores`.
    Returns:
        [through, angle], the largest cosine first; as many as the smaller rank, NaN beyond it.
    Raises:
        ShapeError: if a head does not exist, `earlier` does not come before `later`, or a weight
            is NaN or infinite.
        ConfigError: if `norms` is unknown.
    """
    check_norms(norms)
    require_finite(model)
    first, second = (_one_head(model, pair) for pair in (earlier, later))
    if first[0] >= second[0]:
        raise ShapeError(
            f"{head_name(*first)} does not come before {head_name(*second)}: a head reads what "
            "earlier layers wrote",
            hint="give the head of the lower layer first",
        )
    writers = _writers(model, first[0], norms)
    readers = _readers(model, second[0], norms)
    found = np.full((len(THROUGH), model.config.d_head), np.nan)
    for index, reader in enumerate(readers):
        product = writers.basis[first[1]].mT @ reader.basis[second[1]]
        count = int(torch.minimum(writers.rank[first[1]], reader.rank[second[1]]))
        values = torch.linalg.svdvals(product)[:count].clamp(max=1.0)
        found[index, :count] = values.cpu().numpy()
    return xr.DataArray(
        found,
        dims=("through", "angle"),
        coords={"through": list(THROUGH), "angle": np.arange(model.config.d_head)},
        name="cosine",
        attrs={
            "earlier": head_name(*first),
            "later": head_name(*second),
            "norms": treatment(model, norms),
        },
    )


def _writers(model: Decoder, layer: int, norms: str) -> Subspaces:
    _, out = ov_factors(model, layer, norms=norms)
    return _subspaces(out.mT, model.dtype)


def _readers(model: Decoder, layer: int, norms: str) -> tuple[Subspaces, Subspaces, Subspaces]:
    attn, group = model.blocks[layer].attn, model.config.group_size
    query, key, value = (
        weight.detach().double().repeat_interleave(heads, 0)
        for weight, heads in ((attn.W_Q, 1), (attn.W_K, group), (attn.W_V, group))
    )
    if norms == "folded":
        norm = layer_norm(model, layer)
        query, key, value = norm.fold(query), norm.fold(key), norm.fold(value)
    return (
        _subspaces(query, model.dtype),
        _subspaces(key, model.dtype),
        _subspaces(value, model.dtype),
    )


def _subspaces(columns: Float[Tensor, "head d_model d_head"], dtype: torch.dtype) -> Subspaces:
    """Column spaces. A singular value counts if rounding of the weights' dtype cannot explain it.

    Half precision is held to float32's rounding: by its own, no wide matrix would have a rank.
    """
    largest = columns.abs().amax((-2, -1), keepdim=True)
    left, values, _ = torch.linalg.svd(
        columns / torch.where(largest > 0, largest, 1.0), full_matrices=False
    )
    eps = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    counted = values > max(columns.shape[1:]) * eps * values[:, :1]
    return Subspaces(left * counted[:, None], counted.sum(-1))


def _mean_squared(writer: Subspaces, reader: Subspaces, dims: int) -> tuple[Tensor, Tensor]:
    """Mean squared cosine [earlier, later] and its chance level; NaN where a side is zero."""
    first, second = writer.basis.shape[0], reader.basis.shape[0]
    rows = writer.basis.mT.flatten(0, 1)
    columns = reader.basis.transpose(0, 1).flatten(1)
    squares = (rows @ columns).square().unflatten(0, (first, -1)).unflatten(2, (second, -1))
    ranks = (writer.rank[:, None], reader.rank[None])
    smaller, larger = torch.minimum(*ranks).double(), torch.maximum(*ranks).double()
    none = smaller == 0
    mean = (squares.sum((1, 3)) / smaller).clamp(max=1.0).masked_fill(none, torch.nan)
    return mean, (larger / dims).masked_fill(none, torch.nan)


def _one_head(model: Decoder, pair: Any) -> tuple[int, int]:
    ((layer, heads),) = heads_by_layer(model, [pair]).items()
    return layer, heads[0]
