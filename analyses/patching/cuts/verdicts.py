"""What every question about cuts is held to: the cut that must change nothing, and the one rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headstream.analyses.evidence import Claim, proven
from headstream.analyses.patching import inference
from headstream.analyses.patching.cuts.head_sets import all_heads
from headstream.analyses.patching.cuts.inputs import SELF_CUT, Opened
from headstream.models.decoder import Decoder


@dataclass(frozen=True)
class Verdicts:
    """The control of one call, and what it lets pass.

    Attributes:
        self_cut: largest |effect| of giving all heads the values that they have.
        bound: on it.
        floor: below it an effect is rounding.
    """

    opened: Opened
    self_cut: float
    bound: float
    floor: float

    @classmethod
    def of(cls, model: Decoder, opened: Opened) -> Verdicts:
        size = float(np.abs(opened.runs.base).max())
        self_cut = opened.runs.self_cut(all_heads(model.config))
        rounding = 4 * torch.finfo(model.dtype).eps * size
        return cls(opened, self_cut, SELF_CUT * max(size, 1.0), max(rounding, self_cut))

    def failed(
        self, mean: float, p_value: float, control: float, n: int, *, excludes: str | None = None
    ) -> list[str]:
        """The conditions of the label CAUSAL that an effect fails, in words.

        Args:
            control: mean effect where it should not be.
            excludes: why a control that does as much excludes; by default the opened run's words.
        """
        return inference.failed_conditions(
            mean=mean,
            p_value=p_value,
            unrelated=control,
            n=n,
            unit=self.opened.metric.unit,
            self_patch_held=self.self_cut <= self.bound,
            examples=self.opened.examples,
            control=self.opened.control_words if excludes is None else excludes,
        )

    def held(self) -> Claim:
        """The claim that the control holds, or FAILED."""
        return proven(
            "self_cut.z",
            "heads that are cut to the values they have change nothing",
            error=self.self_cut,
            bound=self.bound,
            reason=f"largest |effect| in {self.opened.metric.unit}, all heads at once",
        )

    def details(self) -> dict[str, Any]:
        """What every result of cuts says of its call."""
        opened = self.opened
        return {
            "values": opened.values,
            "metric": opened.metric.as_values() | {"noun": opened.noun},
            "self_cut_max": self.self_cut,
            "self_cut_bound": self.bound,
            "n": len(opened.runs.base),
        }
