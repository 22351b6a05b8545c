"""Statistics of a pattern, against patterns built by hand and the published numbers."""

import math

import pytest
import torch
from torch import Tensor
from transformer_lens.head_detector import (
    compute_head_attention_similarity_score,
    get_duplicate_token_head_detection_pattern,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
)

from headstream.circuits.statistics import (
    chance_level,
    current_token_score,
    current_token_targets,
    detect_head_score,
    duplicate_token_score,
    duplicate_token_targets,
    first_real_token,
    mean_over_examples,
    prefix_matching_score,
    prefix_matching_targets,
    previous_token_score,
    previous_token_targets,
    sink_mass,
    sink_targets,
)
from headstream.models.errors import ShapeError

BOS = 0


def repeats(block: int, times: int) -> Tensor:
    """`<bos>` and a block of different tokens, `times` over."""
    return torch.tensor([[BOS, *list(range(1, block + 1)) * times]])


def uniform(n: int) -> Tensor:
    """Uniform causal attention."""
    return torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]


def all_on_first(n: int) -> Tensor:
    pattern = torch.zeros(n, n, dtype=torch.float64)
    pattern[:, 0] = 1
    return pattern


def previous(n: int) -> Tensor:
    pattern = all_on_first(n)
    pattern[1:] = torch.eye(n, dtype=torch.float64)[:-1]
    return pattern


def ideal_induction(tokens: Tensor) -> Tensor:
    """All mass evenly on the tokens after earlier copies; on the first token where there are none.

    Written as loops over the definition, apart from the code under test.
    """
    ids = tokens[0].tolist()
    pattern = all_on_first(len(ids))
    for query, token in enumerate(ids):
        targets = [key for key in range(1, query + 1) if ids[key - 1] == token]
        if targets:
            pattern[query] = 0
            pattern[query, targets] = 1 / len(targets)
    return pattern


def heads(*patterns: Tensor) -> Tensor:
    return torch.stack(patterns)[None]


