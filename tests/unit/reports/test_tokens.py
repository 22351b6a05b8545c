"""Every token can be seen, and none can act."""

from __future__ import annotations

import html
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstream.reports.tokens import cut, for_plotly, label, prose, segments, visible


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("the", "the"),
        (" the", "·the"),
        ("a b", "a·b"),
        ("", "∅"),
        (" ", "·"),
        ("\n", "⏎"),
        ("\r\n", "␍⏎"),
        ("\t", "⇥"),
        ("\x00", "U+0000"),
        ("\x1b[31m", "U+001B[31m"),
        ("\u200b", "U+200B"),
        ("\u00a0", "U+00A0"),
        ("\u202eabc", "U+202Eabc"),
        ("\ud83d", "U+D83D"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("<s>", "<s>"),
        ("&lt;", "&lt;"),
        ("</script>", "</script>"),
        ("日本", "日本"),
        ("\ue000", "U+E000"),
    ],
)
def test_visible_form(token: str, shown: str) -> None:
    assert visible(token) == shown


def test_segments_tell_stand_ins_from_the_sign_itself() -> None:
    # A token that is a real middle dot, and one that is a space.
    assert segments("·") == [("·", False)]
    assert segments(" ") == [("·", True)]
    assert segments(" a\n") == [("·", True), ("a", False), ("⏎", True)]


@given(st.text(max_size=30))
def test_every_token_has_a_mark_of_its_own(token: str) -> None:
    shown = visible(token)
    assert shown
    assert not any(unicodedata.category(s)[0] == "C" or s.isspace() for s in shown)


@given(st.text(max_size=40), st.integers(2, 20))
def test_cut_keeps_both_ends(text: str, width: int) -> None:
    short = cut(text, width)
    assert len(short) <= width
    if len(text) > width:
        assert short[0] == text[0]
        assert "…" in short


@given(st.lists(st.text(max_size=40), min_size=2, max_size=8))
def test_labels_of_different_positions_differ(tokens: list[str]) -> None:
    labels = [label(index, token) for index, token in enumerate(tokens)]
    assert len(set(labels)) == len(tokens)


def test_label_is_index_and_token() -> None:
    assert label(4, " John") == "4:·John"
    assert label(0, "x" * 30) == "0:xxxxxxx…xxxxxx"


@given(st.text(max_size=40))
def test_plotly_can_only_show_it(text: str) -> None:
    safe = for_plotly(text)
    assert "<" not in safe
    assert ">" not in safe
    assert html.unescape(safe) == prose(text)


def test_prose_names_signs_that_act_on_their_neighbours() -> None:
    assert prose("a\u202eb\x1b\x00") == "aU+202EbU+001BU+0000"
    assert prose("two\nlines, émigré, 🧑‍🔬") == "two\nlines, émigré, 🧑‍🔬"
