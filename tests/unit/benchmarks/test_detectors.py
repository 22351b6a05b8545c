"""The table of both tests: its rows, and that the committed page is one of this program's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headstream.models.store import load

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def detectors() -> ModuleType:
    path = ROOT / "benchmarks" / "detectors.py"
    spec = importlib.util.spec_from_file_location("detectors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["detectors"] = module
    spec.loader.exec_module(module)
    return module


def test_both_tests_find_the_constructed_head_and_nothing_else(detectors: ModuleType) -> None:
    rows = detectors.table_rows(load("constructed-induction"))
    assert [row[1] for row in rows if row[4] != "no"] == ["L1H2"]
    assert [row[1] for row in rows if row[9] == "induction head"] == ["L1H2"]
    (row,) = (row for row in rows if row[1] == "L1H2")
    assert row[2] == "0.49 (1.00)", "23 of 47 rows have a target"
    assert row[-1] == "CAUSAL"
    committed = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    for row in rows:
        assert "| " + " | ".join(row) + " |" in committed, "run benchmarks/detectors.py again"


def test_the_words_count_the_rows(detectors: ModuleType) -> None:
    def row(model: str, usual: str, ours: str) -> list[str]:
        return [model, "L0H0", "", "", usual, "", "", "", "", ours, ""]

    rows = [
        row("a", "no", "none"),
        row("a", "induction head", "induction head"),
        row("b", "induction head", "fixed-distance copier"),
        row("c", "no", "induction head"),
    ]
    assert detectors.summary(rows) == [
        "The usual test names 2 of 4 heads. 1 of them are induction heads by ours as well; 1 are "
        "not (b). Ours names 1 that the usual test does not."
    ]


def test_the_page_has_the_whole_rule(detectors: ModuleType) -> None:
    text = detectors.page([])
    assert "take back 20% of that when it is restored alone, or else cost 20% of it" in text
    assert '"induction head of a set". In the table no head is one.' in text
    committed = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    ours = next(line for line in text.splitlines() if line.startswith("Ours is"))
    assert ours in committed.splitlines(), "run benchmarks/detectors.py again"


def test_heads_of_a_set_count_as_induction_heads(detectors: ModuleType) -> None:
    row = ["a", "L0H0", "", "", "induction head", "", "", "", "", "induction head of a set", ""]
    (words,) = detectors.summary([row])
    assert words.startswith("The usual test names 1 of 1 heads. 1 of them")


def test_the_committed_page_has_every_decoy_fooling_the_usual_test_alone() -> None:
    text = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| decoy")]
    assert rows
    assert any(row[4] == "induction head" for row in rows)
    assert not any("induction" in row[9] for row in rows)
