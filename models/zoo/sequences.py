"""Token sequences with a known answer: pure functions of a generator, all [batch, pos].

Tokens 1 .. n_content are content, 0 is BOS; every sequence begins with BOS. Within a block tokens
are drawn without replacement, so that the token after an earlier copy is one token and not two.

    repeated_blocks   <bos> lead BLOCK gap BLOCK gap BLOCK ...    what the induction models train on
    single_match      <bos> .. A B .. A                           what the patching task is made of

Nothing here touches the global random state: randomness comes from the `generator` argument.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor

from headstream.models.errors import ShapeError, TaskError

BOS = 0


class RepeatedBlocks(NamedTuple):
    """Sequences in which one block recurs, and where that makes a token predictable.

    Attributes:
        tokens: the sequences; column 0 is BOS.
        predictable: the token here is fixed by what stands before it: it is the second or a later
            token of a block that has occurred already. The best possible loss on these is 0. (The
            first token of a recurring block is not: nothing says where a gap ends.)
        fresh: the token before this one has not occurred earlier, so there is nothing to copy.
            What is neither (the end of a recurring block, a filler seen before) misleads a copier.
        source: position of the latest earlier copy of a predictable token; -1 elsewhere. The
            distance of the repeat is `pos - source`, the induction target of query pos - 1 is
            `source`.
    """

    tokens: Int[Tensor, "batch pos"]
    predictable: Bool[Tensor, "batch pos"]
    fresh: Bool[Tensor, "batch pos"]
    source: Int[Tensor, "batch pos"]


class SingleMatch(NamedTuple):
    """Prompts that end in a token that occurred once before: `<bos> .. A B .. A`.

    Attributes:
        tokens: the prompts; all tokens of a row differ, but the last, which equals the one at
            `earlier`.
        earlier: position of the first A; B stands at `earlier + 1`.
        fresh: content tokens that do not occur in the row, in random order.
    """

    tokens: Int[Tensor, "batch pos"]
    earlier: Int[Tensor, " batch"]
    fresh: Int[Tensor, "batch unused"]


def whole_span(name: str, span: Any) -> tuple[int, int]:
    """`span`, the smallest and the largest of something, as two ints.

    Raises:
        TaskError: unless it is two whole numbers.
    """
    ends = span if isinstance(span, (tuple, list)) else ()
    if len(ends) == 2 and all(_is_whole(end) for end in ends):
        return operator.index(ends[0]), operator.index(ends[1])
    raise TaskError(
        f"{name} must be two whole numbers (smallest, largest), got {span!r}",
        hint=f"for one value give it twice: {name}=({span}, {span})" if _is_whole(span) else "",
    )


def _is_whole(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def repeated_blocks(
    batch: int,
    length: int,
    n_content: int,
    *,
    generator: Generator,
    block: Any,
    gap: Any = (0, 0),
    lead: Any = (0, 0),
) -> RepeatedBlocks:
    """BOS, some filler, then a random block again and again with filler between, cut to `length`.

    Each row draws its block's length once, and a new gap before every recurrence, so neither the
    position nor one distance gives the answer away (unless both ranges are single values, which
    is how the fixed-distance decoys are made). Fillers share no token with the row's block and do
    not recur before the row has used all the others.

    Args:
        batch, length: rows, and tokens a row counting BOS.
        n_content: content tokens are 1 .. n_content.
        generator: source of all randomness.
        block, gap, lead: smallest and largest length in tokens, both included, of the block, of
            the filler between two occurrences and of the filler before the first.
    Raises:
        TaskError: if a range is not two whole numbers, is empty or leaves no token for the filler.
    Example:
        >>> made = repeated_blocks(1, 7, 9, generator=Generator().manual_seed(0), block=(3, 3))
        >>> made.predictable.int().tolist(), made.source.tolist()
        ([[0, 0, 0, 0, 0, 1, 1]], [[-1, -1, -1, -1, -1, 2, 3]])
    """
    _require_sizes(batch, length)
    block, gap, lead = (
        whole_span(name, span) for name, span in (("block", block), ("gap", gap), ("lead", lead))
    )
    for name, span, least in (("block", block, 1), ("gap", gap, 0), ("lead", lead, 0)):
        if not least <= span[0] <= span[1]:
            raise TaskError(
                f"{name} must be (smallest, largest) with {least} <= smallest <= largest, "
                f"got {span}"
            )
    needs_filler = gap[1] > 0 or lead[1] > 0
    if block[1] + needs_filler > n_content:
        raise TaskError(
            f"a block of up to {block[1]} tokens{' and its filler' if needs_filler else ''} "
            f"cannot be drawn without replacement from {n_content} content tokens"
        )
    place = torch.arange(length - 1)  # positions after BOS
    size = _between(block, (batch, 1), generator)
    rounds = (length - 1) // block[0] + 1  # more occurrences than fit
    gaps = _between(gap, (batch, rounds), generator)
    gaps[:, :1] = _between(lead, (batch, 1), generator)
    starts = gaps.cumsum(1) + size * torch.arange(rounds)
    occurrence = (starts[:, None, :] <= place[:, None]).sum(-1) - 1
    previous = starts.gather(1, occurrence.clamp(min=0))
    offset = place - previous
    in_block = (occurrence >= 0) & (offset < size)

    content = _shuffled(batch, n_content, generator)
    body = content.gather(1, offset.clamp(0, n_content - 1))
    filler = _fillers(content, size, (~in_block).cumsum(1) - 1, generator)
    tokens = _after_bos(torch.where(in_block, body, filler))

    predictable = in_block & (occurrence >= 1) & (offset >= 1)
    back = starts.gather(1, (occurrence - 1).clamp(min=0))
    source = torch.where(predictable, back + offset + 1, -1)  # + 1: BOS holds position 0
    return RepeatedBlocks(
        tokens,
        _pad_left(predictable, False),
        _pad_left(~_seen_before(tokens)[:, :-1], False),
        _pad_left(source, -1),
    )


def single_match(
    batch: int,
    length: int,
    n_content: int,
    *,
    generator: Generator,
    distance: Any = None,
) -> SingleMatch:
    """Prompts `<bos> .. A B .. A`, the two A's `distance` tokens apart, the rest all different.

    Args:
        batch, length: rows, and tokens a row counting BOS; every row has the same length.
        n_content: content tokens are 1 .. n_content.
        generator: source of all randomness.
        distance: smallest and largest distance between the two A's, drawn uniformly; None is
            every distance that fits, 2 to length - 2.
    Raises:
        TaskError: if the tokens do not suffice, or distances are not two whole numbers that fit.
    Example:
        >>> made = single_match(1, 6, 9, generator=Generator().manual_seed(0))
        >>> bool(made.tokens[0, made.earlier[0]] == made.tokens[0, -1])
        True
    """
    _require_sizes(batch, length)
    if length < 4:
        raise TaskError(f"`<bos> A B A` takes 4 tokens, got length={length}")
    if length - 1 > n_content:  # length - 2 different tokens, and at least one left over
        raise TaskError(
            f"length={length} needs {length - 1} different content tokens (one of them stays "
            f"unused, to corrupt with), but there are {n_content}",
            hint=f"use a length of at most {n_content + 1}",
        )
    span = (2, length - 2) if distance is None else whole_span("distance", distance)
    if not 2 <= span[0] <= span[1] <= length - 2:
        raise TaskError(
            f"distance must be (smallest, largest) within 2 .. {length - 2} for "
            f"length={length}, got {span}"
        )
    content = _shuffled(batch, n_content, generator)
    earlier = length - 1 - _between(span, (batch,), generator)
    body = content[:, : length - 2]
    query = body.gather(1, earlier[:, None] - 1)
    return SingleMatch(
        _after_bos(torch.cat([body, query], dim=1)), earlier, content[:, length - 2 :]
    )


def _require_sizes(batch: int, length: int) -> None:
    if batch < 1 or length < 2:
        raise ShapeError(f"batch must be >= 1 and length >= 2, got {batch} and {length}")


def _between(span: tuple[int, int], shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Whole numbers, uniform over span[0] .. span[1], both included."""
    return torch.randint(span[0], span[1] + 1, shape, generator=generator)


