"""Generators of sequences: what their masks promise, by hand and by brute force."""

import pytest
import torch
from torch import Generator

from headstream.models.errors import ShapeError, TaskError
from headstream.models.zoo.sequences import repeated_blocks, single_match


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def test_a_block_of_three_by_hand() -> None:
    made = repeated_blocks(50, 9, 20, generator=seeded(), block=(3, 3), gap=(1, 1), lead=(1, 1))
    # <bos> x A B C y A B C
    assert torch.equal(made.tokens[:, 2:5], made.tokens[:, 6:9])
    assert made.predictable.int().tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 1]] * 50
    assert made.source.tolist() == [[-1, -1, -1, -1, -1, -1, -1, 3, 4]] * 50
    # The token before position 7 is A again; before 6 stands y, seen for the first time.
    assert made.fresh.int().tolist() == [[0, 1, 1, 1, 1, 1, 1, 0, 0]] * 50
    assert (made.tokens[:, 1] != made.tokens[:, 5]).all(), "fillers do not recur so soon"


def test_fixed_ranges_give_one_distance_and_wide_ones_many() -> None:
    fixed = repeated_blocks(20, 64, 48, generator=seeded(), block=(16, 16), gap=(4, 4))
    wide = repeated_blocks(80, 64, 48, generator=seeded(), block=(2, 24), gap=(0, 20))
    place = torch.arange(64)
    assert set((place - fixed.source)[fixed.predictable].tolist()) == {20}
    distances = set((place - wide.source)[wide.predictable].tolist())
    assert min(distances) <= 6
    assert max(distances) >= 36
    assert len(distances) > 25


def test_gaps_differ_within_a_row() -> None:
    made = repeated_blocks(100, 64, 48, generator=seeded(), block=(4, 8), gap=(0, 12))
    distance = (torch.arange(64) - made.source).masked_fill(~made.predictable, 0)
    several = [len(set(row[row > 0].tolist())) > 1 for row in distance]
    assert sum(several) > 90


def test_fillers_have_no_order_of_their_own() -> None:
    """With few tokens the fillers recur; a second pass in the first one's order would repeat."""
    made = repeated_blocks(200, 64, 10, generator=seeded(), block=(2, 2), gap=(8, 8))
    unpredictable = ~made.predictable & ~made.fresh
    unpredictable[:, 0] = False
    hits = total = 0
    for row, where in zip(made.tokens.tolist(), unpredictable.tolist()):
        for at, asked in enumerate(where):
            if asked and at > 1:
                last = max(i for i in range(at - 1) if row[i] == row[at - 1])
                hits += row[last + 1] == row[at]
                total += 1
    # Eight fillers in random order follow one another by chance once in seven or eight.
    assert hits / total < 0.25


def test_single_match_by_hand() -> None:
    made = single_match(200, 12, 15, generator=seeded(3))
    row = torch.arange(200)
    assert (made.tokens[:, 0] == 0).all()
    assert torch.equal(made.tokens[row, made.earlier], made.tokens[:, -1])
    for tokens, fresh in zip(made.tokens[:, 1:-1].tolist(), made.fresh.tolist()):
        assert sorted(tokens + fresh) == list(range(1, 16)), "each content token once"
    assert set((11 - made.earlier).tolist()) == set(range(2, 11)), "every distance that fits"


def test_single_match_keeps_to_its_distances() -> None:
    made = single_match(100, 12, 15, generator=seeded(), distance=(4, 5))
    assert set((11 - made.earlier).tolist()) == {4, 5}


def test_generators_leave_the_global_random_state_alone_and_repeat_themselves() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = repeated_blocks(4, 20, 12, generator=seeded(5), block=(2, 5), gap=(0, 4), lead=(0, 3))
    one = single_match(4, 9, 12, generator=seeded(5))
    assert torch.equal(torch.get_rng_state(), before)
    again = repeated_blocks(4, 20, 12, generator=seeded(5), block=(2, 5), gap=(0, 4), lead=(0, 3))
    other = repeated_blocks(4, 20, 12, generator=seeded(6), block=(2, 5), gap=(0, 4), lead=(0, 3))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(one.tokens, single_match(4, 9, 12, generator=seeded(5)).tokens)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({"block": (5, 3)}, r"block must be \(smallest, largest\) with 1 <= .* got \(5, 3\)"),
        ({"block": (0, 3)}, r"block must be .* got \(0, 3\)"),
        ({"block": (2, 3), "gap": (-1, 3)}, r"gap must be .* 0 <= smallest .* got \(-1, 3\)"),
        ({"block": (2, 3), "lead": (2, 1)}, r"lead must be .* got \(2, 1\)"),
        ({"block": (2, 11)}, r"a block of up to 11 tokens cannot be drawn .* 10 content tokens"),
        ({"block": (2, 10), "gap": (0, 1)}, r"up to 10 tokens and its filler cannot be drawn"),
    ],
)
def test_ranges_that_cannot_be_drawn(spans: dict[str, tuple[int, int]], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        repeated_blocks(2, 20, 10, generator=seeded(), **spans)


@pytest.mark.parametrize(
    ("length", "distance", "message"),
    [
        (3, None, "takes 4 tokens, got length=3"),
        (12, None, "length=12 needs 11 different content tokens .* but there are 10; use a length"),
        (8, (1, 3), r"distance must be .* within 2 .. 6 for length=8, got \(1, 3\)"),
        (8, (3, 7), r"within 2 .. 6 for length=8, got \(3, 7\)"),
    ],
)
def test_matches_that_cannot_be_drawn(
    length: int, distance: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        single_match(2, length, 10, generator=seeded(), distance=distance)


def test_sizes_are_checked() -> None:
    with pytest.raises(ShapeError, match="batch must be >= 1 and length >= 2, got 0 and 9"):
        repeated_blocks(0, 9, 10, generator=seeded(), block=(2, 3))
    with pytest.raises(ShapeError, match="got 1 and 1"):
        single_match(1, 1, 10, generator=seeded())
