"""Does a head follow content, or a distance? Scores of every head on sequences that tell.

    induction          mass on the token after the earlier copy, distance by distance
    position_control   the same positions when the second block is other tokens
    content_control    the same distance when the block recurs at another one
    gapped             as induction, in one text whose blocks recur after random gaps
    gapped_control     its position control
    fixed              on tokens without repeats: the largest mass at one distance back, of all

A head that follows content has the first and the fourth, and none of the others; one that copies
from a fixed distance has the first at that distance alone, with both controls, and the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Generator, Tensor

from headstream.circuits.gapped_repeats import (
    draw_gapped,
    draw_in_orders,
    make_elsewhere,
    plan_gaps,
)
from headstream.circuits.heads import Array, masses_on, patterns_of
from headstream.circuits.labels import LABEL_MARGIN, percentile_interval
from headstream.circuits.repeats import LONGEST, RepeatPlan
from headstream.circuits.statistics import chance_level

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

_SCANNED = 16  # sequences of the scan over distances: each has dozens of queries
_NEAREST = 3  # a copy at distance 2 is read from the previous token, which has a label of its own


@dataclass(frozen=True)
class InductionScores:
    """Scores of every head; the first axis of most is the sequence, so that intervals can be had.

    Attributes:
        induction, position_control: [distance, sequence, layer, head].
        content_control: likewise; NaN with a single distance.
        chance: [distance], of the three.
        gapped, gapped_control: [sequence, layer, head], and `gapped_chance`.
        fixed: [sequence, layer, head], mass at the distance `fixed_distance` [layer, head] where
            it is largest, less chance there; distances 3 to `farthest` were looked at.
    """

    induction: Array
    position_control: Array
    content_control: Array
    chance: Array
    gapped: Array
    gapped_control: Array
    gapped_chance: float
    fixed: Array
    fixed_distance: np.ndarray
    farthest: int

    def follows_content(self, *, seed: int) -> np.ndarray:
        """[layer, head]: the score stands clear of chance and of every control, everywhere.

        At each distance and at random gaps the lower end of the 95% interval of score - chance,
        of score - position control and of score - content control is at least `LABEL_MARGIN`.
        """
        differences = [*(self.induction - self.chance[:, None, None, None])]
        differences += [*(self.induction - self.position_control)]
        if np.isfinite(self.content_control).all():
            differences += [*(self.induction - self.content_control)]
        differences += [self.gapped - self.gapped_chance, self.gapped - self.gapped_control]
        return _all_clear(differences, seed)

    def follows_distance(self, *, seed: int) -> np.ndarray:
        """[layer, head]: on tokens without repeats the head looks one distance back."""
        return _all_clear([self.fixed], seed)


def score_induction(
    model: Decoder,
    plan: RepeatPlan,
    orders: Tensor,
    of_pairs: Mapping[str, Array],
    chance: Array,
    *,
    length: int,
    generator: Generator,
    backend: str = "naive",
) -> InductionScores:
    """Score every head of `model`.

    Args:
        plan, orders: of `repeats`, for the single distances.
        of_pairs: what `heads.scores_by_distance` measured on them: "induction" and its control.
        chance: [distance], of these.
        length: tokens of the gapped sequences, BOS included; the scan takes no more than 128.
        generator: of the gapped sequences and the scan.
        backend: must be able to form the pattern.
    Raises:
        ShapeError, TokenError: as `plan_gaps`; BackendError: if scores overflow.
    """
    content = []
    for distance in plan.distances:
        other = _another(plan.distances, distance)
        if other is None:
            content.append(np.full_like(of_pairs["induction"][0], np.nan))
            continue
        tokens, looked = make_elsewhere(plan, orders, distance, other)
        content.append(masses_on(model, tokens, {"": looked}, backend)[""])
    gaps = draw_gapped(plan_gaps(model.config, length), len(orders), generator)
    targets = {"": gaps.after_copies}
    fixed, distances, farthest = _scan(model, plan, min(length, LONGEST), generator, backend)
    return InductionScores(
        of_pairs["induction"],
        of_pairs["induction_control"],
        np.stack(content),
        chance,
        masses_on(model, gaps.repeated, targets, backend)[""],
        masses_on(model, gaps.control, targets, backend)[""],
        float(chance_level(gaps.after_copies).mean()),
        fixed,
        distances,
        farthest,
    )


def _scan(
    model: Decoder, plan: RepeatPlan, length: int, generator: Generator, backend: str
) -> tuple[Array, np.ndarray, int]:
    """Mass less chance at each head's best distance, that distance, and the farthest looked at."""
    bos = plan.bos is not None
    tokens = draw_in_orders(plan.content, plan.bos, length, _SCANNED, generator)
    # A block must fit twice, as in the usual test: then half the queries or more are looked at,
    # and a head that rests on one early token does not pass for one that looks back.
    farthest = (length - bos) // 2
    every = range(min(_NEAREST, farthest), farthest + 1)
    rows = [
        torch.stack(
            [torch.stack([_copied(p, d, bos) for d in every]) for p in patterns],
            2,
        )
        for _, patterns in patterns_of(model, tokens, backend)
    ]
    # [distance, sequence, layer, head]
    found = torch.cat(rows, 1).double().numpy()
    uniform = torch.ones(1, 1, length, length).tril() / torch.arange(1, length + 1)[:, None]
    chance = np.array([float(_copied(uniform, d, bos)) for d in every])
    excess = found - chance[:, None, None, None]
    best = excess.mean(1).argmax(0)
    own = np.take_along_axis(excess, best[None, None], 0)[0]
    return own, best + every.start, farthest


def _copied(pattern: Tensor, distance: int, bos: bool) -> Tensor:
    """[row, head]: mean mass `distance` - 1 back, of queries `distance` or more after the first.

    Where the usual test looks when a block recurs at that distance.
    """
    back = distance - 1
    return pattern.diagonal(-back, 2, 3)[..., distance + bos - back :].mean(-1)


def _another(distances: Sequence[int], distance: int) -> int | None:
    """The next distance of the plan, or the first after the last; None if there is one alone."""
    if len(distances) < 2:
        return None
    return distances[(list(distances).index(distance) + 1) % len(distances)]


def _all_clear(differences: Sequence[Array], seed: int) -> np.ndarray:
    lows = [percentile_interval(each, seed=seed)[0] for each in differences]
    clear: np.ndarray = np.logical_and.reduce([low >= LABEL_MARGIN for low in lows])
    return clear