def everything(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


@pytest.mark.parametrize(
    ("block", "times", "queries", "entries", "entry_mean", "mul"),
    [(25, 4, 75, 150, 0.5, 0.743), (50, 2, 50, 50, 1.0, 0.495)],
)
def test_ideal_head_under_the_rival_definitions(
    block: int, times: int, queries: int, entries: int, entry_mean: float, mul: float
) -> None:
    tokens = repeats(block, times)
    pattern = heads(ideal_induction(tokens))
    targets = prefix_matching_targets(tokens, everything(tokens))
    assert int(targets.any(-1).sum()) == queries
    assert int(targets.sum()) == entries
    assert prefix_matching_score(pattern, tokens).item() == pytest.approx(1.0, abs=1e-12)
    assert pattern[0, 0][targets[0]].mean().item() == pytest.approx(entry_mean, abs=1e-12)
    assert detect_head_score(pattern, targets).item() == pytest.approx(mul, abs=5e-4)


@pytest.mark.parametrize(
    ("block", "times", "latest_only", "expected"),
    [(25, 4, True, 0.987), (25, 4, False, 0.608), (50, 2, False, 0.981)],
)
def test_tutorial_diagonal_counts_rows_of_the_first_block(
    block: int, times: int, latest_only: bool, expected: float
) -> None:
    tokens = repeats(block, times)
    pattern = ideal_induction(tokens)
    if latest_only:  # all mass on the target one period back
        pattern = torch.zeros_like(pattern)
        for query in range(len(pattern)):
            pattern[query, query - block + 1 if query > block else 0] = 1
    diagonal = pattern.diagonal(1 - block)
    assert diagonal.mean().item() == pytest.approx(expected, abs=5e-4)


def test_pure_bos_head_scores_exactly_zero_and_the_diagonal_does_not() -> None:
    tokens = repeats(50, 2)
    pattern = all_on_first(101)
    assert prefix_matching_score(heads(pattern), tokens).item() == 0.0
    assert pattern.diagonal(-49).mean().item() == pytest.approx(1 / 52, abs=1e-12)


def test_uniform_attention_on_the_published_sequences() -> None:
    assert uniform(101).diagonal(-49).mean().item() == pytest.approx(0.0138, abs=5e-5)
    tokens = repeats(25, 4)
    targets = prefix_matching_targets(tokens, everything(tokens))
    assert uniform(101)[targets[0]].mean().item() == pytest.approx(0.0154, abs=5e-5)


def test_four_plain_heads_on_one_repeat() -> None:
    """FR-56: BOS + 8 + the same 8; perfect induction, previous-token, BOS, uniform."""
    tokens = repeats(8, 2)
    pattern = heads(ideal_induction(tokens), previous(17), all_on_first(17), uniform(17))
    expected = [1.0, 0.0, 0.0, sum(1 / (i + 1) for i in range(9, 17)) / 8]
    assert prefix_matching_score(pattern, tokens)[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert expected[3] == pytest.approx(0.0763, abs=5e-5)
    chance = chance_level(prefix_matching_targets(tokens, everything(tokens)))
    assert chance.item() == pytest.approx(expected[3], abs=1e-12)


def test_previous_and_current_token() -> None:
    pattern = heads(previous(8), torch.eye(8, dtype=torch.float64), uniform(8))
    share = sum(1 / (i + 1) for i in range(1, 8)) / 7
    assert previous_token_score(pattern)[0].tolist() == pytest.approx([1, 0, share], abs=1e-12)
    assert current_token_score(pattern)[0].tolist() == pytest.approx([0, 1, share], abs=1e-12)


def test_duplicate_token_sums_copies_and_leaves_the_query_out() -> None:
    tokens = torch.tensor([[5, 6, 5, 5]])
    pattern = torch.tensor(
        [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.6, 0.1, 0.3, 0], [0.2, 0.3, 0.25, 0.25]],
        dtype=torch.float64,
    )
    # query 2 has one copy (0.6), query 3 two (0.2 + 0.25)
    score = duplicate_token_score(heads(pattern), tokens)
    assert score.item() == pytest.approx((0.6 + 0.45) / 2, abs=1e-12)
    chance = chance_level(duplicate_token_targets(tokens, everything(tokens)))
    assert chance.item() == pytest.approx((1 / 3 + 2 / 4) / 2, abs=1e-12)


def test_a_doubled_token_is_its_own_target() -> None:
    targets = prefix_matching_targets(torch.tensor([[9, 4, 4]]), torch.ones(1, 3, dtype=torch.bool))
    assert targets[0].tolist() == [[False] * 3, [False] * 3, [False, False, True]]


def test_sink_mass_leaves_query_zero_out() -> None:
    """FR-57: including query 0 turns 0.2454 into 0.3397."""
    pattern = heads(all_on_first(8), uniform(8), uniform(8), uniform(8))
    mass = sink_mass(pattern)[0]
    share = (sum(1 / n for n in range(1, 9)) - 1) / 7
    assert mass.tolist() == pytest.approx([1.0, share, share, share], abs=1e-12)
    assert share == pytest.approx(0.2454, abs=5e-5)
    assert mass.mean().item() == pytest.approx(0.434, abs=5e-4)


def test_sink_of_several_tokens_starts_counting_after_them() -> None:
    mass = sink_mass(heads(uniform(8)), first=3)
    assert mass.item() == pytest.approx(sum(3 / n for n in range(4, 9)) / 5, abs=1e-12)


def left_padded(pattern: Tensor, by: int) -> Tensor:
    n = pattern.shape[-1] + by
    padded = torch.zeros(*pattern.shape[:-2], n, n, dtype=pattern.dtype)
    padded[..., by:, by:] = pattern
    return padded


def test_left_padding_moves_the_sink_and_no_number() -> None:
    """FR-58, for every score: padded by 2, beside a row of nothing but padding."""
    tokens = torch.tensor([[3, 1, 2, 1, 2, 2]])
    noise = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0)).double().tril()
    pattern = noise / noise.sum(-1, keepdim=True)
    padded = torch.cat([left_padded(pattern, 2), torch.zeros(1, 3, 8, 8)])
    # The padding carries the ids of real tokens, so that counting it would show.
    ids = torch.tensor([[1, 2, 3, 1, 2, 1, 2, 2], [1, 2, 1, 2, 1, 2, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0] * 8])
    for plain, masked in (
        (previous_token_score(pattern), previous_token_score(padded, mask)),
        (current_token_score(pattern), current_token_score(padded, mask)),
        (sink_mass(pattern), sink_mass(padded, mask)),
        (sink_mass(pattern, first=2), sink_mass(padded, mask, first=2)),
        (duplicate_token_score(pattern, tokens), duplicate_token_score(padded, ids, mask)),
        (prefix_matching_score(pattern, tokens), prefix_matching_score(padded, ids, mask)),
    ):
        torch.testing.assert_close(masked[0], plain[0], rtol=0, atol=1e-12)
        assert masked[1].isnan().all()
        torch.testing.assert_close(mean_over_examples(masked), plain[0], rtol=0, atol=1e-12)
    assert first_real_token(mask.bool()).tolist() == [2, -1]


