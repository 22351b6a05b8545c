"""`headstream circuits`: a line a head, one head as a page, JSON, and what cannot be asked."""

from __future__ import annotations

import json

import pytest

from headstream.cli import run

Captured = pytest.CaptureFixture[str]


def test_a_line_a_head(capsys: Captured) -> None:
    assert run(["circuits", "constructed-induction"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "head"
    assert [line.split()[0] for line in lines[1:9]] == [
        f"L{layer}H{head}" for layer in (0, 1) for head in range(4)
    ]
    # Copies, matches its own token through L0H1, and reads its keys; no distance of its own.
    assert lines[7].split() == ["L1H2", "1.000", "97%", "1.000", "-", "L0H1", "100%", "K:L0H1"]
    words = " ".join(lines[9:])
    assert "one that ignores its source -1.00)" in words
    assert "1 of 3 compositions are above" in words
    assert words.endswith("what a head could do, not what it is for")


def test_one_head_is_a_page(capsys: Captured) -> None:
    assert run(["circuits", "constructed-induction", "--head", "l1h2", "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("L1H2 of constructed-induction\n")
    assert "raises most:  t01 -> t01 +10, t02 -> t02 +10\n" in text
    assert "K-composition L0H1 -> L1H2" in text


@pytest.mark.parametrize("head", [[], ["--head", "L1H2"]], ids=["all", "one"])
def test_json(capsys: Captured, head: list[str]) -> None:
    assert run(["circuits", "constructed-induction", "--json", *head]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["head"] == "L1H2" if head else len(value["details"]["cards"]) == 8


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--head", "L9H0"], 3, "layer must be a whole number in [0, 2) = [0, n_layers), got 9"),
        (["--head", "1.2"], 2, "a head is named like L1H4 (layer 1, head 4), got '1.2'"),
        (["--distance", "2"], 3, "the QK circuit does not depend on it; leave distance out"),
        (["--top", "0"], 2, "0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be_asked(
    capsys: Captured, arguments: list[str], code: int, words: str
) -> None:
    assert run(["circuits", "constructed-induction", *arguments]) == code
    assert words in capsys.readouterr().err
