"""Both flash kernels, against arrays worked by hand; what each refuses; what neither allocates."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headstream.models.attend_blocks import attend_blocks, blocks_of, merge, visible_blocks
from headstream.models.attend_flash import (
    _call_cuda,
    _why_not_cuda,
    attend_flash,
    attend_past,
    why_not_fused,
)
from headstream.models.attend_naive import attend_naive
from headstream.models.errors import BackendError, ShapeError

NINF = -math.inf
LN2, LN3, LN4, LN6 = (math.log(number) for number in (2, 3, 4, 6))

both_kernels = pytest.mark.parametrize("kernel", ["fused", "blocks"])


def line(*numbers: float) -> torch.Tensor:
    """[batch 1, pos, head 1, width 1] from one number a position."""
    return torch.tensor(numbers, dtype=torch.float64)[None, :, None, None]


def random_qkv(
    *, batch=2, query_pos=5, key_pos=5, heads=4, kv_heads=2, d_head=8, d_value=8, grad=False
):
    torch.manual_seed(0)
    shapes = (
        (batch, query_pos, heads, d_head),
        (batch, key_pos, kv_heads, d_head),
        (batch, key_pos, kv_heads, d_value),
    )
    return tuple(torch.randn(shape, requires_grad=grad) for shape in shapes)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor, in elements, that any torch operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_iter(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@both_kernels
def test_two_by_two_worked_by_hand(kernel):
    q, k, v = line(1.0, 1.0), line(0.0, LN3), line(10.0, 2.0)
    z, lse = attend_flash(q, k, v, scale=1.0, kernel=kernel, block_size=1)
    # Row 1 weighs its keys e^0 : e^ln3 = 1 : 3, so z = (10 + 3 * 2) / 4.
    torch.testing.assert_close(z[0, :, 0, 0].tolist(), [10.0, 4.0])
    torch.testing.assert_close(lse[0, 0].tolist(), [0.0, LN4])


@both_kernels
def test_three_by_three_with_a_scale_worked_by_hand(kernel):
    q, k, v = line(1.0, 1.0, 1.0), line(0.0, 2 * LN2, 2 * LN3), line(6.0, 12.0, 18.0)
    z, lse = attend_flash(q, k, v, scale=0.5, kernel=kernel, block_size=2)
    # Weights 1 : 2 : 3. Rows: 6; (6 + 24) / 3; (6 + 24 + 54) / 6.
    torch.testing.assert_close(z[0, :, 0, 0].tolist(), [6.0, 10.0, 14.0])
    torch.testing.assert_close(lse[0, 0].tolist(), [0.0, LN3, LN6])


@both_kernels
def test_masked_keys_and_rows_with_nothing_to_read(kernel):
    q, k, v = line(1.0, 1.0, 1.0, 1.0), line(0.0, 0.0, LN2, LN3), line(6.0, 12.0, 18.0, 24.0)
    mask = torch.tensor([[False, True, False, True]])
    z, lse = attend_flash(q, k, v, scale=1.0, key_mask=mask, kernel=kernel, block_size=1)
    # Keys 1 and 3 may be read, 1 : 3 in the last row: (12 + 72) / 4.
    torch.testing.assert_close(z[0, :, 0, 0].tolist(), [0.0, 12.0, 12.0, 21.0])
    torch.testing.assert_close(lse[0, 0].tolist(), [NINF, 0.0, 0.0, LN4])


@both_kernels
@pytest.mark.parametrize("block_size", [1, 4, 7, 8])
def test_the_known_row_has_a_natural_logarithm(kernel, block_size):
    k = line(0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0)
    z, lse = attend_flash(line(1.0), k, k, scale=1.0, kernel=kernel, block_size=block_size)
    # The maximum comes in the second block of 4, so what the first summed must be rescaled.
    torch.testing.assert_close(lse.item(), math.log(7 + math.exp(3)))
    torch.testing.assert_close(z.item(), 3 * math.exp(3) / (7 + math.exp(3)))


@both_kernels
def test_a_long_masked_start_gives_no_nan(kernel):
    # 700 masked keys: whole tiles of both kernels in which no score is finite.
    q, k, v = random_qkv(batch=1, query_pos=800, key_pos=800)
    mask = torch.ones(1, 800, dtype=torch.bool)
    mask[:, :700] = False
    z, lse = attend_flash(q, k, v, scale=0.4, key_mask=mask, kernel=kernel, block_size=64)
    alone, alone_lse = attend_naive(q[:, 700:], k[:, 700:], v[:, 700:], scale=0.4)
    assert (z[:, :700] == 0).all()
    assert torch.isneginf(lse[:, :, :700]).all()
    torch.testing.assert_close(z[:, 700:], alone, atol=1e-5, rtol=0)  # float32 at unit scale
    torch.testing.assert_close(lse[:, :, 700:], alone_lse, atol=1e-5, rtol=0)


@both_kernels
def test_a_head_axis_as_long_as_the_sequence_is_not_mistaken_for_it(kernel):
    q, k, v = random_qkv(query_pos=4, key_pos=4, heads=4, kv_heads=4)
    expected = attend_naive(q, k, v, scale=0.9)
    torch.testing.assert_close(attend_flash(q, k, v, scale=0.9, kernel=kernel), expected)


@both_kernels
def test_inputs_may_have_any_strides(kernel):
    # The fused kernel reads a last axis of stride 2 as if it were dense, without a word.
    q, k, v = random_qkv(d_head=16, d_value=16)
    strided = tuple(x[..., ::2] for x in (q, k, v))
    expanded = (
        q[..., :8],
        k[:, :, :1, :8].expand(-1, -1, 2, -1),
        v[:1, ..., :8].expand_as(k[..., :8]),
    )
    for inputs in (strided, expanded):
        result = attend_flash(*inputs, scale=0.4, kernel=kernel)
        torch.testing.assert_close(result, attend_naive(*inputs, scale=0.4))


@both_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_z_and_lse(kernel, dtype):
    q, k, v = (x.to(dtype) for x in random_qkv(query_pos=3))
    z, lse = attend_flash(q, k, v, scale=0.4, kernel=kernel)
    assert z.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_auto_is_fused_where_the_kernel_is_right_and_blocks_elsewhere():
    q, k, v = random_qkv(grad=True)
    z, lse = attend_flash(q, k, v, scale=0.4)
    assert "Blocks" not in _graph(z)
    assert not lse.requires_grad
    z, lse = attend_flash(q, k, v, scale=0.4, need_lse_grad=True)
    assert "Blocks" in _graph(z)
    assert lse.requires_grad


def _graph(x: torch.Tensor) -> str:
    """Names of the functions that the gradient of x runs through."""
    names, todo = [], [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.append(node.name())
            todo.extend(parent for parent, _ in node.next_functions)
    return " ".join(names)


MASK_LEFT = torch.tensor([[False, True, True, True, True], [True] * 5])


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ({}, {"need_lse_grad": True}, "its log-sum-exp carries no gradient"),
        ({"query_pos": 0}, {}, "an axis is empty, on which the kernel divides by zero"),
        ({"query_pos": 0, "key_pos": 0}, {}, "an axis is empty"),
        ({"query_pos": 3, "grad": True}, {}, "with 3 queries on 5 keys two calls are merged"),
        ({"grad": True}, {"key_mask": MASK_LEFT}, "a row may read no key, where .* NaN"),
    ],
)
def test_fused_says_why_it_refuses_and_auto_goes_on_with_blocks(shape, options, words):
    q, k, v = random_qkv(**shape)
    with pytest.raises(BackendError, match=f"fused kernel cannot do this: {words}"):
        attend_flash(q, k, v, scale=0.4, kernel="fused", **options)
    result = attend_flash(q, k, v, scale=0.4, **options)
    options.pop("need_lse_grad", None)
    torch.testing.assert_close(result, attend_naive(q, k, v, scale=0.4, **options))


def test_fused_refuses_other_devices_and_releases_that_do_not_share_heads(monkeypatch):
    on_meta = tuple(x.to("meta") for x in random_qkv())
    assert why_not_fused(*on_meta) == ("it runs on the CPU and on CUDA and the inputs are on meta")
    monkeypatch.setattr("headstream.models.attend_flash.GROUPED_SINCE", "99.0")
    assert "only from torch 99.0 on" in (why_not_fused(*random_qkv()) or "")
    assert why_not_fused(*random_qkv(kv_heads=4)) is None


def stand_in(q, k, v, *, mask, causal, scale):
    """What a CUDA kernel computes, refusing the inputs that one refuses."""
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert q.shape[3] == k.shape[3] == v.shape[3]
    assert q.shape[3] % 8 == 0
    assert q.is_contiguous()
    assert not causal or q.shape[2] == k.shape[2]
    scores = scale * q.float() @ k.float().mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).bool().triu(1), NINF)
    if mask is not None:
        assert mask.shape == scores.shape
        assert mask.stride(0) % 8 == 0
        scores = scores + mask.float()
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def stand_in_flash(q, k, v, dropout, causal, debug, *, scale):
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[3] <= 256
    z, lse = stand_in(q, k, v, mask=None, causal=causal, scale=scale)
    return z, lse, None, None


def stand_in_efficient(q, k, v, mask, with_lse, dropout, causal, *, scale):
    assert with_lse
    z, lse = stand_in(q, k, v, mask=mask, causal=causal, scale=scale)
    # Padded to a multiple of 32 queries, with numbers that must not be read.
    return z, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan), None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "shape", [{}, {"d_head": 5, "d_value": 11}, {"query_pos": 2}, {"query_pos": 1}]
)
def test_the_cuda_calls_prepare_what_the_kernels_want(monkeypatch, dtype, masked, shape):
    """No GPU here: stand-ins with the kernels' signatures and conditions take the calls."""
    monkeypatch.setattr("headstream.models.attend_flash._call_cpu", _call_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", stand_in_flash)
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_efficient_attention", stand_in_efficient
    )
    q, k, v = (x.to(dtype) for x in random_qkv(**shape))
    mask = MASK_LEFT if masked else None
    for values in (v, v.float()):
        z, lse = attend_flash(q, k, values, scale=0.4, key_mask=mask, kernel="fused")
        expected, expected_lse = attend_naive(q, k, values, scale=0.4, key_mask=mask)
        assert z.dtype == values.dtype
        # bfloat16 rounds to 8 bits: z of size 1 is off by up to 2^-8, and so is what it sums.
        bound = 2e-2 if z.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(z, expected, rtol=0, atol=bound)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


