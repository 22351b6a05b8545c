"""The scan over distances, on heads whose attention is known position by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator

from headstream.circuits.fixed_distance import (
    FEWEST_QUERIES,
    SEQUENCES,
    FixedDistances,
    scan_distances,
)
from headstream.circuits.gapped_repeats import draw_in_orders
from headstream.circuits.repeats import plan_repeats
from headstream.models.hooks import capture


def scan(made: Any, length: int) -> FixedDistances:
    plan = plan_repeats(made.model.config)
    return scan_distances(made.model, plan, length, Generator().manual_seed(0))


def test_every_distance_is_seen_that_leaves_enough_queries(hand) -> None:
    """64 tokens after BOS: a head that looks 39 back copies from distance 40, past the middle."""
    made = hand.HandMade(n_content=64, n_ctx=65, n_layers=1)
    for head, back in enumerate((39, 31, 55, 2)):
        made.look_back(0, head, back)
    found = scan(made, 65)
    assert found.farthest == 64 - FEWEST_QUERIES
    assert found.distance[0].tolist() == [40, 32, 56, 3]
    assert found.stands_out(seed=0).all()
    # All of the mass, less chance: 1 / (i + 1) at position i, from position 41 on.
    chance = np.mean([1 / (i + 1) for i in range(41, 65)])
    assert found.mass[:, 0, 0] == pytest.approx(np.full(SEQUENCES, 1 - chance), abs=1e-5)


def test_the_numbers_are_those_of_the_pattern(build) -> None:
    """Oracle: entries of the pattern, one by one."""
    model = build({"d_vocab": 30, "n_ctx": 24, "bos_token_id": 0}, dtype=torch.float32)
    plan = plan_repeats(model.config)
    found = scan_distances(model, plan, 24, Generator().manual_seed(3))
    tokens = draw_in_orders(plan.content, 0, 24, SEQUENCES, Generator().manual_seed(3))
    _, acts = capture(model, tokens, "blocks.1.attn.hook_pattern")
    pattern = acts["blocks.1.attn.hook_pattern"][:, 2].double()
    distance = int(found.distance[1, 2])
    queries = list(range(distance + 1, 24))
    chance = {i: 1 / (i + 1) for i in queries}

    def excess(back: int, some: list[int]) -> float:
        return float(np.mean([float(pattern[:, i, i - back].mean()) - chance[i] for i in some]))

    late = queries[len(queries) // 2 :]
    assert found.mass[:, 1, 2].mean() == pytest.approx(excess(distance - 1, queries), abs=1e-6)
    assert found.late[:, 1, 2].mean() == pytest.approx(excess(distance - 1, late), abs=1e-6)
    beside = max(excess(0, queries), excess(1, queries))
    assert found.beside[1, 2] == pytest.approx(beside, abs=1e-6)


def test_where_early_positions_rest_is_not_where_the_head_looks(hand) -> None:
    """31 back; positions that have nothing there rest 12 back."""
    at = {i: i - 31 if i >= 32 else i - 12 for i in range(12, 48)}
    made = hand.HandMade(n_layers=1, n_heads=1).look(0, 0, at)
    for length in (42, 44, 48):
        found = scan(made, length)
        assert found.distance[0, 0] == 32, "most positions rest, but not late ones"
        assert found.stands_out(seed=0)[0, 0]
    # The mean over all of them alone would say 13: 18 of 28 rest, 10 look.
    assert (32 - 14) / 28 - 0.05 > 0.3 > np.mean([i < 32 for i in range(28, 42)]) - 0.05


@pytest.mark.parametrize("length", [7, 9, 12, 20, 48])
def test_a_head_that_looks_at_one_position_has_no_distance(hand, length: int) -> None:
    made = hand.HandMade(n_layers=1, n_ctx=max(length, 9))
    for head, where in enumerate((2, 3, 5, 0)):
        made.look(0, head, dict.fromkeys(range(where, made.n_ctx), where))
    assert not scan(made, length).stands_out(seed=0).any()


def test_what_looks_at_itself_more_is_no_copier(hand) -> None:
    """0.6 on its own token and 0.4 back: at its distance, but not before all."""
    made = hand.HandMade(n_layers=1, n_heads=2)
    for head, own in ((0, 0.6), (1, 0.4)):
        made.look_back(0, head, 9)
        attn = made.model.blocks[0].attn
        with torch.no_grad():
            extra = torch.log(torch.tensor(own / (1 - own)))
            for i in range(made.n_ctx):
                attn.W_Q[head, made.position.start + i, i] += 30.0 + float(extra)
    found = scan(made, 48)
    assert found.distance[0].tolist() == [10, 10]
    assert found.stands_out(seed=0)[0].tolist() == [False, True]
