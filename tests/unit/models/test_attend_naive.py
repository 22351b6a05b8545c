"""The definition of attention, against arrays worked by hand."""

import math

import pytest
import torch

from headstream.models.attend_naive import (
    allowed_edges,
    attend_naive,
    masked_scores,
    pattern_of,
    row_lse,
    weigh,
)
from headstream.models.errors import ShapeError

NINF = -math.inf
LN2, LN3, LN4, LN6 = (math.log(number) for number in (2, 3, 4, 6))


def line(*numbers: float) -> torch.Tensor:
    """[batch 1, pos, head 1, width 1] from one number a position."""
    return torch.tensor(numbers, dtype=torch.float64)[None, :, None, None]


def random_qkv(*, batch=2, query_pos=5, key_pos=5, heads=4, kv_heads=2, d_head=8, d_value=6):
    torch.manual_seed(0)
    q = torch.randn(batch, query_pos, heads, d_head, dtype=torch.float64)
    k = torch.randn(batch, key_pos, kv_heads, d_head, dtype=torch.float64)
    v = torch.randn(batch, key_pos, kv_heads, d_value, dtype=torch.float64)
    return q, k, v


def test_two_by_two_worked_by_hand():
    q, k, v = line(1.0, 1.0), line(0.0, LN3), line(10.0, 2.0)
    scores = masked_scores(q, k, scale=1.0)
    lse = row_lse(scores)
    pattern = pattern_of(scores, lse)
    z = weigh(pattern, v)
    # Row 1 weighs its keys e^0 : e^ln3 = 1 : 3, so z = (10 + 3 * 2) / 4.
    torch.testing.assert_close(scores[0, 0].tolist(), [[0.0, NINF], [0.0, LN3]])
    torch.testing.assert_close(lse[0, 0].tolist(), [0.0, LN4])
    torch.testing.assert_close(pattern[0, 0].tolist(), [[1.0, 0.0], [0.25, 0.75]])
    torch.testing.assert_close(z[0, :, 0, 0].tolist(), [10.0, 4.0])


def test_three_by_three_with_a_scale_worked_by_hand():
    q, k, v = line(1.0, 1.0, 1.0), line(0.0, 2 * LN2, 2 * LN3), line(6.0, 12.0, 18.0)
    z, lse = attend_naive(q, k, v, scale=0.5)
    # Weights 1 : 2 : 3. Rows: 6; (6 + 24) / 3; (6 + 24 + 54) / 6.
    torch.testing.assert_close(lse[0, 0].tolist(), [0.0, LN3, LN6])
    torch.testing.assert_close(z[0, :, 0, 0].tolist(), [6.0, 10.0, 14.0])


def test_a_masked_key_is_left_out_of_every_row():
    q, k, v = line(1.0, 1.0, 1.0), line(0.0, LN2, LN3), line(6.0, 12.0, 18.0)
    mask = torch.tensor([[True, False, True]])
    scores = masked_scores(q, k, scale=1.0, key_mask=mask)
    pattern = pattern_of(scores, row_lse(scores))
    # Row 2 weighs keys 0 and 2 as 1 : 3, so z = (6 + 54) / 4.
    expected = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.25, 0.0, 0.75]]
    torch.testing.assert_close(pattern[0, 0].tolist(), expected)
    torch.testing.assert_close(weigh(pattern, v)[0, :, 0, 0].tolist(), [6.0, 6.0, 15.0])


def test_rows_with_nothing_to_read_are_zero_and_their_lse_is_minus_infinity():
    q, k, v = line(1.0, 1.0, 1.0), line(0.0, LN2, LN3), line(6.0, 12.0, 18.0)
    mask = torch.tensor([[False, False, True]])
    scores = masked_scores(q, k, scale=1.0, key_mask=mask)
    lse = row_lse(scores)
    pattern = pattern_of(scores, lse)
    assert lse[0, 0].tolist()[:2] == [NINF, NINF]
    torch.testing.assert_close(lse[0, 0, 2].item(), LN3)
    assert pattern[0, 0].tolist() == [[0.0] * 3, [0.0] * 3, [0.0, 0.0, 1.0]]
    assert weigh(pattern, v)[0, :, 0, 0].tolist() == [0.0, 0.0, 18.0]


def test_rows_with_nothing_to_read_give_finite_gradients():
    q, k, v = (x.requires_grad_() for x in random_qkv())
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, :2] = False
    mask[1] = False
    z, lse = attend_naive(q, k, v, scale=0.5, key_mask=mask)
    loss = z.sum() + lse[torch.isfinite(lse)].sum()
    for grad in torch.autograd.grad(loss, (q, k, v)):
        assert torch.isfinite(grad).all()
        assert (grad[1] == 0).all()  # sequence 1 reads nothing at all
        assert (grad[0] != 0).any()


def test_empty_rows_give_finite_gradients_at_the_scores_themselves():
    # A hook stands on the scores, after the mask: torch.logsumexp's own gradient is NaN there.
    scores = torch.tensor([[[[NINF, NINF], [0.0, LN3]]]], requires_grad=True)
    lse = row_lse(scores)
    pattern = pattern_of(scores, lse)
    (grad,) = torch.autograd.grad(lse.sum(), scores, retain_graph=True)
    torch.testing.assert_close(grad.tolist(), [[[[0.0, 0.0], [0.25, 0.75]]]])
    (grad,) = torch.autograd.grad(pattern[..., 1].sum(), scores)
    # A softmax moves by p_1 (1 - p_1) = 3 / 16.
    torch.testing.assert_close(grad.tolist(), [[[[0.0, 0.0], [-0.1875, 0.1875]]]])


