"""Prompt pairs for recall: `<bos> <data> k1 v1 .. kn vn <inst> k`, and the same with one change.

The answer is the value of the needle, the pair that `<inst> k` asks for. What is replaced:

    needle_key     the needle's key in the data, by a key that occurs nowhere: nothing matches the
                   question any more; the wrong answer is the value of another pair
    needle_value   the needle's value, by a value that occurs nowhere: the wrong answer is that one
    question       the key that is asked for, by that of another pair: the wrong answer is its value
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Generator

from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest
from headstream.models.zoo.recall_sequences import D_VOCAB, N_KEYS, prompt_length, questions

RecallCorruption = Literal["needle_key", "needle_value", "question"]


def recall_pairs(
    card: Mapping[str, Any],
    n: Any,
    seed: int,
    *,
    corruption: Any = "needle_key",
    n_pairs: Any = None,
    depth: Any = None,
    config: DecoderConfig | None = None,
) -> dict[str, Any]:
    """`n` pairs of prompts; see `tasks.pairs_for`.

    Args:
        n_pairs: key-value pairs of a prompt; None is what the card's task names.
        depth: smallest and largest index of the needle among them, both included; None is all.
    Returns:
        The arguments of `Task`; roles `needle_key`, `needle_value`, `other_value` (the value that
        is the wrong answer, where it is one of the prompt), `instruction` and `question`.
    Raises:
        TaskError: as `pairs_for`.
    """
    n_pairs = _number(card, n_pairs, config)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise TaskError(f"n must be a whole number of pairs >= 1, got {n!r}")
    if corruption not in get_args(RecallCorruption):
        raise TaskError(
            f"corruption must be one of {', '.join(get_args(RecallCorruption))}, "
            f"got {corruption!r}",
            hint=nearest(str(corruption), get_args(RecallCorruption)),
        )
    generator = Generator().manual_seed(seed)
    made = questions(n, n_pairs, generator=generator, depth=depth)
    row = torch.arange(n)
    other = (made.depth + torch.randint(1, n_pairs, (n,), generator=generator)) % n_pairs
    key_at, value_at = 2 * made.depth + 2, 2 * made.depth + 3
    corrupted = made.tokens.clone()
    wrong = made.tokens[row, 2 * other + 3]
    if corruption == "needle_key":
        corrupted[row, key_at] = made.unused_keys[:, 0]
    elif corruption == "needle_value":
        wrong = made.unused_values[:, 0]
        corrupted[row, value_at] = wrong
    else:
        corrupted[:, -1] = made.tokens[row, 2 * other + 2]
    last = made.tokens.shape[1] - 1
    roles = {
        "needle_key": key_at,
        "needle_value": value_at,
        "other_value": 2 * other + 3,
        "instruction": torch.full((n,), last - 1),
        "question": torch.full((n,), last),
    }
    if corruption == "needle_value":
        del roles["other_value"]
    return {
        "clean": made.tokens,
        "corrupted": corrupted,
        "answer": made.answer,
        "wrong": wrong,
        "roles": roles,
    }


def _number(card: Mapping[str, Any], n_pairs: Any, config: DecoderConfig | None) -> int:
    """Pairs of a prompt, as far as the vocabulary and the model hold them."""
    asked = card["task"].get("pairs") if n_pairs is None else n_pairs
    if isinstance(asked, bool) or not isinstance(asked, int) or not 2 <= asked < N_KEYS:
        where = f"the task of {card.get('name')!r}" if n_pairs is None else "n_pairs"
        raise TaskError(
            f"{where} must give the number of key-value pairs, within 2 .. {N_KEYS - 1}, "
            f"got {asked!r}"
        )
    if config is None:
        return asked
    for name, needs, held in (
        (f"{asked} pairs take length", prompt_length(asked), config.n_ctx),
        ("its tokens take d_vocab", D_VOCAB, config.d_vocab),
    ):
        if needs > held:
            raise TaskError(
                f"the task of {card.get('name')!r} does not fit the model: {name}={needs}, "
                f"the model has {held}",
                hint="fewer pairs, or build a Task from your own pairs",
            )
    return asked
