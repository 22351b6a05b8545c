"""A card in plain words: what is said of the shipped ones, and that any card can be shown."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstream.models.store import load
from headstream.models.zoo.card_words import Part, card_parts, plain, reached
from headstream.models.zoo.registry import list_models
from headstream.models.zoo.tasks import pairs_for

CARDS = {model.name: model.card for model in list_models()}
BY_HAND = [name for name in CARDS if name.startswith("constructed")]


def part(name: str, word: str) -> Part:
    (found,) = [part for part in card_parts(CARDS[name]) if part.word == word]
    return found


def test_loss_stands_beside_the_best_possible() -> None:
    assert part("induction-2l", "loss").rows[:2] == (
        ("on repeats", "0.00004 nats, best possible 0"),
        ("on fresh tokens", "13.204 nats, uniform guessing 3.871"),
    )
    rows = dict(part("backcopy-1l", "loss").rows)
    assert rows["elsewhere"] == "2.5861 nats, best possible 2.5736"
    assert rows["measured on"] == "512 sequences"
    rows = dict(part("recall-2l", "loss").rows)
    assert rows["by number of pairs, past training"].startswith("22: 0.0001, 24: 0, ")


def test_bars_and_recipe_are_sentences() -> None:
    rows = dict(part("decoy-2l", "bars").rows)
    assert rows["loss, on repeats"] == "0.00003, must be below 0.02, met"
    assert rows["measured, usual test, block length 32"] == "0.93, must be above 0.9, met"
    rows = dict(part("induction-2l", "recipe").rows)
    assert rows["phase 2"] == "steps 1100, block 2 to 24, gap 0 to 20, lead 0 to 20"
    assert rows["turn positions"] == "yes"
    assert rows["init scale"] == "embed.W_E 10; pos_embed.W_pos 10"
    assert "of steps" not in rows, "all of them were run"
    missed = {"bars": {"loss.on": {"value": 0.5, "below": 0.1, "met": False}}}
    assert card_parts(missed)[0].line == "loss, on: 0.5, must be below 0.1, MISSED"


def test_a_test_at_several_lengths_says_that_they_are_lengths() -> None:
    rows = dict(part("decoy-2l", "measured").rows)
    assert rows["usual test"].startswith("<bos> block block: attention one block back plus one")
    assert rows["usual test by block length"] == (
        "12: 0.035 (L1H1), 20: 0.027 (L1H0), 31: 0.019 (L1H1), 32: 0.93 (L1H0)"
    )
    own = {"measured": {"usual_test": {"12": 0.5, "seed": 3}}}
    assert card_parts(own)[0].rows == (
        ("usual test by block length", "12: 0.5"),
        ("usual test, more", "seed: 3"),
    )


def test_no_jargon_of_the_card_is_shown() -> None:
    assert dict(part("decoy-2l", "task").rows)["prompts"].endswith(
        "a repeat 32 tokens back, the answer replaced in the corrupted prompt"
    )
    assert (
        "attention from the question to the value asked for"
        in (part("recall-2l", "measured").table[0])
    )
    odd = {"task": {"kind": "induction", "corruption": "own", "distance": [4, 9]}}
    assert card_parts(odd)[0].rows[1][1] == "corruption own, a repeat 4 to 9 tokens back"


def test_kinds_without_heads_are_not_shown_and_idle_says_what_it_means() -> None:
    circuit = {"previous-token": [], "induction": [], "idle": ["L0H0"], "other": []}
    card = {"circuit": circuit, "measured": {"idle_below": 0.001}}
    assert [part.line for part in card_parts(card)] == [
        "idle: L0H0 (cut one by one and all together, the loss moves by less than 0.001 nats)"
    ]
    assert part("decoy-2l-rotary", "circuit").line == (
        "fixed-distance: L1H0, L1H1, L1H2, L1H3; other: L0H0, L0H1, L0H2, L0H3"
    )


def test_figures_of_heads_are_one_table_whichever_way_they_are_nested() -> None:
    header, first, *_, last = part("induction-2l", "measured").table
    assert header == ("head", "previous token score", "induction score", "loss on repeats without")
    assert first == ("L0H0", "0.95", "0.003", "11.1508")
    assert last == ("all idle", "", "", "0")
    header, only = part("backcopy-1l", "measured").table
    assert dict(zip(header, only))["rise without it at triggers"] == "4.6139"
    assert part("backcopy-1l", "measured").line.startswith(
        "bos mass at non triggers: L0H0 0.9991; "
    )


@pytest.mark.parametrize("name", CARDS)
def test_no_shipped_card_shows_its_nesting(name: str) -> None:
    parts = card_parts(CARDS[name])
    assert {"loss", "vocabulary", "task", "circuit"} <= {part.word for part in parts}
    for shown in parts:
        assert not set("{}[]'") & set(shown.line.replace("task's", "")), shown.line
        assert "_" not in shown.line.replace("W_E", "").replace("W_pos", "") or "." in shown.line
    loss, best = reached(CARDS[name])
    assert float(loss) >= float(best) == 0


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_of_models_written_by_hand_is_what_they_lose(name: str, seed: int) -> None:
    model = load(name)
    assert model.card is not None
    pairs = pairs_for(model.card, 512, seed, config=model.config)
    with torch.no_grad():
        logits = model(pairs["clean"])[:, -1].double()
    lost = float(torch.nn.functional.cross_entropy(logits, pairs["answer"]))
    # The card rounds to five decimals; one prompt is as hard as another.
    assert lost == pytest.approx(model.card["loss"]["on_answers"], abs=6e-6)
    # The answer is fixed by the prompt, so that the best possible loss is 0.
    assert model.card["loss"]["best_possible_on_answers"] == 0.0
    assert (logits.argmax(-1) == pairs["answer"]).all()


def test_numbers() -> None:
    shown = [plain(value) for value in (0.0, 4e-05, 1e-7, 13.204, 1.0, 2e12, 3, -0.25)]
    assert shown == ["0", "0.00004", "1e-07", "13.204", "1", "2e+12", "3", "-0.25"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)
_KEYS = ("purpose", "task", "loss", "circuit", "measured", "bars", "recipe", "retrained", "own")


@settings(max_examples=150, deadline=None)
@given(card=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=5))
def test_any_card_can_be_shown(card: dict[str, Any]) -> None:
    for shown in card_parts(json.loads(json.dumps(card))):
        assert isinstance(shown.line, str)
        assert shown.line
    assert len(reached(card)) == 2


@settings(max_examples=100, deadline=None)
@given(
    part=st.sampled_from(_KEYS),
    inner=st.dictionaries(
        st.sampled_from(
            ("unit", "on_x", "best_possible_on_x", "phases", "bars", "kind", "L0H0", "all idle")
        ),
        _JSON,
        max_size=4,
    ),
)
def test_any_part_can_be_shown(part: str, inner: dict[str, Any]) -> None:
    card_parts({part: json.loads(json.dumps(inner))})
    reached({part: inner})


def test_words_load_no_torch() -> None:
    code = "import sys, headstream.models.zoo.card_words; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
