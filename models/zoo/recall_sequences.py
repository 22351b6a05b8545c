"""Key-value recall with distractors: pairs, then a question which of them is meant.

    <bos> <data> k1 v1 k2 v2 .. kn vn <inst> k v <inst> k v ..

The pairs stand in the data segment; each `<inst> k` of the instruction segment asks for one of
them, the needle, and the others distract. Keys and values are disjoint sets and none recurs among
the pairs, so the answer is the one value after the one copy of the key. Training sequences ask for
every pair once, as far as there is room, and then again; in the end only what is asked for the
first time counts, since a second time it could be copied from the first answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor

from headstream.models.errors import ShapeError, TaskError
from headstream.models.zoo.sequences import BOS, whole_span

DATA, INST = 1, 2
N_KEYS = 64
N_VALUES = 64
KEY_FROM = INST + 1
VALUE_FROM = KEY_FROM + N_KEYS
D_VOCAB = VALUE_FROM + N_VALUES
SEGMENTS = ("data", "instruction")  # what the numbers of `segments` stand for; -1 is neither (BOS)

Span = tuple[int, int]


class RecallSequences(NamedTuple):
    """Sequences, and where they are asked for what.

    Attributes:
        tokens: the sequences; column 0 is BOS.
        counted: the token here is an answer that was not given before.
        needle: position of the pair's value in the data segment, for every answer; -1 elsewhere.
        n_pairs: pairs of each row.
    """

    tokens: Int[Tensor, "batch pos"]
    counted: Bool[Tensor, "batch pos"]
    needle: Int[Tensor, "batch pos"]
    n_pairs: Int[Tensor, " batch"]


class Questions(NamedTuple):
    """Prompts that end in one question, all with as many pairs.

    Attributes:
        tokens: `<bos> <data> k1 v1 .. kn vn <inst> k`.
        answer: the needle's value.
        depth: which pair the needle is, 0 the first.
        unused_keys, unused_values: tokens that do not occur in the row, in random order.
    """

    tokens: Int[Tensor, "batch pos"]
    answer: Int[Tensor, " batch"]
    depth: Int[Tensor, " batch"]
    unused_keys: Int[Tensor, "batch keys"]
    unused_values: Int[Tensor, "batch values"]


def prompt_length(n_pairs: int) -> int:
    """Tokens of a prompt with that many pairs, up to and with the key that is asked for."""
    return 2 * n_pairs + 4


def recall_sequences(
    batch: int, length: int, *, generator: Generator, pairs: Span
) -> RecallSequences:
    """Training sequences; each row draws its number of pairs from `pairs`, both ends included.

    Raises:
        TaskError: if the pairs do not fit, with one question and its answer, or there are not as
            many keys.
    """
    _require_pairs(pairs, length - 1)
    n_pairs = torch.randint(pairs[0], pairs[1] + 1, (batch, 1), generator=generator)
    keys, values = _keys_and_values(batch, generator)
    order = torch.rand(batch, pairs[1], generator=generator)
    # Pairs that a row does not have sort to the end and are never asked for.
    order = order.masked_fill(torch.arange(pairs[1]) >= n_pairs, 2.0).argsort(1)

    place = torch.arange(length).expand(batch, -1)
    asked_at = place - (2 + 2 * n_pairs)  # 0 at the first <inst>
    question = asked_at.div(3, rounding_mode="floor").clamp(min=0)
    in_data = asked_at < 0
    pair = torch.where(in_data, (place - 2).clamp(min=0) // 2, order.gather(1, question % n_pairs))
    part = torch.where(in_data, place % 2 + 1, asked_at % 3)  # 0 <inst>, 1 key, 2 value
    key, value = keys.gather(1, pair), values.gather(1, pair)
    tokens = torch.where(part == 1, key, torch.where(part == 2, value, INST))
    tokens[:, 0], tokens[:, 1] = BOS, DATA
    answer = ~in_data & (part == 2)
    return RecallSequences(
        tokens,
        answer & (question < n_pairs),
        torch.where(answer, 2 * pair + 3, -1),
        n_pairs[:, 0],
    )


def questions(batch: int, n_pairs: int, *, generator: Generator, depth: Any = None) -> Questions:
    """Prompts that end in one question.

    Args:
        batch: rows.
        n_pairs: pairs of every row.
        generator: source of all randomness.
        depth: smallest and largest index of the needle among the pairs, both included; None is
            all of them.
    Raises:
        TaskError: for a number of pairs or a depth that cannot be.
    """
    _require_pairs((n_pairs, n_pairs), prompt_length(n_pairs))
    low, high = (0, n_pairs - 1) if depth is None else whole_span("depth", depth)
    if not 0 <= low <= high < n_pairs:
        raise TaskError(
            f"depth must be (smallest, largest) within 0 .. {n_pairs - 1} for {n_pairs} pairs, "
            f"got {(low, high)}"
        )
    keys, values = _keys_and_values(batch, generator)
    needle = torch.randint(low, high + 1, (batch,), generator=generator)
    row = torch.arange(batch)
    tokens = torch.full((batch, prompt_length(n_pairs)), INST)
    tokens[:, 0], tokens[:, 1] = BOS, DATA
    tokens[:, 2:-2:2], tokens[:, 3:-2:2] = keys[:, :n_pairs], values[:, :n_pairs]
    tokens[:, -1] = keys[row, needle]
    return Questions(tokens, values[row, needle], needle, keys[:, n_pairs:], values[:, n_pairs:])


def segments(tokens: Tensor) -> Int[Tensor, "batch pos"]:
    """The segment of each position, as an index into `SEGMENTS`; -1 for BOS.

    The data segment begins with its `<data>`, the instruction segment with the first `<inst>`.

    Raises:
        ShapeError: if tokens are not [batch, pos].
    Example:
        >>> segments(torch.tensor([[0, 1, 5, 100, 6, 101, 2, 5]])).tolist()
        [[-1, 0, 0, 0, 0, 0, 1, 1]]
    """
    if tokens.ndim != 2:
        raise ShapeError(f"tokens have shape {list(tokens.shape)}, expected [batch, pos]")
    begun = (tokens == DATA).cumsum(1).clamp(max=1) + (tokens == INST).cumsum(1).clamp(max=1)
    return begun - 1


def _require_pairs(pairs: Span, room: int) -> None:
    if not 1 <= pairs[0] <= pairs[1] <= min(N_KEYS, N_VALUES):
        raise TaskError(
            f"the number of pairs must lie within 1 .. {min(N_KEYS, N_VALUES)}, got {pairs}"
        )
    if prompt_length(pairs[1]) > room:
        raise TaskError(
            f"{pairs[1]} pairs and a question take {prompt_length(pairs[1])} tokens, and there is "
            f"room for {room}"
        )


def _keys_and_values(batch: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """All keys and all values once a row, each in random order."""
    keys = torch.rand(batch, N_KEYS, generator=generator).argsort(1) + KEY_FROM
    values = torch.rand(batch, N_VALUES, generator=generator).argsort(1) + VALUE_FROM
    return keys, values
