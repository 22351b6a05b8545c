"""Random sequences in which one block occurs twice, and their content-matched controls.

    repeated   <bos> BLOCK gap BLOCK      the copy `distance` tokens after the original
    control    <bos> BLOCK gap OTHER      the same positions, nothing repeats

Tokens are drawn without replacement, so that each query has one target, and the two sequences of a
pair are equal up to the second block. A head that looks back a fixed distance, whatever stands
there, behaves the same on both; one that matches content does not. Several distances tell a head
that follows the content from one that learned a single distance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor

from headstream.circuits.statistics import duplicate_token_targets, prefix_matching_targets
from headstream.models.arguments import check_count
from headstream.models.config import DecoderConfig
from headstream.models.errors import ShapeError, TokenError

LONGEST = 128  # tokens of a sequence when the caller names no distance
BLOCK = 16  # tokens of a block when the caller names no length
N_DISTANCES = 4

_MASK = Bool[Tensor, "batch query_pos key_pos"]


class RepeatPair(NamedTuple):
    """Sequences of one distance, their controls, and where a copier should look.

    Attributes:
        repeated, control: [batch, pos]; row i of both is equal up to the second block.
        after_copy: for each query of the second block, the key after its token's first occurrence.
        copy: the key of that first occurrence. Both are sets of positions, good for either
            sequence: on the control they hold what a head puts there by position alone.
    """

    repeated: Int[Tensor, "batch pos"]
    control: Int[Tensor, "batch pos"]
    after_copy: _MASK
    copy: _MASK


@dataclass(frozen=True)
class RepeatPlan:
    """Which repeats fit a model.

    Attributes:
        length: tokens of the block.
        distances: of the second block from the first, in tokens, ascending.
        content: tokens that may be drawn: all but BOS and padding.
        bos: token that stands first, or None.
        notes: what could not be had, in words.
    """

    length: int
    distances: tuple[int, ...]
    content: tuple[int, ...]
    bos: int | None
    notes: tuple[str, ...] = ()


def plan_repeats(
    config: DecoderConfig, distances: Any = None, length: int | None = None
) -> RepeatPlan:
    """Choose block length and distances that fit vocabulary and context, or say why none do.

    A pair at distance d with a block of m tokens needs d + m different content tokens and as many
    positions, BOS apart. Left to itself the plan stays within `n_train` (if known) and within 128
    tokens, takes a third of that for the block (at most 16), and spreads four distances evenly
    from the block's length (no gap) to the farthest that fits.

    Args:
        config: of the model.
        distances: in tokens, each at least the block's length.
        length: tokens of the block, at least 2.
    Raises:
        TokenError: if there are too few content tokens for any repeat.
        ShapeError: if the context is too short for any repeat, or what was asked does not fit.
    """
    special = {config.bos_token_id, config.pad_token_id}
    content = tuple(token for token in range(config.d_vocab) if token not in special)
    has_bos = config.bos_token_id is not None
    if length is not None:
        length = check_count("length", length, least=2, of="tokens")
    room = config.n_ctx - has_bos
    if len(content) < 4:
        raise TokenError(
            f"{len(content)} content tokens are too few for a repeat and its control: the "
            f"smallest takes 4 (d_vocab={config.d_vocab}, without BOS and padding)",
            hint="score patterns of your own with headstream.circuits.statistics",
        )
    if room < 4:
        raise ShapeError(
            f"n_ctx={config.n_ctx} is too short for a repeat: the smallest takes 4 positions"
            f"{' after BOS' if has_bos else ''}"
        )
    limit = min(room, len(content))
    usual = min(limit, LONGEST, (config.n_train or config.n_ctx) - has_bos)
    if distances is None:
        block = max(2, min(BLOCK, usual // 3)) if length is None else length
        _require_block(block, limit // 2)
        far = max(usual, 2 * block) - block
        steps = torch.linspace(block, far, N_DISTANCES).round().int().tolist()
        chosen = tuple(sorted(set(steps)))
    else:
        chosen = _distances(distances)
        if chosen[0] < 2 or chosen[-1] > limit - 2:
            raise ShapeError(
                f"distances {list(chosen)} do not fit: each must lie in [2, {limit - 2}] tokens, "
                f"to leave room for two blocks of 2 in {len(content)} content tokens and {room} "
                "positions"
            )
        fits = min(chosen[0], limit - chosen[-1])
        block = min(BLOCK, fits) if length is None else length
        if block < 2 or block > fits:
            raise ShapeError(
                f"distances {list(chosen)} with a block of {block} tokens do not fit: each must "
                f"lie in [{max(2, block)}, {limit - max(2, block)}], from the block's length to "
                f"what {len(content)} content tokens and {room} positions leave"
            )
    notes = []
    if distances is None and len(chosen) < N_DISTANCES:
        notes.append(f"{len(chosen)} of {N_DISTANCES} repeat distances fit this model")
    if len(chosen) == 1:
        notes.append("one repeat distance: only the control tells content from position")
    return RepeatPlan(block, chosen, content, config.bos_token_id, tuple(notes))


def draw_orders(plan: RepeatPlan, n: int, generator: Generator) -> Int[Tensor, "batch content"]:
    """`n` random orders of the content tokens: the raw material of the pairs of every distance."""
    shuffled = torch.rand(n, len(plan.content), generator=generator).argsort(1)
    return torch.tensor(plan.content)[shuffled]


def make_pair(plan: RepeatPlan, orders: Int[Tensor, "batch content"], distance: int) -> RepeatPair:
    """Repeated sequences at `distance` and their controls, made of the first tokens of `orders`."""
    first, fresh = orders[:, :distance], orders[:, distance : distance + plan.length]
    repeated = torch.cat([first, orders[:, : plan.length]], 1)
    control = torch.cat([first, fresh], 1)
    if plan.bos is not None:
        start = torch.full_like(orders[:, :1], plan.bos)
        repeated, control = torch.cat([start, repeated], 1), torch.cat([start, control], 1)
    real = torch.ones_like(repeated, dtype=torch.bool)
    return RepeatPair(
        repeated,
        control,
        prefix_matching_targets(repeated, real),
        duplicate_token_targets(repeated, real),
    )


def _distances(given: object) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable) or not _several(given):
        raise ShapeError(f"distances must be a list of whole numbers of tokens, got {given!r}")
    chosen = tuple(sorted({check_count("a distance", one, of="tokens") for one in given}))
    if not chosen:
        raise ShapeError("distances is empty, expected at least one distance in tokens")
    return chosen


def _several(given: object) -> bool:
    """False for a tensor or array that holds one number: it only looks like a list."""
    return getattr(given, "ndim", 1) > 0


def _require_block(block: int, largest: int) -> None:
    if not 2 <= block <= largest:
        raise ShapeError(
            f"length must lie in [2, {largest}] tokens, so that two blocks fit, got {block}"
        )
