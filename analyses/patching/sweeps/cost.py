"""What a sweep will cost, found by running a few of its blocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headstream.analyses.patching.sweeps.plans import (
    Plan,
    forwards_of,
    open_plan,
    work_of,
)
from headstream.analyses.patching.sweeps.workers import one_number_of_threads
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder

# Seconds after which no further block is tried.
_ENOUGH = 10.0


@dataclass(frozen=True)
class SweepCost:
    """What a sweep asks for.

    Attributes:
        cells, passes, blocks: cells of the effects, passes (controls included), blocks of all.
        forwards: forward passes of all pairs, if every cell of every pass were run whole.
        forward_seconds: one of them, measured.
        block_seconds: a block, by what the cells of `tried` of them took, from the first layer to
            the last.
        seconds: of all blocks, one after another in one process.
        peak_bytes: memory of a process that ran the blocks tried, all that it holds; None where
            the system does not tell.
    """

    cells: int
    passes: int
    blocks: int
    forwards: int
    forward_seconds: float
    block_seconds: float
    tried: int
    seconds: float
    peak_bytes: int | None

    @property
    def forward_equivalents(self) -> float:
        """How many forward passes of all pairs take as long as the sweep."""
        return self.seconds / self.forward_seconds


def sweep_cost(
    model: Decoder, plan: Plan, engine: str = "suffix", *, threads: int | None = None
) -> SweepCost:
    """Time one forward pass and a few blocks.

    Args:
        threads: that a process will compute with; None is what this one does.
    Raises:
        TaskError, TokenError, ShapeError, HookError: as the sweep itself would.
    """
    work, task = work_of(plan, model.config), plan.task
    of_effects = [block for block in work if block.kind == "effects"]
    # The middles of equal parts of the work, the middle one first.
    some = dict.fromkeys(of_effects[len(of_effects) * part // 10] for part in (5, 1, 9, 3, 7))
    with one_number_of_threads(threads or torch.get_num_threads()), torch.no_grad():
        forward = forward_seconds(model, task, plan.backend)
        opened = open_plan(model, plan, engine)
        tried: dict[int, float] = {}
        began = time.perf_counter()
        for block in some:
            took = _seconds(lambda: opened.run(block), model.device)  # noqa: B023
            if not tried and took < _ENOUGH / 10:
                # The first run of anything also warms up.
                took = _seconds(lambda: opened.run(block), model.device)  # noqa: B023
            tried[block.index] = took
            if time.perf_counter() - began > _ENOUGH:
                break
    cells = sum(len(work[index].cells) for index in tried)
    seconds = sum(tried.values()) / cells * sum(len(block.cells) for block in work)
    return SweepCost(
        cells=sum(len(block.cells) for block in of_effects),
        passes=len({block.kind for block in work}),
        blocks=len(work),
        forwards=forwards_of(plan, model.config),
        forward_seconds=forward,
        block_seconds=seconds / len(work),
        tried=len(tried),
        seconds=seconds,
        peak_bytes=_peak_bytes(model.device),
    )


def forward_seconds(model: Decoder, task: Task, backend: str | None) -> float:
    """What one forward pass of all clean prompts takes, the better of two."""
    tokens, mask = task.clean.to(model.device), task.attention_mask
    mask = None if mask is None else mask.to(model.device)
    with torch.no_grad():
        return min(
            _seconds(lambda: model(tokens, attention_mask=mask, backend=backend), model.device)
            for _ in range(2)
        )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _peak_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
