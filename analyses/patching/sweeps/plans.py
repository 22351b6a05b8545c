"""The two kinds of plan, sites and paths, and all that a long sweep asks of either.

Nothing else in `sweeps` knows which kind it runs: a plan has a task and metrics, its blocks have an
index, a pass and cells, and what is opened runs blocks.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from headstream.analyses.patching.engines import open_sweep
from headstream.analyses.patching.paths.engines import open_paths
from headstream.analyses.patching.paths.plan import PathBlock, PathPlan, path_blocks
from headstream.analyses.patching.sweep_plan import Block, SweepPlan, blocks
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

Plan = SweepPlan | PathPlan
Piece = Block | PathBlock


@runtime_checkable
class Opened(Protocol):
    """A sweep with both unpatched runs at hand.

    Attributes:
        base: by run (`clean`, `corrupted`), its metrics [metric, example].
    """

    base: dict[str, Float[np.ndarray, "metric example"]]

    def run(self, block: Any) -> Float[np.ndarray, "metric cell example"]:
        """Effects of one of the plan's blocks."""
        ...


def open_plan(model: Decoder, plan: Plan, engine: str) -> Opened:
    """Record what the sweep starts from.

    Raises:
        TaskError, TokenError, ShapeError: on a plan that does not fit the model.
        HookError: if `engine` is `suffix` and hooks or edits are on the model.
    """
    if isinstance(plan, PathPlan):
        return open_paths(model, plan, engine)
    return open_sweep(model, plan, engine)


def work_of(plan: Plan, config: DecoderConfig) -> tuple[Piece, ...]:
    """All blocks, decided by plan and configuration alone."""
    return path_blocks(plan, config) if isinstance(plan, PathPlan) else blocks(plan, config)


def size_of(plan: Plan, kind: str, config: DecoderConfig) -> int:
    """How many cells a pass is kept in; those that no block of it holds stay NaN."""
    if isinstance(plan, SweepPlan):
        return plan.grid(config).size
    return plan.totals.grid(config).size if kind == "total" else int(np.prod(plan.shape))


def forwards_of(plan: Plan, config: DecoderConfig) -> int:
    """Forward passes of all pairs, were every cell of every pass run whole, both bases included.

    A path takes two, one of them straight to the logits one.
    """
    count = 2
    for block in work_of(plan, config):
        twice = (
            isinstance(plan, PathPlan)
            and isinstance(block, PathBlock)
            and block.of_totals is None
            and plan.receivers[block.receivers[0]].kind != "logits"
        )
        count += len(block.cells) * (2 if twice else 1)
    return count


def name_of(plan: Plan, config: DecoderConfig) -> str:
    """What is patched, in a word: a kind of site, or `paths`."""
    return "paths" if isinstance(plan, PathPlan) else plan.grid(config).name
