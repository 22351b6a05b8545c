"""headstream train: what it prints, saves and exits with. No recipe runs in full here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headstream.cli import run
from headstream.commands.train import bars_of, bars_table, decimals
from headstream.models.decoder import Decoder
from headstream.models.store import load
from headstream.models.zoo import repeats, training
from headstream.models.zoo.recipes import RECIPES
from headstream.models.zoo.registry import list_models

Captured = pytest.CaptureFixture[str]
WHOLE = training.train


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of training, measured on few sequences: no bar of induction-2l is met."""
    monkeypatch.setattr(repeats, "_EVALUATED", 16)
    monkeypatch.setattr(repeats, "_CIRCUIT_ON", 8)
    monkeypatch.setattr(training, "train", lambda name, **given: WHOLE(name, steps=3, **given))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that gives the shipped model at once."""

    def shipped(name: str, **_: Any) -> Decoder:
        return load(name)

    monkeypatch.setattr(training, "train", shipped)


@pytest.mark.usefixtures("at_once")
def test_bars_that_are_met(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "mine"
    assert run(["train", "decoy-2l", "-o", str(target), "-q"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0] == "decoy-2l, trained for 900 steps from seed 0 in 0 s (0 s of CPU)"
    assert lines[2:7] == [
        "measured on new sequences                     must be     reached",
        "loss on tokens that a repeat predicts (nats)  below 0.02  0.00003  met",
        "loss at its best other distance (nats)        above 3     10.1871  met",
        "usual induction test, repeat 32 tokens on     above 0.9      0.93  met",
        "usual induction test, repeat 20 tokens on     below 0.1     0.027  met",
    ]
    assert lines[8] == f"All 4 bars are met. Saved to {target}; to look at it:"
    assert lines[9] == f"  headstream report {target} -o FILE"
    assert lines[10:] == ["Its weights are the shipped ones, bit for bit."]
    assert load(target).weights_sha256() == load("decoy-2l").weights_sha256()


@pytest.mark.usefixtures("few_steps")
def test_a_missed_bar_is_said_exits_1_and_stands_in_the_card(
    tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "mine"
    assert run(["train", "induction-2l", "-o", str(target), "--seed", "5", "-q"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("induction-2l, trained for 3 steps from seed 5 in ")
    row = next(line for line in out.splitlines() if line.startswith("loss on tokens"))
    assert row.split()[-4:-2] == ["below", "0.02"]
    assert row.endswith("  MISSED")
    assert "MISSED 1 of 1: this is not the induction-2l of the zoo." in out
    assert f"It is saved to {target}, to be looked into, and its card says so." in out
    assert 'Another --seed may do better; load("induction-2l") is the shipped one.' in out
    assert "bars are met" not in out
    assert "Its weights are not the shipped ones" in out
    assert run(["models", str(target)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"purpose +misses 1 of its recipe's 1 bars \(loss.on_repeats\)", shown)
    assert load(target).card is not None


@pytest.mark.usefixtures("few_steps")
def test_json_holds_the_same(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "mine"
    assert run(["train", "induction-2l", "-o", str(target), "--json", "-q"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(target)
    assert said["sha256"] == load(target).weights_sha256()
    assert said["shipped"] is False
    assert 0 < said["seconds"] < 60
    assert said["cpu_seconds"] > 0
    (bar,) = said["bars"]
    assert bar == {
        "figure": "loss.on_repeats",
        "means": "loss on tokens that a repeat predicts (nats)",
        **said["card"]["bars"]["loss.on_repeats"],
    }
    assert bar["value"] > 1.0
    assert bar["met"] is False


@pytest.mark.usefixtures("at_once")
def test_json_says_that_the_weights_are_the_shipped_ones(tmp_path: Path, capsys: Captured) -> None:
    assert run(["train", "recall-2l", "-o", str(tmp_path / "mine"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["shipped"] is True
    assert [bar["met"] for bar in said["bars"]] == [True, True]


@pytest.mark.usefixtures("few_steps")
def test_progress_is_on_stderr_and_a_log_is_not_filled_with_it(
    tmp_path: Path, capsys: Captured
) -> None:
    assert run(["train", "induction-1l", "-o", str(tmp_path / "mine")]) == 0
    printed = capsys.readouterr()
    assert "training induction-1l: 100%" in printed.err
    assert "3/3" in printed.err
    assert printed.err.count("\r") <= 4
    assert "3/3" not in printed.out
    assert "The bar is met. Saved to" in printed.out, "one layer cannot, from the first step on"


@pytest.mark.usefixtures("few_steps")
def test_what_is_there_is_kept_or_replaced_when_asked(tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "mine"
    arguments = ["train", "induction-1l", "-o", str(target), "-q"]
    assert run(arguments) == 0
    before = load(target).weights_sha256()
    assert run([*arguments, "--seed", "5"]) == 2
    assert "exists; choose another folder, or --overwrite" in capsys.readouterr().err
    assert load(target).weights_sha256() == before
    assert run([*arguments, "--seed", "5", "--overwrite"]) == 0
    assert load(target).weights_sha256() != before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("induction-3l", "nearest is 'induction-2l'"),
        ("constructed-and", "has no recipe: its weights are written by hand"),
    ],
)
def test_a_name_without_a_recipe(name: str, words: str, tmp_path: Path, capsys: Captured) -> None:
    assert run(["train", name, "-o", str(tmp_path / "mine")]) == 3
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_steps")
def test_a_run_that_went_astray_saves_nothing(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: Callable[..., Any] = training._training_loss
    monkeypatch.setattr(training, "_training_loss", lambda *given: first(*given) * float("nan"))
    assert run(["train", "induction-2l", "-o", str(tmp_path / "mine"), "-q", "--json"]) == 3
    said = json.loads(capsys.readouterr().out)["error"]
    assert "ran away: weights are not finite" in said["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_of_every_recipe_fits_a_terminal(name: str) -> None:
    card = next(model.card for model in list_models() if model.name == name)
    lines = bars_table(bars_of(RECIPES[name], card)).splitlines()
    assert len(lines) == 1 + len(RECIPES[name].bars)
    assert all(line.endswith("  met") for line in lines[1:])
    assert max(map(len, lines)) + len("MISSED") - len("met") <= 80


def test_figures_are_written_without_powers_of_ten() -> None:
    assert [decimals(value) for value in (4e-05, 13.6815, 1.0, 0.02, 0.0)] == [
        "0.00004",
        "13.6815",
        "1",
        "0.02",
        "0",
    ]
