"""`headstream induction`: the table, the page, the refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstream.cli import run

Captured = pytest.CaptureFixture[str]


def test_it_prints_scores_and_labels_and_writes_a_page(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "induction.html"
    command = ["induction", "constructed-induction", "-n", "8", "-q", "-o", str(page)]
    assert run(command) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith("L1H2"))
    assert row.split()[1:8] == ["1.000", "1.000", "0.000", "0.000", "1.000", "3.495", "1.000"]
    assert row.endswith("induction head")
    assert "CAUSAL: continuing a repeat needs L1H2" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= max(80, len(str(page)))
    assert page.stat().st_size > 10_000
    assert run(command) == 2, "an existing file stays"
    assert "exists" in capsys.readouterr().err


def test_distances_and_length_are_the_callers(capsys: Captured) -> None:
    words = ["--length", "40", "--distance", "12", "--distance", "20", "-n", "6", "-q", "--json"]
    assert run(["induction", "constructed-induction", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "induction"
    assert said["details"]["distances"] == [12, 20]
    assert said["details"]["length"] == 40
    assert "--length 40 --distance 12 --distance 20" in said["provenance"]["command"]


def test_it_says_which_fixed_distance(capsys: Captured) -> None:
    assert run(["induction", "decoy-2l", "-n", "6", "-q"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "at a fixed distance of 32 tokens: L0H0, L1H0"
    assert "clears chance and both controls" in " ".join(said)


def test_one_distance_has_one_control_and_says_so_once(capsys: Captured) -> None:
    assert run(["induction", "decoy-2l", "-n", "6", "--distance", "2", "-q"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("one repeat distance") == 1
    assert "no content control" not in said
    assert "both controls" not in said
    assert "cont.:" not in said
    assert "content elsewhere" not in said
    assert "at the one distance of 2; gaps:" in said
    assert "clears chance and the position control by 0.3 at the one distance of 2" in said
    assert "too short for the labels previous-token, current-token, sink: chance is 0.32" in said


def test_what_does_not_fit_is_one_line(capsys: Captured) -> None:
    assert run(["induction", "constructed-induction", "--length", "500", "-q"]) == 3
    assert "length=500 is out of range" in capsys.readouterr().err
