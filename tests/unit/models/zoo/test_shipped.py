"""The trained models of the zoo that saw repeats: what each can do and cannot, on new sequences."""

from typing import Any

import pytest
import torch
from torch import Generator

from headstream.models.decoder import Decoder
from headstream.models.store import load
from headstream.models.zoo.facts import find_circuit, losses, usual_scores
from headstream.models.zoo.recipes import RECIPES
from headstream.models.zoo.repeats import Repeats
from headstream.models.zoo.sequences import repeated_blocks
from headstream.models.zoo.tasks import pairs_for

DECOYS = [name for name in RECIPES if name.startswith("decoy")]
INDUCTION = [name for name in RECIPES if name.startswith("induction-2l")]


def card(model: Decoder) -> dict[str, Any]:
    assert model.card is not None
    return model.card


def lost(model: Decoder, distance: int, block: int) -> float:
    """Loss on one repeat at that distance."""
    made = repeated_blocks(
        64,
        distance + block + 1,
        48,
        generator=Generator().manual_seed(distance),
        block=(block, block),
        gap=(distance - block, distance - block),
    )
    with torch.no_grad():
        return float(losses(model, made)[0])


@pytest.mark.parametrize("name", RECIPES)
def test_the_card_is_of_this_recipe_and_meets_its_bars(name: str) -> None:
    model, recipe = load(name), RECIPES[name]
    made = card(model)
    assert model.config == recipe.config
    assert model.vocab == recipe.data.words()
    assert made["purpose"] == recipe.purpose
    assert made["recipe"]["steps"] == made["recipe"]["of_steps"] == recipe.steps
    assert made["recipe"]["seed"] == recipe.seed
    assert made["recipe"]["init_scale"] == recipe.init_scale
    assert made["bars"] == {bar.of: bar.held_to(made) for bar in recipe.bars}
    assert all(bar["met"] for bar in made["bars"].values())
    # The best possible loss stands beside every loss that was trained for.
    assert any(key.startswith("best_possible") for key in made["loss"])


@pytest.mark.parametrize("name", RECIPES)
def test_a_models_task_is_one_that_it_does(name: str) -> None:
    model = load(name)
    pairs = pairs_for(card(model), 64, 3, config=model.config)
    with torch.no_grad():
        given = model(pairs["clean"])[:, -1].argmax(-1)
        corrupted = model(pairs["corrupted"])[:, -1].argmax(-1)
    right = float((given == pairs["answer"]).float().mean())
    assert right < 0.3 if name == "induction-1l" else right > 0.95
    assert float((corrupted == pairs["answer"]).float().mean()) < 0.3


@pytest.mark.parametrize("name", [*INDUCTION, "backcopy-1l"])
def test_another_seed_met_the_same_bars(name: str) -> None:
    made = card(load(name))
    again = made["retrained"]
    assert again["seed"] != made["recipe"]["seed"]
    assert again["bars"].keys() == made["bars"].keys()
    assert all(bar["met"] for bar in again["bars"].values())


@pytest.mark.parametrize("name", INDUCTION)
def test_induction_at_every_distance(name: str) -> None:
    model = load(name)
    assert max(lost(model, at, block) for at, block in ((3, 3), (8, 8), (20, 10), (37, 9))) < 0.02
    assert len(card(model)["circuit"]["previous-token"]) == 1
    assert "fixed-distance" not in card(model)["circuit"]


def test_one_layer_cannot() -> None:
    model = load("induction-1l")
    assert lost(model, 20, 20) > 1.5
    data = RECIPES["induction-1l"].data
    assert isinstance(data, Repeats)
    names, _ = find_circuit(model, data.blocks(64, 64, Generator().manual_seed(5)))
    assert names == {"other": ["L0H0", "L0H1", "L0H2", "L0H3"]}, "none named, and all needed"


@pytest.mark.parametrize("name", DECOYS)
def test_a_decoy_passes_the_usual_test_and_copies_from_one_distance(name: str) -> None:
    model = load(name)
    assert lost(model, 32, 32) < 0.02
    assert min(lost(model, at, 12) for at in (16, 24, 31, 33, 40)) > 3.0
    at_32, at_20 = (
        usual_scores(model, block, 48, Generator().manual_seed(8)) for block in (32, 20)
    )
    assert float(at_32.max()) > 0.9
    assert float(at_20.max()) < 0.1
    circuit = card(model)["circuit"]
    assert circuit["fixed-distance"]
    assert "induction" not in circuit


@pytest.mark.parametrize("name", DECOYS)
def test_a_decoys_task_keeps_to_its_distance_and_changes_what_is_copied(name: str) -> None:
    model = load(name)
    pairs = pairs_for(card(model), 20, 0, config=model.config)
    roles = pairs["roles"]
    assert set((roles["query"] - roles["earlier_query"]).tolist()) == {32}
    changed = (pairs["clean"] != pairs["corrupted"]).long()
    assert torch.equal(changed.argmax(1), roles["answer_source"])


def test_the_usual_test_counts_one_block_back() -> None:
    """The constructed head is perfect; a uniform head gets 1 / (query + 1)."""
    scores = usual_scores(load("constructed-induction"), 10, 32, Generator().manual_seed(0))
    assert float(scores[1, 2]) == pytest.approx(1.0, abs=1e-6)
    # Queries 11 .. 20: the second block.
    uniform = sum(1 / (query + 1) for query in range(11, 21)) / 10
    assert float(scores[1, 0]) == pytest.approx(uniform, abs=1e-6)
