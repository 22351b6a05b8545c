"""Two heads behind an AND and behind an OR: denoising and noising find what theory says."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.result import PatchingResult
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.task import Task
from headstream.models.store import load

BOTH = {"both": [At("z", 0, 0), At("z", 0, 2)]}


def swept(gate: str, site: object, direction: str) -> PatchingResult:
    model = load(f"constructed-{gate}")
    with warnings.catch_warnings():
        # That every effect is zero is here the right answer.
        warnings.filterwarnings("ignore", message=".*every effect is exactly zero")
        return patch(model, Task.for_model(model, n=32), site, direction=direction, progress=False)


def causal(result: PatchingResult) -> list[str]:
    return [claim.id for claim in result.claims if claim.evidence is Evidence.CAUSAL]


def test_where_the_metric_stays_the_second_is_said() -> None:
    """One input of an AND: what the logit difference cannot see the log-probability does."""
    model = load("constructed-and")
    words = (
        r"patch of z, denoise: every effect is exactly zero; no one of these values moves the "
        r"metric; its second metric, log_prob, moves by up to \+4\.86 nats"
    )
    with pytest.warns(UserWarning, match=words):
        result = patch(model, Task.for_model(model, n=6), "z", progress=False)
    assert float(abs(result.data["second"]).max()) == pytest.approx(4.858, abs=1e-3)


@pytest.mark.parametrize(
    ("gate", "direction", "finds"),
    [
        ("and", "denoise", []),
        ("and", "noise", ["z.L0H0", "z.L0H2"]),
        ("or", "denoise", ["z.L0H0", "z.L0H2"]),
        ("or", "noise", []),
    ],
)
def test_single_heads(gate: str, direction: str, finds: list[str]) -> None:
    result = swept(gate, "z", direction)
    assert causal(result) == finds
    # By construction a head moves the whole gap or nothing.
    expected = [1.0 if f"z.L0H{head}" in finds else 0.0 for head in range(4)]
    np.testing.assert_allclose(result.normalized.values[0], expected, atol=1e-6)


@pytest.mark.parametrize("gate", ["and", "or"])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_output_and_both_heads_together_always(gate: str, direction: str) -> None:
    assert causal(swept(gate, BOTH, direction)) == ["sets.both"]
    assert causal(swept(gate, "mlp_out", direction)) == ["mlp_out.L0@11"]
