"""Prompt pairs: what each corruption changes, and what stays."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from headstream.analyses.patching.task import Task
from headstream.models.errors import TaskError
from headstream.models.store import load
from headstream.models.zoo.constructed import constructed_induction
from headstream.models.zoo.sequences import repeated_blocks
from headstream.models.zoo.tasks import pairs_for

CARD: dict[str, Any] = {
    "name": "toy",
    "task": {"kind": "induction", "length": 14, "n_content": 20},
}
ROW = torch.arange(60)


@pytest.mark.parametrize("corruption", ["earlier_query", "answer", "last"])
def test_one_token_differs_and_it_is_new(corruption: str) -> None:
    pairs = pairs_for(CARD, 60, 0, corruption=corruption)
    clean, corrupted, roles = pairs["clean"], pairs["corrupted"], pairs["roles"]
    assert clean.shape == corrupted.shape == (60, 14)
    changed = clean != corrupted
    assert changed.sum(1).tolist() == [1] * 60
    where = {"earlier_query": "earlier_query", "answer": "answer_source", "last": "query"}
    assert torch.equal(changed.long().argmax(1), roles[where[corruption]])
    new = corrupted[changed]
    assert not (clean == new[:, None]).any(), "the new token occurs nowhere in the clean prompt"


def test_roles_and_answer_fit_together() -> None:
    pairs = pairs_for(CARD, 60, 0)
    clean, roles = pairs["clean"], pairs["roles"]
    assert (roles["query"] == 13).all()
    assert torch.equal(clean[ROW, roles["earlier_query"]], clean[ROW, roles["query"]])
    assert torch.equal(roles["answer_source"], roles["earlier_query"] + 1)
    assert torch.equal(clean[ROW, roles["answer_source"]], pairs["answer"])
    assert set((13 - roles["earlier_query"]).tolist()) == set(range(2, 13)), "all distances"


@pytest.mark.parametrize("corruption", ["earlier_query", "last"])
def test_wrong_stands_in_both_prompts(corruption: str) -> None:
    pairs = pairs_for(CARD, 60, 0, corruption=corruption)
    wrong = pairs["wrong"]
    for prompt in (pairs["clean"], pairs["corrupted"]):
        assert (prompt == wrong[:, None]).any(1).all()
    assert (wrong != pairs["answer"]).all()
    assert (wrong != pairs["clean"][:, -1]).all()
    assert (wrong != 0).all()


def test_wrong_is_drawn_from_everywhere() -> None:
    pairs = pairs_for(CARD, 60, 0)
    places = (pairs["clean"] == pairs["wrong"][:, None]).long().argmax(1)
    assert set(places.tolist()) >= {1, 2, 11, 12}


def test_wrong_is_what_replaced_the_answer() -> None:
    pairs = pairs_for(CARD, 60, 0, corruption="answer")
    replaced = pairs["corrupted"][ROW, pairs["roles"]["answer_source"]]
    assert torch.equal(replaced, pairs["wrong"])


def test_the_seed_decides_and_nothing_else_is_touched() -> None:
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first, again, other = (pairs_for(CARD, 9, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first["clean"], again["clean"])
    assert torch.equal(first["wrong"], again["wrong"])
    assert not torch.equal(first["clean"], other["clean"])


def test_corruptions_share_their_clean_prompts() -> None:
    cleans = [pairs_for(CARD, 9, 0, corruption=kind)["clean"] for kind in ("answer", "last")]
    assert torch.equal(*cleans)


def test_distances_can_be_chosen() -> None:
    pairs = pairs_for(CARD, 60, 0, distance=(3, 4))
    assert set((13 - pairs["roles"]["earlier_query"]).tolist()) == {3, 4}


def test_a_real_card_serves() -> None:
    model = constructed_induction()
    assert model.card is not None
    pairs = pairs_for(model.card, 3, 0)
    assert pairs["clean"].shape == (3, 32)
    assert int(pairs["clean"].max()) < model.config.d_vocab


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({"name": "x"}, "the card of 'x' names no known task, got None"),
        ({"name": "x", "task": {"kind": "chess"}}, "names no known task, got {'kind': 'chess'}"),
        ({"name": "x", "task": "induction"}, "names no known task, got 'induction'"),
        (
            {"name": "x", "task": {"kind": "induction", "length": 9}},
            "length and n_content as whole",
        ),
        (
            {"name": "x", "task": {"kind": "induction", "length": 4, "n_content": 9}},
            "takes at least 5 tokens, .* got length=4",
        ),
        (
            {"name": "x", "task": {"kind": "induction", "length": 12, "n_content": 9}},
            "length=12 needs 11 different content tokens",
        ),
    ],
)
def test_cards_without_a_usable_task(card: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        pairs_for(card, 3, 0)


def test_options_are_checked() -> None:
    with pytest.raises(TaskError, match="corruption must be one of earlier_query, answer, last, "):
        pairs_for(CARD, 3, 0, corruption="anser")
    with pytest.raises(TaskError, match="nearest is 'answer'"):
        pairs_for(CARD, 3, 0, corruption="anser")
    with pytest.raises(TaskError, match="n must be a whole number of pairs >= 1, got 0"):
        pairs_for(CARD, 0, 0)
    with pytest.raises(TaskError, match=r"within 2 .. 12 for length=14, got \(1, 3\)"):
        pairs_for(CARD, 3, 0, distance=(1, 3))


@pytest.mark.parametrize(
    "span", ["ab", ("a", "b"), (2.5, 3), (3,), (3, 4, 5), (True, 4), {3: 4, 5: 6}, None, 5, 2.5]
)
@pytest.mark.parametrize(
    ("name", "option"),
    [("induction-2l", "distance"), ("decoy-2l", "distance"), ("recall-2l", "depth")],
)
def test_a_span_is_two_whole_numbers(name: str, option: str, span: Any) -> None:
    model = load(name)
    if span is None:  # the kind's own
        assert len(Task.for_model(model, n=2, **{option: None})) == 2
        return
    words = f"{option} must be two whole numbers (smallest, largest), got {span!r}"
    with pytest.raises(TaskError, match=re.escape(words)) as caught:
        Task.for_model(model, n=2, **{option: span})
    assert (f"for one value give it twice: {option}=(5, 5)" in str(caught.value)) == (span == 5)


def test_spans_from_json_and_from_numpy_are_spans() -> None:
    model = load("recall-2l")
    for span in ([3, 4], np.array([3, 4]).tolist(), tuple(np.array([3, 4]))):
        needles = Task.for_model(model, n=40, depth=span).roles["needle_key"]
        assert set(needles.tolist()) == {8, 10}, "<bos> <data>, and two tokens a pair"


@pytest.mark.parametrize("span", [5, "ab", (2.5, 3)])
@pytest.mark.parametrize("name", ["block", "gap", "lead"])
def test_spans_of_blocks(name: str, span: Any) -> None:
    spans = {"block": (2, 3)} | {name: span}
    words = f"{name} must be two whole numbers (smallest, largest), got {span!r}"
    with pytest.raises(TaskError, match=re.escape(words)):
        repeated_blocks(2, 20, 30, generator=torch.Generator(), **spans)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"corruption": 5}, "corruption must be one of .*, got 5"),
        ({"corruption": ["answer"]}, r"corruption must be one of .*, got \['answer'\]"),
        ({"n": 2.5}, r"n must be a whole number of pairs >= 1, got 2\.5"),
        ({"n": "two"}, "n must be a whole number of pairs >= 1, got 'two'"),
    ],
)
@pytest.mark.parametrize("name", ["induction-2l", "constructed-and", "backcopy-1l", "recall-2l"])
def test_every_kind_says_what_it_takes(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        pairs_for(load(name).card or {}, **({"n": 3, "seed": 0} | options))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"n_content": 500}, r"its task has n_content=500, the model has 32 content tokens"),
        ({"length": 490}, r"its task has length=490, the model has 48 positions"),
    ],
)
def test_a_card_that_asks_for_more_than_the_model_holds(task: dict[str, int], words: str) -> None:
    config = constructed_induction().config
    card = {"name": "toy", "task": CARD["task"] | task}
    with pytest.raises(TaskError, match=rf"the card of 'toy' does not fit the model: {words}"):
        pairs_for(card, 4, 0, config=config)
    assert len(pairs_for(CARD, 4, 0, config=config)["clean"]) == 4
