"""`headstream patch --paths`: which component passes what to which, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstream.analyses.patching.paths.path_patch import path_patch
from headstream.analyses.patching.paths.sweep import PathSweep
from headstream.analyses.patching.task import Task
from headstream.cli import run
from headstream.models.store import load

Captured = pytest.CaptureFixture[str]
MODEL = "constructed-induction"
CIRCUIT = {"embed->L0H1.v", "L0H1->L1H2.k", "L1H2->logits"}


def test_help_shows_every_question(capsys: Captured) -> None:
    assert run(["patch", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("--from L0H1 --to L1H2.k", "--cut L0H1,L1H2", "--circuit L0H1,L1H2"):
        assert f"headstream patch MODEL {words}" in text
    headings = ["What is measured", "Sites", "Paths", "Cuts", "Long sweeps", "Output"]
    at = [text.index(f"\n{heading}:") for heading in [*headings, "Every command"]]
    assert at == sorted(at)


def test_all_paths(capsys: Captured) -> None:
    assert run(["patch", MODEL, "--paths", "-n", "16", "-q"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:2] == ["path", "nats"]
    assert {line.split()[0] for line in lines if line.endswith("CAUSAL")} == CIRCUIT
    assert "78 more have smaller effects or none" in lines
    assert "Three paths of 81 restore the answer: embed->L0H1.v" in printed.out
    assert max(map(len, lines)) <= 80
    assert printed.err == ""


def test_json_is_the_librarys_result_and_its_command_gives_it_again(capsys: Captured) -> None:
    arguments = ["--from", "L0H1,embed", "--to", "L1H2,logits", "--no-freeze-mlps"]
    arguments += ["--positions", "roles", "--direction", "noise", "--engine", "hooks"]
    assert run(["patch", MODEL, "-n", "8", "--seed", "3", "--json", *arguments]) == 0
    value = json.loads(capsys.readouterr().out)
    model = load(MODEL)
    expected = path_patch(
        model,
        Task.for_model(model, 8, 3),
        ["L0H1", "embed"],
        ["L1H2", "logits"],
        freeze_mlps=False,
        positions="roles",
        direction="noise",
        engine="hooks",
        seed=3,
        progress=False,
    ).to_json()
    said = value["provenance"].pop("command")
    assert expected["provenance"].pop("command") is None
    assert value == expected
    assert said == (
        "headstream patch constructed-induction --seed 3 -n 8 --paths --from L0H1,embed "
        "--to L1H2,logits --no-freeze-mlps --positions roles --direction noise --engine hooks"
    )
    assert run([*said.split()[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == value["data"]


def test_own_pairs_and_a_page(tmp_path: Path, capsys: Captured) -> None:
    model = load(MODEL)
    task = Task.for_model(model, 8)
    assert task.wrong is not None
    columns = (task.clean, task.corrupted, task.answer, task.wrong)
    names = ("clean", "corrupted", "answer", "wrong")
    lines = [
        json.dumps(dict(zip(names, row))) for row in zip(*(column.tolist() for column in columns))
    ]
    pairs, page = tmp_path / "pairs.jsonl", tmp_path / "paths.html"
    pairs.write_text("\n".join(lines), encoding="utf-8")
    arguments = ["patch", MODEL, "--from", "heads", "--pairs", str(pairs), "-q"]
    assert run([*arguments, "-o", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "L0H1-&gt;L1H2.k" in text or "L0H1->L1H2.k" in text or "L0H1→L1H2.k" in text
    assert "Which path carries it" in text
    assert 'class="broken"' not in text


def test_cost(capsys: Captured, tmp_path: Path) -> None:
    arguments = ["patch", MODEL, "--paths", "-n", "16", "--resume", str(tmp_path / "folder")]
    assert run([*arguments, "--dry-run"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["cells"] == "81 paths, 16 pairs of prompts"
    assert lines["passes"] == "4: the effects, their controls, and the total effects of the senders"
    # 9 senders of which 8 are heads, and 25 receivers: 72 paths of two passes and 9 to the logits
    # in each of two sweeps, 24 + 1 of the self-patch likewise, the totals and the two bases.
    expected = 2 * (72 * 2 + 9) + 24 * 2 + 1 + 9 + 2
    assert lines["forwards"].startswith(f"{expected} passes of all pairs")
    assert not (tmp_path / "folder").exists()
    assert run([*arguments, "--dry-run", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["cells"], value["forwards"], value["finished"]) == (81, expected, 0)
    assert 0 < value["seconds"] == pytest.approx(value["seconds_left"]), "to rounding of a sum"


def test_resumed(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, then a look, then the rest; and another sweep is told apart."""
    folder = tmp_path / "folder"
    arguments = ["patch", MODEL, "--paths", "-n", "16", "-q"]
    assert run([*arguments, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    computes = PathSweep.run

    def stopped(self: PathSweep, block: Any) -> Any:
        if block.index == 7:
            raise KeyboardInterrupt
        return computes(self, block)

    monkeypatch.setattr(PathSweep, "run", stopped)
    arguments += ["--resume", str(folder)]
    assert run(arguments) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("headstream: stopped; 7 of ")
    assert printed.err.endswith(f"kept in '{folder}', and the same call goes on from there\n")
    monkeypatch.setattr(PathSweep, "run", computes)
    assert run([*arguments, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 7
    for other in (["--seed", "1"], ["--from", "heads"], ["--direction", "noise"]):
        assert run([*arguments, *other]) == 3
        error = capsys.readouterr().err
        assert error.startswith(f"headstream: resume folder '{folder}' belongs to another sweep: ")
        assert len(error.splitlines()) == 1
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == whole


@pytest.mark.slow
def test_workers(capsys: Captured) -> None:
    """Its one worker takes seconds to start."""
    arguments = ["patch", MODEL, "--from", "heads", "-n", "16", "-q", "--json"]
    assert run(arguments) == 0
    here = json.loads(capsys.readouterr().out)
    assert run([*arguments, "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == here


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--paths", "--site", "q"], "--site does not go with --paths; leave it out"),
        (["--from", "L0H1", "--layers", "1"], "--layers does not go with --from; leave it out"),
        (["--to", "logits", "--values", "zero"], "--values does not go with --to; leave it out"),
        (["--paths", "--how", "full"], "--how does not go with --paths; it needs --cut or --redun"),
        (["--no-freeze-mlps"], "--freeze-mlps/--no-freeze-mlps needs --paths"),
        (["--from", "L0H1,"], "expected names like L0H1,L1H2, got 'L0H1,'"),
        (["--to", "--seed"], "expected names like L0H1,L1H2, got '--seed'"),
        (["--from", "L0H0", "--site", "z"], "--site does not go with --from; leave it out"),
        (["--to", "logits", "--cut", "L0H1"], "--to and --cut ask two things; give one of them"),
        (["--paths", "--cut", "L0H1"], "--paths and --cut ask two things; give one of them"),
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
        (["--from", "L0H9"], "senders names 'L0H9', and the model has embed .. L1H3; nearest is"),
        (["--from", "L1H2", "--to", "L0H1"], "sender L1H2 writes after every receiver has read"),
        (["--to", "mlps"], "receivers names 'mlps', and this model is attention only"),
        (["--paths", "--positions", "edges"], "positions must be 'all', 'each', 'roles'"),
    ],
)
def test_input_that_cannot_be_used(arguments: list[str], words: str, capsys: Captured) -> None:
    assert run(["patch", MODEL, "-n", "4", "-q", *arguments]) == 3
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