def test_what_no_cuda_kernel_takes_is_named(monkeypatch):
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    assert _why_not_cuda(q) == "no CUDA kernel takes float64"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in (_why_not_cuda(q.bfloat16()) or "")
    assert _why_not_cuda(q.half()) is None
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "ROCm" in (_why_not_cuda(q.half()) or "")


def test_without_gradients_fused_takes_padding_and_a_cache():
    q, k, v = random_qkv(query_pos=3, grad=True)
    with torch.no_grad():
        assert why_not_fused(q, k, v, key_mask=MASK_LEFT) is None
    # One query on many keys needs no merge, and right padding leaves no row empty.
    assert why_not_fused(q[:, :1], k, v, key_mask=MASK_LEFT) is None
    assert why_not_fused(*random_qkv(grad=True), key_mask=MASK_LEFT.flip(1)) is None


@both_kernels
def test_no_positions_at_all_are_no_error(kernel):
    q, k, v = random_qkv(query_pos=0, key_pos=3)
    z, lse = attend_flash(q, k, v, scale=0.4, kernel="auto" if kernel == "fused" else kernel)
    assert z.shape == (2, 0, 4, 8)
    assert lse.shape == (2, 4, 0)


def test_an_unknown_kernel_and_an_impossible_block_are_refused():
    q, k, v = random_qkv()
    with pytest.raises(BackendError, match=r"no flash kernel 'flsh'; use 'auto', 'fused' or"):
        attend_flash(q, k, v, scale=0.4, kernel="flsh")
    with pytest.raises(BackendError, match="block_size is 0; give a positive number of positions"):
        attend_blocks(q, k, v, scale=0.4, block_size=0)


