"""One call of `path_patch` as plain values: with the model, it decides every number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headstream.analyses.patching import inference
from headstream.analyses.patching.measured import measure
from headstream.analyses.patching.metrics import Metric, second_metric
from headstream.analyses.patching.paths.ends import End
from headstream.analyses.patching.paths.hooks import hooked_path, record_writes
from headstream.analyses.patching.places import Place
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder

# `effects` is what was asked for; `self` sends a run its own writes, `unrelated` another pair's.
Pass = Literal["effects", "self", "unrelated"]


@dataclass(frozen=True, eq=False)
class PathPlan:
    """What to patch.

    Attributes:
        senders, receivers: in the order of a pass.
        places: where a sender's write is replaced; `positions` says of which kind they are.
        direction, freeze_mlps, seed, backend: as for `path_patch`.
    """

    task: Task
    senders: tuple[End, ...]
    receivers: tuple[End, ...]
    places: tuple[Place, ...]
    positions: str
    direction: str
    freeze_mlps: bool
    seed: int
    backend: str | None

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
        groups = torch.zeros_like(lengths) if self.positions == "roles" else lengths
        return torch.from_numpy(inference.partners(groups.numpy(), seed=self.seed))

    def rows(self, kind: str) -> Tensor:
        """Which pair each pair receives from."""
        return self.others if kind == "unrelated" else torch.arange(len(self.task))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the effects: metric, sender, receiver, place, example."""
        ends = (len(self.senders), len(self.receivers))
        return (len(self.metrics), *ends, len(self.places), len(self.task))

    @cached_property
    def paths(self) -> list[tuple[int, int]]:
        """Indices of sender and receiver of every path there is."""
        return [
            (s, r)
            for s, sender in enumerate(self.senders)
            for r, receiver in enumerate(self.receivers)
            if sender.before(receiver)
        ]

    @cached_property
    def first_senders(self) -> dict[int, int]:
        """By receiver, the first sender that comes before it."""
        return {r: s for s, r in reversed(self.paths)}


@runtime_checkable
class Paths(Protocol):
    """What both engines give.

    Attributes:
        base: by run (`clean`, `corrupted`), its metrics [metric, example].
    """

    base: dict[str, Float[np.ndarray, "metric example"]]

    def run(self, kind: Pass) -> Float[np.ndarray, "metric sender receiver place example"]:
        """metric(patched) - metric(the run patched into); NaN where there is no path.

        Of the pass `self`, one sender of each receiver is run, and the others are NaN: they all
        send nothing.
        """
        ...


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
    def run(self, kind: Pass) -> Float[np.ndarray, "metric sender receiver place example"]:
        plan = self._plan
        found = np.full(plan.shape, np.nan)
        for s, r in plan.paths:
            if kind == "self" and s != plan.first_senders[r]:
                continue
            for p, place in enumerate(plan.places[:1] if kind == "self" else plan.places):
                logits, patched = hooked_path(
                    self._model,
                    plan.task,
                    plan.tokens(plan.into),
                    plan.senders[s],
                    plan.receivers[r],
                    base=self._writes[plan.into],
                    source=self._writes[plan.into if kind == "self" else plan.source],
                    rows=plan.rows(kind),
                    place=place,
                    freeze_mlps=plan.freeze_mlps,
                    backend=plan.backend,
                )
                moved = self._measure(logits[None])[:, 0] - self.base[plan.into]
                found[:, s, r, p] = np.where(patched.cpu().numpy(), moved, np.nan)
        return found

    def _measure(self, logits: Tensor) -> np.ndarray:
        return measure(self._plan.metrics, logits, self._plan.task, self._clean)
