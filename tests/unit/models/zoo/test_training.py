"""The recipe runner, on a few steps; `benchmarks/retrain.py` runs recipes to their bars."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError
from headstream.models.zoo import repeats, training
from headstream.models.zoo.recipe import Bar
from headstream.models.zoo.recipes import RECIPES, find_recipe
from headstream.models.zoo.training import train

NAME = "induction-2l"


@pytest.fixture(scope="module", autouse=True)
def few_measured() -> Iterator[None]:
    """Cards from 64 sequences instead of 512: measuring would take longer than the few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "_EVALUATED", 64)
        patch.setattr(repeats, "_CIRCUIT_ON", 8)
        yield


@pytest.fixture(scope="module")
def short() -> Decoder:
    return train(NAME, steps=4, progress=False)


def card(model: Decoder) -> dict[str, Any]:
    assert model.card is not None
    return model.card


def test_the_loss_falls() -> None:
    """From above ln 48 = 3.87 (initial logits are not uniform) towards it, in 30 steps of 1500."""
    start = card(train(NAME, steps=1, progress=False))["loss"]["on_repeats"]
    later = card(train(NAME, steps=30, progress=False))["loss"]["on_repeats"]
    assert start > 4.1
    assert later < start - 0.1


def test_one_seed_one_model_and_another_seed_another(short: Decoder) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = train(NAME, steps=4, progress=False)
    assert torch.equal(torch.get_rng_state(), state), "the global random state is left alone"
    assert again.weights_sha256() == short.weights_sha256()
    other = train(NAME, steps=4, seed=1, progress=False)
    assert other.weights_sha256() != short.weights_sha256()
    assert card(other)["recipe"]["seed"] == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing_and_is_put_back(
    short: Decoder, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "card_of", lambda *_: {})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert train(NAME, steps=4, progress=False).weights_sha256() == short.weights_sha256()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_model_comes_ready_to_use(short: Decoder) -> None:
    assert not short.training
    assert short.name == NAME
    assert short.config == RECIPES[NAME].config
    assert short.vocab is not None
    assert short.vocab[:2] == ["<bos>", "t01"]
    assert all(p.requires_grad and p.grad is None for p in short.parameters())
    assert short.hooks_active() == 0


def test_the_card_says_what_was_done_and_is_json(short: Decoder) -> None:
    made = card(short)
    assert made["recipe"]["steps"] == 4
    assert made["recipe"]["of_steps"] == RECIPES[NAME].steps == 1500
    assert made["recipe"]["phases"][1]["gap"] == [0, 20]
    assert made["loss"]["best_possible_on_repeats"] == 0.0
    assert made["task"] == {"kind": "induction", "length": 32, "n_content": 48}
    assert json.loads(json.dumps(made)) == made


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [training._rate(step, 400) for step in (0, 24, 49, 150, 300, 350, 399)]
    assert rates == pytest.approx([0.02, 0.5, 1.0, 1.0, 1.0, 0.5, 0.01])


def test_turned_positions_run_on_and_wrap() -> None:
    tokens = torch.zeros(40, 64, dtype=torch.int64)
    turned = training._turned(RECIPES[NAME], tokens, torch.Generator().manual_seed(0))
    assert ((turned[:, 1:] - turned[:, :-1]) % 64 == 1).all()
    assert sorted(turned[0].tolist()) == list(range(64))
    assert len(set(turned[:, 0].tolist())) > 20


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    train(NAME, steps=1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert NAME in printed.err
    assert "loss=" in printed.err


def test_progress_can_be_silenced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "card_of", lambda *_: {})
    train(NAME, steps=1, progress=False)
    assert capsys.readouterr().err == ""


def test_an_unknown_recipe_lists_them_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no recipe 'induction-3l'; there are induction-2l") as e:
        train("induction-3l")
    assert "nearest is 'induction-2l'" in str(e.value)
    with pytest.raises(ConfigError, match="the zoo's other models are written by hand"):
        find_recipe("zzz")


def test_a_model_written_by_hand_has_no_recipe_and_is_no_slip() -> None:
    with pytest.raises(ConfigError, match="has no recipe: its weights are written by hand") as e:
        find_recipe("constructed-and")
    assert e.value.hint == "use it by its name, as in load('constructed-and')"


@pytest.mark.parametrize("steps", [0, -3, True])
def test_steps_are_checked(steps: int) -> None:
    with pytest.raises(ConfigError, match="steps must be a whole number >= 1, got"):
        train(NAME, steps=steps)


def bar(of: str = "loss.worst", **side: float) -> Bar:
    return Bar(of=of, means="worst loss (nats)", **side)


def test_a_bar_says_whether_it_is_met() -> None:
    made = {"loss": {"worst": 0.5}}
    assert bar(below=0.6).held_to(made) == {"value": 0.5, "below": 0.6, "met": True}
    assert not bar(below=0.5).held_to(made)["met"]
    assert bar(above=0.0).held_to(made)["met"]
    assert not bar(above=0.5).held_to(made)["met"]
    with pytest.raises(ConfigError, match=r"the card has no figure 'loss\.best' to hold"):
        bar("loss.best", below=1.0).held_to(made)
    with pytest.raises(ConfigError, match="either below or above something, got below=None and"):
        bar()


def test_a_model_that_misses_a_bar_is_not_called_what_it_was_to_be(short: Decoder) -> None:
    """Four steps of 1500 do not meet it; what meets it keeps its purpose (`test_shipped`)."""
    assert not card(short)["bars"]["loss.on_repeats"]["met"]
    assert card(short)["purpose"] == (
        "misses 1 of its recipe's 1 bars (loss.on_repeats); "
        "meant as a trained two-layer model that continues repeats at any distance"
    )


def test_weights_that_ran_away_are_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def nan(model: Decoder, *_: Any) -> torch.Tensor:
        return next(model.parameters()).sum() * float("nan")

    monkeypatch.setattr(training, "_training_loss", nan)
    with pytest.raises(ConfigError, match="training induction-2l from seed 7 ran away") as caught:
        train(NAME, steps=1, seed=7, progress=False)
    assert caught.value.hint == "train from another seed"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_bars_and_a_vocabulary_of_its_size(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.bars
    assert all(0 < len(bar.means) <= 50 for bar in recipe.bars), "a table of them fits a terminal"
    assert len({bar.means for bar in recipe.bars}) == len(recipe.bars)
    assert len(recipe.data.words()) == recipe.config.d_vocab
    drawn = recipe.data.draw(2, recipe.length, torch.Generator().manual_seed(0))
    assert drawn.tokens.shape == drawn.counted.shape == (2, recipe.length)
    assert drawn.counted.any()
    assert not drawn.counted[:, 0].any()
