"""Redundant sets: an OR is found by the joint cut, and its members by single restoration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.cuts.ablate import ablate
from headstream.analyses.patching.cuts.head_sets import labelled_heads
from headstream.analyses.patching.cuts.results import RedundancyResult
from headstream.analyses.patching.cuts.sets import redundant_set
from headstream.analyses.patching.task import Task
from headstream.analyses.stored import load_result
from headstream.analyses.studies.heads import heads
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.store import load

MakeTask = Callable[..., Task]


def labels(result: RedundancyResult) -> dict[str, Evidence]:
    return {claim.id: claim.evidence for claim in result.claims if claim.id != "self_cut.z"}


def test_the_induction_heads_are_not_missed() -> None:
    """Cut one by one none of them has a label; the set has, and each of them in it."""
    model = load("induction-2l")
    task = Task.for_model(model, n=32)
    single = ablate(model, task, progress=False)
    assert single.data["cut"].values[single.data["causal"].values].tolist() == ["L0H0"]
    census = heads(model, n=8)
    result = redundant_set(model, task, labelled_heads(census), progress=False)
    assert result.details["set"] == ["L1H0", "L1H1", "L1H2", "L1H3"]
    assert set(labels(result).values()) == {Evidence.CAUSAL}
    assert result.members == result.details["set"]
    assert float(result.recovered.min()) > 0.2
    harm = -result.data["alone_mean"]
    assert float(harm.max()) < 0.2 * -result.details["joint"]["mean"]


@pytest.mark.parametrize(("gate", "members"), [("or", ["L0H0", "L0H2"]), ("and", [])])
def test_gates(gate: str, members: list[str]) -> None:
    model = load(f"constructed-{gate}")
    result = redundant_set(
        model, Task.for_model(model, n=16), ["L0H0", "L0H1", "L0H2"], progress=False
    )
    assert labels(result)["set"] is Evidence.CAUSAL
    assert result.members == members
    # By hand: either bit opens the OR, and neither alone the AND.
    expected = [1.0 if f"L0H{head}" in members else 0.0 for head in range(3)]
    np.testing.assert_allclose(result.recovered.values, expected, atol=1e-6)
    whole = "each recover at least a fifth" if members else "no head restored alone recovers"
    assert whole in result.summary()


def test_the_parts_are_ablations(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 8)
    chosen = ["L0H1", "L0H2", "L1H0"]
    result = redundant_set(model, task, chosen, n_flips=1, progress=False)
    sets = {"all": chosen, "but L0H1": chosen[1:], "but L1H0": chosen[:2]}
    parts = ablate(model, task, chosen, sets, n_flips=1, progress=False).effects
    data = result.data
    np.testing.assert_array_equal(data["joint"], parts.sel(cut="all"))
    np.testing.assert_array_equal(data["alone"], parts.sel(cut=chosen))
    np.testing.assert_array_equal(data["restored"].sel(head="L0H1"), parts.sel(cut="but L0H1"))
    np.testing.assert_array_equal(data["restored"].sel(head="L1H0"), parts.sel(cut="but L1H0"))
    mean = parts.mean("example")
    share = 1 - mean.sel(cut="but L0H1") / mean.sel(cut="all")
    assert float(result.recovered.sel(head="L0H1")) == pytest.approx(float(share))


def test_without_the_sets_label_no_member_has_one() -> None:
    model = load("constructed-or")
    result = redundant_set(model, Task.for_model(model, n=16), ["L0H1", "L0H3"], progress=False)
    assert set(labels(result).values()) == {Evidence.UNKNOWN}
    assert "the set is not shown to be needed" in result.summary()
    few = redundant_set(model, Task.for_model(model, n=4), ["L0H0", "L0H2"], progress=False)
    assert set(labels(few).values()) == {Evidence.UNKNOWN}
    assert "n = 4, and at least 6 pairs are needed" in few.claims[1].reason
    assert few.members == []


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    model = load("constructed-or")
    # Cut to 0, only pairs that ask for 1 are moved: half of them.
    result = redundant_set(model, Task.for_model(model, n=16), ["L0H0", "L0H2"], progress=False)
    back = load_result(result.save(tmp_path / "set.json"))
    assert isinstance(back, RedundancyResult)
    assert back.summary() == result.summary()
    assert back.members == ["L0H0", "L0H2"]
    assert list(back.to_frame()["head"]) == ["L0H0", "L0H2"]


def test_sets_that_do_not_fit(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 6)
    for given, words in (
        (["L0H1"], "takes two heads or more, got L0H1; ablate cuts a single head"),
        ([], "heads is an empty set of heads"),
        ([(0, 1), (5, 0)], r"heads holds \(5, 0\), and"),
        (["L0H1", [0, -1]], r"heads holds \[0, -1\], and"),
        ([(np.int64(0), -1), "L0H1"], r"heads holds \(0, -1\), and"),
        (["L0H9", "L0H1"], "heads holds 'L0H9', and"),
    ):
        with pytest.raises(TaskError, match=words):
            redundant_set(model, task, given, progress=False)


def test_labels_that_no_head_has() -> None:
    census = heads(load("constructed-induction"), n=4)
    assert labelled_heads(census) == [(1, 2)]
    with pytest.raises(TaskError, match="no head of the census has the label 'inducton pattern'"):
        labelled_heads(census, "inducton pattern")
