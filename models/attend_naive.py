"""Attention as it is defined: scores, their log-sum-exp, the pattern, the weighted values.

    s_ij  = scale * q_i . k_j          -inf where query i may not read key j
    lse_i = log sum_j exp(s_ij)        natural logarithm; -inf for a row that may read nothing
    A_ij  = exp(s_ij - lse_i)          a row that may read nothing is all zero
    z_i   = sum_j A_ij v_j

Each step is a function of its own because hooks sit between them. Everything here forms the
query_pos x key_pos matrix; `headstream.models.attend_flash` computes the same z and lse without it
and is tested against this file.

A query is always causal. With `key_pos > query_pos` (a key/value cache) the queries are the last
ones: query t stands at position `t + key_pos - query_pos` and reads keys up to and with its own.
Query head h reads key/value head `h // (heads // kv_heads)`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.models.errors import ShapeError


def attend_naive(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    *,
    scale: float,
    key_mask: Tensor | None = None,
) -> tuple[Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]]:
    """Causal attention by the definition: the four steps of this module in a row.

    Args:
        q: queries, already rotated where positions are rotary.
        k: keys; at least as many positions as `q`, the queries being the last of them.
        v: values; their width need not be the keys'.
        scale: what q . k is multiplied by, 1 / sqrt(d_head) by custom.
        key_mask: boolean [batch, key_pos], True where a key may be read; None lets every key be.
    Returns:
        `z` in the dtype of `v`, and the natural log-sum-exp of each row of scores, float32 for
        half-precision inputs. A row that may read nothing has z = 0 and lse = -inf.
    Raises:
        ShapeError: if heads do not divide, there are more queries than keys, or the mask is not a
            boolean [batch, key_pos].
    """
    scores = masked_scores(q, k, scale=scale, key_mask=key_mask)
    lse = row_lse(scores)
    return weigh(pattern_of(scores, lse), v), lse


def allowed_edges(
    query_pos: int,
    key_pos: int,
    *,
    key_mask: Bool[Tensor, "batch key_pos"] | None = None,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "batch_or_1 1 query_pos key_pos"]:
    """Which query may read which key: no key after the query's own position, no masked key.

    Args:
        query_pos: number of queries, the last of the `key_pos` positions.
        key_pos: number of keys.
        key_mask: True where a key may be read.
        device: where the answer lives.
    Returns:
        True where the edge is allowed; the batch axis has length 1 without a mask.
    Raises:
        ShapeError: if there are more queries than keys.
    """
    check_lengths(query_pos, key_pos)
    own = torch.arange(key_pos - query_pos, key_pos, device=device)
    causal = torch.arange(key_pos, device=device) <= own[:, None]
    if key_mask is None:
        return causal[None, None]
    return causal & key_mask[:, None, None, :]


def masked_scores(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    *,
    scale: float,
    key_mask: Tensor | None = None,
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """Scaled scores, -inf where the edge is not allowed.

    Half-precision inputs are widened to float32 first, so that their products are exact and only
    the inputs carry the half-precision rounding.

    Raises:
        ShapeError: as `attend_naive`.
    """
    check_heads(q, k)
    check_mask(k, key_mask)
    batch, query_pos, heads, d_head = q.shape
    key_pos, kv_heads = k.shape[1], k.shape[2]
    wide_q, wide_k = widen(q), widen(k)
    # One kv_head serves a group of neighbouring query heads; the group is an axis, not a copy.
    grouped = wide_q.reshape(batch, query_pos, kv_heads, heads // kv_heads, d_head)
    products = torch.einsum("bqkgd,bjkd->bkgqj", grouped, wide_k)
    scores = products.reshape(batch, heads, query_pos, key_pos) * scale
    allowed = allowed_edges(query_pos, key_pos, key_mask=key_mask, device=q.device)
    return scores.masked_fill(~allowed, -torch.inf)


def row_lse(
    scores: Float[Tensor, "batch head query_pos key_pos"],
) -> Float[Tensor, "batch head query_pos"]:
    """Natural log-sum-exp over the keys of each row; -inf, with zero gradient, for an empty row."""
    empty = empty_rows(scores)
    if not bool(empty.any()):
        return torch.logsumexp(scores, dim=-1)
    # The gradient of logsumexp at a row of -inf is NaN, so such a row never enters it.
    filled = scores.masked_fill(empty[..., None], 0.0)
    return torch.logsumexp(filled, dim=-1).masked_fill(empty, -torch.inf)


def pattern_of(
    scores: Float[Tensor, "batch head query_pos key_pos"],
    lse: Float[Tensor, "batch head query_pos"],
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """A = exp(scores - lse): each row sums to 1, or is all zero where lse is -inf.

    It is computed as a softmax, which subtracts the row's maximum: exp(scores - lse) in float32
    would carry a relative error of about 1e-7 * |lse|. `lse` says which rows are empty.
    """
    empty = torch.isneginf(lse)[..., None]
    if not bool(empty.any()):
        return torch.softmax(scores, dim=-1)
    return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)


def weigh(
    pattern: Float[Tensor, "batch head query_pos key_pos"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
) -> Float[Tensor, "batch query_pos head d_value"]:
    """z_i = sum_j A_ij v_j per query head, summed in float32 or better, in the dtype of `v`."""
    batch, heads, query_pos, key_pos = pattern.shape
    kv_heads, d_value = v.shape[2], v.shape[3]
    grouped = widen(pattern).reshape(batch, kv_heads, heads // kv_heads, query_pos, key_pos)
    z = torch.einsum("bkgqj,bjkd->bqkgd", grouped, widen(v))
    return z.reshape(batch, query_pos, heads, d_value).to(v.dtype)


def empty_rows(
    scores: Float[Tensor, "batch head query_pos key_pos"],
) -> Bool[Tensor, "batch head query_pos"]:
    """Rows in which every score is -inf (also those of no key at all)."""
    if scores.shape[-1] == 0:
        return torch.ones(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    return torch.isneginf(scores.detach().amax(dim=-1))


def widen(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """`x` in float32 if it is in half precision, else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_heads(q: Tensor, k: Tensor) -> None:
    """Raise ShapeError unless the query heads split evenly over the key/value heads."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly",
            hint="the number of query heads must be a multiple of the number of key/value heads",
        )
    check_lengths(q.shape[1], k.shape[1])


def check_lengths(query_pos: int, key_pos: int) -> None:
    """Raise ShapeError if there are more queries than keys: queries are the last positions."""
    if query_pos > key_pos:
        raise ShapeError(
            f"{query_pos} queries but only {key_pos} keys",
            hint="queries are the last positions of the keys: give the cached keys too",
        )


def check_mask(k: Tensor, key_mask: Tensor | None) -> None:
    """Raise ShapeError unless the mask is None or a boolean [batch, key_pos] for these keys."""
    if key_mask is None:
        return
    expected = (k.shape[0], k.shape[1])
    if key_mask.dtype != torch.bool or tuple(key_mask.shape) != expected:
        raise ShapeError(
            f"key_mask is {key_mask.dtype} of shape {tuple(key_mask.shape)}, expected a boolean "
            f"[batch, key_pos] = {expected}",
            hint="True where a key may be read",
        )
