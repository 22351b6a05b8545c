"""Two backends, one truth: flash against the definition, and the definition against torch."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headstream.models.attend_blocks import attend_blocks
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import attend_naive, masked_scores

# Largest difference allowed at unit scale: rounding of sums of at most 130 terms, with room.
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}

MASKS = ("none", "left", "right", "holes", "all")


def problem(dtype, heads, lengths, mask, *, d_value=8):
    generator = torch.Generator().manual_seed(0)
    query_pos, key_pos = lengths
    q, k, v = (
        torch.randn(3, pos, count, width, dtype=dtype, generator=generator, requires_grad=True)
        for pos, count, width in (
            (query_pos, heads[0], 8),
            (key_pos, heads[1], 8),
            (key_pos, heads[1], d_value),
        )
    )
    if mask == "none":
        return q, k, v, None
    key_mask = torch.ones(3, key_pos, dtype=torch.bool)
    if mask == "left":
        key_mask[0, : key_pos // 2] = False
    elif mask == "right":
        key_mask[0, key_pos // 2 :] = False
    elif mask == "holes":
        key_mask[0, ::3] = False
    else:
        key_mask[0] = False
    return q, k, v, key_mask


def difference(a, b):
    """Largest difference; equal infinities differ by nothing."""
    return torch.where(a == b, 0.0, a - b).abs().max().item()


@pytest.mark.parametrize("dtype", list(BOUND), ids=["float64", "float32"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [(1, 1), (33, 33), (130, 130), (5, 40), (1, 40)])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients(dtype, heads, lengths, mask):
    q, k, v, key_mask = problem(dtype, heads, lengths, mask)
    z, lse = attend_naive(q, k, v, scale=0.35, key_mask=key_mask)
    to_z, to_lse = torch.randn_like(z), torch.randn_like(lse)
    finite = torch.isfinite(lse)
    with_lse = torch.autograd.grad(
        (z * to_z).sum() + (lse * to_lse)[finite].sum(), (q, k, v), retain_graph=True
    )
    without = torch.autograd.grad((z * to_z).sum(), (q, k, v))
    bound = BOUND[dtype]

    with torch.no_grad():
        fused_z, fused_lse = attend_flash(q, k, v, scale=0.35, key_mask=key_mask, kernel="fused")
    assert difference(fused_z, z) <= bound
    assert difference(fused_lse, lse) <= bound

    auto_z, _ = attend_flash(q, k, v, scale=0.35, key_mask=key_mask)
    for expected, got in zip(without, torch.autograd.grad((auto_z * to_z).sum(), (q, k, v))):
        assert difference(expected, got) <= bound

    for block_size in (7, 64, None):
        blocks_z, blocks_lse = attend_flash(
            q, k, v, scale=0.35, key_mask=key_mask, kernel="blocks", block_size=block_size
        )
        assert difference(blocks_z, z) <= bound
        assert difference(blocks_lse, lse) <= bound
        loss = (blocks_z * to_z).sum() + (blocks_lse * to_lse)[finite].sum()
        for expected, got in zip(with_lse, torch.autograd.grad(loss, (q, k, v))):
            assert difference(expected, got) <= bound


@pytest.mark.parametrize("kernel", ["fused", "blocks"])
@pytest.mark.parametrize("d_value", [3, 13])
def test_values_of_another_width_than_the_keys(kernel, d_value):
    q, k, v, key_mask = problem(torch.float64, (4, 2), (9, 9), "right", d_value=d_value)
    z, lse = attend_naive(q, k, v, scale=0.35, key_mask=key_mask)
    flash_z, flash_lse = attend_flash(q, k, v, scale=0.35, key_mask=key_mask, kernel=kernel)
    assert difference(flash_z, z) <= 1e-10
    assert difference(flash_lse, lse) <= 1e-10
    to_z = torch.randn_like(z)
    for expected, got in zip(
        torch.autograd.grad((z * to_z).sum(), (q, k, v)),
        torch.autograd.grad((flash_z * to_z).sum(), (q, k, v)),
    ):
        assert difference(expected, got) <= 1e-10


def test_gradcheck_of_z_and_lse_together_with_rows_that_read_nothing():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, pos, count, 2, dtype=torch.float64, generator=generator, requires_grad=True)
        for pos, count in ((3, 2), (4, 1), (4, 1))
    )
    key_mask = torch.tensor([[False, False, True, True], [False] * 4])

    def naive(q, k, v):
        z, lse = attend_naive(q, k, v, scale=0.7, key_mask=key_mask)
        return z, lse.masked_fill(torch.isneginf(lse), 0.0)

    def blocks(q, k, v):
        z, lse = attend_blocks(q, k, v, scale=0.7, key_mask=key_mask, block_size=2)
        return z, lse.masked_fill(torch.isneginf(lse), 0.0)

    for attend in (naive, blocks):
        assert torch.autograd.gradcheck(attend, (q, k, v))
    # The block loop's backward pass is itself differentiable.
    assert torch.autograd.gradgradcheck(blocks, (q, k, v))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(9, 9), (4, 9)])
def test_naive_against_torch(lengths, mask):
    q, k, v, key_mask = problem(torch.float64, (4, 2), lengths, mask)
    z, lse = attend_naive(q, k, v, scale=0.35, key_mask=key_mask)
    query_pos, key_pos = lengths
    edges = torch.ones(query_pos, key_pos, dtype=torch.bool).tril(key_pos - query_pos)[None, None]
    if key_mask is not None:
        edges = edges & key_mask[:, None, None, :]
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=edges, scale=0.35, enable_gqa=True
    ).transpose(1, 2)
    assert difference(z, expected) <= 1e-12  # float64, nine terms
    scores = masked_scores(q, k, scale=0.35, key_mask=key_mask)
    assert difference(lse, torch.logsumexp(scores, dim=-1)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["fused", "blocks"])
@pytest.mark.parametrize("size", [1.0, 4.0], ids=["unit", "large"])
@pytest.mark.parametrize("mask", ["none", "left"])
def test_half_precision_errs_no_more_than_twice_what_naive_does(dtype, kernel, size, mask):
    # The inputs of the float32 reference are not rounded to half, as in a model run in half.
    q, k, v, key_mask = problem(torch.float32, (4, 2), (200, 200), mask)
    with torch.no_grad():
        wide = tuple(size * x for x in (q, k, v))
        half = tuple(x.to(dtype) for x in wide)
        z, lse = attend_naive(*wide, scale=0.35, key_mask=key_mask)
        naive_z, naive_lse = attend_naive(*half, scale=0.35, key_mask=key_mask)
        flash_z, flash_lse = attend_flash(*half, scale=0.35, key_mask=key_mask, kernel=kernel)
        assert 0 < difference(flash_z.float(), z) <= 2 * difference(naive_z.float(), z)
        assert 0 < difference(flash_lse, lse) <= 2 * difference(naive_lse, lse)
        # Stronger: on the same rounded inputs the sums are float32's, so lse agrees to its
        # rounding (scores reach 100 at the large size) and z to one rounding of the result.
        assert difference(flash_lse, naive_lse) <= 1e-5 * size**2
        same_z, _ = attend_naive(*(x.float() for x in half), scale=0.35, key_mask=key_mask)
        rounding = torch.finfo(dtype).eps * same_z.abs().max().item()
        assert difference(flash_z.float(), same_z) <= rounding
    finite = flash_lse[torch.isfinite(flash_lse)]
    assert finite.std() > 0.1  # and it is no constant
