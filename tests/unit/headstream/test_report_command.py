"""headstream report: what it says on stdout, and what it warns of on stderr."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from headstream.cli import run
from headstream.console import warnings_as_notes
from headstream.models.store import load

Captured = pytest.CaptureFixture[str]


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_gate_is_told_from_both_sides_and_warned_of_in_one_line(
    tmp_path: Path, capsys: Captured
) -> None:
    page = tmp_path / "and.html"
    assert run(["report", "constructed-and", "-n", "8", "-q", "-o", str(page)]) == 0
    said = capsys.readouterr()
    first, second, last = said.out.splitlines()
    assert first.startswith("No head of 4 is shown to restore the answer; every effect is zero")
    assert second.startswith("Two heads are needed for the answer: L0H0 (+1.00 [")
    assert "L0H2 (+1.00 [" in second
    assert last.startswith(f"{page}  ")
    notes = said.err.splitlines()
    assert notes
    assert all(line.startswith("headstream: warning: ") for line in notes), said.err
    assert len(set(notes)) == len(notes), "once each"
    assert any("every effect is exactly zero" in line for line in notes)
    text = page.read_text(encoding="utf-8")
    shown = text[text.index('id="patching-') :].partition("<figure")[0]
    assert "Every effect is exactly zero" in shown, "beside the map of that patch"
    assert "No cell was tested: every effect is zero." in text
    assert "at least six pairs" not in text, "there are eight"
    assert "less than 0 nats" not in text
    top = text.partition("What is claimed, and how well")[0]
    assert "No head of 4 is shown to restore the answer" in top
    assert "Two heads are needed for the answer" in top


@pytest.mark.filterwarnings("default::UserWarning")
def test_json_stays_one_value_with_warnings(tmp_path: Path, capsys: Captured) -> None:
    page = str(tmp_path / "or.html")
    assert run(["report", "constructed-or", "-n", "8", "-q", "--json", "-o", page]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["failed"] is False
    assert said.err.startswith("headstream: warning: ")


@pytest.mark.filterwarnings("default::UserWarning")
def test_several_models_are_told_apart_on_stdout(tmp_path: Path, capsys: Captured) -> None:
    saved = []
    for name in ("constructed-and", "constructed-or"):
        folder = tmp_path / name
        saved.append(str(folder))
        page = str(tmp_path / f"{name}.html")
        assert run(["report", name, "-n", "6", "-q", "-o", page, "--results", str(folder)]) == 0
    capsys.readouterr()
    assert run(["report", *saved, "-q", "-o", str(tmp_path / "both.html")]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert {line.partition(": ")[0] for line in lines} == {
        "constructed-and",
        "constructed-or",
    }
    assert "constructed-or: Two heads restore the answer" in "\n".join(lines)


def test_a_model_without_a_card_is_looked_through_for_copiers(
    tmp_path: Path, capsys: Captured
) -> None:
    """A head that copies from a fixed distance, in a model that nobody described."""
    model = load("decoy-2l-rotary")
    model.card = None
    folder = tmp_path / "own"
    model.save(folder)
    page = tmp_path / "own.html"
    assert run(["report", str(folder), "-q", "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert "No induction head" in out
    assert "from a fixed distance" in out
    assert "Which heads continue repeats" in page.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("default::UserWarning")
def test_warnings_to_users_are_notes_and_others_are_not(capsys: Captured) -> None:
    with warnings_as_notes():
        for _ in range(2):
            warnings.warn("two\nlines \x1b[2J", stacklevel=1)
        with pytest.raises(DeprecationWarning, match="old"):  # the tests' own filter still stands
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        assert capsys.readouterr().err == "", "a progress bar may be in the way"
    assert capsys.readouterr().err == "headstream: warning: two lines \\x1b[2J\n"


@pytest.mark.filterwarnings("default::UserWarning")
def test_notes_come_after_an_error_too(capsys: Captured) -> None:
    def fail() -> None:
        with warnings_as_notes():
            warnings.warn("before", stacklevel=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert capsys.readouterr().err == "headstream: warning: before\n"