@pytest.mark.parametrize("attend", [attend_flash, attend_blocks])
def test_shapes_are_refused_as_by_naive(attend):
    q, k, v = random_qkv()
    with pytest.raises(ShapeError, match="4 query heads cannot share 3 key/value heads"):
        attend(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1), scale=0.4)
    with pytest.raises(ShapeError, match="5 queries but only 4 keys"):
        attend(q, k[:, 1:], v[:, 1:], scale=0.4)
    with pytest.raises(ShapeError, match="expected a boolean"):
        attend(q, k, v, scale=0.4, key_mask=torch.ones(2, 5))


def test_merge_worked_by_hand():
    # Weights 1 and 2 in the first set, 3 in the second: shares 1/2 and 1/2.
    z, lse = merge(line(10.0), torch.tensor([[[LN3]]]), line(18.0), torch.tensor([[[LN3]]]))
    torch.testing.assert_close(z.item(), 14.0)
    torch.testing.assert_close(lse.item(), LN6, atol=1e-6, rtol=0)  # the lse given is float32


def test_merge_with_an_empty_set_changes_nothing_and_two_empty_sets_are_empty():
    none = torch.full((1, 1, 3), NINF, dtype=torch.float64)
    some = torch.tensor([[[0.0, LN2, NINF]]], dtype=torch.float64)
    z, lse = merge(line(5.0, 7.0, 0.0), some, line(0.0, 0.0, 0.0), none)
    assert z[0, :, 0, 0].tolist() == [5.0, 7.0, 0.0]
    assert lse.tolist() == some.tolist()
    z, lse = merge(line(0.0, 0.0, 0.0), none, line(5.0, 7.0, 0.0), some)
    assert z[0, :, 0, 0].tolist() == [5.0, 7.0, 0.0]
    assert lse.tolist() == some.tolist()


