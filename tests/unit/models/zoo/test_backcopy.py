"""Bigram-Backcopy: the rule by hand, the exact best loss, and the shipped model's bars."""

from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.store import load
from headstream.models.zoo.backcopy import (
    TRIGGERS,
    Backcopy,
    BackcopySequences,
    active_dormant,
    backcopy_sequences,
    bigram_table,
    excess,
    excess_of,
)
from headstream.models.zoo.tasks import pairs_for
from headstream.models.zoo.training import train

CARD: dict[str, Any] = {"name": "toy", "task": {"kind": "backcopy", "length": 12}}


@pytest.fixture(scope="module")
def made() -> BackcopySequences:
    return backcopy_sequences(400, 64, generator=Generator().manual_seed(3))


def is_trigger(tokens: Tensor) -> Tensor:
    return torch.isin(tokens, torch.tensor(TRIGGERS))


def test_rows_of_the_table_are_distributions_with_frequent_triggers() -> None:
    table = bigram_table()
    assert table.shape == (33, 33)
    assert torch.allclose(table.sum(1), torch.ones(33, dtype=torch.float64), atol=1e-12)
    assert (table[:, 0] == 0).all(), "BOS never follows"
    assert (table[1:, 1:4] >= 0.08 / 1.24).all()
    assert (table[0, 1:4] == 0).all(), "a sequence starts with no trigger"
    # The table belongs to the shipped model: another one would make its bars mean nothing.
    assert float((table**2).sum()) == pytest.approx(3.4100125171143665, abs=1e-9)


def test_every_trigger_stands_between_two_equal_tokens(made: BackcopySequences) -> None:
    tokens, trigger = made.tokens, is_trigger(made.tokens)
    assert torch.equal(trigger, made.trigger)
    assert 0.1 < float(trigger.float().mean()) < 0.4
    assert not (trigger[:, 1:] & trigger[:, :-1]).any(), "no two are adjacent"
    assert not trigger[:, :2].any()
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1:] > 0).all(), "BOS is never copied"
    inner = trigger[:, 1:-1]
    assert torch.equal(tokens[:, 2:][inner], tokens[:, :-2][inner])


def test_the_truth_is_what_the_rule_says(made: BackcopySequences) -> None:
    table = bigram_table()
    for row in range(5):
        for at in range(1, 63):
            truth = made.truth[row, at]
            if made.trigger[row, at]:
                assert int(truth.argmax()) == int(made.tokens[row, at - 1])
                assert float(truth.max()) == 1.0
            else:
                assert torch.equal(truth, table[made.tokens[row, at]])


def test_tokens_are_drawn_from_it(made: BackcopySequences) -> None:
    """Followers of the most frequent ordinary token, against its row of the table."""
    tokens = made.tokens
    common = int(tokens[tokens > 3].bincount().argmax())
    after = tokens[:, 1:][tokens[:, :-1] == common]
    found = after.bincount(minlength=33).double() / len(after)
    # Three standard errors of the largest share, at most sqrt(0.25 / n) each.
    assert float((found - bigram_table()[common]).abs().max()) < 3 * (0.25 / len(after)) ** 0.5


