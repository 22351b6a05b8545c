"""Does a head look one distance back, whatever stands there? A scan over distances.

On random tokens without a repeat, at every distance d: the mean attention d - 1 back, which is
where the usual test looks when a block recurs at d, less chance. The queries are all that have d
tokens before them. A head's distance is where most is found in all these queries and in the later
half of them alike: a head that looks far back finds nothing there from early positions, rests
somewhere instead, and where it rests is not where it looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from headstream.circuits.gapped_repeats import draw_in_orders
from headstream.circuits.heads import Array, patterns_of
from headstream.circuits.labels import LABEL_MARGIN, percentile_interval
from headstream.circuits.repeats import RepeatPlan

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

SEQUENCES = 16  # each has dozens of queries
NEAREST = 3  # a copy at distance 2 is read from the previous token, which has a label of its own
# Of fewer queries one head in some passes for one that looks back: where each of them looks at a
# position of its own, two or three may happen to be at one distance.
FEWEST_QUERIES = 8


@dataclass(frozen=True)
class FixedDistances:
    """The distance of every head, and what it takes there.

    Attributes:
        mass: [sequence, layer, head], attention at the head's distance less chance, mean over all
            queries that reach it; `late`: over the later half of these.
        beside: [layer, head], the most that the query's own token or the token before takes of
            the same queries, less chance.
        distance: [layer, head], in tokens; `NEAREST` to `farthest` were looked at.
        length: tokens of a sequence, BOS included.
        start: queries count from the one with `distance` + `start` tokens before it (BOS is one).
    """

    mass: Array
    late: Array
    beside: np.ndarray
    distance: np.ndarray
    farthest: int
    length: int
    start: int

    def stands_out(self, *, seed: int) -> np.ndarray:
        """[layer, head]: the head looks there, from late positions too, and more than elsewhere.

        The lower end of the 95% interval over sequences is at least `LABEL_MARGIN` above chance,
        for all queries and for the later half, and the query's own token and the token before it
        take less.
        """
        clear = [percentile_interval(each, seed=seed)[0] for each in (self.mass, self.late)]
        found: np.ndarray = np.minimum(*clear) >= LABEL_MARGIN
        return found & (self.mass.mean(0) > self.beside)


def scan_distances(
    model: Decoder, plan: RepeatPlan, length: int, generator: Generator, backend: str = "naive"
) -> FixedDistances:
    """Look for every head's distance on `SEQUENCES` random sequences of `length` tokens.

    Distances run from `NEAREST` up to what leaves `FEWEST_QUERIES`, or half the queries in short
    sequences.

    Args:
        plan: for content tokens and BOS; its distances do not matter.
        length: tokens, BOS included, at least 4 after BOS.
        backend: must be able to form the pattern.
    Raises:
        BackendError: if scores overflow.
    """
    start = int(plan.bos is not None)
    tokens = draw_in_orders(plan.content, plan.bos, length, SEQUENCES, generator)
    room = length - start
    farthest = max(room // 2, room - FEWEST_QUERIES)
    every = range(min(NEAREST, farthest), farthest + 1)
    rows = []
    for _, patterns in patterns_of(model, tokens, backend):
        rows.append(torch.stack([_by_distance(each, every, start) for each in patterns], 3))
    uniform = torch.ones(1, 1, length, length).tril() / torch.arange(1, length + 1)[:, None]
    chance = _by_distance(uniform, every, start)[..., 0].double().numpy()
    # [what, distance, sequence, layer, head]
    excess = torch.cat(rows, 2).double().numpy() - chance[..., None, None]
    means = excess.mean(2)
    best = np.minimum(means[0], means[1]).argmax(0)
    at = best[None, None, None]
    mass, late, own, before = np.take_along_axis(excess, at, 1)[:, 0]
    return FixedDistances(
        mass=mass,
        late=late,
        beside=np.maximum(own.mean(0), before.mean(0)),
        distance=best + every.start,
        farthest=farthest,
        length=length,
        start=start,
    )


def _by_distance(
    pattern: Float[Tensor, "row head query_pos key_pos"], every: range, start: int
) -> Float[Tensor, "what distance row head"]:
    """Mean mass at each distance: all queries, the later half; their own token, the one before."""
    found = []
    for distance in every:
        first = distance + start
        there, own, before = (
            pattern.diagonal(-back, 2, 3)[..., first - back :] for back in (distance - 1, 0, 1)
        )
        late = there[..., there.shape[-1] // 2 :]
        found.append(torch.stack([each.mean(-1) for each in (there, late, own, before)]))
    return torch.stack(found, 1)
