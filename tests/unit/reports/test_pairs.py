"""Prompt pairs by columns: the same pairs come back, whatever the words are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstream.reports.pairs import as_columns, as_pairs


def pair(ids: list[int], words: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "clean": ids,
        "corrupted": ids[::-1],
        "clean_tokens": words,
        "corrupted_tokens": words[::-1],
        "answer": ids[0],
        "wrong": None,
        "answer_token": words[0],
        "wrong_token": None,
        "roles": {"query": 1},
        "mask": None,
    } | changes


def back(pairs: Any) -> Any:
    return as_pairs(json.loads(json.dumps(as_columns(pairs))))


def test_by_columns_each_word_stands_once() -> None:
    pairs = [pair([5, 7], [" Mary", "</s>"]), pair([7, 7], ["</s>", "</s>"])]
    assert as_columns(pairs) == {
        "vocabulary": {"5": " Mary", "7": "</s>"},
        "columns": {
            "clean": [[5, 7], [7, 7]],
            "corrupted": [[7, 5], [7, 7]],
            "clean_tokens": {"words_of": "clean"},
            "corrupted_tokens": {"words_of": "corrupted"},
            "answer": [5, 7],
            "wrong": [None, None],
            "answer_token": {"words_of": "answer"},
            "wrong_token": {"words_of": "wrong"},
            "roles": [{"query": 1}, {"query": 1}],
            "mask": [None, None],
        },
    }
    assert json.dumps(back(pairs)) == json.dumps(pairs), "also in the order of the fields"


words = st.text(max_size=3)
some = st.integers(1, 4).flatmap(
    lambda n: st.builds(
        pair,
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
        st.lists(words, min_size=n, max_size=n),
    )
)


@given(st.lists(some, max_size=4))
def test_pairs_come_back_with_any_words(pairs: list[dict[str, Any]]) -> None:
    """Most of these have two words for one id somewhere; those words are then written out."""
    assert back(pairs) == pairs


@pytest.mark.parametrize(
    "changes",
    [
        {"clean_tokens": ["a"]},
        {"clean_tokens": None},
        {"answer": True},
        {"answer": [5]},
        {"wrong": 5},
        {"wrong_token": "w"},
        {"clean_tokens": "ab"},
        {"extra": 1},
    ],
)
def test_pairs_of_another_form_come_back_too(changes: dict[str, Any]) -> None:
    pairs = [pair([5, 7], ["a", "b"]), pair([5, 7], ["a", "b"], **changes)]
    assert back(pairs) == pairs


def test_what_are_no_pairs_stays() -> None:
    for value in ([], [1, 2], [{"a": 1}, None], [{"a": 1}, {"b": 2}]):
        assert back(value) == value


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["vocabulary"].pop("5"),
        lambda value: value["columns"].pop("clean"),
        lambda value: value["columns"]["answer"].append(5),
        lambda value: value.pop("columns"),
        lambda value: value.update(vocabulary=None),
    ],
)
def test_damage_is_an_error(change: Any) -> None:
    value = as_columns([pair([5, 7], ["a", "b"])])
    change(value)
    with pytest.raises((LookupError, TypeError, ValueError)):
        as_pairs(value)
