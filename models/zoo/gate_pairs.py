"""Prompt pairs for the gates: `<bos> .. a1 .. b1 .. =`, and the same with other bits.

The clean prompt has both bits right, so that either gate holds and the answer is that bit. What is
replaced by the other bit:

    both      both bits: neither gate holds any more; the wrong answer `?` is then the better one
    first     the first bit: AND no longer holds, OR still does
    second    the second bit

Half of the pairs ask for 0 and half for 1. Where the bits stand, which comes first, and what stands
between them is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest
from headstream.models.zoo.gates import A0, B0, BOS, MIXED, QUERY, ZERO

GateCorruption = Literal["both", "first", "second"]


def gate_pairs(
    card: Mapping[str, Any],
    n: Any,
    seed: int,
    *,
    corruption: Any = "both",
    config: DecoderConfig | None = None,
) -> dict[str, Any]:
    """`n` pairs for a gate; see `tasks.pairs_for`.

    Returns:
        The arguments of `Task`; roles `a`, `b` and `query`.
    Raises:
        TaskError: as `pairs_for`.
    """
    length, n_fillers = _sizes(card, config)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise TaskError(f"n must be a whole number of pairs >= 1, got {n!r}")
    if corruption not in get_args(GateCorruption):
        raise TaskError(
            f"corruption must be one of {', '.join(get_args(GateCorruption))}, got {corruption!r}",
            hint=nearest(str(corruption), get_args(GateCorruption)),
        )
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(n)
    clean = torch.randint(MIXED + 1, MIXED + 1 + n_fillers, (n, length), generator=generator)
    clean[:, 0], clean[:, -1] = BOS, QUERY
    order = torch.rand(n, length - 2, generator=generator).argsort(1) + 1
    first, second = order[:, 0], order[:, 1]
    bit = torch.randperm(n, generator=generator) % 2
    clean[row, first], clean[row, second] = A0 + bit, B0 + bit
    corrupted = clean.clone()
    if corruption != "second":
        corrupted[row, first] = A0 + 1 - bit
    if corruption != "first":
        corrupted[row, second] = B0 + 1 - bit
    return {
        "clean": clean,
        "corrupted": corrupted,
        "answer": ZERO + bit,
        "wrong": torch.full((n,), MIXED),
        "roles": {"a": first, "b": second, "query": torch.full((n,), length - 1)},
    }


def _sizes(card: Mapping[str, Any], config: DecoderConfig | None) -> tuple[int, int]:
    """Length and number of fillers of the card's task, as far as the model holds them."""
    task = card["task"]
    sizes = task.get("length"), task.get("n_fillers")
    if not all(isinstance(size, int) for size in sizes):
        raise TaskError(
            f"the task of {card.get('name')!r} must give length and n_fillers as whole numbers, "
            f"got {task!r}"
        )
    length, n_fillers = sizes
    if length < 4 or n_fillers < 1:
        raise TaskError(
            "a gate's task takes at least 4 tokens, `<bos> a b =`, and 1 filler, got "
            f"length={length} and n_fillers={n_fillers}"
        )
    if config is not None:
        held = (config.n_ctx, config.d_vocab - MIXED - 1)
        for name, asked, has, of in (
            ("length", length, held[0], f"positions (n_ctx={config.n_ctx})"),
            ("n_fillers", n_fillers, held[1], f"fillers (d_vocab={config.d_vocab})"),
        ):
            if asked > has:
                raise TaskError(
                    f"the card of {card.get('name')!r} does not fit the model: its task has "
                    f"{name}={asked}, the model has {has} {of}",
                    hint="correct card.json, or build a Task from your own pairs",
                )
    return length, n_fillers
