"""Key-value recall: sequences, segments and prompts by hand, and the shipped model's bars."""

from typing import Any

import pytest
import torch
from torch import Generator

from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TaskError
from headstream.models.store import load
from headstream.models.zoo.recall import Recall
from headstream.models.zoo.recall_facts import ask
from headstream.models.zoo.recall_sequences import (
    D_VOCAB,
    KEY_FROM,
    SEGMENTS,
    VALUE_FROM,
    questions,
    recall_sequences,
    segments,
)
from headstream.models.zoo.recipes import RECIPES
from headstream.models.zoo.tasks import pairs_for
from headstream.models.zoo.training import train

CARD: dict[str, Any] = {"name": "toy", "task": {"kind": "recall", "pairs": 5}}
WORDS = Recall(pairs=(2, 9)).words()


def is_key(token: int) -> bool:
    return KEY_FROM <= token < VALUE_FROM


def test_the_vocabulary() -> None:
    assert len(WORDS) == D_VOCAB == 131
    assert WORDS[:4] == ["<bos>", "<data>", "<inst>", "k00"]
    assert (WORDS[VALUE_FROM - 1], WORDS[VALUE_FROM], WORDS[-1]) == ("k63", "v00", "v63")


def test_sequences_read_token_by_token() -> None:
    made = recall_sequences(60, 40, generator=Generator().manual_seed(0), pairs=(2, 15))
    seen = set()
    for row, counted, needle, n_pairs in zip(
        made.tokens.tolist(), made.counted.tolist(), made.needle.tolist(), made.n_pairs.tolist()
    ):
        seen.add(n_pairs)
        assert row[:2] == [0, 1]
        data = row[2 : 2 + 2 * n_pairs]
        keys, values = data[::2], data[1::2]
        assert all(map(is_key, keys))
        assert all(value >= VALUE_FROM for value in values)
        assert len(set(keys)) == len(set(values)) == n_pairs
        value_of, asked = dict(zip(keys, values)), []
        for at in range(2 + 2 * n_pairs, 40):
            part = (at - 2 - 2 * n_pairs) % 3
            if part == 0:
                assert row[at] == 2
            elif part == 1:
                assert row[at] in value_of
            else:
                assert row[at] == value_of[row[at - 1]] == row[needle[at]]
                assert row[needle[at] - 1] == row[at - 1]
                assert counted[at] == (row[at - 1] not in asked), "asked for the first time"
                asked.append(row[at - 1])
            if part != 2:
                assert not counted[at]
                assert needle[at] == -1
        assert not any(counted[: 2 + 2 * n_pairs])
        assert len(asked) >= 1
        # Every pair is asked for once before any is asked for again.
        assert len(set(asked)) == min(len(asked), n_pairs)
    assert seen == set(range(2, 16))


