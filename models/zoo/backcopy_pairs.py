"""Prompt pairs for Bigram-Backcopy: a sequence that ends in a trigger.

The answer is the token before the trigger. What is replaced:

    before    the token before the trigger, by another that is no trigger: what is copied changes,
              and the wrong answer is the new token
    trigger   the trigger, by a token that is none: the head has nothing to copy; the wrong answer
              is another token of the prompt
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor

from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest
from headstream.models.zoo.backcopy import N_CONTENT, TRIGGERS, backcopy_sequences

BackcopyCorruption = Literal["before", "trigger"]
_FIRST = TRIGGERS[-1] + 1  # tokens from here on are no triggers


def backcopy_pairs(
    card: Mapping[str, Any],
    n: Any,
    seed: int,
    *,
    corruption: Any = "before",
    config: DecoderConfig | None = None,
) -> dict[str, Any]:
    """`n` pairs; see `tasks.pairs_for`.

    Returns:
        The arguments of `Task`; roles `before` and `trigger`, the last two positions.
    Raises:
        TaskError: as `pairs_for`.
    """
    length = _length(card, config)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise TaskError(f"n must be a whole number of pairs >= 1, got {n!r}")
    if corruption not in get_args(BackcopyCorruption):
        raise TaskError(
            f"corruption must be one of {', '.join(get_args(BackcopyCorruption))}, "
            f"got {corruption!r}",
            hint=nearest(str(corruption), get_args(BackcopyCorruption)),
        )
    generator = Generator().manual_seed(seed)
    # Four rows for one: those that end in a trigger cannot be followed by another.
    drawn = backcopy_sequences(4 * n + 64, length - 1, generator=generator)
    clean = drawn.tokens[~drawn.trigger[:, -1]][:n]
    if len(clean) < n:
        raise TaskError(
            f"too few of {len(drawn.tokens)} sequences end in a token that can be copied"
        )
    trigger = torch.tensor(TRIGGERS)[torch.randint(len(TRIGGERS), (n,), generator=generator)]
    clean = torch.cat([clean, trigger[:, None]], 1)
    answer = clean[:, -2]
    corrupted = clean.clone()
    if corruption == "before":
        wrong = _another(answer, generator)
        corrupted[:, -2] = wrong
    else:
        corrupted[:, -1] = _another(answer, generator)
        wrong = _of_the_prompt(clean, answer, generator)
    return {
        "clean": clean,
        "corrupted": corrupted,
        "answer": answer,
        "wrong": wrong,
        "roles": {
            "before": torch.full((n,), length - 2),
            "trigger": torch.full((n,), length - 1),
        },
    }


def _another(token: Tensor, generator: Generator) -> Tensor:
    """A token each that is no trigger and not `token`, uniformly."""
    count = N_CONTENT - len(TRIGGERS)
    step = torch.randint(1, count, token.shape, generator=generator)
    return (token - _FIRST + step) % count + _FIRST


def _of_the_prompt(clean: Tensor, answer: Tensor, generator: Generator) -> Tensor:
    """A token of each prompt that is neither BOS, a trigger nor the answer; another if none is."""
    chance = torch.rand(clean.shape, generator=generator)
    chance[(clean < _FIRST) | (clean == answer[:, None])] = -1.0
    best, place = chance.max(1)
    found = clean.gather(1, place[:, None])[:, 0]
    return torch.where(best < 0, _another(answer, generator), found)


def _length(card: Mapping[str, Any], config: DecoderConfig | None) -> int:
    length = card["task"].get("length")
    if not isinstance(length, int) or length < 3:
        raise TaskError(
            f"the task of {card.get('name')!r} must give its length as a whole number >= 3, "
            f"`<bos> x trigger`, got {length!r}"
        )
    if config is not None:
        for name, asked, held in (
            ("length", length, config.n_ctx),
            ("d_vocab", N_CONTENT + 1, config.d_vocab),
        ):
            if asked > held:
                raise TaskError(
                    f"the card of {card.get('name')!r} does not fit the model: its task needs "
                    f"{name}={asked}, the model has {held}",
                    hint="correct card.json, or build a Task from your own pairs",
                )
    return length
