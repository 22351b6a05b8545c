"""Text for toys: a list of strings, joined by spaces.

A toy's vocabulary is a list of distinct, non-empty strings without white space; a prompt is those
strings with spaces between them. Unknown words are errors, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstream.models.errors import ShapeError, TokenError, nearest


def check_vocabulary(vocab: Sequence[str], d_vocab: int) -> list[str]:
    """`vocab` as a list, if it can serve a model of `d_vocab` tokens.

    Raises:
        TokenError: on a wrong length, a repeated or empty string, or white space in one.
    """
    words = list(vocab)
    if len(words) != d_vocab:
        raise TokenError(f"vocabulary has {len(words)} strings, expected d_vocab = {d_vocab}")
    seen: set[str] = set()
    for index, word in enumerate(words):
        if not isinstance(word, str) or not word or word != "".join(word.split()):
            raise TokenError(
                f"vocabulary[{index}] must be a non-empty string without white space, got {word!r}"
            )
        if word in seen:
            raise TokenError(f"vocabulary[{index}] repeats {word!r}; strings must be distinct")
        seen.add(word)
    return words


def encode(text: str, vocab: Sequence[str]) -> list[int]:
    """Token ids of a prompt, word by word.

    Raises:
        TokenError: naming the word that is not in the vocabulary, and its place.
    """
    index = {word: token for token, word in enumerate(vocab)}
    ids = []
    for place, word in enumerate(text.split()):
        if word not in index:
            raise TokenError(
                f"word {place} of the prompt, {word!r}, is not in the vocabulary of "
                f"{len(vocab)} strings",
                hint=nearest(word, vocab) or "model.vocab lists them",
            )
        ids.append(index[word])
    return ids


def check_tokens(tokens: Tensor, d_vocab: int, *, argument: str = "tokens") -> Tensor:
    """`tokens` as int64 `[batch, pos]`; one row `[pos]` becomes a batch of one.

    Raises:
        ShapeError: on another rank, an empty batch or row, or another dtype.
        TokenError: on a token outside the vocabulary, naming it and its place.
    """
    if not isinstance(tokens, Tensor):
        raise ShapeError(
            f"{argument} must be an int64 tensor [batch, pos], got {type(tokens).__name__}",
            hint="use torch.tensor(ids)",
        )
    if tokens.dtype != torch.int64:
        raise ShapeError(
            f"{argument} must be int64 [batch, pos], got {str(tokens.dtype).removeprefix('torch.')}"
            f" {list(tokens.shape)}",
            hint=f"use {argument}.long() if these are token ids",
        )
    if tokens.ndim not in (1, 2) or tokens.numel() == 0:
        raise ShapeError(
            f"{argument} must be [batch, pos] or [pos] and not empty, got {list(tokens.shape)}"
        )
    rows = tokens if tokens.ndim == 2 else tokens[None]
    outside = (rows < 0) | (rows >= d_vocab)
    if bool(outside.any()):
        row, place = outside.nonzero()[0].tolist()
        raise TokenError(
            f"{argument}[{row}, {place}] is {int(rows[row, place])}, outside the vocabulary "
            f"[0, {d_vocab})"
        )
    return rows
