"""Random sequences that tell a head which follows content from one that follows a distance.

    gapped       <bos> gap BLOCK gap BLOCK gap ..   every gap of another, random length
    elsewhere    <bos> .. BLOCK gap BLOCK           the copy at one distance, looked for at another
    in orders    <bos> ORDER ORDER ..               random orders of all tokens: no structure at all

In a gapped sequence a block's tokens stand in blocks alone, the gaps are filled with the others, so
a query's targets are what came after the earlier copies of its token, and an ideal head scores 1
however many there are. Its control keeps the first block and puts other tokens in place of the
later ones: the same positions, content broken. Nothing is drawn twice within a block or a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor

from headstream.circuits.repeats import RepeatPlan
from headstream.circuits.statistics import prefix_matching_targets
from headstream.models.config import DecoderConfig
from headstream.models.errors import ShapeError, TokenError

BLOCK = 12  # tokens of a block in a gapped sequence, where they fit
_FEWEST = 6  # tokens after BOS: two blocks of 2 and two gaps of up to 1

_MASK = Bool[Tensor, "batch query_pos key_pos"]


class GappedRepeats(NamedTuple):
    """Gapped sequences and their controls, [batch, pos].

    Attributes:
        repeated, control: see the module; equal up to the second block of each row.
        after_copies: for queries of the second and later blocks of `repeated`, the keys after
            earlier copies of their token. Positions, good for either sequence.
    """

    repeated: Int[Tensor, "batch pos"]
    control: Int[Tensor, "batch pos"]
    after_copies: _MASK


@dataclass(frozen=True)
class GapPlan:
    """What fits: tokens of the block, and the longest gap."""

    length: int
    block: int
    longest_gap: int
    content: tuple[int, ...]
    bos: int | None


def fewest_tokens(config: DecoderConfig) -> int:
    """The shortest gapped sequence, BOS included."""
    return _FEWEST + (config.bos_token_id is not None)


def plan_gaps(config: DecoderConfig, length: int) -> GapPlan:
    """Block and longest gap for sequences of exactly `length` tokens, BOS included.

    Two blocks with their gaps always fit; a longer gap means more distances.

    Raises:
        ShapeError: if `length` is more than the context or too little for a repeat.
        TokenError: if there are fewer than 4 content tokens.
    """
    special = {config.bos_token_id, config.pad_token_id}
    content = tuple(token for token in range(config.d_vocab) if token not in special)
    least = fewest_tokens(config)
    if not least <= length <= config.n_ctx:
        raise ShapeError(
            f"length={length} is out of range: repeats at random gaps take at least {least} "
            f"tokens, and the model holds n_ctx={config.n_ctx}"
        )
    if len(content) < 4:
        raise TokenError(
            f"{len(content)} content tokens are too few for a repeat and its control: the "
            f"smallest takes 4 (d_vocab={config.d_vocab}, without BOS and padding)"
        )
    room = length - (config.bos_token_id is not None)
    block = max(2, min(BLOCK, room // 5, len(content) // 2))
    longest = min(len(content) - block, (room - 2 * block) // 2)
    return GapPlan(length, block, longest, content, config.bos_token_id)


def draw_gapped(plan: GapPlan, n: int, generator: Generator) -> GappedRepeats:
    """`n` gapped sequences, each with its own block, gaps and control."""
    rows = [_draw_one(plan, generator) for _ in range(n)]
    repeated, control, asked = (torch.stack(parts) for parts in zip(*rows, strict=True))
    real = torch.ones_like(repeated, dtype=torch.bool)
    targets = prefix_matching_targets(repeated, real) & asked[:, :, None]
    return GappedRepeats(repeated, control, targets)


def _draw_one(plan: GapPlan, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Repeated [pos], control [pos], and which positions are in a second or later block."""
    room = plan.length - (plan.bos is not None)
    content = torch.tensor(plan.content)
    shuffled = content[torch.randperm(len(content), generator=generator)]
    block, others = shuffled[: plan.block], shuffled[plan.block :]

    def drawn(count: int) -> Tensor:
        return others[torch.randperm(len(others), generator=generator)[:count]]

    start = content[:0] if plan.bos is None else torch.tensor([plan.bos])
    repeated, control, asked = [start], [start], [torch.zeros(len(start), dtype=torch.bool)]
    length = number = 0
    while length < room:
        gap = int(torch.randint(plan.longest_gap + 1, (), generator=generator))
        fill = drawn(gap)
        fresh = block if number == 0 else drawn(plan.block)
        repeated += [fill, block]
        control += [fill, fresh]
        asked += [torch.zeros(gap, dtype=torch.bool), torch.full((plan.block,), number > 0)]
        length += gap + plan.block
        number += 1
    return (
        torch.cat(repeated)[: plan.length],
        torch.cat(control)[: plan.length],
        torch.cat(asked)[: plan.length],
    )


def make_elsewhere(
    plan: RepeatPlan, orders: Int[Tensor, "batch content"], distance: int, other: int
) -> tuple[Int[Tensor, "batch pos"], _MASK]:
    """Sequences whose block recurs at `other`, and where a copy at `distance` would be read.

    Args:
        plan, orders: of `repeats`.
        distance, other: two different distances of the plan.
    Returns:
        Tokens, and for each query of the second block the key `distance` - 1 back: an induction
        head has no reason to look there, a head that learned this distance looks nowhere else.
    """
    until = max(distance, other)
    first = orders[:, :until]
    second = first[:, until - other : until - other + plan.length]
    tokens = torch.cat([first, second], 1)
    if plan.bos is not None:
        tokens = torch.cat([torch.full_like(orders[:, :1], plan.bos), tokens], 1)
    n, length = tokens.shape
    return tokens, _back(n, length, distance - 1, first=length - plan.length)


def draw_in_orders(
    content: tuple[int, ...], bos: int | None, length: int, n: int, generator: Generator
) -> Int[Tensor, "batch pos"]:
    """`n` sequences of random orders of the content, one after the other; BOS included in length.

    No longer than the vocabulary they hold no token twice; beyond, copies stand at all distances.
    """
    room = length - (bos is not None)
    times = -(-room // len(content))
    index = torch.rand(n, times, len(content), generator=generator).argsort(2).flatten(1)
    tokens = torch.tensor(content)[index[:, :room]]
    if bos is None:
        return tokens
    return torch.cat([torch.full_like(tokens[:, :1], bos), tokens], 1)


def _back(n: int, length: int, offset: int, *, first: int) -> _MASK:
    """The key `offset` before each query from `first` on; the same for `n` rows."""
    at = torch.arange(length)
    mask = (at[:, None] - offset == at) & (at >= first)[:, None]
    return mask.expand(n, length, length)
