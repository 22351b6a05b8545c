"""Sequences that tell content from distance: what stands where, and what an ideal head scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstream.circuits.gapped_repeats import (
    draw_gapped,
    draw_in_orders,
    fewest_tokens,
    make_elsewhere,
    plan_gaps,
)
from headstream.circuits.repeats import draw_orders, plan_repeats
from headstream.circuits.statistics import prefix_matching_targets, target_mass
from headstream.models.config import DecoderConfig
from headstream.models.errors import ShapeError, TokenError


def config(d_vocab: int = 49, n_ctx: int = 128, bos: int | None = 0) -> DecoderConfig:
    return DecoderConfig(
        n_layers=1,
        n_heads=1,
        d_model=8,
        d_head=4,
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        bos_token_id=bos,
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ideal(tokens: Tensor) -> Tensor:
    """Attention to what followed earlier copies; to the first token where there is none."""
    targets = prefix_matching_targets(tokens, torch.ones_like(tokens, dtype=torch.bool)).float()
    first = torch.zeros_like(targets)
    first[:, :, 0] = 1.0
    count = targets.sum(-1, keepdim=True)
    return torch.where(count > 0, targets / count.clamp(min=1), first)[:, None]


def back(offset: int) -> Callable[[Tensor], Tensor]:
    def pattern(tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1])
        keys = (at - offset).clamp(min=0)
        one = torch.nn.functional.one_hot(keys, tokens.shape[1]).float()
        return one.expand(len(tokens), 1, -1, -1)

    return pattern


@pytest.mark.parametrize("length", [7, 16, 33, 64, 128])
@pytest.mark.parametrize("bos", [0, None])
def test_an_ideal_head_scores_one_however_many_copies(length: int, bos: int | None) -> None:
    drawn = draw_gapped(plan_gaps(config(bos=bos), length), 16, seeded())
    assert drawn.repeated.shape == drawn.control.shape == (16, length)
    assert drawn.after_copies.any((1, 2)).all(), "every row asks"
    score = target_mass(ideal(drawn.repeated), drawn.after_copies)
    assert score.flatten().tolist() == pytest.approx([1.0] * 16)
    # Where the content is broken the same head has no reason to look there. A key after a token
    # that came twice by chance is the exception, and rare.
    assert float(target_mass(ideal(drawn.control), drawn.after_copies).mean()) < 0.15


@pytest.mark.parametrize("offset", [1, 15, 16, 31, 47])
def test_no_distance_explains_random_gaps(offset: int) -> None:
    drawn = draw_gapped(plan_gaps(config(), 128), 32, seeded())
    assert float(target_mass(back(offset)(drawn.repeated), drawn.after_copies).mean()) < 0.2


def test_nothing_is_drawn_twice_in_a_block_or_gap_and_blocks_keep_to_themselves() -> None:
    plan = plan_gaps(config(), 128)
    drawn = draw_gapped(plan, 8, seeded(4))
    for row, control, asks in zip(
        drawn.repeated.tolist(), drawn.control.tolist(), drawn.after_copies.any(-1), strict=True
    ):
        assert row[0] == control[0] == 0
        first = int(asks.int().argmax())
        block = row[first : first + plan.block]
        assert len(set(block)) == plan.block
        start = row.index(block[0])
        assert row[start : start + plan.block] == block
        assert row[:first] == control[:first], "equal up to the second block"
        later = [token for token, asked in zip(row, asks, strict=True) if asked]
        assert set(later) <= set(block)
        others = [t for t, asked in zip(control[first:], asks[first:], strict=True) if asked]
        assert not set(others) & set(block), "content broken"
        gap = row[start + plan.block : first]
        assert len(set(gap)) == len(gap)
        assert not set(gap) & set(block)


def test_content_elsewhere_is_looked_for_at_the_wrong_distance() -> None:
    plan = plan_repeats(config(), [16, 24], 8)
    orders = draw_orders(plan, 4, seeded())
    for distance, other in ((16, 24), (24, 16)):
        tokens, looked = make_elsewhere(plan, orders, distance, other)
        assert tokens.shape[1] == 1 + 24 + 8
        assert torch.equal(tokens[:, -8:], tokens[:, -8 - other : -other]), "it recurs, there"
        score = target_mass(ideal(tokens), looked)
        assert float(score.max()) == 0.0, "a head that follows content"
        score = target_mass(back(distance - 1)(tokens), looked)
        assert float(score.min()) == 1.0, "a head that follows the distance"
        assert int(looked.any(-1).sum()) == 4 * 8, "the queries of the second block"


def test_orders_use_every_token_before_one_twice() -> None:
    tokens = draw_in_orders(tuple(range(1, 11)), 0, 26, 5, seeded())
    assert (tokens[:, 0] == 0).all()
    for row in tokens[:, 1:].tolist():
        assert sorted(row[:10]) == sorted(row[10:20]) == list(range(1, 11))
        assert len(set(row[20:])) == 5
    assert draw_in_orders((3, 4), None, 2, 1, seeded()).sort().values.tolist() == [[3, 4]]


def test_what_does_not_fit_is_refused() -> None:
    assert fewest_tokens(config()) == 7
    assert fewest_tokens(config(bos=None)) == 6
    with pytest.raises(ShapeError, match=r"length=6 is out of range.* at least 7 tokens"):
        plan_gaps(config(), 6)
    with pytest.raises(ShapeError, match=r"length=129 .* n_ctx=128"):
        plan_gaps(config(), 129)
    with pytest.raises(TokenError, match="3 content tokens are too few"):
        plan_gaps(config(d_vocab=4), 20)
