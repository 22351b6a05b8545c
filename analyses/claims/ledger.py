"""The ledger: statements that algebra makes about every decoder, each with a runnable check.

A check is a function `(subject) -> Finding` registered under the statement's id. `audit` runs them
all on a float64 copy of the model, so that what is left is rounding and a bound of 1e-10 means
something, and prints one row a statement: PROVEN within its bound, FAILED over it, or the reason
why it does not apply to this model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor

from headstream.analyses.evidence import Claim, Evidence, proven
from headstream.analyses.kinds import AuditResult
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.errors import ExactnessError

# Sums of some hundred float64 terms of order one round at about 1e-14; 1e-10 leaves room for depth
# and width and is still a million times below what any wrong formula gives.
BOUND = 1e-10
WHY_BOUND = "float64 rounding over depth and width, relative to the largest entry compared"


@dataclass(frozen=True)
class Subject:
    """What the checks run on.

    Attributes:
        model: a float64 copy of the audited model.
        tokens: `[batch, pos]`, drawn at random.
        mask: `[batch, pos]`, with the first row left-padded, for checks on padding.
    """

    model: Decoder
    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]


@dataclass(frozen=True)
class Finding:
    """The largest error that a check met, relative to the largest entry compared, and where."""

    error: float
    worst: str

    @classmethod
    def between(cls, found: Tensor, expected: Tensor, where: str, axes: str) -> Finding:
        """Compare two tensors; `axes` names their axes, space-separated, for the place."""
        gap = (found - expected).abs()
        size = max(1.0, float(expected.abs().max()))
        place = torch.unravel_index(gap.nan_to_num(torch.inf).argmax(), gap.shape)
        at = ", ".join(f"{axis} {int(index)}" for axis, index in zip(axes.split(), place))
        return cls(float(gap.max()) / size, f"{where}, {at}")

    @classmethod
    def worst_of(cls, findings: list[Finding]) -> Finding:
        """The finding with the largest error; NaN counts as the largest."""
        return max(findings, key=lambda f: float("inf") if f.error != f.error else f.error)


class NotApplicable(Exception):
    """Raised by a check whose statement says nothing about this model; the message is why."""


@dataclass(frozen=True)
class Check:
    """A statement of the ledger and the function that checks it."""

    id: str
    statement: str
    run: Callable[[Subject], Finding]
    bound: float = BOUND
    reason: str = WHY_BOUND


LEDGER: dict[str, Check] = {}


def check(
    id: str, statement: str, *, bound: float = BOUND, reason: str = WHY_BOUND
) -> Callable[[Callable[[Subject], Finding]], Callable[[Subject], Finding]]:
    """Register a function as the check of statement `id`."""

    def register(run: Callable[[Subject], Finding]) -> Callable[[Subject], Finding]:
        assert id not in LEDGER, f"two checks of {id}"
        LEDGER[id] = Check(id, statement, run, bound, reason)
        return run

    return register


def audit(model: Decoder, tokens: Tensor | None = None, *, seed: int = 0) -> AuditResult:
    """Run every registered check on `model`.

    Args:
        tokens: `[batch, pos]` to run on; None draws 4 rows of up to 24 tokens from `seed`.
    Returns:
        One claim a statement; `.failed` says whether any was over its bound.
    """
    # Importing a module of checks registers them.
    from headstream.analyses.claims import attention, block, causality  # noqa: F401

    subject = _subject(model, tokens, seed)
    claims, rows = [], []
    for item in LEDGER.values():
        claim, row = _run(item, subject)
        rows.append(row)
        if claim is not None:
            claims.append(claim)
    return AuditResult(
        title=f"Audit of {model.name}",
        data=xr.Dataset(),
        # The checks run on a float64 copy, and name the backend that they compare.
        provenance=replace(
            Provenance.of(model, seed=seed), backend="naive and flash", dtype="float64"
        ),
        claims=tuple(claims),
        details={"rows": rows, "dtype": "float64", "tokens": subject.tokens.tolist()},
    )


def _run(item: Check, subject: Subject) -> tuple[Claim | None, dict[str, Any]]:
    row: dict[str, Any] = {"id": item.id, "statement": item.statement, "bound": item.bound}
    try:
        with torch.no_grad():
            finding = item.run(subject)
    except NotApplicable as reason:
        return None, row | {
            "largest_error": None,
            "reason": str(reason),
            "worst": "",
            "passed": True,
            "applies": False,
        }
    except ExactnessError as broken:
        # A check that stands on an identity of its own which does not hold has failed too.
        finding = Finding(float("inf"), broken.message)
    claim = proven(
        item.id, item.statement, error=finding.error, bound=item.bound, reason=item.reason
    )
    return claim, row | {
        "largest_error": finding.error,
        "reason": item.reason,
        "worst": finding.worst,
        "passed": claim.evidence is Evidence.PROVEN,
        "applies": True,
    }


def _subject(model: Decoder, tokens: Tensor | None, seed: int) -> Subject:
    exact = copy.deepcopy(model).double()
    if tokens is None:
        generator = torch.Generator().manual_seed(seed)
        length = min(24, model.config.n_ctx)
        tokens = torch.randint(model.config.d_vocab, (4, length), generator=generator)
        if model.config.bos_token_id is not None:
            tokens[:, 0] = model.config.bos_token_id
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, : tokens.shape[1] // 3] = False
    return Subject(exact, tokens.to(model.device), mask.to(model.device))
