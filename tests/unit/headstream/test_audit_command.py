"""`headstream audit`: the checks as a table, and after them what was measured, each on what."""

from __future__ import annotations

import json

import pytest

from headstream.cli import run

Captured = pytest.CaptureFixture[str]


def test_what_was_measured_follows_the_checks(capsys: Captured) -> None:
    assert run(["audit", "constructed-induction"]) == 0
    checks, *seen, end = capsys.readouterr().out.rstrip().split("\n\n")
    assert checks.splitlines()[0].split() == ["id", "label", "error", "statement"]
    (linear,) = (text for text in seen if text.startswith("B4"))
    assert linear.splitlines() == [
        "B4  MEASURED  the share of the logits' variance that fixed linear paths explain:",
        # Attention alone, without a norm, is linear once the patterns are held.
        "    1.000 [1.000, 1.000] of the variance, n = 32",
        "    on this attention-only model, 32 sequences of 24 tokens, a random block twice; "
        "patterns held",
    ]
    assert end.endswith("checks passed, in float64")


def test_json_holds_checks_and_measurements(capsys: Captured) -> None:
    assert run(["audit", "constructed-induction", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    labels = {(claim["id"], claim["evidence"]) for claim in value["claims"]}
    assert labels >= {("M2", "PROVEN"), ("M4", "MEASURED"), ("P2", "PROVEN"), ("P2", "MEASURED")}
    for claim in value["claims"]:
        if claim["evidence"] == "MEASURED":
            assert all(claim[key] is not None for key in ("value", "interval", "n", "reason"))
    rows = {row["id"]: row for row in value["details"]["rows"]}
    assert not rows["P3"]["applies"]