def test_the_seed_decides_and_nothing_else_is_touched() -> None:
    state = torch.get_rng_state()
    first, again, other = (
        backcopy_sequences(4, 20, generator=Generator().manual_seed(seed)).tokens
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def oracle(made: BackcopySequences, sharp: float = 1.0) -> Tensor:
    """Logits of one that knows the rule, up to a constant that a softmax does not see."""
    return sharp * made.truth.log().clamp(min=-200.0) + 3.0


def test_the_best_possible_model_has_no_excess(made: BackcopySequences) -> None:
    best = excess_of(oracle(made), made)
    assert best["at_triggers"] == pytest.approx(0.0, abs=1e-12)
    assert best["elsewhere"] == pytest.approx(0.0, abs=1e-12)


def test_excess_of_a_uniform_model_by_hand(made: BackcopySequences) -> None:
    uniform = excess_of(oracle(made, sharp=0.0), made)
    log33 = torch.tensor(33.0, dtype=torch.float64).log()
    assert uniform["at_triggers"] == pytest.approx(float(log33), abs=1e-9)
    entropies, count = 0.0, 0
    for row, trigger in zip(made.truth[:, :-1], made.trigger[:, :-1]):
        for truth in row[~trigger]:
            entropies -= float((truth[truth > 0] * truth[truth > 0].log()).sum())
            count += 1
    assert uniform["elsewhere"] == pytest.approx(float(log33) - entropies / count, abs=1e-9)


def test_all_but_bos_counts() -> None:
    drawn = Backcopy().draw(3, 10, Generator().manual_seed(0))
    assert drawn.counted.tolist() == [[False] + [True] * 9] * 3


@pytest.fixture(scope="module")
def shipped() -> Decoder:
    return load("backcopy-1l")


def test_the_shipped_model_meets_its_bars_on_new_sequences(
    shipped: Decoder, made: BackcopySequences
) -> None:
    found = active_dormant(shipped, made, 0, 0)
    assert found["bos_mass_at_non_triggers"] > 0.85
    assert found["previous_token_mass_at_triggers"] > 0.9
    assert found["value_ratio"] < 0.3
    lost = excess(shipped, made)
    assert lost["at_triggers"] < 0.05
    assert lost["elsewhere"] < 0.05


def test_cutting_the_head_costs_at_triggers_only(shipped: Decoder, made: BackcopySequences) -> None:
    whole = excess(shipped, made)
    with shipped.hooks([("blocks.0.attn.hook_z", lambda z, hook: torch.zeros_like(z))]):
        cut = excess(shipped, made)
    assert cut["at_triggers"] - whole["at_triggers"] > 2.0
    assert cut["elsewhere"] - whole["elsewhere"] < 0.05


def test_the_shipped_card_reports_this_model(shipped: Decoder) -> None:
    assert shipped.card is not None
    assert shipped.card["circuit"] == {"active-dormant": ["L0H0"]}


def test_one_seed_one_model() -> None:
    first, again = (train("backcopy-1l", steps=2, progress=False) for _ in range(2))
    assert first.weights_sha256() == again.weights_sha256()
    assert first.vocab is not None
    assert first.vocab[:5] == ["<bos>", "T01", "T02", "T03", "t04"]


@pytest.mark.parametrize(("corruption", "at"), [("before", 10), ("trigger", 11)])
def test_pairs_differ_in_one_token(corruption: str, at: int) -> None:
    pairs = pairs_for(CARD, 50, 0, corruption=corruption)
    clean, corrupted = pairs["clean"], pairs["corrupted"]
    assert clean.shape == (50, 12)
    assert (clean != corrupted).nonzero()[:, 1].tolist() == [at] * 50
    assert is_trigger(clean[:, -1]).all()
    assert torch.equal(pairs["answer"], clean[:, -2])
    assert not is_trigger(torch.stack([clean[:, -2], corrupted[:, -2], pairs["wrong"]])).any()
    assert (pairs["wrong"] != pairs["answer"]).all()
    assert {name: set(place.tolist()) for name, place in pairs["roles"].items()} == {
        "before": {10},
        "trigger": {11},
    }
    if corruption == "before":
        assert torch.equal(corrupted[:, -2], pairs["wrong"])
    else:
        assert not is_trigger(corrupted[:, -1]).any()
        assert (clean == pairs["wrong"][:, None]).any(1).float().mean() > 0.9


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"length": 2}, r"whole number >= 3, `<bos> x trigger`, got 2"),
        ({"length": None}, r"whole number >= 3, `<bos> x trigger`, got None"),
        ({"length": 400}, r"does not fit the model: its task needs length=400, the model has 64"),
    ],
)
def test_cards_without_a_usable_task(shipped: Decoder, task: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        pairs_for({"name": "toy", "task": CARD["task"] | task}, 3, 0, config=shipped.config)


def test_options_are_checked() -> None:
    with pytest.raises(TaskError, match="must be one of before, trigger, got 'befor'") as caught:
        pairs_for(CARD, 3, 0, corruption="befor")
    assert "nearest is 'before'" in str(caught.value)
    with pytest.raises(TaskError, match=r"the pairs of a backcopy task have none; they take corr"):
        pairs_for(CARD, 3, 0, distance=(2, 3))
    with pytest.raises(TaskError, match="n must be a whole number of pairs >= 1, got 0"):
        pairs_for(CARD, 0, 0)
    with pytest.raises(TaskError, match="batch must be >= 1 and length >= 2, got 0 and 5"):
        backcopy_sequences(0, 5, generator=Generator())
