"""How well a statement is established: four labels, and what each must carry.

    PROVEN     algebra or arithmetic, and it held on this model within the stated bound
    CAUSAL     an intervention was made and the output moved, by the one rule of inference
    MEASURED   observed on this model and these inputs; nothing was intervened on
    UNKNOWN    not established; the reason says what evidence would settle it

FAILED is no label but an alarm: a statement that should be PROVEN and was over its bound. Labels
are computed by the functions below (and by `patching.inference` for CAUSAL), never typed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Evidence(StrEnum):
    """The label of a claim, from strongest to weakest; FAILED is the alarm."""

    FAILED = "FAILED"
    PROVEN = "PROVEN"
    CAUSAL = "CAUSAL"
    MEASURED = "MEASURED"
    UNKNOWN = "UNKNOWN"

    @property
    def mark(self) -> str:
        """One sign that stands beside the word, so that colour is never the only cue."""
        return {"FAILED": "✗", "PROVEN": "∎", "CAUSAL": "⇄", "MEASURED": "◴", "UNKNOWN": "?"}[self]


@dataclass(frozen=True)
class Claim:
    """One statement and how well it is established.

    Attributes:
        id: short and stable: a ledger id ("B2") or a site ("z.L1H2").
        statement: the sentence, without its evidence.
        evidence: the label.
        value, unit: the number behind it (largest error, effect, score) and its unit.
        interval: 95% interval of `value`; None where there is none (one that is not finite
            becomes None).
        n: examples behind it.
        reason: what the label rests on, or why a stronger one was refused.
        where: the section of a report that shows it ("patching", "heads", "audit", ...).
    """

    id: str
    statement: str
    evidence: Evidence
    value: float | None = None
    unit: str = ""
    interval: tuple[float, float] | None = None
    n: int | None = None
    reason: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        # An interval that could not be computed (one prompt, say) is no interval.
        if self.interval is not None and not all(map(math.isfinite, self.interval)):
            object.__setattr__(self, "interval", None)


def proven(
    id: str, statement: str, *, error: float, bound: float, reason: str = "", where: str = "audit"
) -> Claim:
    """A claim that algebra makes, checked here: PROVEN if `error <= bound`, FAILED otherwise.

    A NaN error is a failure: a check that could not compare has not passed.
    """
    held = math.isfinite(error) and error <= bound
    words = f"largest error {error:.1e}, bound {bound:.0e}" + (f" ({reason})" if reason else "")
    return Claim(
        id,
        statement,
        Evidence.PROVEN if held else Evidence.FAILED,
        value=error,
        unit="largest absolute error",
        reason=words,
        where=where,
    )


def measured(
    id: str,
    statement: str,
    *,
    value: float,
    unit: str,
    n: int,
    interval: tuple[float, float] | None = None,
    reason: str = "",
    where: str = "",
) -> Claim:
    """A claim that was observed on this model and these inputs, with no intervention."""
    return Claim(id, statement, Evidence.MEASURED, value, unit, interval, n, reason, where)


def unknown(id: str, statement: str, *, reason: str, where: str = "") -> Claim:
    """A claim that is not established; `reason` says what evidence would settle it."""
    return Claim(id, statement, Evidence.UNKNOWN, reason=reason, where=where)
