"""The entropy that the block loop accumulates: worked rows, precision, gradients."""

import math

import pytest
import torch
from torch import Tensor

from headstream.models.attend_blocks import attend_blocks, row_entropy
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import masked_scores, pattern_of, row_lse
from headstream.models.errors import BackendError, ShapeError


def last_row(scores: list[float]) -> tuple[Tensor, Tensor]:
    """One query at the end whose scores, at scale 1, are these."""
    k = torch.tensor(scores, dtype=torch.float64)[None, :, None, None]
    return torch.ones(1, 1, 1, 1, dtype=torch.float64), k


def published(scores: list[float], block: int) -> float:
    """ToProVAR (ICLR 2026), Algorithm 2, as printed but for its sign: no l (m - m')."""
    m, normaliser, spread = -math.inf, 0.0, 0.0
    for start in range(0, len(scores), block):
        tile = scores[start : start + block]
        top = max(m, *tile)
        rescale = math.exp(m - top)
        normaliser = rescale * normaliser + sum(math.exp(s - top) for s in tile)
        spread = rescale * spread + sum(math.exp(s - top) * (s - top) for s in tile)
        m = top
    return math.log(normaliser) - spread / normaliser


def entropy_of(scores: list[float]) -> float:
    lse = math.log(sum(map(math.exp, scores)))
    return -sum(math.exp(s - lse) * (s - lse) for s in scores)


SPIKE = [0.0, 0, 0, 0, 3, 0, 0, 0]


def test_the_published_recurrence_is_wrong_and_ours_is_not() -> None:
    assert published(SPIKE, 4) == pytest.approx(0.6313, abs=5e-5)
    # Right where the first block holds the maximum, so a test on such a row would not see it.
    assert published(SPIKE[4:] + SPIKE[:4], 4) == pytest.approx(entropy_of(SPIKE), abs=1e-12)
    q, k = last_row(SPIKE)
    ours = row_entropy(q, k, scale=1.0, block_size=4).item()
    assert ours == pytest.approx(1.0743, abs=5e-5)
    assert ours == pytest.approx(entropy_of(SPIKE), abs=1e-12)


@pytest.mark.parametrize("block_size", [1, 7, 64, 256])
@pytest.mark.parametrize("order", ["ascending", "descending", "spike first", "spike last"])
def test_rows_that_move_the_maximum(order: str, block_size: int) -> None:
    drawn = 3 * torch.randn(256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = drawn.sort().values.tolist()
    if order == "descending":
        scores = scores[::-1]
    elif order.startswith("spike"):
        scores = [0.0] * 255
        scores.insert(0 if order == "spike first" else 255, 9.0)
    q, k = last_row(scores)
    found = row_entropy(q, k, scale=1.0, block_size=block_size).item()
    assert found == pytest.approx(entropy_of(scores), abs=1e-11)


def test_rows_that_may_read_nothing_or_one_key_have_no_entropy() -> None:
    q = k = torch.randn(1, 5, 1, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False, False, True, True, False]])
    found = row_entropy(q, k, scale=1.0, key_mask=mask, block_size=2)[0, 0]
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert found[3] > 0


# Bounds are a few roundings of float32 scores of that size.
@pytest.mark.parametrize(
    ("largest", "bound"), [(6.0, 2e-6), (42.0, 1e-5), (420.0, 1e-4), (4203.0, 3e-4)]
)
def test_precision_is_that_of_the_definition(largest: float, bound: float) -> None:
    q, k, scale = rows_of_lse(largest)
    exact = entropy(q.double(), k.double(), scale)
    by_blocks = row_entropy(q, k, scale=scale)
    error = (by_blocks - exact).abs().max().item()
    assert error <= bound
    assert by_blocks.min() >= 0
    # The definition in float32 errs as much; the identity far more once lse is large.
    assert error <= 4 * (entropy(q, k, scale) - exact).abs().max().item()
    keys, lse = attend_flash(q, k, k, scale=scale)
    identity = lse - scale * (q * keys).sum(-1).transpose(1, 2)
    owed = (identity - exact).abs().max().item()
    assert owed <= 3 * torch.finfo(torch.float32).eps * largest
    if largest > 100:
        assert owed > 3 * error


def rows_of_lse(largest: float) -> tuple[Tensor, Tensor, float]:
    """Random rows, and the scale at which their largest |lse| is this."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 256, 2, 16, generator=generator) for _ in range(2))
    low, high = 1e-3, 1e4
    for _ in range(40):
        scale = math.sqrt(low * high)
        lse = row_lse(masked_scores(q.double(), k.double(), scale=scale))
        low, high = (scale, high) if lse.abs().max() < largest else (low, scale)
    return q, k, low


def entropy(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = masked_scores(q, k, scale=scale)
    return torch.special.entr(pattern_of(scores, row_lse(scores))).sum(-1)


def test_gradcheck_of_the_entropy_with_groups_a_cache_and_empty_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(2, pos, heads, 2, dtype=torch.float64, generator=generator, requires_grad=True)
        for pos, heads in ((3, 2), (4, 1))
    )
    mask = torch.tensor([[False, False, True, True], [False] * 4])

    def blocks(q: Tensor, k: Tensor) -> Tensor:
        return row_entropy(q, k, scale=0.7, key_mask=mask, block_size=2)

    assert torch.autograd.gradcheck(blocks, (q, k))
    assert torch.autograd.gradgradcheck(blocks, (q, k))


def test_the_plain_loop_is_untouched_by_the_accumulator() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 90, 3, 4, generator=generator) for _ in range(3))
    z, lse = attend_blocks(q, k, v, scale=0.5, block_size=16)
    expected = entropy(q, k, 0.5)
    assert (row_entropy(q, k, scale=0.5, block_size=16) - expected).abs().max() <= 2e-6
    naive = pattern_of(masked_scores(q, k, scale=0.5), lse)
    assert (torch.einsum("bhqk,bkhd->bqhd", naive, v) - z).abs().max() <= 1e-5


def test_arguments_are_checked() -> None:
    q = k = torch.zeros(1, 3, 2, 4)
    with pytest.raises(BackendError, match="block_size is 0; give a positive number of positions"):
        row_entropy(q, k, scale=1.0, block_size=0)
    with pytest.raises(ShapeError, match="3 queries but only 2 keys"):
        row_entropy(q, k[:, :2], scale=1.0)