def test_chance_counts_only_visible_real_keys() -> None:
    tokens, mask = torch.tensor([[1, 1, 2, 1, 2]]), torch.tensor([[0, 1, 1, 1, 1]]).bool()
    # real tokens 1 2 1 2: query 3 (sees 3) has target 2; query 4 (sees 4) has target 3
    targets = prefix_matching_targets(tokens, mask)
    assert targets.nonzero().tolist() == [[0, 3, 2], [0, 4, 3]]
    assert chance_level(targets, mask).item() == pytest.approx((1 / 3 + 1 / 4) / 2, abs=1e-12)


def test_a_hole_in_the_mask_is_stepped_over() -> None:
    real = torch.tensor([[True, False, True]])
    assert previous_token_targets(real).nonzero().tolist() == [[0, 2, 0]]


def test_no_repeat_is_not_applicable_and_never_zero() -> None:
    tokens = torch.tensor([[1, 2, 3], [1, 2, 1]])
    pattern = heads(all_on_first(3)).repeat(2, 1, 1, 1)
    for score in (prefix_matching_score(pattern, tokens), duplicate_token_score(pattern, tokens)):
        assert math.isnan(score[0].item())
        assert not math.isnan(score[1].item())
    alone = mean_over_examples(prefix_matching_score(pattern[:1], tokens[:1]))
    assert math.isnan(alone.item())
    assert math.isnan(chance_level(prefix_matching_targets(tokens, everything(tokens)))[0].item())


@pytest.mark.parametrize("kind", ["previous", "duplicate", "induction"])
def test_conversion_and_targets_are_those_of_detect_head(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 6, (1, 24), generator=generator)
    noise = torch.rand(24, 24, generator=generator).double().tril()
    pattern = noise / noise.sum(-1, keepdim=True)
    ours = {
        "previous": previous_token_targets(everything(tokens)),
        "duplicate": duplicate_token_targets(tokens, everything(tokens)),
        "induction": prefix_matching_targets(tokens, everything(tokens)),
    }[kind]
    theirs = {
        "previous": get_previous_token_head_detection_pattern,
        "duplicate": get_duplicate_token_head_detection_pattern,
        "induction": get_induction_head_detection_pattern,
    }[kind](tokens)
    assert torch.equal(ours[0], theirs.bool())
    expected = compute_head_attention_similarity_score(
        pattern,
        detection_pattern=theirs,
        exclude_bos=False,
        exclude_current_token=False,
        error_measure="mul",
    )
    converted = detect_head_score(heads(pattern), ours)
    assert converted.item() == pytest.approx(expected, abs=1e-7)  # theirs sums in float32


def test_what_does_not_fit_is_named() -> None:
    square = heads(uniform(4))
    with pytest.raises(
        ShapeError, match=r"pattern has shape \[1, 1, 3, 4\], expected a square \[batch, head,"
    ):
        previous_token_score(square[:, :, :3])
    with pytest.raises(ShapeError, match=r"tokens has shape \[1, 3\].*\[batch, pos\] = \[1, 4\]"):
        prefix_matching_score(square, torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"attention_mask has shape \[4\], expected"):
        sink_mass(square, torch.ones(4))
    with pytest.raises(ShapeError, match="first must be a whole number >= 1, got 0"):
        sink_mass(square, first=0)


def test_current_token_targets_skip_the_first_real_token() -> None:
    real = torch.tensor([[False, True, True, True]])
    assert current_token_targets(real).nonzero().tolist() == [[0, 2, 2], [0, 3, 3]]
    assert sink_targets(real).nonzero().tolist() == [[0, 2, 1], [0, 3, 1]]
