"""Labels are computed: what passes is PROVEN, what does not is FAILED, and NaN never passes."""

from __future__ import annotations

import math

import pytest

from headstream.analyses.evidence import Evidence, measured, proven, unknown


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (0.0, Evidence.PROVEN),
        (1e-10, Evidence.PROVEN),
        (1.1e-10, Evidence.FAILED),
        (math.nan, Evidence.FAILED),
        (math.inf, Evidence.FAILED),
    ],
)
def test_proven_holds_its_bound(error: float, label: Evidence) -> None:
    claim = proven("B2", "the writes sum", error=error, bound=1e-10, reason="rounding")
    assert claim.evidence is label
    assert "bound 1e-10" in claim.reason
    assert "rounding" in claim.reason


def test_every_label_has_its_own_mark() -> None:
    assert len({label.mark for label in Evidence}) == len(Evidence)


def test_measured_and_unknown_say_what_they_rest_on() -> None:
    seen = measured("x", "it looks", value=0.5, unit="mass", n=8, interval=(0.4, 0.6))
    assert (seen.evidence, seen.n, seen.interval) == (Evidence.MEASURED, 8, (0.4, 0.6))
    open_question = unknown("y", "why", reason="not tested; patch it")
    assert open_question.evidence is Evidence.UNKNOWN
    assert open_question.value is None
    assert open_question.reason == "not tested; patch it"


def test_an_interval_that_could_not_be_computed_is_none() -> None:
    claim = measured("x", "s", value=1.0, unit="nats", n=1, interval=(math.nan, math.nan))
    assert claim.interval is None
