"""One call of `path_patch` as plain values, and the work that it makes, in fixed pieces.

    plan      a `PathPlan`: the task and the arguments of `path_patch`
    blocks    `path_blocks(plan, config)`: every path once for the effects and once for the control,
              one sender of each receiver for the self-patch, and the total effect of each sender
    opened    `open_paths(model, plan)` (`engines`): both unpatched runs, recorded once a process
    run       `opened.run(block)`: effects [metric, cell, example]

A block is a fixed set of paths, decided by plan and model configuration alone, so any split, order
or executor gives the same numbers to the bit, as for sweeps over sites (`sweep_plan`). The cells of
a block are indices into (sender, receiver, place), those of the totals into (sender, place).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headstream.analyses.patching import inference
from headstream.analyses.patching.metrics import Metric, second_metric
from headstream.analyses.patching.paths.ends import End
from headstream.analyses.patching.places import Place, places_of
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.sweep_plan import Block, SweepPlan, blocks, cells_a_block
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig

# `effects` is what was asked for; `self` sends a run its own writes, `unrelated` another pair's;
# `total` is what the sender's other write does through everything that follows it.
Pass = Literal["effects", "self", "unrelated", "total"]


@dataclass(frozen=True, eq=False)
class PathPlan:
    """What to patch.

    Attributes:
        senders, receivers: in the order of a pass.
        positions, direction, freeze_mlps, seed, backend: as for `path_patch`.
    """

    task: Task
    senders: tuple[End, ...]
    receivers: tuple[End, ...]
    positions: Any = "all"
    direction: str = "denoise"
    freeze_mlps: bool = True
    seed: int = 0
    backend: str | None = None

    @cached_property
    def _places(self) -> tuple[str, tuple[Place, ...]]:
        return places_of(self.task, self.positions)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where a sender's write is replaced.

        Raises:
            TaskError: if `positions` names what the task lacks.
        """
        return self._places[1]

    @property
    def kind_of_places(self) -> str:
        """The kind of axis that they make: all, each, roles, listed."""
        return self._places[0]

    @property
    def into(self) -> str:
        """Which run is patched."""
        return "corrupted" if self.direction == "denoise" else "clean"

    @property
    def source(self) -> str:
        """Which run gives the sender's write."""
        return "clean" if self.direction == "denoise" else "corrupted"

    def tokens(self, run: str) -> Tensor:
        return self.task.clean if run == "clean" else self.task.corrupted

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (self.task.metric, second_metric(self.task.metric, self.task))

    @cached_property
    def others(self) -> Tensor:
        """Another pair for each pair, -1 if it has none: of equal length, unless roles are given.

        At a role pairs of any length correspond.
        """
        lengths = self.task.lengths
        groups = torch.zeros_like(lengths) if self.kind_of_places == "roles" else lengths
        return torch.from_numpy(inference.partners(groups.numpy(), seed=self.seed))

    def rows(self, kind: str) -> Tensor:
        """Which pair each pair receives from."""
        return self.others if kind == "unrelated" else torch.arange(len(self.task))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the cells: sender, receiver, place."""
        return len(self.senders), len(self.receivers), len(self.places)

    @property
    def paths(self) -> int:
        """How many pairs of a sender and a receiver after it there are."""
        return sum(s.before(r) for s in self.senders for r in self.receivers)

    @cached_property
    def totals(self) -> SweepPlan:
        """The sweep of the total effects: each sender's write itself, place by place."""
        return SweepPlan(
            self.task,
            {
                f"{sender.label} {place.name}": [_written(sender, place.name)]
                for sender in self.senders
                for place in self.places
            },
            direction=self.direction,
            seed=self.seed,
            backend=self.backend,
        )


@dataclass(frozen=True)
class PathBlock:
    """One piece of a sweep over paths: some senders times some receivers, at one place.

    Attributes:
        index: among all blocks of the plan.
        kind: which pass it belongs to.
        cells: indices of its paths, senders before receivers; of the totals, of its senders.
        senders, receivers: indices into the plan's; receivers are of one kind in one layer.
        place: index into the plan's places.
        of_totals: the block of `plan.totals` that it stands for, in pass `total`.
    """

    index: int
    kind: Pass
    cells: tuple[int, ...]
    senders: tuple[int, ...] = ()
    receivers: tuple[int, ...] = ()
    place: int = 0
    of_totals: Block | None = None


def path_blocks(plan: PathPlan, config: DecoderConfig) -> tuple[PathBlock, ...]:
    """All blocks of a plan, those of its controls and its totals too."""
    kinds: tuple[Pass, ...] = ("effects", "self", "unrelated")
    most = cells_a_block(plan.task, config)
    pieces: list[dict[str, Any]] = [
        {"kind": kind} | piece for kind in kinds for piece in _pieces(plan, kind, most)
    ]
    pieces += [
        {"kind": "total", "cells": block.cells, "of_totals": block}
        for block in blocks(plan.totals, config, controls=False)
    ]
    return tuple(PathBlock(index, **piece) for index, piece in enumerate(pieces))


def _pieces(plan: PathPlan, kind: Pass, most: int) -> Iterator[dict[str, Any]]:
    """Of receivers that read the same stream, as many as fit; and as many senders as then fit.

    What is sent to itself is nothing, so of the self-patch any one sender stands for all.
    """
    index = np.arange(int(np.prod(plan.shape))).reshape(plan.shape)
    numbered = enumerate(plan.receivers)
    for _, group in groupby(numbered, key=lambda item: (item[1].layer, item[1].kind)):
        alike = [(r, end) for r, end in group]
        first = alike[0][1]
        senders = [s for s, sender in enumerate(plan.senders) if sender.before(first)]
        places = range(len(plan.places))
        if kind == "self":
            senders, places = senders[:1], places[:1]
        for start in range(0, len(alike), most):
            receivers = tuple(r for r, _ in alike[start : start + most])
            each = max(1, most // len(receivers))
            for place in places:
                for begin in range(0, len(senders), each):
                    some = tuple(senders[begin : begin + each])
                    cells = index[np.ix_(some, receivers, (place,))].reshape(-1)
                    yield {
                        "cells": tuple(cells.tolist()),
                        "senders": some,
                        "receivers": receivers,
                        "place": place,
                    }


def _written(sender: End, place: Any) -> At:
    if sender.kind == "embed":
        # Positions are the same in both runs, so the stream differs by the embedding.
        return At("resid_pre", 0, place=place)
    site = "z" if sender.kind == "head" else "mlp_out"
    return At(site, sender.layer, sender.head, place)
