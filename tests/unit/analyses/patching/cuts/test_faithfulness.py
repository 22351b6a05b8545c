"""Circuits beside random sets: the known ones are faithful and complete, and what is in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.cuts.ablate import ablate
from headstream.analyses.patching.cuts.faithfulness import faithfulness
from headstream.analyses.patching.cuts.results import FaithfulnessResult
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.task import Task
from headstream.analyses.stored import load_result
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.store import load

MakeTask = Callable[..., Task]


@pytest.mark.parametrize("values", ["mean", "zero", "resample", "pair"])
def test_the_constructed_circuit_is_the_model(values: str) -> None:
    model = load("constructed-induction")
    task = Task.for_model(model, n=16)
    result = faithfulness(model, task, ["L0H1", "L1H2"], values=values, progress=False)
    # By hand: the other heads write nothing, and either of the two breaks it.
    assert result.faithfulness == pytest.approx(1, abs=1e-5)
    assert result.left == pytest.approx(0, abs=0.05)
    assert result.details["n_random"] == 27
    assert result.details["all_sets"]
    assert result.details["faithfulness"]["percentile"] == 1.0
    assert abs(result.details["faithfulness"]["random_mean"]) < 0.05
    assert [claim.evidence for claim in result.claims[1:]] == [Evidence.CAUSAL] * 2


def test_half_a_circuit_is_none_of_it() -> None:
    model = load("constructed-induction")
    result = faithfulness(model, Task.for_model(model, n=16), ["L1H2"], progress=False)
    # Without its first head the second meets keys that are a mean over prompts: nearly nothing.
    assert result.faithfulness == pytest.approx(0, abs=0.1)
    assert result.left == pytest.approx(0, abs=0.05)
    faithful, complete = result.claims[1:]
    assert faithful.evidence is Evidence.UNKNOWN
    assert complete.evidence is Evidence.CAUSAL


def test_a_faithful_part_of_an_or_is_not_complete() -> None:
    model = load("constructed-or")
    task = Task.for_model(model, n=16)
    result = faithfulness(model, task, "L0H0", values="zero", progress=False)
    assert (result.faithfulness, result.left) == pytest.approx((1.0, 1.0))
    faithful, complete = result.claims[1:]
    assert faithful.evidence is Evidence.CAUSAL
    assert complete.evidence is Evidence.UNKNOWN


def test_the_trained_circuit_against_random_ones() -> None:
    model = load("induction-2l")
    circuit = ["L0H0", "L1H0", "L1H1", "L1H2", "L1H3"]
    result = faithfulness(model, Task.for_model(model, n=32), circuit, n_random=20, progress=False)
    assert result.faithfulness == pytest.approx(1, abs=0.05)
    assert result.left == pytest.approx(0, abs=0.05)
    assert result.details["n_random"] == 20
    assert not result.details["all_sets"]
    assert circuit not in result.details["random_sets"]
    assert len({tuple(names) for names in result.details["random_sets"]}) == 20
    assert result.details["faithfulness"]["percentile"] > 0.9
    assert "more than" in result.summary()
    full, empty, kept = (float(result.data[x].mean()) for x in ("full", "empty", "circuit"))
    assert result.faithfulness == pytest.approx((kept - empty) / (full - empty))


def test_the_parts_are_ablations_and_patches(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 8)
    circuit = ["L0H1", "L1H0"]
    every = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    rest = [name for name in every if name not in circuit]
    sets: dict[str, Any] = {"empty": every, "circuit": rest, "without": circuit}
    result = faithfulness(
        model, task, circuit, values="zero", n_random=2, n_flips=1, progress=False
    )
    cut = ablate(model, task, ["L0H0"], sets, n_flips=1, progress=False)
    for name in sets:
        expected = cut.effects.sel(cut=name) + cut.data["base"]
        np.testing.assert_allclose(result.data[name], expected, atol=1e-12)
    noised = patch(
        model,
        task,
        {"rest": [At("z", int(name[1]), int(name[3])) for name in rest]},
        direction="noise",
        n_flips=1,
        progress=False,
    )
    paired = faithfulness(
        model, task, circuit, values="pair", n_random=2, n_flips=1, progress=False
    )
    moved = paired.data["circuit"] - paired.data["full"]
    np.testing.assert_allclose(moved, noised.effects.values[0], atol=1e-5)


def test_all_six_choices_stand_beside_the_number() -> None:
    model = load("constructed-and")
    result = faithfulness(model, Task.for_model(model, n=8), ["L0H0", "L0H2"], progress=False)
    assert list(result.details["choices"]) == [
        "unit",
        "nodes or edges",
        "values",
        "positions",
        "direction",
        "circuit or complement",
    ]
    for what in result.details["choices"]:
        assert f"{what}: " in result.claims[1].reason


def test_a_denominator_within_its_noise_is_refused() -> None:
    """Half of the pairs ask for 0 and half for 1: the mean bit opens an OR as well as any."""
    model = load("constructed-or")
    result = faithfulness(model, Task.for_model(model, n=16), ["L0H0", "L0H2"], progress=False)
    assert "the mean gap between the whole model and none" in result.summary()
    assert np.isnan(result.faithfulness)
    assert np.isnan(result.left)
    assert result.claims[1].evidence is Evidence.UNKNOWN


def test_the_seed_decides(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 6)
    drawn = [
        faithfulness(
            model, task, ["L0H1", "L1H0"], n_random=5, seed=seed, n_flips=1, progress=False
        ).details["random_sets"]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    for name in ("constructed-and", "constructed-or"):
        model = load(name)
        result = faithfulness(model, Task.for_model(model, n=8), ["L0H0", "L0H2"], progress=False)
        back = load_result(result.save(tmp_path / f"{name}.json"))
        assert isinstance(back, FaithfulnessResult)
        assert back.summary() == result.summary()
        np.testing.assert_allclose(back.faithfulness, result.faithfulness, rtol=1e-6)


@pytest.mark.parametrize(
    ("circuit", "options", "words"),
    [
        ([], {}, "circuit is an empty set of heads"),
        (["L7H0"], {}, "circuit holds 'L7H0'"),
        ([(a, b) for a in range(2) for b in range(4)], {}, "circuit holds all 8 heads"),
        (["L0H0"], {"n_random": 0}, "n_random must be a whole number >= 1, got 0"),
        (["L0H0"], {"values": "median"}, "'zero', 'mean', 'resample', 'pair', got 'median'"),
    ],
)
def test_arguments_that_do_not_fit(
    model: Decoder, make_task: MakeTask, circuit: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        faithfulness(model, make_task(model, 6), circuit, progress=False, **options)


def test_tokens_have_no_pair(model: Decoder) -> None:
    with pytest.raises(TaskError, match="and tokens have none; give a Task"):
        faithfulness(model, [[1, 2, 3]], ["L0H0"], values="pair", progress=False)
