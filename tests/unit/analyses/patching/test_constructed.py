"""The ground truth: on the model whose circuit was written by hand, no miss and no false find."""

from __future__ import annotations

import numpy as np
import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.result import PatchingResult
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.store import load


@pytest.fixture(scope="module")
def constructed() -> Decoder:
    return load("constructed-induction")


def causal(result: PatchingResult) -> set[str]:
    return {claim.id for claim in result.claims if claim.evidence is Evidence.CAUSAL}


@pytest.mark.parametrize(
    ("corruption", "heads"),
    [
        ("earlier_query", ["previous-token", "induction"]),
        ("answer", ["induction"]),
        ("last", ["induction"]),
    ],
)
def test_denoising_finds_the_heads_that_the_corruption_breaks(
    constructed: Decoder, corruption: str, heads: list[str]
) -> None:
    """With the earlier occurrence replaced the match itself must be made: both heads matter."""
    assert constructed.card is not None
    circuit = constructed.card["circuit"]
    result = patch(constructed, Task.for_model(constructed, n=16, corruption=corruption), "z")
    assert causal(result) == {f"z.{head}" for name in heads for head in circuit[name]}
    found = result.normalized.values[result.data["causal"].values]
    # Written by hand: each head carries the whole difference. float32, scores of tens.
    np.testing.assert_allclose(found, 1.0, atol=1e-3)
    assert (result.mean.values[~result.data["causal"].values] == 0).all()


def test_the_path_by_role(constructed: Decoder) -> None:
    """The earlier token is read by the token after it, and that one by the last."""
    task = Task.for_model(constructed, n=16)
    stream = patch(constructed, task, "resid_pre", positions="roles")
    assert causal(stream) == {"resid_pre.L0@earlier_query", "resid_pre.L1@answer_source"}
    writes = patch(constructed, task, "attn_out", positions="roles")
    assert causal(writes) == {"attn_out.L0@answer_source", "attn_out.L1@query"}


def test_the_task_is_drawn_by_its_seed(constructed: Decoder) -> None:
    first, again, other = (Task.for_model(constructed, n=4, seed=seed) for seed in (0, 0, 1))
    assert first.clean.tolist() == again.clean.tolist() != other.clean.tolist()
    assert list(first.roles) == ["earlier_query", "answer_source", "query"]
    with pytest.raises(TaskError, match="corruption must be one of"):
        Task.for_model(constructed, corruption="nothing")
