"""The ledger: statements that algebra makes about every decoder, each with a runnable check.

A check is a function `(subject) -> Finding` registered under the statement's id. `audit` runs them
all on a float64 copy of the model, so that what is left is rounding and a bound of 1e-10 means
something, and gives one row a statement: PROVEN within its bound, FAILED over it, or the reason
why it does not apply to this model.

Where algebra stops, a measurement `(subject) -> Observation` may stand beside the check under the
same id: MEASURED, with its interval and what it was measured on. It proves nothing and cannot fail.
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

from headstream.analyses.evidence import Claim, Evidence, measured, proven
from headstream.analyses.kinds import AuditResult
from headstream.analyses.result import Provenance
from headstream.models.arguments import check_length, check_seed
from headstream.models.decoder import Decoder
from headstream.models.errors import ExactnessError
from headstream.models.given_model import takes_model
from headstream.models.vocabulary import check_tokens

# Sums of some hundred float64 terms of order one round at about 1e-14; 1e-10 leaves room for depth
# and width and is still a million times below what any wrong formula gives.
BOUND = 1e-10
WHY_BOUND = "float64 rounding"

# What is measured is measured on this many sequences, fewer where their logits would not fit in
# this many float64 entries (134 MB).
SEQUENCES = 32
_ROOM = 2**24

# The ledger's own order: attention, heads, block, norms, feed-forward, positions, flash.
_FAMILIES = "AMBNFPL"


@dataclass(frozen=True)
class Subject:
    """What the checks run on.

    Attributes:
        model: a float64 copy of the audited model.
        tokens: `[batch, pos]`, drawn at random.
        mask: `[batch, pos]`, with the first row left-padded, for checks on padding.
        sample: `[sequence, pos]`, what is measured is measured on these.
        sampled: the same in words.
        seed: of what is drawn.
    """

    model: Decoder
    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    sample: Int[Tensor, "sequence pos"]
    sampled: str
    seed: int


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


@dataclass(frozen=True)
class Observation:
    """What was measured on this model.

    Attributes:
        value, unit: the number and its unit.
        interval: its 95% interval.
        n: sequences, or pairs of heads, behind it.
        on: what it was measured on, and what to compare it with.
    """

    value: float
    unit: str
    interval: tuple[float, float]
    n: int
    on: str


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


@dataclass(frozen=True)
class Measurement:
    """A statement of the ledger that is measured, and the function that measures it."""

    id: str
    statement: str
    run: Callable[[Subject], Observation]


LEDGER: dict[str, Check] = {}
MEASUREMENTS: list[Measurement] = []


def check(
    id: str, statement: str, *, bound: float = BOUND, reason: str = WHY_BOUND
) -> Callable[[Callable[[Subject], Finding]], Callable[[Subject], Finding]]:
    """Register a function as the check of statement `id`."""

    def register(run: Callable[[Subject], Finding]) -> Callable[[Subject], Finding]:
        assert id not in LEDGER, f"two checks of {id}"
        LEDGER[id] = Check(id, statement, run, bound, reason)
        return run

    return register


def measurement(
    id: str, statement: str
) -> Callable[[Callable[[Subject], Observation]], Callable[[Subject], Observation]]:
    """Register a function as a measurement that stands under statement `id`."""

    def register(run: Callable[[Subject], Observation]) -> Callable[[Subject], Observation]:
        MEASUREMENTS.append(Measurement(id, statement, run))
        return run

    return register


def register_all() -> None:
    """Import the modules of checks and measurements, which registers them."""
    from headstream.analyses.claims import (  # noqa: F401
        added_positions,
        attention,
        block,
        causality,
        heads,
        interplay,
        linearity,
        memory,
        norms,
        rotary,
    )


@takes_model
def audit(model: Decoder, tokens: Tensor | None = None, *, seed: int = 0) -> AuditResult:
    """Run every registered check and measurement on `model`.

    Args:
        tokens: int64 `[batch, pos]`, or `[pos]` as one row, to run on; None draws from `seed`: 4
            rows of up to 24 tokens for the checks, and up to 32 rows that hold a random block
            twice for what is measured.
        seed: of everything drawn.
    Returns:
        One claim a statement, PROVEN or FAILED or MEASURED; `.failed` says whether any check was
        over its bound, `.rows()` lists them with those that do not apply.
    Raises:
        ShapeError, TokenError: for tokens that the model cannot run on, a seed that is none, or a
            weight that is NaN or infinite.
        HookError: if something edits the model's runs.
    """
    register_all()
    subject = _subject(model, tokens, seed)
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    items: list[Check | Measurement] = [*LEDGER.values(), *MEASUREMENTS]
    for item in sorted(items, key=_place):
        claim, row = _run(item, subject) if isinstance(item, Check) else _observe(item, subject)
        if claim is not None:
            claims.append(claim)
        # A check and a measurement of one statement that say the same are one row.
        if row is not None and not any(_same(row, other) for other in rows):
            rows.append(row)
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


def _same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return not row["applies"] and all(row[key] == other[key] for key in ("id", "reason"))


def _place(item: Check | Measurement) -> tuple[int, int, bool]:
    return _FAMILIES.index(item.id[0]), int(item.id[1:]), isinstance(item, Measurement)


def _run(item: Check, subject: Subject) -> tuple[Claim | None, dict[str, Any]]:
    row: dict[str, Any] = {"id": item.id, "statement": item.statement, "bound": item.bound}
    try:
        with torch.no_grad():
            finding = item.run(subject)
    except NotApplicable as reason:
        return None, row | _not_applicable(reason)
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


def _observe(item: Measurement, subject: Subject) -> tuple[Claim | None, dict[str, Any] | None]:
    """The claim alone says all of a measurement; a row is for one that does not apply."""
    try:
        with torch.no_grad():
            seen = item.run(subject)
    except (NotApplicable, ExactnessError) as reason:
        # What stands on an identity that does not hold says nothing; its check has FAILED.
        row = {"id": item.id, "statement": item.statement, "bound": None}
        return None, row | _not_applicable(reason)
    return measured(
        item.id,
        item.statement,
        value=seen.value,
        unit=seen.unit,
        n=seen.n,
        interval=seen.interval,
        reason=seen.on,
        where="audit",
    ), None


def _not_applicable(reason: Exception) -> dict[str, Any]:
    return {
        "largest_error": None,
        "reason": str(reason),
        "worst": "",
        "passed": True,
        "applies": False,
    }


def _subject(model: Decoder, tokens: Tensor | None, seed: int) -> Subject:
    seed = check_seed(seed)
    exact = copy.deepcopy(model).double()
    if tokens is None:
        generator = torch.Generator().manual_seed(seed)
        length = min(24, model.config.n_ctx)
        tokens = torch.randint(model.config.d_vocab, (4, length), generator=generator)
        sample, sampled = _sample(model, length, generator)
        if model.config.bos_token_id is not None:
            tokens[:, 0] = sample[:, 0] = model.config.bos_token_id
    else:
        tokens = check_tokens(tokens, model.config.d_vocab)
        check_length(tokens.shape[1], past=0, n_ctx=model.config.n_ctx)
        sample, sampled = tokens, f"the {len(tokens)} rows of tokens given"
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, : tokens.shape[1] // 3] = False
    device = model.device
    return Subject(exact, tokens.to(device), mask.to(device), sample.to(device), sampled, seed)


def _sample(model: Decoder, length: int, generator: torch.Generator) -> tuple[Tensor, str]:
    """Sequences that hold a random block twice: half of each is new, half is a repeat."""
    n = max(4, min(SEQUENCES, _ROOM // (length * model.config.d_vocab)))
    block = torch.randint(model.config.d_vocab, (n, (length + 1) // 2), generator=generator)
    return block.repeat(1, 2)[
        :, -length:
    ], f"{n} sequences of {length} tokens, a random block twice"
