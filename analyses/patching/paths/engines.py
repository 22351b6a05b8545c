"""An opened sweep over paths: both unpatched runs at hand, ready to run blocks.

`hooks` is the definition, `suffix` the same numbers at the cost of what changes.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headstream.analyses.patching.engines import Sweep, open_sweep
from headstream.analyses.patching.measured import measure
from headstream.analyses.patching.paths.hooks import hooked_path, record_writes
from headstream.analyses.patching.paths.plan import PathBlock, PathPlan
from headstream.analyses.patching.paths.sweep import PathSweep
from headstream.models.decoder import Decoder


@runtime_checkable
class Paths(Protocol):
    """What every engine gives.

    Attributes:
        base: by run (`clean`, `corrupted`), its metrics [metric, example].
    """

    base: dict[str, Float[np.ndarray, "metric example"]]

    def run(self, block: PathBlock) -> Float[np.ndarray, "metric cell example"]:
        """metric(patched) - metric(the run patched into); NaN where a row was not patched."""
        ...


def open_paths(model: Decoder, plan: PathPlan, engine: str = "suffix") -> Paths:
    """Record what the sweep starts from.

    Raises:
        TaskError, TokenError, ShapeError: on a plan that does not fit the model.
        HookError: if `engine` is `suffix` and hooks or edits are on the model.
    """
    return _WithTotals(model, plan, engine)


class _WithTotals:
    """Paths by one engine, and the senders' total effects by the engine of that name for sites."""

    def __init__(self, model: Decoder, plan: PathPlan, engine: str) -> None:
        self._model, self._plan, self._engine = model, plan, engine
        self._paths: Paths = (
            PathSweep(model, plan) if engine == "suffix" else HookedPaths(model, plan)
        )
        self._totals: Sweep | None = None
        self.base = self._paths.base

    def run(self, block: PathBlock) -> Float[np.ndarray, "metric cell example"]:
        if block.of_totals is None:
            return self._paths.run(block)
        if self._totals is None:
            # Most workers of a long sweep meet none of them, and need no third pair of runs.
            self._totals = open_sweep(self._model, self._plan.totals, self._engine)
        return self._totals.run(block.of_totals)


class HookedPaths:
    """Two hooked forward passes a path: the definition."""

    def __init__(self, model: Decoder, plan: PathPlan) -> None:
        self._model, self._plan = model, plan
        with torch.no_grad():
            runs = {
                name: record_writes(model, plan.task, plan.tokens(name), plan.backend)
                for name in ("clean", "corrupted")
            }
        self._writes = {name: kept for name, (_, kept) in runs.items()}
        self._clean = runs["clean"][0]
        self.base = {name: self._measure(logits[None])[:, 0] for name, (logits, _) in runs.items()}

    @torch.no_grad()
    def run(self, block: PathBlock) -> Float[np.ndarray, "metric cell example"]:
        plan, found = self._plan, []
        for s, r in ((s, r) for s in block.senders for r in block.receivers):
            logits, patched = hooked_path(
                self._model,
                plan.task,
                plan.tokens(plan.into),
                plan.senders[s],
                plan.receivers[r],
                base=self._writes[plan.into],
                source=self._writes[plan.into if block.kind == "self" else plan.source],
                rows=plan.rows(block.kind),
                place=plan.places[block.place],
                freeze_mlps=plan.freeze_mlps,
                backend=plan.backend,
            )
            moved = self._measure(logits[None])[:, 0] - self.base[plan.into]
            found.append(np.where(patched.cpu().numpy(), moved, np.nan))
        return np.stack(found, axis=1)

    def _measure(self, logits: Tensor) -> np.ndarray:
        return measure(self._plan.metrics, logits, self._plan.task, self._clean)
