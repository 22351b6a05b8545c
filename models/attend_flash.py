"""Attention without the query_pos x key_pos matrix: the same z and lse as `attend_naive`.

Two kernels give the same numbers:

- `fused`: one of torch's kernels that also return the natural log-sum-exp of each row (a plain
  number: it carries no gradient). On the CPU that is its flash kernel; on CUDA FlashAttention for
  half precision without a key mask, the memory-efficient kernel for the rest but float64;
- `blocks`: the online softmax written out in `attend_blocks`, for everything the kernel refuses.

`auto` takes the fused kernel wherever it is right; `why_not_fused` says in words where it is not.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.models.attend_blocks import attend_blocks, merge
from headstream.models.attend_naive import check_heads, check_mask, widen
from headstream.models.errors import BackendError

KERNELS = ("auto", "fused", "blocks")

# The release on which the kernel was checked to share a key/value head between query heads. Kernels
# without that support (it was merged in 2025) would take a key/value head for each query head.
GROUPED_SINCE = "2.13"


def attend_flash(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    *,
    scale: float,
    key_mask: Tensor | None = None,
    kernel: str = "auto",
    block_size: int | None = None,
    need_lse_grad: bool = False,
) -> tuple[Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]]:
    """Causal attention in O(query_pos + key_pos) memory; meanings as in `attend_naive`.

    Args:
        q: queries, the last `query_pos` of the `key_pos` positions.
        k: keys.
        v: values; their width need not be the keys'.
        scale: what q . k is multiplied by.
        key_mask: boolean [batch, key_pos], True where a key may be read; None lets every key be.
        kernel: "fused", "blocks", or "auto" for fused where it is right.
        block_size: side of a tile of the block loop, None for its own choice; no effect on the
            fused kernel.
        need_lse_grad: whether a gradient will be asked of the returned lse.
    Returns:
        `z` in the dtype of `v`, differentiable, and the natural log-sum-exp of each row in float32
        (float64 for float64 inputs), differentiable if `need_lse_grad`. A row that may read nothing
        has z = 0 and lse = -inf.
    Raises:
        ShapeError: as `attend_naive`.
        BackendError: if `kernel` is not one of the three, or is "fused" and the fused kernel
            cannot do it.
    """
    check_heads(q, k)
    check_mask(k, key_mask)
    if kernel not in KERNELS:
        raise BackendError(f"no flash kernel {kernel!r}", hint="use 'auto', 'fused' or 'blocks'")
    if kernel != "blocks":
        refusal = why_not_fused(q, k, v, key_mask=key_mask, need_lse_grad=need_lse_grad)
        if refusal is None:
            return _attend_fused(q, k, v, scale=scale, key_mask=key_mask)
        if kernel == "fused":
            raise BackendError(
                f"the fused kernel cannot do this: {refusal}", hint="use kernel='auto' or 'blocks'"
            )
    return attend_blocks(q, k, v, scale=scale, key_mask=key_mask, block_size=block_size)


def attend_past(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    *,
    scale: float,
    key_mask: Tensor | None = None,
) -> tuple[Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]]:
    """Attention to keys that all stand before every query: no causal mask.

    Merged with the attention to the remaining keys (`attend_blocks.merge`) it is the whole row.
    Arguments and results as in `attend_flash`, by the fused kernel alone: lse carries no gradient.

    Raises:
        ShapeError: if heads do not divide or the mask does not fit.
        BackendError: where the fused kernel cannot do it.
    """
    check_heads(q[:, :0], k)
    check_mask(k, key_mask)
    # Every query reads what one query after all of the keys would read.
    refusal = why_not_fused(q[:, :1], k, v, key_mask=key_mask)
    if refusal is not None:
        raise BackendError(
            f"the fused kernel cannot do this: {refusal}", hint="use attend_flash on all keys"
        )
    z, lse = _kernel(q, k, v, scale=scale, key_mask=key_mask, causal=False)
    return z.to(v.dtype), lse


def why_not_fused(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    *,
    key_mask: Bool[Tensor, "batch key_pos"] | None = None,
    need_lse_grad: bool = False,
) -> str | None:
    """The reason why the fused kernel would fail or be wrong here, or None if it is right."""
    if q.device.type == "cuda":
        refusal = _why_not_cuda(q)
        if refusal is not None:
            return refusal
    elif q.device.type != "cpu":
        return f"it runs on the CPU and on CUDA and the inputs are on {q.device}"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return "an axis is empty, on which the kernel divides by zero"
    grouped = q.shape[2] != k.shape[2]
    if grouped and q.device.type == "cpu" and torch.__version__ < GROUPED_SINCE:
        return f"only from torch {GROUPED_SINCE} on is it known to share a key/value head"
    if need_lse_grad:
        return "its log-sum-exp carries no gradient"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if 1 < q.shape[1] < k.shape[1]:
            return (
                f"with {q.shape[1]} queries on {k.shape[1]} keys two calls are merged by their "
                "log-sum-exp, which carries no gradient"
            )
        if key_mask is not None and bool(_nothing_to_read(q.shape[1], key_mask).any()):
            return "a row may read no key, where the kernel's gradient is NaN"
    return None


def _why_not_cuda(q: Float[Tensor, "batch query_pos head d_head"]) -> str | None:
    """The reason why no CUDA kernel would do, or None."""
    if torch.version.hip is not None:
        return "its ROCm kernels were not checked for what they return"
    if q.dtype == torch.float64:
        return "no CUDA kernel takes float64"
    if q.dtype == torch.bfloat16 and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "its bfloat16 kernels need compute capability 8.0"
    return None


def _attend_fused(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    *,
    scale: float,
    key_mask: Bool[Tensor, "batch key_pos"] | None,
) -> tuple[Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]]:
    """The kernel's causal mask is right for as many queries as keys; a cache needs two calls."""
    query_pos, key_pos = q.shape[1], k.shape[1]
    past = key_pos - query_pos
    if past == 0 or query_pos == 1:
        z, lse = _kernel(q, k, v, scale=scale, key_mask=key_mask, causal=past == 0)
        return z.to(v.dtype), lse
    past_mask, own_mask = (None, None)
    if key_mask is not None:
        past_mask, own_mask = key_mask[:, :past], key_mask[:, past:]
    z, lse = merge(
        *_kernel(q, k[:, :past], v[:, :past], scale=scale, key_mask=past_mask, causal=False),
        *_kernel(q, k[:, past:], v[:, past:], scale=scale, key_mask=own_mask, causal=True),
    )
    return z.to(v.dtype), lse


