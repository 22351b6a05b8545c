"""Repeats and their controls: what is drawn, and what does not fit."""

from typing import Any

import pytest
import torch

from headstream.circuits.repeats import draw_orders, make_pair, plan_repeats
from headstream.models.config import DecoderConfig
from headstream.models.errors import ShapeError, TokenError


def config(**fields: Any) -> DecoderConfig:
    sizes = {"n_layers": 1, "n_heads": 1, "d_model": 4, "d_head": 4, "d_vocab": 49, "n_ctx": 64}
    return DecoderConfig(**(sizes | {"bos_token_id": 0} | fields))


def test_a_pair_by_hand() -> None:
    plan = plan_repeats(config(d_vocab=7, n_ctx=8), distances=[3], length=2)
    pair = make_pair(plan, torch.tensor([[5, 6, 1, 2, 3, 4]]), 3)
    assert pair.repeated.tolist() == [[0, 5, 6, 1, 5, 6]]
    assert pair.control.tolist() == [[0, 5, 6, 1, 2, 3]]
    assert pair.after_copy.nonzero().tolist() == [[0, 4, 2], [0, 5, 3]]
    assert pair.copy.nonzero().tolist() == [[0, 4, 1], [0, 5, 2]]


@pytest.mark.parametrize("bos", [None, 0, 5])
@pytest.mark.parametrize("distance", [4, 9])
def test_pairs_repeat_only_what_they_should(bos: int | None, distance: int) -> None:
    plan = plan_repeats(
        config(bos_token_id=bos, pad_token_id=7, d_vocab=20), distances=[distance], length=4
    )
    orders = draw_orders(plan, 30, torch.Generator().manual_seed(0))
    pair = make_pair(plan, orders, distance)
    skip = 0 if bos is None else 1
    for repeated, control in zip(pair.repeated.tolist(), pair.control.tolist(), strict=True):
        if bos is not None:
            assert repeated[0] == control[0] == bos
        assert not {bos, 7} & set(repeated[skip:] + control[skip:])
        assert len(set(control)) == len(control)
        second = skip + distance
        assert repeated[:second] == control[:second]
        assert repeated[second:] == repeated[skip : skip + 4]
        assert len(set(repeated)) == len(repeated) - 4
    queries = pair.after_copy.any(-1)
    assert queries.nonzero()[:, 1].unique().tolist() == list(range(second, second + 4))
    assert bool((pair.after_copy.sum(-1)[queries] == 1).all())
    rows, query, key = pair.after_copy.nonzero().T
    assert bool((query - key == distance - 1).all())
    assert len({tuple(row) for row in pair.repeated.tolist()}) == 30
    assert len(rows) == 30 * 4


def test_default_spreads_over_what_fits() -> None:
    plan = plan_repeats(config())  # 48 content tokens, 63 positions
    assert (plan.length, plan.distances) == (16, (16, 21, 27, 32))
    assert plan.notes == ()
    plan = plan_repeats(config(d_vocab=5000, n_ctx=4096))
    assert (plan.length, plan.distances) == (16, (16, 48, 80, 112))
    plan = plan_repeats(config(d_vocab=5000, n_ctx=4096, n_train=31))
    assert (plan.length, plan.distances) == (10, (10, 13, 17, 20))


def test_fewer_distances_are_stated() -> None:
    plan = plan_repeats(config(d_vocab=7))  # 6 content tokens
    assert (plan.length, plan.distances) == (2, (2, 3, 4))
    assert plan.notes == ("3 of 4 repeat distances fit this model",)
    plan = plan_repeats(config(n_ctx=5))
    assert plan.distances == (2,)
    only = "one repeat distance: only the control tells content from position"
    assert plan.notes == ("1 of 4 repeat distances fit this model", only)
    assert plan_repeats(config(), distances=[20]).notes == (only,)
    assert plan_repeats(config(), distances=[20, 30]).notes == ()


def test_asked_for_distances_and_length() -> None:
    plan = plan_repeats(config(), distances=[30, 20, 30])
    assert (plan.length, plan.distances) == (16, (20, 30))
    assert plan_repeats(config(), distances=[6, 40]).length == 6
    assert plan_repeats(config(), length=5).distances == (5, 18, 30, 43)


def test_what_does_not_fit() -> None:
    with pytest.raises(
        TokenError, match=r"3 content tokens are too few for a repeat .* takes 4 \(d_vocab=4, with"
    ):
        plan_repeats(config(d_vocab=4))
    with pytest.raises(
        ShapeError, match="n_ctx=4 is too short for a repeat: the smallest takes 4 positions after"
    ):
        plan_repeats(config(n_ctx=4))
    with pytest.raises(
        ShapeError,
        match=r"distances \[8, 44\] with a block of 8 tokens do not fit: each must lie in \[8, 40\]"
        r".*48 content tokens and 63 positions",
    ):
        plan_repeats(config(), distances=[44, 8], length=8)
    with pytest.raises(ShapeError, match=r"distances \[1\] .* must lie in \[2, 46\]"):
        plan_repeats(config(), distances=[1])
    with pytest.raises(ShapeError, match="distances is empty"):
        plan_repeats(config(), distances=[])
    with pytest.raises(ShapeError, match=r"length must lie in \[2, 24\] tokens.*got 25"):
        plan_repeats(config(), length=25)
