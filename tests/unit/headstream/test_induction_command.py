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


def test_what_does_not_fit_is_one_line(capsys: Captured) -> None:
    assert run(["induction", "constructed-induction", "--length", "500", "-q"]) == 3
    assert "length=500 is out of range" in capsys.readouterr().err
