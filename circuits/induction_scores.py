"""Does a head follow content, or a distance? Scores of every head on sequences that tell.

    induction          mass on the token after the earlier copy, distance by distance
    position_control   the same positions when the second block is other tokens
    content_control    the same distance when the block recurs at another one
    gapped             as induction, in one text whose blocks recur after random gaps
    gapped_control     its position control
    fixed              on tokens without repeats: the mass at one distance back (`fixed_distance`)

A head that follows content has the first and the fourth, and none of the others; one that copies
from a fixed distance has the first at that distance alone, with both controls, and the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Generator, Tensor

from headstream.circuits.fixed_distance import FixedDistances, scan_distances
from headstream.circuits.gapped_repeats import draw_gapped, make_elsewhere, plan_gaps
from headstream.circuits.heads import Array, masses_on
from headstream.circuits.labels import LABEL_MARGIN, percentile_interval
from headstream.circuits.repeats import RepeatPlan
from headstream.circuits.statistics import chance_level

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@dataclass(frozen=True)
class InductionScores:
    """Scores of every head; the first axis of most is the sequence, so that intervals can be had.

    Attributes:
        induction, position_control: [distance, sequence, layer, head].
        content_control: likewise; NaN with a single distance.
        chance: [distance], of the three.
        gapped, gapped_control: [sequence, layer, head], and `gapped_chance`.
        fixed: the distance back that every head looks at most.
    """

    induction: Array
    position_control: Array
    content_control: Array
    chance: Array
    gapped: Array
    gapped_control: Array
    gapped_chance: float
    fixed: FixedDistances

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


def score_induction(
    model: Decoder,
    plan: RepeatPlan,
    orders: Tensor,
    of_pairs: Mapping[str, Array],
    chance: Array,
    *,
    length: int,
    scanned: int,
    generator: Generator,
    backend: str = "naive",
) -> InductionScores:
    """Score every head of `model`.

    Args:
        plan, orders: of `repeats`, for the single distances.
        of_pairs: what `heads.scores_by_distance` measured on them: "induction" and its control.
        chance: [distance], of these.
        length: tokens of the gapped sequences, BOS included.
        scanned: of those in which fixed distances are looked for.
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
    return InductionScores(
        of_pairs["induction"],
        of_pairs["induction_control"],
        np.stack(content),
        chance,
        masses_on(model, gaps.repeated, targets, backend)[""],
        masses_on(model, gaps.control, targets, backend)[""],
        float(chance_level(gaps.after_copies).mean()),
        scan_distances(model, plan, scanned, generator, backend),
    )


def _another(distances: Sequence[int], distance: int) -> int | None:
    """The next distance of the plan, or the first after the last; None if there is one alone."""
    if len(distances) < 2:
        return None
    return distances[(list(distances).index(distance) + 1) % len(distances)]


def _all_clear(differences: Sequence[Array], seed: int) -> np.ndarray:
    lows = [percentile_interval(each, seed=seed)[0] for each in differences]
    clear: np.ndarray = np.logical_and.reduce([low >= LABEL_MARGIN for low in lows])
    return clear
