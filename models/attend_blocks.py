"""The online softmax: attention tile by tile, never the query_pos x key_pos matrix.

For one block of queries the key blocks are read from left to right, with scores S of the tile:

    m' = max(m, rowmax S)      running maximum, -inf at the start
    r  = exp(m - m')           <= 1, rescales what was summed under the old maximum
    P  = exp(S - m')
    l' = r l + rowsum P        running normaliser
    O' = r O + P V             running numerator
    at the end  z = O / l,  lse = m + log l

The entropy of a row, where it is asked for, takes one more accumulator, E = sum exp(s - m) (s - m):

    E' = r (E + l (m - m')) + rowsum P (S - m')
    at the end  H = log l - E / l

The term l (m - m') moves what was summed to the new maximum. A published kernel leaves it out
(ToProVAR, ICLR 2026, Algorithm 2), which is right only if the first block holds the row's maximum.

The backward pass forms each tile again from q, k and lse instead of keeping it.

Source: Milakov & Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (arXiv 2205.14135), 2023
(arXiv 2307.08691). We differ in that lse and entropy are differentiable and rows with nothing to
read are defined (z = 0, lse = -inf, H = 0).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.models.attend_naive import check_heads, check_mask, widen
from headstream.models.errors import BackendError

# Elements of one tile over batch and heads: 4 MiB in float32. Larger tiles leave the cache, in
# smaller ones the calls cost more than the sums; measured on CPUs, and not sharp.
TILE = 2**20


def attend_blocks(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    *,
    scale: float,
    key_mask: Tensor | None = None,
    block_size: int | None = None,
) -> tuple[Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]]:
    """Causal attention by the block loop; arguments and results as in `attend_flash`.

    Any float dtype and device; z and lse are both differentiable, in O(n) memory.

    Args:
        q, k, v, scale, key_mask: as in `attend_flash`.
        block_size: side of a tile; None picks one by batch and heads. It moves rounding only.
    Raises:
        ShapeError: as `attend_naive`.
        BackendError: if `block_size` is not positive.
    """
    z, lse, _ = _run(q, k, v, scale, key_mask, block_size, entropy=False)
    return z.to(v.dtype), lse


def row_entropy(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    *,
    scale: float,
    key_mask: Tensor | None = None,
    block_size: int | None = None,
) -> Float[Tensor, "batch head query_pos"]:
    """Entropy in nats of each row of the pattern, by the block loop's centred accumulator.

    It sums differences from the row's maximum, so no large numbers cancel: the error is what
    rounding of the scores makes it (in float32 5e-7 at an lse of 6, 2e-5 at 420), and it is never
    negative. Differentiable, in O(n) memory.

    Args:
        q, k, scale, key_mask, block_size: as in `attend_blocks`.
    Returns:
        Float32 for half-precision inputs; 0 for a row that may read nothing.
    Raises:
        ShapeError, BackendError: as `attend_blocks`.
    """
    _, _, entropy = _run(q, k, k[..., :0], scale, key_mask, block_size, entropy=True)
    return entropy


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None,
    block_size: int | None,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor, Any]:
    """z, lse and, if asked for, the entropy (else None), in float32 or better."""
    check_heads(q, k)
    check_mask(k, key_mask)
    if block_size is not None and block_size < 1:
        raise BackendError(
            f"block_size is {block_size}", hint="give a positive number of positions, or None"
        )
    batch, query_pos, heads, d_head = q.shape
    kv_heads = k.shape[2]
    # One kv_head serves a group of neighbouring query heads; the group is an axis, not a copy.
    grouped = widen(q).reshape(batch, query_pos, kv_heads, heads // kv_heads, d_head)
    z, lse, spread = _Blocks.apply(  # type: ignore[no-untyped-call]
        grouped.permute(0, 2, 3, 1, 4),
        widen(k).transpose(1, 2).contiguous(),
        widen(v).transpose(1, 2).contiguous(),
        key_mask,
        scale,
        _block_for(batch * heads) if block_size is None else block_size,
        entropy,
    )
    z = z.permute(0, 3, 1, 2, 4).reshape(batch, query_pos, heads, v.shape[3])
    rows = (batch, heads, query_pos)
    return z, lse.reshape(rows), spread.reshape(rows) if entropy else None


def merge(
    z_1: Float[Tensor, "batch query_pos head d_value"],
    lse_1: Float[Tensor, "batch head query_pos"],
    z_2: Float[Tensor, "batch query_pos head d_value"],
    lse_2: Float[Tensor, "batch head query_pos"],
) -> tuple[Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]]:
    """Attention over the union of two disjoint key sets, from attention over each.

    lse = log(exp lse_1 + exp lse_2), z = exp(lse_1 - lse) z_1 + exp(lse_2 - lse) z_2. Where both
    sets are empty (-inf), z = 0 and lse = -inf.
    """
    empty = torch.isneginf(lse_1) & torch.isneginf(lse_2)
    # logaddexp of two -inf has a NaN gradient: such rows never enter it.
    lse = torch.logaddexp(lse_1.masked_fill(empty, 0.0), lse_2.masked_fill(empty, 0.0))
    share_1, share_2 = (
        torch.exp(part - lse).masked_fill(empty, 0.0).transpose(1, 2)[..., None]
        for part in (lse_1, lse_2)
    )
    z = share_1 * z_1 + share_2 * z_2
    return z, lse.masked_fill(empty, -torch.inf)


class _Blocks(torch.autograd.Function):
    """The loop and its gradient, on q [batch, kv_head, group, query_pos, d_head]."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        scale: float,
        block_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        z = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full(q.shape[:-1], -torch.inf)
        entropy = q.new_zeros(q.shape[:-1]) if with_entropy else None
        for rows in blocks_of(q.shape[3], block_size):
            z[..., rows, :], lse[..., rows], of_rows = _one_query_block(
                q, k, v, key_mask, scale, block_size, rows, with_entropy
            )
            if entropy is not None and of_rows is not None:
                entropy[..., rows] = of_rows
        return z, lse, entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, key_mask, ctx.scale, ctx.block_size, _ = inputs
        ctx.save_for_backward(q, k, v, key_mask, *output)

    @staticmethod
    def backward(
        ctx: Any, grad_z: Tensor, grad_lse: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """P = exp(S - lse); dV = P^T dO; dQ = c dS K; dK = c dS^T Q, with
        dS = P (dO V^T - D + dlse) - P (log P + H) dH."""
        q, k, v, key_mask, z, lse, entropy = ctx.saved_tensors
        scale, block_size = ctx.scale, ctx.block_size
        # D_i = sum_d dO_id O_id; the gradients of lse and entropy enter dS beside it.
        empty = torch.isneginf(lse)
        shift = grad_lse - (grad_z * z).sum(-1)
        if entropy is not None:
            shift = shift - entropy * grad_entropy
        shift = shift.masked_fill(empty, 0.0)
        finite = lse.masked_fill(empty, 0.0)
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in blocks_of(q.shape[3], block_size):
            for cols in visible_blocks(rows, q.shape[3], k.shape[2], block_size):
                query, out = q[..., rows, :].flatten(2, 3), grad_z[..., rows, :].flatten(2, 3)
                key, value = k[..., cols, :], v[..., cols, :]
                scores = _tile(q, k, key_mask, scale, rows, cols)
                logs = (scores - finite[..., rows, None]).flatten(2, 3)
                pattern = torch.exp(logs)
                grad_pattern = out @ value.mT
                if grad_entropy is not None:
                    upstream = grad_entropy[..., rows].flatten(2, 3)[..., None]
                    grad_pattern = grad_pattern - _finite(logs) * upstream
                grad_scores = pattern * (grad_pattern + shift[..., rows].flatten(2, 3)[..., None])
                grad_v[..., cols, :] += pattern.mT @ out
                grad_k[..., cols, :] += scale * (grad_scores.mT @ query)
                grad_q[..., rows, :] += scale * (grad_scores @ key).reshape(q[..., rows, :].shape)
        return grad_q, grad_k, grad_v, None, None, None, None


def _one_query_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    scale: float,
    block_size: int,
    rows: slice,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """z, lse and entropy of the queries `rows`, reading the key blocks from left to right."""
    shape = q[..., rows, :].shape[:-1]
    maximum = q.new_full(shape, -torch.inf)
    normaliser = q.new_zeros(shape)
    numerator = q.new_zeros(*shape, v.shape[-1])
    spread = q.new_zeros(shape)
    for cols in visible_blocks(rows, q.shape[3], k.shape[2], block_size):
        scores = _tile(q, k, key_mask, scale, rows, cols)
        new_maximum = torch.maximum(maximum, scores.amax(-1))
        # While a row has read nothing its maximum is -inf, and -inf - (-inf) is NaN.
        finite = new_maximum.masked_fill(torch.isneginf(new_maximum), 0.0)
        moved = maximum - finite
        rescale = torch.exp(moved)
        scores.sub_(finite[..., None])
        centred = _finite(scores) if with_entropy else None
        weights = scores.exp_()
        if centred is not None:
            carried = spread + normaliser * _finite(moved)
            spread = rescale * carried + centred.mul_(weights).sum(-1)
        normaliser = rescale * normaliser + weights.sum(-1)
        weighted = weights.flatten(2, 3) @ v[..., cols, :]
        numerator = rescale[..., None] * numerator + weighted.reshape(numerator.shape)
        maximum = new_maximum
    total = normaliser.masked_fill(normaliser == 0, 1.0)
    entropy = torch.log(total) - spread / total if with_entropy else None
    return numerator / total[..., None], maximum + torch.log(normaliser), entropy


def _tile(
    q: Tensor, k: Tensor, key_mask: Tensor | None, scale: float, rows: slice, cols: slice
) -> Tensor:
    """Scores [batch, kv_head, group, rows, cols], -inf where the edge is not allowed."""
    query, key = q[..., rows, :], k[..., cols, :]
    scores = ((scale * query).flatten(2, 3) @ key.mT).reshape(*query.shape[:-1], key.shape[2])
    first = k.shape[2] - q.shape[3]
    if cols.stop > first + rows.start + 1:
        own = torch.arange(first + rows.start, first + rows.stop, device=q.device)
        later = torch.arange(cols.start, cols.stop, device=q.device) > own[:, None]
        scores.masked_fill_(later, -torch.inf)
    if key_mask is not None:
        scores.masked_fill_(~key_mask[:, None, None, None, cols], -torch.inf)
    return scores


def _finite(x: Tensor) -> Tensor:
    """A copy with -inf made finite: what it is multiplied by is 0, and 0 times -inf is NaN."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _block_for(rows_of_heads: int) -> int:
    """The largest power of two in 64..512 whose tiles hold at most `TILE` elements."""
    fits = (size for size in (512, 256, 128) if rows_of_heads * size**2 <= TILE)
    return next(fits, 64)


def blocks_of(length: int, block_size: int) -> list[slice]:
    """Slices that cover `length` positions, the last one shorter if need be."""
    return [slice(start, min(start + block_size, length)) for start in range(0, length, block_size)]


def visible_blocks(rows: slice, query_pos: int, key_pos: int, block_size: int) -> list[slice]:
    """Key blocks of which some query in `rows` may see a part: those in the future are left out."""
    return blocks_of(key_pos - query_pos + rows.stop, block_size)
