"""The kinds of result beside patching: what their arrays are called, and the sentence they say.

    heads          value, low, high   (score, layer, head)   chance (score)   label (layer, head)
                   induction_by_distance, control_by_distance (distance, layer, head)
    decomposition  attribution (component, example)   mean, low, high (component)   total (example)
    audit          one claim a row; nothing else
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headstream.analyses.evidence import Evidence
from headstream.analyses.result import Result
from headstream.models.names import head_name


@dataclass(frozen=True, eq=False, repr=False)
class HeadsResult(Result):
    """The census: every score of every head, beside its chance level."""

    kind: ClassVar[str] = "heads"

    def summary(self) -> str:
        labels = self.data["label"]
        found: dict[str, list[str]] = {}
        for layer in labels["layer"].values.tolist():
            for head in labels["head"].values.tolist():
                label = str(labels.sel(layer=layer, head=head).item())
                if label != "none":
                    found.setdefault(label, []).append(head_name(layer, head))
        if not found:
            return f"no head of {labels.size} stands out from chance"
        return "; ".join(f"{label}: {', '.join(heads)}" for label, heads in found.items())


@dataclass(frozen=True, eq=False, repr=False)
class DecompositionResult(Result):
    """Who writes the answer: direct logit attribution, component by component."""

    kind: ClassVar[str] = "decomposition"

    def summary(self) -> str:
        mean = self.data["mean"]
        order = mean.argsort().values[::-1]
        top = ", ".join(
            f"{mean['component'].values[i]} {mean.values[i]:+.2f}" for i in order[:3].tolist()
        )
        total = float(self.data["total"].mean())
        n = self.data.sizes["example"]
        return f"largest direct writes {top} of {total:+.2f} nats in all (n = {n})"


@dataclass(frozen=True, eq=False, repr=False)
class AuditResult(Result):
    """Identities of the forward pass, checked on this model."""

    kind: ClassVar[str] = "audit"

    @property
    def failed(self) -> bool:
        return any(claim.evidence is Evidence.FAILED for claim in self.claims)

    def summary(self) -> str:
        checked = [c for c in self.claims if c.evidence in (Evidence.PROVEN, Evidence.FAILED)]
        passed = sum(claim.evidence is Evidence.PROVEN for claim in checked)
        return f"{passed} of {len(checked)} checks passed"