def test_the_seed_decides_and_nothing_else_is_touched() -> None:
    state = torch.get_rng_state()
    first, again, other = (
        recall_sequences(4, 40, generator=Generator().manual_seed(seed), pairs=(2, 9)).tokens
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_segments_partition_all_but_bos() -> None:
    made = questions(2, 3, generator=Generator().manual_seed(0))
    assert segments(made.tokens).tolist() == [[-1, 0, 0, 0, 0, 0, 0, 0, 1, 1]] * 2
    assert SEGMENTS == ("data", "instruction")
    long = recall_sequences(5, 40, generator=Generator().manual_seed(0), pairs=(2, 9))
    for row, n_pairs in zip(segments(long.tokens).tolist(), long.n_pairs.tolist()):
        data = 2 * n_pairs + 1
        assert row == [-1] + [0] * data + [1] * (39 - data)
    with pytest.raises(ShapeError, match=r"tokens have shape \[3\], expected \[batch, pos\]"):
        segments(torch.zeros(3, dtype=torch.int64))


def test_questions_ask_at_the_depth_that_was_asked() -> None:
    made = questions(200, 9, generator=Generator().manual_seed(0), depth=(2, 4))
    assert made.tokens.shape == (200, 22)
    assert set(made.depth.tolist()) == {2, 3, 4}
    row = torch.arange(200)
    assert torch.equal(made.tokens[row, 2 * made.depth + 2], made.tokens[:, -1])
    assert torch.equal(made.tokens[row, 2 * made.depth + 3], made.answer)
    for tokens, unused in zip(made.tokens, made.unused_keys):
        assert not torch.isin(unused, tokens).any()
    assert set(questions(200, 9, generator=Generator()).depth.tolist()) == set(range(9))


def test_numbers_that_cannot_be() -> None:
    generator = Generator()
    with pytest.raises(TaskError, match=r"must lie within 1 \.\. 64, got \(0, 4\)"):
        recall_sequences(1, 64, generator=generator, pairs=(0, 4))
    with pytest.raises(TaskError, match=r"30 pairs and a question take 64 tokens, .* room for 63"):
        recall_sequences(1, 64, generator=generator, pairs=(2, 30))
    with pytest.raises(TaskError, match=r"within 0 \.\. 4 for 5 pairs, got \(2, 5\)"):
        questions(1, 5, generator=generator, depth=(2, 5))


@pytest.mark.parametrize(
    ("corruption", "role"),
    [("needle_key", "needle_key"), ("needle_value", "needle_value"), ("question", "question")],
)
def test_pairs_differ_where_their_corruption_says(corruption: str, role: str) -> None:
    pairs = pairs_for(CARD, 80, 0, corruption=corruption)
    clean, corrupted, roles = pairs["clean"], pairs["corrupted"], pairs["roles"]
    row = torch.arange(80)
    changed = clean != corrupted
    assert changed.sum(1).tolist() == [1] * 80
    assert torch.equal(changed.long().argmax(1), roles[role])
    assert torch.equal(clean[row, roles["needle_value"]], pairs["answer"])
    assert torch.equal(clean[row, roles["needle_key"]], clean[row, roles["question"]])
    assert (clean[row, roles["instruction"]] == 2).all()
    assert (pairs["wrong"] != pairs["answer"]).all()
    new = corrupted[changed]
    if corruption == "question":
        assert torch.equal(corrupted[row, roles["other_value"] - 1], new)
    else:
        assert not (clean == new[:, None]).any()
    if corruption == "needle_value":
        assert torch.equal(new, pairs["wrong"])
        assert "other_value" not in roles
    else:
        assert torch.equal(clean[row, roles["other_value"]], pairs["wrong"])


def test_the_default_corruption_breaks_the_match_and_options_vary_it() -> None:
    default = pairs_for(CARD, 5, 0)
    assert torch.equal(
        default["corrupted"], pairs_for(CARD, 5, 0, corruption="needle_key")["corrupted"]
    )
    deep = pairs_for(CARD, 40, 0, n_pairs=20, depth=(19, 19))
    assert deep["clean"].shape == (40, 44)
    assert set(deep["roles"]["needle_key"].tolist()) == {40}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"corruption": "key"}, "must be one of needle_key, needle_value, question, got 'key'"),
        ({"n_pairs": 1}, r"n_pairs must give the number .* within 2 \.\. 63, got 1"),
        ({"n_pairs": 63}, "does not fit the model: 63 pairs take length=130, the model has 128"),
        ({"depth": (0, 5)}, r"within 0 \.\. 4 for 5 pairs, got \(0, 5\)"),
        ({"distance": (2, 3)}, "of a recall task have none; they take corruption, n_pairs, depth"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    config = RECIPES["recall-2l"].config
    with pytest.raises(TaskError, match=words):
        pairs_for(CARD, 3, 0, config=config, **options)


def test_a_card_without_a_number_of_pairs() -> None:
    card = {"name": "toy", "task": {"kind": "recall"}}
    with pytest.raises(TaskError, match=r"the task of 'toy' must give the number .* got None"):
        pairs_for(card, 3, 0)
    with pytest.raises(TaskError, match="n must be a whole number of pairs >= 1, got 0"):
        pairs_for(CARD, 0, 0)


def test_one_seed_one_model() -> None:
    first, again = (train("recall-2l", steps=2, progress=False) for _ in range(2))
    assert first.weights_sha256() == again.weights_sha256()
    assert first.vocab == WORDS


@pytest.fixture(scope="module")
def shipped() -> Decoder:
    return load("recall-2l")


@pytest.mark.parametrize("n_pairs", [2, 11, 21])
def test_the_shipped_model_meets_its_bars_on_new_questions(shipped: Decoder, n_pairs: int) -> None:
    lost, right = ask(shipped, questions(256, n_pairs, generator=Generator().manual_seed(99)))
    loss, accuracy = RECIPES["recall-2l"].bars[:2]
    assert lost < (loss.below or 0.0)
    assert right > (accuracy.above or 1.0)


def test_the_shipped_card_tells_within_from_past_training(shipped: Decoder) -> None:
    assert shipped.card is not None
    assert all(bar["met"] for bar in shipped.card["bars"].values())
    found = shipped.card["accuracy"]["by_number_of_pairs"]
    assert max(map(int, found["within_training"])) == 21
    assert min(map(int, found["past_training"])) == 22
    assert shipped.config.n_train == 48
    assert shipped.config.n_ctx == 128
    assert "previous-token" not in shipped.card["circuit"]
    for layer, kind in ((0, "value-to-key"), (1, "retrieval")):
        assert shipped.card["circuit"][kind]
        assert all(name.startswith(f"L{layer}") for name in shipped.card["circuit"][kind])
