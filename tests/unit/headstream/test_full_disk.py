"""A disk that is full at the end takes the file, and not the answer."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headstream.cli import run
from headstream.models.decoder import Decoder
from headstream.models.store import load
from headstream.models.zoo import training

Captured = pytest.CaptureFixture[str]
PATCH = ["patch", "constructed-or", "-n", "8", "-q"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A result, to be rendered without its model."""
    path = tmp_path_factory.mktemp("saved") / "z.json"
    assert run([*PATCH, "-o", str(path)]) == 0
    return str(path)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: str) -> None:
    """Nothing gets its name in this folder, as where the last block is missing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/x/.unnamed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr("headstream.models.store._write", refuse)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        ([*PATCH, "-o", "a.html"], "site ", "(n = 8)"),
        ([*PATCH, "-o", "a.json"], "site ", "(n = 8)"),
        ([*PATCH, "--cut", "heads", "-o", "a.html"], "cut ", "+0.00"),
        (["sinks", "constructed-or", "-n", "6", "-q", "-o", "a.html"], "head ", ""),
        (["report", "SAVED", "-q", "-o", "a.html"], "", ""),
    ],
)
def test_the_answer_then_the_file_that_failed(
    arguments: list[str], first: str, last: str, saved: str, tmp_path: Path, capsys: Captured
) -> None:
    arguments = [saved if word == "SAVED" else word for word in arguments]
    assert run(arguments) == 3
    printed = capsys.readouterr()
    line = f"headstream: cannot write '{arguments[-1]}': No space left on device\n"
    assert printed.err == line
    assert printed.out.startswith(first)
    assert printed.out.rstrip().endswith(last)
    assert printed.out.strip()
    assert "a.html" not in printed.out
    assert list(tmp_path.iterdir()) == []
    assert run([*arguments, "--json"]) == 3
    printed = capsys.readouterr()
    assert printed.err == line
    value = json.loads(printed.out)
    if arguments[0] == "report":
        assert value["path"] is value["bytes"] is value["sha256"] is None
        assert value["findings"]
    else:
        assert value["claims"]


@pytest.mark.usefixtures("full")
def test_results_that_cannot_be_kept(saved: str, capsys: Captured) -> None:
    arguments = ["report", saved, "-q", "--results", "kept"]
    assert run([*arguments, "-o", "a.html"]) == 3
    printed = capsys.readouterr()
    assert printed.err == "headstream: cannot write 'kept': No space left on device\n"
    assert printed.out
    # The page is on stdout by then.
    assert run([*arguments, "-o", "-"]) == 3
    printed = capsys.readouterr()
    assert printed.err == "headstream: cannot write 'kept': No space left on device\n"
    assert printed.out.rstrip().endswith("</html>")


@pytest.mark.usefixtures("full")
def test_a_model_that_cannot_be_saved(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shipped(name: str, **_: Any) -> Decoder:
        return load(name)

    monkeypatch.setattr(training, "train", shipped)
    arguments = ["train", "decoy-2l", "-q", "-o", "mine"]
    assert run(arguments) == 3
    printed = capsys.readouterr()
    assert printed.err == "headstream: cannot write 'mine': No space left on device\n"
    assert "usual induction test, repeat 20 tokens on" in printed.out
    assert "Saved" not in printed.out
    assert run([*arguments, "--json"]) == 3
    printed = capsys.readouterr()
    value = json.loads(printed.out)
    assert value["path"] is None
    assert len(value["bars"]) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("full")
def test_debug_shows_the_traceback(capsys: Captured) -> None:
    with pytest.raises(OSError, match="No space left"):
        run([*PATCH, "-o", "a.html", "--debug"])
    assert capsys.readouterr().out.startswith("site ")


def test_a_folder_that_came_meanwhile(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What headstream itself refuses keeps its words."""
    page = tmp_path / "a.html"

    def made(*_: Any, **__: Any) -> None:
        page.mkdir()

    monkeypatch.setattr("headstream.models.threads.use_one_thread_if_small", made)
    assert run([*PATCH, "-o", str(page)]) == 3
    printed = capsys.readouterr()
    assert printed.err == f"headstream: cannot write '{page}': it is a folder; name a file in it\n"
    assert printed.out.startswith("site ")
