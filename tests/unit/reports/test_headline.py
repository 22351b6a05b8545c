"""The first lines: the finding with its numbers, and before it what speaks against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headstream.analyses.evidence import Evidence
from headstream.analyses.studies.induction import induction
from headstream.models.store import load
from headstream.reports.headline import headline
from headstream.reports.study import Study


def of(*results):
    line = headline(Study.of("a title", list(results)))
    # "n = 12" is kept on one line of the page by spaces that do not break.
    return replace(line, finding=tuple(text.replace("\u00a0", " ") for text in line.finding))


def test_finding_names_the_causal_heads_with_effect_interval_and_n(samples) -> None:
    line = of(samples.audit(), samples.patching())
    assert line.alarms == ()
    (finding,) = line.finding
    assert finding == samples.patching().summary() + "."
    for words in ("Two heads restore the answer", "L1H2", "0.85", "[0.83, 0.87]", "L0H1", "n = 12"):
        assert words in finding
    assert line.facts == (
        "12 prompt pairs",
        "every check passed (3 of 3)",
        "model toy-2l",
        "seed 0",
        "float32 on cpu",
    )


def test_tally_counts_labels_and_leaves_out_none(samples) -> None:
    line = of(samples.audit(), samples.patching())
    assert dict(line.tally) == {Evidence.PROVEN: 3, Evidence.CAUSAL: 2, Evidence.UNKNOWN: 1}


def test_failed_check_comes_before_the_finding(samples) -> None:
    line = of(samples.audit(failing=True), samples.patching())
    (alarm,) = line.alarms
    assert alarm.startswith("Warning: 1 of three checks FAILED: B2 (the writes sum to the final")
    assert "2 of 3 checks passed" in line.facts


def test_one_pair_is_called_a_demonstration(samples) -> None:
    line = of(samples.patching(n=1))
    assert line.alarms[0].startswith("A demonstration on one prompt pair")
    assert line.finding[0].startswith("No head of 8 is shown to restore the answer")
    assert line.facts[0] == "1 prompt pair"


def test_five_pairs_are_too_few(samples) -> None:
    assert of(samples.patching(n=5)).alarms[0].startswith("Only 5 prompt pairs: too few")
    assert of(samples.patching(n=6)).alarms == ()


def test_both_directions_are_said(samples) -> None:
    line = of(samples.patching(), samples.patching(direction="noise"))
    assert [text.split(":")[0] for text in line.finding] == [
        "Two heads restore the answer",
        "Two heads are needed for the answer",
    ]


def test_heads_come_before_positions(samples) -> None:
    line = of(samples.by_position(), samples.patching())
    assert len(line.finding) == 1
    assert line.finding[0].startswith("Two heads")
    assert of(samples.by_position()).finding[0].startswith("One site restores part of the answer")


def test_nothing_found_is_said(samples) -> None:
    line = of(samples.patching(mean=np.full((2, 4), 0.01), causal=[]))
    assert line.finding[0].startswith("No head of 8 is shown to restore the answer")


def test_a_finding_that_cannot_be_said_is_an_alarm(samples) -> None:
    result = samples.patching()
    del result.details["metric"]["noun"]
    line = of(result)
    assert line.alarms == ("The finding could not be put into words: KeyError: 'noun'.",)
    assert line.finding == ()
    assert line.facts


def test_without_intervention_nothing_is_about_cause(samples) -> None:
    line = of(samples.heads(), samples.decomposition())
    assert line.finding[0] == "No intervention was run: nothing on this page is about cause."
    assert "induction pattern: L1H2" in line.finding[1]
    assert "no identity was checked" in line.facts


def test_cuts_name_a_head_before_its_pattern_does(samples) -> None:
    """An induction study of the same model outweighs the census; of another it says nothing."""
    study = induction(load("constructed-induction"), n=6)
    for weights, name in (("ab" * 32, "induction head"), ("cd" * 32, "induction pattern")):
        census, paths = samples.heads(), samples.paths()
        origin = replace(study.provenance, weights_sha256=weights)
        same = census.provenance.weights_sha256 == weights
        assert same == (name == "induction head"), "the samples' own weights"
        line = of(samples.patching(), census, paths, replace(study, provenance=origin))
        assert f"into the keys of L1H2 ({name})" in line.finding[1]


def test_copiers_from_a_fixed_distance_stand_at_the_top(samples) -> None:
    decoy = induction(load("decoy-2l-rotary"), n=6, distances=[16, 32])
    line = of(samples.patching(), decoy)
    assert line.finding[-1].startswith("No induction head")
    assert "from a fixed distance" in line.finding[-1]
    assert len(of(samples.patching(), induction(load("constructed-and"), n=6)).finding) == 1