def test_merge_has_finite_gradients_where_sets_are_empty():
    some = torch.tensor([[[0.0, LN2, NINF]]], requires_grad=True)
    none = torch.full((1, 1, 3), NINF, requires_grad=True)
    z_1, z_2 = torch.ones(1, 3, 1, 2, requires_grad=True), torch.zeros(1, 3, 1, 2)
    z, lse = merge(z_1, some, z_2, none)
    loss = z.sum() + lse[torch.isfinite(lse)].sum()
    grads = torch.autograd.grad(loss, (z_1, some, none))
    assert grads[0][0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]
    assert grads[1].tolist() == [[[1.0, 1.0, 0.0]]]  # z does not move: its share is 1 already
    assert grads[2].tolist() == [[[0.0, 0.0, 0.0]]]


def test_blocks_cover_the_positions_and_stop_at_the_future():
    assert blocks_of(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert blocks_of(0, 3) == []
    assert visible_blocks(slice(0, 4), 8, 8, 4) == [slice(0, 4)]
    assert visible_blocks(slice(4, 8), 8, 8, 4) == [slice(0, 4), slice(4, 8)]
    # Two queries on six keys: the first stands at position 4.
    assert visible_blocks(slice(0, 1), 2, 6, 4) == [slice(0, 4), slice(4, 5)]


@both_kernels
@pytest.mark.parametrize("padded", [False, True])
def test_no_tensor_of_the_size_of_the_matrix_is_formed(kernel, padded):
    n, heads = 4096, 8
    q, k, v = random_qkv(batch=1, query_pos=n, key_pos=n, heads=heads, kv_heads=heads)
    mask = torch.arange(n)[None] >= 100 if padded else None
    with LargestTensor() as largest:
        attend_flash(q, k, v, scale=0.4, key_mask=mask, kernel=kernel)
    # A tile over all heads, or the inputs themselves; one head's matrix alone is 16.8 million.
    assert largest.numel <= 2**20


def test_the_block_loop_does_not_keep_the_matrix_for_its_gradient():
    n = 2048
    q, k, v = random_qkv(batch=1, query_pos=n, key_pos=n, heads=2, kv_heads=1, grad=True)
    kept = []

    def note(x):
        kept.append(x.numel())
        return x

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        z, lse = attend_flash(q, k, v, scale=0.4, need_lse_grad=True)
        (z.sum() + lse.sum()).backward()
    assert 0 < sum(kept) <= 8 * q.numel()  # q, k, v, z, lse: a few times the input
    assert largest.numel <= 2**20 < n * n


@pytest.mark.parametrize("padded", [False, True])
def test_a_row_is_its_past_merged_with_the_rest(padded):
    q, k, v = random_qkv(key_pos=5)
    mask = torch.tensor([[False, False, True, True, True], [True] * 5]) if padded else None
    masks = (None, None) if mask is None else (mask[:, :2], mask[:, 2:])
    z, lse = merge(
        *attend_past(q[:, 2:], k[:, :2], v[:, :2], scale=0.4, key_mask=masks[0]),
        *attend_flash(q[:, 2:], k[:, 2:], v[:, 2:], scale=0.4, key_mask=masks[1]),
    )
    whole_z, whole_lse = attend_naive(q, k, v, scale=0.4, key_mask=mask)
    assert torch.allclose(z, whole_z[:, 2:], atol=1e-6)
    assert torch.allclose(lse, whole_lse[..., 2:], atol=1e-6)


def test_a_past_that_may_not_be_read_is_empty():
    q, k, v = random_qkv(batch=1, query_pos=3, key_pos=2)
    z, lse = attend_past(q, k, v, scale=0.4, key_mask=torch.tensor([[False, False]]))
    assert (z == 0).all()
    assert torch.isneginf(lse).all()


def test_what_the_past_refuses():
    q, k, v = random_qkv(query_pos=3, key_pos=2, grad=True)
    with pytest.raises(BackendError, match=r"a row may read no key.*use attend_flash on all keys"):
        attend_past(q, k, v, scale=0.4, key_mask=torch.zeros(2, 2, dtype=torch.bool))
    with pytest.raises(ShapeError, match="4 query heads cannot share 3 key/value heads"):
        attend_past(q, *(x[:, :, :1].expand(-1, -1, 3, -1) for x in (k, v)), scale=0.4)


def test_a_large_batch_gets_smaller_tiles():
    q, k, v = random_qkv(batch=64, query_pos=256, key_pos=256, heads=4, kv_heads=4, d_head=2)
    with LargestTensor() as largest:
        attend_blocks(q, k, v, scale=0.4)
    assert largest.numel == 64 * 4 * 64**2  # 64 x 64, the smallest: the matrix would be 16 times it
