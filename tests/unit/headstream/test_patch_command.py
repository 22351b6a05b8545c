"""`headstream patch`: the sweep on the command line, its cost, its folder, its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from headstream.analyses.patching.engines import Engine
from headstream.analyses.patching.metrics import METRICS
from headstream.analyses.patching.patch import Direction, Values
from headstream.analyses.patching.patch import patch as library
from headstream.analyses.patching.sites import SITES
from headstream.analyses.patching.suffix.engine import SuffixSweep
from headstream.analyses.patching.task import Task
from headstream.analyses.stored import load_result
from headstream.cli import run
from headstream.commands import patch as command
from headstream.models.store import load

Captured = pytest.CaptureFixture[str]
MODEL = "constructed-induction"


def test_choices_are_those_of_the_library() -> None:
    assert set(command.SITES) == set(SITES)
    assert set(command.METRICS) == set(METRICS)
    assert get_args(Direction) == command.DIRECTIONS
    assert get_args(Values) == command.VALUES
    assert get_args(Engine) == command.ENGINES


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom headstream.cli import run\nassert run(['patch', '--help']) == 0\n"
        "assert run(['patch', 'induction-2l', '--site', 'x']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "--dry-run" in ran.stdout


def test_the_zoo_task(capsys: Captured) -> None:
    assert run(["patch", MODEL, "-n", "16", "-q"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split() == ["site", "nats", "low", "high", "of", "gap", "p", "unrelated"]
    assert lines[1].endswith("CAUSAL")
    found = {line.split()[0] for line in lines if line.endswith("CAUSAL")}
    assert found == {"L0H1", "L1H2"}
    assert "Two heads restore the answer: " in printed.out
    assert max(map(len, lines)) <= 80
    assert printed.err == ""


def test_json_is_the_librarys_result(capsys: Captured) -> None:
    arguments = ["--site", "pattern", "--positions", "roles", "--direction", "noise"]
    arguments += ["--values", "mean", "--layers", "0-1", "--heads", "1,2", "--engine", "hooks"]
    assert run(["patch", MODEL, "-n", "8", "--seed", "3", "--json", *arguments]) == 0
    value = json.loads(capsys.readouterr().out)
    model = load(MODEL)
    expected = library(
        model,
        Task.for_model(model, 8, 3),
        "pattern",
        positions="roles",
        direction="noise",
        values="mean",
        layers=[0, 1],
        heads=[1, 2],
        engine="hooks",
        seed=3,
    ).to_json()
    said = value["provenance"].pop("command")
    assert expected["provenance"].pop("command") is None
    assert value == expected
    words = "headstream patch constructed-induction --seed 3 -n 8 --site pattern --positions roles"
    assert said.startswith(words)
    assert said.endswith("--layers 0,1 --heads 1,2 --engine hooks")
    assert run([*said.split()[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["data"] == value["data"], "the command that a result names gives it again"


def test_own_pairs_and_metric(tmp_path: Path, capsys: Captured) -> None:
    pairs = tmp_path / "pairs.jsonl"
    line = {"clean": "t01 t02 t03 t01", "corrupted": "t09 t02 t03 t01", "answer": "t02"}
    pairs.write_text(json.dumps(line) + "\n")
    arguments = ["patch", MODEL, "--pairs", str(pairs), "--json"]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["details"]["metric"]["name"] == "log_prob"
    assert "no pair names 'wrong': the metric is log_prob" in printed.err
    assert run([*arguments, "--metric", "kl"]) == 0
    assert json.loads(capsys.readouterr().out)["details"]["metric"]["name"] == "kl"
    assert run([*arguments, "--metric", "logit_difference"]) == 3
    assert "compares answer with wrong" in capsys.readouterr().out
    assert run(["patch", MODEL, "-n", "4", "--metric", "prob", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["details"]["metric"]["name"] == "prob"


def test_positions_by_number(capsys: Captured) -> None:
    assert run(["patch", MODEL, "-n", "4", "--positions=-1,0-2", "--json", "-q"]) == 0
    coords = json.loads(capsys.readouterr().out)["coords"]
    assert coords["pos"]["values"] == [-1, 0, 1, 2]


def test_saved_as_json_and_as_html(tmp_path: Path, capsys: Captured) -> None:
    saved, page = tmp_path / "z.json", tmp_path / "z.html"
    assert run(["patch", MODEL, "-n", "8", "-q", "-o", str(saved)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{saved}; next: headstream report {saved} -o {page}"
    assert load_result(saved).kind == "patching"
    assert run(last.split("next: headstream ")[1].split()) == 0
    assert "L1H2" in page.read_text(encoding="utf-8")
    assert run(["patch", MODEL, "-n", "8", "-q", "-o", str(page)]) == 2
    assert "exists; choose another name, or --force" in capsys.readouterr().err
    assert run(["patch", MODEL, "-n", "8", "-q", "-o", str(page), "--force"]) == 0
    assert "L1H2" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("where", [[], ["--positions", "edges", "--layers", "1", "--heads", "2"]])
def test_a_page_of_the_pattern(where: list[str], tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "pattern.html"
    arguments = ["patch", MODEL, "-n", "8", "--site", "pattern", *where, "-q", "-o", str(page)]
    assert run(arguments) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "Map of effects: attention patterns of heads" in text
    assert 'class="broken"' not in text


def test_the_condition_that_the_largest_effect_fails(capsys: Captured) -> None:
    why = "why not CAUSAL, L0H0: n = 4, and at least 6 pairs are needed; more would settle"
    assert run(["patch", "constructed-or", "-n", "4", "-q"]) == 0
    assert why in capsys.readouterr().out
    assert run(["patch", "constructed-or", "-n", "4", "--paths", "-q"]) == 0
    assert "why not CAUSAL, embed->L0H0.v: n = 4, and at" in capsys.readouterr().out
    assert run(["patch", "constructed-or", "-n", "16", "-q"]) == 0
    assert "why not" not in capsys.readouterr().out


def test_what_one_pair_cannot_say_is_a_dash(capsys: Captured) -> None:
    assert run(["patch", "constructed-or", "-n", "1", "-q"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["L0H0", "+10.000", "-", "-", "1.000", "-", "-"]
    assert "nan" not in out


class TestDryRun:
    def test_says_the_cost_and_runs_nothing(
        self, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        seen: list[int] = []
        whole = SuffixSweep.run

        def counting(self: SuffixSweep, block: Any) -> Any:
            seen.append(block.index)
            return whole(self, block)

        monkeypatch.setattr(SuffixSweep, "run", counting)
        arguments = ["patch", MODEL, "-n", "64", "--positions", "each", "--dry-run"]
        arguments += ["--resume", str(tmp_path / "folder"), "--workers", "2"]
        assert run(arguments) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert list(lines) == ["cells", "passes", "blocks", "forwards", "costs", "time", "memory"]
        assert lines["cells"] == "256 of z, 64 pairs of prompts"
        assert lines["passes"].startswith("3: ")
        assert lines["forwards"].startswith("770 passes of all pairs")
        assert "on 2 workers, beside their start (" in lines["time"]
        assert lines["memory"].endswith(" MB a process, 3 processes")
        # One block in five places of the grid, the first of them once more to warm up.
        assert len(seen) == 6
        assert not (tmp_path / "folder").exists()

    def test_json(self, capsys: Captured) -> None:
        assert run(["patch", MODEL, "-n", "8", "--dry-run", "--json"]) == 0
        value = json.loads(capsys.readouterr().out)
        assert value["cells"] == 8
        assert value["forwards"] == 3 * 8 + 2
        assert value["finished"] == 0
        assert value["workers"] is None
        assert 0 < value["block_seconds"] <= value["seconds"] == value["seconds_left"]
        assert value["forward_equivalents"] == value["seconds"] / value["forward_seconds"]
        assert value["peak_bytes"] > 10**7

    def test_refuses_what_the_sweep_would(self, capsys: Captured) -> None:
        assert run(["patch", MODEL, "--site", "mlp_out", "--dry-run"]) == 3
        assert "needs an MLP, and this model is attention only" in capsys.readouterr().err


def test_resumed(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, then a look, then the rest; and another task is told apart."""
    folder = tmp_path / "folder"
    arguments = ["patch", MODEL, "-n", "64", "--positions", "each", "-q"]
    assert run([*arguments, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    computes = SuffixSweep.run

    def stopped(self: SuffixSweep, block: Any) -> Any:
        if block.index == 7:
            raise KeyboardInterrupt
        return computes(self, block)

    monkeypatch.setattr(SuffixSweep, "run", stopped)
    arguments += ["--resume", str(folder)]
    assert run(arguments) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("headstream: stopped; 7 of ")
    assert printed.err.endswith(f"kept in '{folder}', and the same call goes on from there\n")
    monkeypatch.setattr(SuffixSweep, "run", computes)
    assert run([*arguments, "--dry-run", "--json"]) == 0
    looked = json.loads(capsys.readouterr().out)
    assert looked["finished"] == 7
    left = looked["blocks"] - 7
    assert looked["seconds_left"] == pytest.approx(looked["block_seconds"] * left)
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == whole
    for other in (["--seed", "1"], ["--site", "q"], ["--dry-run", "--direction", "noise"]):
        assert run([*arguments, *other]) == 3
        error = capsys.readouterr().err
        assert error.startswith(f"headstream: resume folder '{folder}' belongs to another sweep: ")
        assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_workers(capsys: Captured) -> None:
    """A process of its own, as the command line is; its one worker takes seconds to start."""
    arguments = ["patch", MODEL, "-n", "16", "--positions", "each", "-q", "--json"]
    assert run(arguments) == 0
    here = json.loads(capsys.readouterr().out)
    assert run([*arguments, "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == here


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--site", "w"], "'w' is not one of"),
        (["--positions", "some"], "expected all, each, roles, edges or numbers like 0,-1, got"),
        (["--positions", ""], "expected all, each, roles, edges or numbers like 0,-1, got ''"),
        (["--layers", "1-"], "expected numbers like 0,2,5-7, got '1-'"),
        (["--layers", "3-1"], "expected numbers like 0,2,5-7, got '3-1'"),
        (["--heads", "0-99999999"], "expected numbers like 0,2,5-7"),
        (["--workers", "0"], "0 is not in the range x>=1"),
        (["-o", "result.txt"], "'result.txt' must end in .json or .html"),
        (["-o", "no/such/z.json"], "folder 'no/such' does not exist"),
        (["--resume", ""], "the folder of --resume is empty"),
        (["--pairs", "none.jsonl"], "'none.jsonl' does not exist"),
        (["--pairs", __file__, "-n", "3"], "-n does not go with --pairs, of which all are used;"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headstream.models.store.load", None)
    assert run(["patch", MODEL, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "7"], "layers holds 7, but layer runs from 0 to 1"),
        (["--site", "resid_pre", "--heads", "1"], "heads=[1] was given, but site 'resid_pre'"),
        (["--positions", "edges"], "positions must be 'all', 'each', 'roles'"),
        (["--resume", "/proc/x/y"], "cannot write in '/proc/x/y'"),
    ],
)
def test_input_that_cannot_be_used(arguments: list[str], words: str, capsys: Captured) -> None:
    assert run(["patch", MODEL, "-n", "4", *arguments]) == 3
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert "Traceback" not in printed.err
