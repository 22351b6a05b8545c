"""Prompt pairs in the twin: one list a field, and each token's word once.

    {"vocabulary": {"5": " Mary"}, "columns": {"clean": [[5, ...], ...], ...,
     "clean_tokens": {"words_of": "clean"}, ...}}

Entry i of every column belongs to pair i. A column of words that follows from a column of ids by
the vocabulary is not written out; one that does not follow (two words for one id) stands as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Which field holds the words of which ids.
_WORDS = {
    "clean_tokens": "clean",
    "corrupted_tokens": "corrupted",
    "answer_token": "answer",
    "wrong_token": "wrong",
}


def as_columns(pairs: Sequence[Any]) -> Any:
    """`pairs` by columns; as they are, if they do not all have the same fields in one order."""
    fields = {tuple(pair) if isinstance(pair, Mapping) else None for pair in pairs}
    if len(fields) != 1 or None in fields:
        return pairs
    columns: dict[str, Any] = {name: [pair[name] for pair in pairs] for name in pairs[0]}
    vocabulary: dict[str, str] = {}
    for words, ids in _WORDS.items():
        if words in columns and ids in columns:
            found = _vocabulary(columns[ids], columns[words], vocabulary)
            if found is not None:
                vocabulary = found
                columns[words] = {"words_of": ids}
    ordered = {key: vocabulary[key] for key in sorted(vocabulary, key=int)}
    return {"vocabulary": ordered, "columns": columns}


def as_pairs(value: Any) -> Any:
    """The pairs of `as_columns`, field for field.

    Raises:
        LookupError, TypeError, ValueError: if a column or a word is missing, or too short.
    """
    if not isinstance(value, Mapping):
        return value
    vocabulary, columns = value["vocabulary"], dict(value["columns"])
    for name, column in columns.items():
        if isinstance(column, Mapping):
            columns[name] = [_words(entry, vocabulary) for entry in columns[column["words_of"]]]
    return [
        dict(zip(columns, entries, strict=True)) for entries in zip(*columns.values(), strict=True)
    ]


def _words(entry: Any, vocabulary: Mapping[str, str]) -> Any:
    if isinstance(entry, list):
        return [_words(item, vocabulary) for item in entry]
    return None if entry is None else vocabulary[str(entry)]


def _vocabulary(ids: Any, words: Any, known: Mapping[str, str]) -> dict[str, str] | None:
    """`known` with every word of these columns, or None if they do not fit it."""
    found = dict(known)
    for key, word in _matched(ids, words):
        if (
            type(key) is not int
            or type(word) is not str
            or found.setdefault(str(key), word) != word
        ):
            return None
    return found


def _matched(ids: Any, words: Any) -> Iterator[tuple[Any, Any]]:
    """Every id with its word, or what else stands in its place; nothing where both are None."""
    if isinstance(ids, list) and isinstance(words, list) and len(ids) == len(words):
        for one, other in zip(ids, words, strict=True):
            yield from _matched(one, other)
    elif ids is not None or words is not None:
        yield ids, words