def _kernel(
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    *,
    scale: float,
    key_mask: Bool[Tensor, "batch key_pos"] | None,
    causal: bool,
) -> tuple[Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]]:
    """One call of torch's kernel with its traps taken out; z in float32 or better."""
    d_value = v.shape[3]
    call = _call_cuda if q.device.type == "cuda" else _call_cpu
    z, lse = call(q, k, v, scale=scale, key_mask=key_mask, causal=causal)
    z = z.transpose(1, 2)[..., :d_value]
    if key_mask is not None:
        # A row that may read nothing comes back as lse = 0, as if that were a value; its z = 0 is
        # what this release does and no promise.
        empty = _nothing_to_read(q.shape[1] if causal else 1, key_mask)
        z = z.masked_fill(empty[:, :, None, None], 0.0)
        lse = lse.masked_fill(empty[:, None, :], -torch.inf)
    return z, lse


def _call_cpu(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """z [batch, head, query_pos, width] and lse [batch, head, query_pos]."""
    # It wants one width for q, k and v: zeros added to a width change no product. Half precision is
    # widened, because in it the kernel's exp is good to 1e-4 only.
    width = max(q.shape[3], v.shape[3])
    query, key, value = (_heads_first(widen(x), width) for x in (q, k, v))
    bias = None
    if key_mask is not None:
        # [batch, 1, 1, key_pos]: broadcast over the queries inside the kernel.
        bias = query.new_zeros(key_mask.shape).masked_fill(~key_mask, -torch.inf)[:, None, None, :]
    z, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return z, lse


def _call_cuda(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """The same on CUDA. Half precision stays as it is: these kernels sum it in float32."""
    if q.dtype != v.dtype or k.dtype != v.dtype:
        # Float32 values beside half queries, as the entropy asks for: one dtype for all three.
        q, k, v = widen(q), widen(k), widen(v)
    # Rows of 16 bytes: widths of 8 serve every dtype. The kernels' causal mask starts at the first
    # key, or at the last query, by version: they are called with as many of one as of the other.
    group = q.shape[2] // k.shape[2]
    width = -(-max(q.shape[3], v.shape[3]) // 8) * 8
    query = _heads_first(q, width).contiguous()
    key, value = (_heads_first(x.repeat_interleave(group, 2), width).contiguous() for x in (k, v))
    capable = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if key_mask is None and q.dtype != torch.float32 and width <= 256 and capable:
        z, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return z, lse
    bias = None
    if key_mask is not None:
        # A view over heads and queries of one padded row: the kernel reads it 16 bytes at a time.
        batch, key_pos = key_mask.shape
        row = query.new_zeros(batch, -(-key_pos // 8) * 8)
        row[:, :key_pos].masked_fill_(~key_mask, -torch.inf)
        bias = row[:, None, None, :key_pos].expand(batch, query.shape[1], query.shape[2], key_pos)
    z, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )
    # It comes padded to a multiple of 32 queries.
    return z, lse[..., : query.shape[2]]


def _heads_first(
    x: Float[Tensor, "batch pos heads d"], width: int
) -> Float[Tensor, "batch heads pos {width}"]:
    """[batch, heads, pos, width] with a dense last axis: the kernel ignores its stride."""
    if x.shape[3] < width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[3]))
    x = x.transpose(1, 2)
    return x if x.stride(3) == 1 else x.contiguous()


def _nothing_to_read(
    query_pos: int, key_mask: Bool[Tensor, "batch key_pos"]
) -> Bool[Tensor, "batch {query_pos}"]:
    """True for the rows, the last `query_pos` of all positions, with no allowed key up to them."""
    return key_mask.cumsum(dim=1)[:, key_mask.shape[1] - query_pos :] == 0
