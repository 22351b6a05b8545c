"""What a sweep computes, in pieces that anyone may compute in any order.

    plan      a `SweepPlan`: the task and the arguments of `patch`, plain values that pickle
    blocks    `blocks(plan, config)`: the whole work, in fixed pieces
    opened    `open_sweep(model, plan)` (`engines`): both unpatched runs, recorded once a process
    run       `opened.run(block)`: effects `[metric, cell, example]`, NaN where nothing was patched

A block is a fixed set of cells, decided by plan and model configuration alone. What it computes
depends on nothing but model, plan and block, so any split, order or executor gives the same numbers
to the bit (on one kind of machine, with one number of threads). Blocks are placed by `cells`, the
indices of their cells in the grid's order:

    grid = plan.grid(model.config)
    found = np.full((len(plan.metrics), grid.size, len(plan.task)), np.nan)
    found[:, list(block.cells)] = opened.run(block)

A task whose metric is a lambda does not pickle; one whose metric is a named function of a module
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headstream.analyses.patching import inference
from headstream.analyses.patching.metrics import Metric, second_metric
from headstream.analyses.patching.site_sets import SetGrid, plan_sets
from headstream.analyses.patching.sites import Grid, plan
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig

# `effects` is what was asked for; `self` gives a run its own values, `unrelated` another pair's.
Pass = Literal["effects", "self", "unrelated"]

# Tokens that a block runs through, counted as if every cell ran whole prompts: some 5 seconds for a
# model of GPT-2's size on two cores, and 20 milliseconds for a toy.
BLOCK_TOKENS = 2**14
# Logits that a block holds, in entries: 128 MB in float32.
BLOCK_LOGITS = 2**25


@dataclass(frozen=True, eq=False)
class SweepPlan:
    """One call of `patch` as plain values: with the model, it decides every number.

    Attributes:
        task: prompts, answers and metric.
        site: the name of a site, or named sets of sites `{name: [At(...), ...]}`.
        direction, values, layers, heads, positions, seed, backend: as for `patch`.
        second: whether the second metric is measured too.
    """

    task: Task
    site: str | Mapping[str, Any]
    direction: str = "denoise"
    values: str = "pair"
    layers: Any = None
    heads: Any = None
    positions: Any = None
    seed: int = 0
    backend: str | None = None
    second: bool = True

    def grid(self, config: DecoderConfig) -> Grid | SetGrid:
        """The cells.

        Raises:
            TaskError: naming the argument that does not fit this model and task.
        """
        if isinstance(self.site, Mapping):
            return plan_sets(config, self.task, self.site)
        return plan(
            config,
            self.task,
            self.site,
            layers=self.layers,
            heads=self.heads,
            positions=self.positions,
        )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        first = self.task.metric
        return (first, second_metric(first, self.task)) if self.second else (first,)

    @property
    def into(self) -> str:
        """Which run is patched."""
        return "corrupted" if self.direction == "denoise" else "clean"

    @property
    def source(self) -> str:
        """Which run gives the values."""
        return "clean" if self.direction == "denoise" else "corrupted"

    def tokens(self, run: str) -> Tensor:
        return self.task.clean if run == "clean" else self.task.corrupted

    @property
    def others(self) -> Tensor:
        """Another pair for each pair, -1 if it has none: of equal length, unless places go by name.

        At a role, or at members of a set that are roles, pairs of any length correspond.
        """
        by_role = self.positions == "roles"
        lengths = self.task.lengths
        groups = torch.zeros_like(lengths) if by_role else lengths
        return torch.from_numpy(inference.partners(groups.numpy(), seed=self.seed))


@dataclass(frozen=True)
class Block:
    """One piece of a sweep.

    Attributes:
        index: among all blocks of the plan.
        kind: which pass it belongs to.
        cells: indices in the grid's order, the order of its result.
        layer, units, places: of a `Grid`, indices into its axes whose product the cells are
            (`cells` runs through units, then places); empty for a `SetGrid`.
    """

    index: int
    kind: Pass
    cells: tuple[int, ...]
    layer: int = 0
    units: tuple[int, ...] = ()
    places: tuple[int, ...] = ()


def blocks(plan: SweepPlan, config: DecoderConfig, *, controls: bool = True) -> tuple[Block, ...]:
    """All blocks of a plan; with `controls`, those of the passes `self` and `unrelated` too.

    With `values="resample"` the sweep is the unrelated-prompt control itself, which then has no
    blocks of its own.
    """
    kinds: list[Pass] = ["effects"]
    if controls:
        kinds += ["self"] if plan.values == "resample" else ["self", "unrelated"]
    grid = plan.grid(config)
    most = cells_a_block(plan.task, config)
    split = list(_of_sets(grid, most) if isinstance(grid, SetGrid) else _of_grid(grid, most))
    return tuple(
        Block(index, kind, *piece)
        for index, (kind, piece) in enumerate((kind, piece) for kind in kinds for piece in split)
    )


def cells_a_block(task: Task, config: DecoderConfig) -> int:
    """How many cells a block may hold, each taken for a run of all whole prompts."""
    n, length = task.columns.shape
    return max(1, min(BLOCK_TOKENS // (n * length), BLOCK_LOGITS // (n * config.d_vocab)))


def _of_sets(grid: SetGrid, most: int) -> Iterator[tuple[Any, ...]]:
    for start in range(0, grid.size, most):
        yield (tuple(range(start, min(start + most, grid.size))),)


def _of_grid(grid: Grid, most: int) -> Iterator[tuple[Any, ...]]:
    """Within a layer, as many units as fit at one place, and as many places as then fit."""
    units = 1 if grid.heads is None else len(grid.heads)
    places = len(grid.places)
    index = np.arange(grid.size).reshape(len(grid.layers), units, places)
    units_each = min(units, most)
    places_each = min(places, max(1, most // units_each))
    for layer in range(len(grid.layers)):
        for start in range(0, places, places_each):
            at = tuple(range(start, min(start + places_each, places)))
            for first in range(0, units, units_each):
                which = tuple(range(first, min(first + units_each, units)))
                cells = index[layer][np.ix_(which, at)].reshape(-1)
                yield tuple(cells.tolist()), layer, which, at
