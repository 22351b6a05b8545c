"""`headstream patch --cut`, `--redundant`, `--circuit`: heads taken out, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from headstream.analyses.patching.cuts.ablate import ablate
from headstream.analyses.patching.cuts.runs import How
from headstream.analyses.patching.task import Task
from headstream.cli import run
from headstream.commands import patch as command
from headstream.models.store import load

Captured = pytest.CaptureFixture[str]
MODEL = "constructed-induction"


def printed_rows(capsys: Captured) -> dict[str, list[str]]:
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    return {line.split()[0]: line.split()[1:] for line in lines[1:] if line[:1] in ("L", "a")}


def test_choices_are_those_of_the_library() -> None:
    assert get_args(How) == command.HOW


def test_every_head(capsys: Captured) -> None:
    assert run(["patch", MODEL, "--cut", "heads", "-n", "16", "-q"]) == 0
    rows = printed_rows(capsys)
    assert len(rows) == 8
    assert {name for name, row in rows.items() if row[-1] == "CAUSAL"} == {"L0H1", "L1H2"}


def test_a_set_alone_and_together_is_the_librarys_result(capsys: Captured) -> None:
    arguments = ["--cut", "L0H0,L0H2", "--cut", "L0H1", "--values", "resample", "--seed", "2"]
    said = ["patch", "constructed-or", "-n", "16", *arguments]
    assert run([*said, "--json", "-q"]) == 0
    value = json.loads(capsys.readouterr().out)
    model = load("constructed-or")
    expected = ablate(
        model,
        Task.for_model(model, 16, 2),
        heads=["L0H0", "L0H2", "L0H1"],
        sets={"L0H0+L0H2": ["L0H0", "L0H2"]},
        values="resample",
        seed=2,
        progress=False,
    ).to_json()
    again = value["provenance"].pop("command")
    assert expected["provenance"].pop("command") is None
    assert value == expected
    assert again == (
        "headstream patch constructed-or --seed 2 -n 16 --cut L0H0,L0H2 --cut L0H1 "
        "--values resample"
    )
    assert run([*again.split()[1:], "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == value["data"]


def test_an_or_of_two_heads_shows_only_together(capsys: Captured) -> None:
    assert run(["patch", "constructed-or", "--cut", "L0H0,L0H2", "-n", "32", "-q"]) == 0
    rows = printed_rows(capsys)
    assert [name for name, row in rows.items() if row[-1] == "CAUSAL"] == ["L0H0+L0H2"]
    said = ["patch", "constructed-or", "--redundant", "L0H0,L0H1,L0H2", "-n", "32", "-q"]
    assert run(said) == 0
    rows = printed_rows(capsys)
    assert [name for name, row in rows.items() if row[-1] == "CAUSAL"] == ["all", "L0H0", "L0H2"]


def test_the_set_has_a_row_and_its_condition_is_told(capsys: Captured) -> None:
    for model, alone in (("constructed-or", "+0.000"), ("constructed-and", "-5.000")):
        assert run(["patch", model, "-n", "8", "--redundant", "L0H0,L0H2", "-q"]) == 0
        out = capsys.readouterr().out
        header, whole, first, *_ = (line.split() for line in out.splitlines())
        assert header == ["cut", "nats", "p", "restored", "low", "high"]
        assert whole == ["all", "of", "them", "-5.000", "0.1250", "-", "-", "-"]
        assert first[1] == alone
        why = "why not CAUSAL, the set: p = 0.12 with the maximum over the grid is above 0.05;"
        assert why in out
        assert "-0.000" not in out, "zero has no sign"


def test_the_condition_that_a_cut_fails(capsys: Captured) -> None:
    assert run(["patch", "constructed-or", "-n", "8", "--cut", "L0H0,L0H2", "-q"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "why not CAUSAL, L0H0, L0H2: its effects are zero to rounding; the same cut" in out
    assert "why not CAUSAL, L0H0+L0H2: p = 0.12 with the maximum over the grid" in out
    # Of all heads the largest, if none is.
    assert run(["patch", "constructed-and", "-n", "4", "--cut", "heads", "-q"]) == 0
    out = capsys.readouterr().out
    assert "why not CAUSAL, L0H0: n = 4, and at least 6 pairs are needed" in out
    assert out.count("why not") == 1
    assert run(["patch", "constructed-and", "-n", "16", "--cut", "heads", "-q"]) == 0
    assert "why not" not in capsys.readouterr().out
    assert run(["patch", MODEL, "-n", "4", "--circuit", "L0H1,L1H2", "-q"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "why not CAUSAL, kept by the circuit, left without it: n = 4, and at least 6" in out
    assert run(["patch", "constructed-and", "-n", "1", "--cut", "heads", "-q"]) == 0
    assert "nan" not in capsys.readouterr().out


def test_a_circuit(capsys: Captured) -> None:
    assert run(["patch", MODEL, "--circuit", "L0H1,L1H2", "-n", "16", "-q"]) == 0
    printed = capsys.readouterr()
    kept, left = printed.out.splitlines()[1:3]
    assert kept.split()[:7] == ["kept", "by", "the", "circuit", "1.000", "1.000", "1.000"]
    assert kept.endswith("CAUSAL")
    assert left.startswith("left without it")
    assert left.endswith("CAUSAL")
    assert "the circuit of 2 heads keeps 1.00 [1.00, 1.00] of the answer" in printed.out


@pytest.mark.parametrize(
    ("arguments", "heading"),
    [
        (["--cut", "L0H1,L1H2"], "L0H1+L1H2"),
        (["--redundant", "L0H1,L1H2"], "L1H2"),
        (["--circuit", "L0H1,L1H2"], "L1H2"),
    ],
)
def test_a_page(arguments: list[str], heading: str, tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "cuts.html"
    assert run(["patch", MODEL, *arguments, "-n", "8", "-q", "-o", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "What heads do together" in text
    assert 'class="broken"' not in text
    assert heading in text


@pytest.mark.parametrize(
    ("arguments", "cuts", "forwards"),
    [
        (["--cut", "heads"], 8, 19),
        (["--cut", "L0H1,L1H2"], 3, 9),
        (["--redundant", "L0H1,L1H2"], 5, 9),
        # 8 over 2 less the circuit itself, kept and left out, beside full, empty and the circuit.
        (["--circuit", "L0H1,L1H2"], 57, 60),
    ],
)
def test_cost(arguments: list[str], cuts: int, forwards: int, capsys: Captured) -> None:
    assert run(["patch", MODEL, *arguments, "-n", "8", "--dry-run", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["cuts"], value["forwards"]) == (cuts, forwards)
    assert value["seconds"] == pytest.approx(value["forward_seconds"] * forwards)
    assert run(["patch", MODEL, *arguments, "-n", "8", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"cuts      {cuts}, 8 pairs of prompts\nforwards")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cut", "L0H1", "--resume", "x"], "--resume does not go with --cut; leave it out"),
        (["--cut", "L0H1", "--workers", "2"], "--workers does not go with --cut; leave it out"),
        (["--cut", "L0H1", "--values", "pair"], "--values pair does not go with --cut; give zero,"),
        (
            ["--circuit", "L0H1", "--how", "full"],
            "--how does not go with --circuit; it needs --cut",
        ),
        (["--circuit", "L0H1", "--redundant", "L0H1"], "--redundant and --circuit ask two things"),
        (["--how", "full"], "--how needs --cut or --redundant"),
    ],
)
def test_usage_errors(
    arguments: list[str], words: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstream.models.store.load", None)
    assert run(["patch", MODEL, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cut", "L0H9"], "heads holds 'L0H9', and the model has layers 0 to 1 of heads 0 to 3"),
        (["--cut", "L0H1,L0H1"], "set 'L0H1+L0H1' names L0H1 twice"),
        (["--redundant", "L0H1"], "a redundant set takes two heads or more, got L0H1"),
        (["--circuit", "L9H9"], "circuit holds 'L9H9'"),
    ],
)
def test_input_that_cannot_be_used(arguments: list[str], words: str, capsys: Captured) -> None:
    for more in ([], ["--dry-run"]):
        if "--redundant" in arguments and more:
            continue  # what one head would cost is no secret
        assert run(["patch", MODEL, "-n", "4", "-q", *arguments, *more]) == 3
        printed = capsys.readouterr()
        assert words in printed.err
        assert len(printed.err.splitlines()) == 1