def _shuffled(batch: int, n_content: int, generator: Generator) -> Int[Tensor, "batch content"]:
    """Every content token once a row, in random order."""
    return torch.rand(batch, n_content, generator=generator).argsort(1) + 1


def _fillers(
    content: Int[Tensor, "batch content"],
    size: Int[Tensor, "batch 1"],
    rank: Int[Tensor, "batch places"],
    generator: Generator,
) -> Int[Tensor, "batch places"]:
    """The `rank`-th filler of each row: pass after pass over the tokens outside the block.

    Each pass has its own order; one order for all would make the fillers a second repeat.
    """
    batch, n_content = content.shape
    pool = n_content - size
    passes = int((rank.max() + 1).clamp(min=1)) // max(int(pool.min()), 1) + 1
    keys = torch.rand(batch, passes, n_content, generator=generator)
    in_block = torch.arange(n_content) < size
    order = keys.masked_fill(in_block[:, None], 2.0).argsort(2)  # block tokens sort to the end
    rank, pool = rank.clamp(min=0), pool.clamp(min=1)
    row = torch.arange(batch)[:, None]
    return content.gather(1, order[row, rank // pool, rank % pool])


def _seen_before(tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """Whether the token at a position occurs earlier in its row."""
    same = tokens[:, :, None] == tokens[:, None, :]
    return same.tril(-1).any(-1)


def _after_bos(tokens: Int[Tensor, "batch places"]) -> Int[Tensor, "batch pos"]:
    return _pad_left(tokens, BOS)


def _pad_left(values: Tensor, fill: int | bool) -> Tensor:
    return torch.cat([torch.full_like(values[:, :1], fill), values], dim=1)
