"""The command line: answers on stdout, everything else on stderr, exit codes as documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headstream.analyses.stored import load_result
from headstream.cli import run
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.store import load

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random model on disk, without a card that names a task."""
    config = DecoderConfig(
        n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=30, n_ctx=32, bos_token_id=0
    )
    model = Decoder(config, seed=3)
    model.vocab = ["<s>", *(f"<b>{i}</b>" for i in range(29))]
    target = tmp_path / "tiny"
    model.save(target)
    return target


def test_models_lists_the_zoo(capsys: Captured) -> None:
    assert run(["models"]) == 0
    out = capsys.readouterr().out
    header, *rows = out.splitlines()
    assert header.split("  ")[0] == "name"
    assert "best possible" in header
    start = header.index("what it is for")
    assert all(row[start - 1] == " " and row[start] != " " for row in rows), "aligned"
    gate = next(row for row in rows if row.startswith("constructed-and"))
    assert gate.split()[1:3] == ["0.00775", "0"]
    assert run(["models", "--json"]) == 0
    names = [model["name"] for model in json.loads(capsys.readouterr().out)]
    assert {"constructed-induction", "induction-2l"} <= set(names)


def test_models_shows_a_card(capsys: Captured) -> None:
    assert run(["models", "constructed-induction"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("circuit")
    assert lines[at + 1].split() == ["previous-token", "L0H1"]
    assert lines[at + 2].split() == ["induction", "L1H2"]
    assert lines[at + 1].index("L0H1") == lines[at + 2].index("L1H2"), "aligned"
    assert "  on answers  0.00145 nats, best possible 0" in lines
    assert not [line for line in lines if set("{}[]") & set(line)]
    assert run(["models", "constructed-induction", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["circuit"]["induction"] == ["L1H2"]


def test_heads_puts_the_induction_head_first(capsys: Captured) -> None:
    assert run(["heads", "constructed-induction", "-q"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[1].startswith("L1H2")
    assert lines[1].endswith("induction pattern")
    assert any(line.startswith("chance") for line in lines)
    assert max(map(len, lines[:10])) <= 80, "a table fits a terminal"
    assert run(["heads", "constructed-induction", "--sort", "previous_token", "-q"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("L0H1")


def test_audit_passes_and_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["audit", "constructed-induction"]) == 0
    out = capsys.readouterr().out
    assert "PROVEN" in out
    assert "does not apply: this model has no norm" in out
    from headstream.models import attention

    right = attention.attend_flash
    monkeypatch.setattr(
        attention, "attend_flash", lambda *a, **k: (right(*a, **k)[0] * 1.001, right(*a, **k)[1])
    )
    assert run(["audit", "constructed-induction"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_report_of_a_model_without_a_task(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "out.html"
    assert run(["report", str(folder), "-o", str(page), "-q", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == page.stat().st_size
    assert said["path"] == str(page)
    assert "no patching was run" in page.read_text(encoding="utf-8")


def test_report_is_redrawn_from_saved_results(tmp_path: Path, capsys: Captured) -> None:
    page, again, saved = tmp_path / "a.html", tmp_path / "b.html", tmp_path / "results"
    arguments = ["report", "constructed-induction", "-n", "8", "-q", "--results", str(saved)]
    assert run([*arguments, "-o", str(page)]) == 0
    assert load_result(sorted(saved.iterdir())[0]).kind == "audit"
    assert run(["report", str(saved), "-o", str(again)]) == 0
    assert page.read_bytes() == again.read_bytes()
    capsys.readouterr()
    assert run(["report", str(saved), "-o", "-"]) == 0
    assert capsys.readouterr().out.encode() == page.read_bytes()


def test_report_never_overwrites_unasked(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "kept.html"
    page.write_text("mine")
    assert run(["report", "constructed-induction", "-o", str(page)]) == 2
    assert "exists; choose another name, or --force" in capsys.readouterr().err
    assert page.read_text() == "mine"


def test_own_pairs(tmp_path: Path, capsys: Captured) -> None:
    pairs = tmp_path / "pairs.jsonl"
    line = {"clean": "t01 t02 t03 t01", "corrupted": "t09 t02 t03 t01"}
    pairs.write_text(json.dumps(line | {"answer": "t02", "wrong": "t03"}) + "\n")
    page = tmp_path / "own.html"
    arguments = ["report", "constructed-induction", "--pairs", str(pairs), "-o", str(page), "-q"]
    assert run(arguments) == 0
    pairs.write_text('{"clean": "t01"\n')
    assert run([*arguments, "--force"]) == 3
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heads", "constructed-inductoin"], "nearest is 'constructed-induction'"),
        (["heads"], "Missing argument 'MODEL'"),
        (["heads", "constructed-induction", "--sort", "x"], "'x' is not one of"),
        (["report", "constructed-induction"], "Missing option"),
        (["report", "constructed-induction", "-o", "no/such/x.html"], "folder 'no/such' does not"),
        (["report", "constructed-induction", "-o", "."], "'.' exists"),
        (["train", "induction-2l", "-o", "no/such/x"], "folder 'no/such' does not exist"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_usage_errors(arguments: list[str], words: str, capsys: Captured) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("headstream: ")
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert run([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["type"] == "UsageError"
    assert printed.err == ""


def test_damaged_model_is_input_that_cannot_be_used(folder: Path, capsys: Captured) -> None:
    (folder / "weights.safetensors").write_bytes(b"not weights")
    assert run(["heads", str(folder)]) == 3
    error = capsys.readouterr().err
    assert "is damaged" in error
    assert "Traceback" not in error
    assert run(["heads", str(folder), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "StoreError"


def test_saved_results_that_are_none(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert run(["report", str(tmp_path / "x.json"), "-o", str(tmp_path / "y.html")]) == 3
    assert "is not a headstream result" in capsys.readouterr().err
    assert not (tmp_path / "y.html").exists()
    (tmp_path / "empty").mkdir()
    assert run(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "y.html")]) == 2
    assert "holds no model and no saved results" in capsys.readouterr().err


def test_debug_shows_the_traceback(folder: Path) -> None:
    from headstream.models.errors import StoreError

    (folder / "config.json").write_text("{}")
    with pytest.raises(StoreError):
        run(["heads", str(folder), "--debug"])


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    from headstream.models import store

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "load", stop)
    assert run(["heads", "constructed-induction"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_tokens_that_a_terminal_would_obey_are_escaped() -> None:
    from headstream.console import printable, table

    assert printable("a\x1b[31mb\n") == "a\\x1b[31mb\\n"
    assert printable("é ⏎ [bold]") == "é ⏎ [bold]"
    text = table(["head", "score"], [["L0H0", "0.5"], ["L10H0", "-"]])
    assert text == "head   score\nL0H0     0.5\nL10H0      -"


def test_seeds_change_what_is_drawn_and_nothing_else(capsys: Captured) -> None:
    values = []
    for seed in ("0", "0", "1"):
        assert run(["heads", "constructed-induction", "--seed", seed, "--json", "-q"]) == 0
        values.append(capsys.readouterr().out)
    assert values[0] == values[1] != values[2]


def test_load_gives_what_the_cli_reads(folder: Path) -> None:
    model = load(folder)
    assert model.name == "tiny"
    assert model(torch.tensor([[0, 1, 2]])).shape == (1, 3, 30)


def test_heads_at_a_length(capsys: Captured) -> None:
    assert run(["heads", "constructed-induction", "--length", "48", "-q"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[1].startswith("L1H2")
    assert lines[1].endswith("induction pattern")
    assert "47 tokens are drawn from 32" in printed.out
    assert printed.err == ""
    assert run(["heads", "constructed-induction", "--length", "49"]) == 3
    assert "more than the n_ctx=48 positions" in capsys.readouterr().err


def test_sinks_prints_masses_and_cuts_and_writes_a_page(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "sinks.html"
    assert run(["sinks", "constructed-induction", "-n", "8", "-q", "-o", str(page)]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("L1H2"))
    assert row.split()[3] == "0.000", "BOS has no value"
    assert row.split()[6].endswith("*")
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "L1H2" in page.read_text(encoding="utf-8")
    assert run(["sinks", "constructed-induction", "-q", "-o", str(page)]) == 2
    assert "exists" in capsys.readouterr().err


def test_sinks_of_a_model_without_a_task(folder: Path, capsys: Captured) -> None:
    assert run(["sinks", str(folder), "-n", "6", "--length", "12", "-q", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "sinks"
    assert said["details"]["inputs"] == "random tokens"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heads", ""], "the name of a model is empty"),
        (["models", ""], "the name of a model is empty"),
        (["report", "", "-o", "x.html"], "a target is empty"),
        (["report", "constructed-induction", "-o", ""], "the name to write to is empty"),
        (["report", "constructed-induction", "-o", "-x"], "'-x' looks like an option"),
        (["train", "induction-2l", "-o", "-"], "'-' looks like an option"),
        (["sinks", "constructed-induction", "-o", "-"], "'-' looks like an option"),
        (["heads", "constructed-induction", "--seed", "-1"], "-1 is not in the range 0<=x<=42949"),
        (["heads", "constructed-induction", "--seed", str(10**23)], "is not in the range 0<=x<="),
        (["report", "constructed-induction", "-o", "x.html", "-n", "0"], "0 is not in the range"),
        (
            ["report", "constructed-or", "-o", "x.html", "-n", "9", "--pairs", __file__],
            "-n does not go with --pairs, of which all are used; leave it out",
        ),
        (["sinks", "constructed-induction", "-n", "-3"], "-3 is not in the range x>=1"),
        (
            ["report", "induction-2l", "induction-2l", "-o", "x.html"],
            "target 'induction-2l' is given twice",
        ),
        (["report", "induction-2l", "-o", "x.html", "--results", ""], "--results is empty"),
    ],
)
def test_what_no_command_can_mean(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_same_folder_by_two_paths_is_one_target(folder: Path, capsys: Captured) -> None:
    again = str(folder.parent / "." / ".." / folder.parent.name / folder.name)
    page = str(folder.parent / "x.html")
    assert run(["report", str(folder), again, "-o", page]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_stdout_has_one_owner(tmp_path: Path, capsys: Captured) -> None:
    assert run(["report", "constructed-induction", "-o", "-", "--json"]) == 2
    assert "both claim stdout" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_json_as_the_value_of_an_option_is_not_json_mode(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report", "constructed-induction", "-o", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "'--json' looks like an option" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_card_that_is_no_object(folder: Path, capsys: Captured) -> None:
    for text, words in (("[1]", "must hold a JSON object, got list"), ("{", "no readable card")):
        (folder / "card.json").write_text(text)
        assert run(["models", str(folder)]) == 3
        assert words in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder nobody can write in")
@pytest.mark.parametrize(
    "where",
    [
        ["report", "constructed-induction", "-o", "/proc/x.html"],
        ["report", "constructed-induction", "-o", "x.html", "--results", "/proc/x/y"],
        ["sinks", "constructed-induction", "-o", "/proc/x.html"],
        ["train", "induction-2l", "-o", "/proc/x"],
    ],
)
def test_a_place_that_cannot_be_written_is_known_before_the_study(
    where: list[str], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("a model was loaded first")

    monkeypatch.setattr("headstream.models.store.load", too_late)
    monkeypatch.setattr("headstream.models.zoo.training.train", too_late)
    monkeypatch.chdir(tmp_path)
    assert run(where) == 3
    printed = capsys.readouterr()
    assert "cannot write in '/proc" in printed.err
    assert len(printed.err.splitlines()) == 1


def test_what_the_system_refuses_later_is_one_line(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/x/y")

    monkeypatch.setattr("headstream.models.store.load", full)
    assert run(["heads", "constructed-induction"]) == 3
    assert capsys.readouterr().err == "headstream: '/x/y': No space left on device\n"
    with pytest.raises(OSError, match="No space left"):
        run(["heads", "constructed-induction", "--debug"])


def test_pairs_without_a_wrong_answer_use_log_prob(tmp_path: Path, capsys: Captured) -> None:
    pairs, saved = tmp_path / "pairs.jsonl", tmp_path / "results"
    line = {"clean": "t01 t02 t03 t01", "corrupted": "t09 t02 t03 t01", "answer": "t02"}
    pairs.write_text(json.dumps(line) + "\n")
    arguments = ["report", "constructed-induction", "--pairs", str(pairs), "--results", str(saved)]
    assert run([*arguments, "-o", str(tmp_path / "own.html")]) == 0
    assert "no pair names 'wrong': the metric is log_prob" in capsys.readouterr().err
    found = [load_result(path) for path in sorted(saved.iterdir())]
    metrics = {one.details["metric"]["name"] for one in found if one.kind == "patching"}
    assert metrics == {"log_prob"}
