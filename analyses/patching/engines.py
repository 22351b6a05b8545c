"""An opened sweep: both unpatched runs at hand, ready to run blocks.

`hooks` is the definition, `suffix` the same numbers at the cost of what changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headstream.analyses.patching.hooked_engine import (
    Donor,
    Run,
    mean_of_run,
    record,
    rows_of_run,
    sweep,
    zero_of_run,
)
from headstream.analyses.patching.measured import measure
from headstream.analyses.patching.suffix.engine import SuffixSweep
from headstream.analyses.patching.sweep_plan import Block, SweepPlan
from headstream.models.decoder import Decoder

Engine = Literal["suffix", "hooks"]


@runtime_checkable
class Sweep(Protocol):
    """What every engine gives.

    Attributes:
        base: by run (`clean`, `corrupted`), its metrics `[metric, example]`.
    """

    base: dict[str, Float[np.ndarray, "metric example"]]

    def run(self, block: Block) -> Float[np.ndarray, "metric cell example"]:
        """metric(patched) - metric(the run patched into); NaN where a row was not patched."""
        ...


def open_sweep(model: Decoder, plan: SweepPlan, engine: str = "suffix") -> Sweep:
    """Record what the sweep starts from.

    Raises:
        TaskError, TokenError, ShapeError: on a plan that does not fit the model.
        HookError: if `engine` is `suffix` and hooks or edits are on the model.
    """
    return SuffixSweep(model, plan) if engine == "suffix" else HookedSweep(model, plan)


class HookedSweep:
    """One hooked forward pass a cell."""

    def __init__(self, model: Decoder, plan: SweepPlan) -> None:
        self._model, self._plan = model, plan
        self._grid = plan.grid(model.config)
        self._cells = list(self._grid.cells())
        with torch.no_grad():
            self._runs = {
                name: record(model, plan.task, plan.tokens(name), self._grid, plan.backend)
                for name in ("clean", "corrupted")
            }
        self.base = {
            name: self._measure(run.logits[None])[:, 0] for name, run in self._runs.items()
        }

    @torch.no_grad()
    def run(self, block: Block) -> Float[np.ndarray, "metric cell example"]:
        plan = self._plan
        effects = []
        for logits, patched in sweep(
            self._model,
            plan.task,
            plan.tokens(plan.into),
            [self._cells[cell] for cell in block.cells],
            self._donor(block.kind),
            plan.backend,
        ):
            moved = self._measure(logits[None])[:, 0] - self.base[plan.into]
            effects.append(np.where(patched.numpy(), moved, np.nan))
        return np.stack(effects, axis=1)

    def _measure(self, logits: Tensor) -> np.ndarray:
        plan = self._plan
        return measure(plan.metrics, logits, plan.task, self._runs["clean"].logits)

    def _donor(self, kind: str) -> Donor:
        plan = self._plan
        if kind == "self":
            return rows_of_run(self._runs[plan.into], torch.arange(len(plan.task)))
        source = self._runs[plan.source]
        donors: dict[str, Callable[[Run], Any]] = {
            "pair": lambda run: rows_of_run(run, torch.arange(len(plan.task))),
            "zero": zero_of_run,
            "mean": mean_of_run,
            "resample": lambda run: rows_of_run(run, plan.others),
        }
        donor: Donor = donors["resample" if kind == "unrelated" else plan.values](source)
        return donor