def test_the_known_row_has_a_natural_logarithm():
    # One query at the end of a row of scores 0, 0, 0, 0, 3, 0, 0, 0.
    k = line(0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0)
    _, lse = attend_naive(line(1.0), k, k, scale=1.0)
    torch.testing.assert_close(lse.item(), math.log(7 + math.exp(3)))  # 3.2990, not log2's 4.76


def test_allowed_edges_are_aligned_to_the_last_key():
    mask = torch.tensor([[True, False, True, True]])
    assert allowed_edges(2, 4)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    edges = allowed_edges(2, 4, key_mask=mask)
    assert edges[0, 0].int().tolist() == [[1, 0, 1, 0], [1, 0, 1, 1]]


def test_masked_scores_are_minus_infinity_exactly_where_the_edge_is_not_allowed():
    q, k, _ = random_qkv()
    mask = torch.tensor([[False, True, True, True, True], [True, True, False, True, False]])
    scores = masked_scores(q, k, scale=0.5, key_mask=mask)
    edges = allowed_edges(5, 5, key_mask=mask)
    assert torch.equal(torch.isneginf(scores), ~edges.expand_as(scores))
    assert torch.isfinite(scores[edges.expand_as(scores)]).all()


def test_queries_of_a_cached_chunk_read_what_they_read_in_the_full_pass():
    q, k, v = random_qkv(query_pos=6, key_pos=6)
    z, lse = attend_naive(q, k, v, scale=0.5)
    chunk_z, chunk_lse = attend_naive(q[:, 4:], k, v, scale=0.5)
    torch.testing.assert_close(chunk_z, z[:, 4:])
    torch.testing.assert_close(chunk_lse, lse[:, :, 4:])


def test_query_head_h_reads_key_value_head_h_over_group():
    # Each kv head's values are its own number; d_value 1.
    q, k, _ = random_qkv(heads=4, kv_heads=2)
    v = torch.tensor([5.0, 7.0], dtype=torch.float64)[None, None, :, None].expand(2, 5, 2, 1)
    z, _ = attend_naive(q, k, v, scale=0.5)
    torch.testing.assert_close(z[0, 3, :, 0].tolist(), [5.0, 5.0, 7.0, 7.0])


def test_shared_heads_equal_copied_heads():
    q, k, v = random_qkv(heads=6, kv_heads=2)
    shared = attend_naive(q, k, v, scale=0.5)
    copied = attend_naive(
        q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2), scale=0.5
    )
    torch.testing.assert_close(shared, copied)


def test_a_whole_row_knocked_out_by_an_edit_of_the_scores_is_an_empty_row():
    q, k, v = random_qkv()
    scores = masked_scores(q, k, scale=0.5)
    scores[:, 1, 3] = NINF
    lse = row_lse(scores)
    pattern = pattern_of(scores, lse)
    assert torch.isneginf(lse[:, 1, 3]).all()
    assert torch.isfinite(lse[:, 0]).all()
    assert (pattern[:, 1, 3] == 0).all()
    assert (weigh(pattern, v)[:, 3, 1] == 0).all()


def test_pattern_rows_sum_to_one_at_scores_in_the_thousands():
    # exp(scores - lse) in float32 is off by 1e-7 * |lse| = 5e-4 here; a softmax is not.
    torch.manual_seed(0)
    scores = torch.randn(1, 1, 50, 300) * 1000
    pattern = pattern_of(scores, row_lse(scores))
    # 300 float32 terms: 1e-6 is about ten roundings of the sum.
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 1, 50), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32_and_handed_back_in_half(dtype):
    q, k, v = (x.to(dtype) for x in random_qkv())
    scores = masked_scores(q, k, scale=0.5)
    lse = row_lse(scores)
    assert scores.dtype == lse.dtype == torch.float32
    z, _ = attend_naive(q, k, v, scale=0.5)
    assert z.dtype == dtype
    wide, wide_lse = attend_naive(q.double(), k.double(), v.double(), scale=0.5)
    torch.testing.assert_close(lse.double(), wide_lse, atol=1e-6, rtol=0)  # float32 sums
    torch.testing.assert_close(z, wide.to(dtype))  # and one rounding of the result


def test_no_positions_at_all_are_no_error():
    q, k, v = random_qkv(query_pos=0, key_pos=3)
    z, lse = attend_naive(q, k, v, scale=0.5)
    assert z.shape == (2, 0, 4, 6)
    assert lse.shape == (2, 4, 0)
    assert row_lse(torch.zeros(1, 1, 2, 0)).tolist() == [[[NINF, NINF]]]


def test_heads_that_do_not_divide_are_refused():
    q, k, v = random_qkv(heads=4, kv_heads=3)
    with pytest.raises(ShapeError, match="4 query heads cannot share 3 key/value heads evenly"):
        attend_naive(q, k, v, scale=0.5)


def test_more_queries_than_keys_are_refused():
    q, k, v = random_qkv(query_pos=5, key_pos=4)
    with pytest.raises(ShapeError, match=r"5 queries but only 4 keys; .* give the cached keys too"):
        attend_naive(q, k, v, scale=0.5)
    with pytest.raises(ShapeError, match="5 queries but only 4 keys"):
        allowed_edges(5, 4)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 5, dtype=torch.int64), r"key_mask is torch.int64 of shape \(2, 5\)"),
        (torch.ones(1, 5, dtype=torch.bool), r"torch.bool of shape \(1, 5\), expected .*\(2, 5\)"),
        (torch.ones(2, 4, dtype=torch.bool), r"of shape \(2, 4\), expected a boolean"),
    ],
)
def test_a_mask_of_the_wrong_kind_is_refused(mask, words):
    q, k, v = random_qkv()
    with pytest.raises(ShapeError, match=words):
        attend_naive(q, k, v, scale=0.5, key_mask=mask)
