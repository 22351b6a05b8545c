"""The section on induction: its figure with both controls, its table, and what it must not say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.kinds import HeadsResult, InductionResult
from headstream.analyses.result import Result
from headstream.analyses.standard import standard_study
from headstream.analyses.studies.heads import heads
from headstream.analyses.studies.induction import induction as measure
from headstream.models.store import load
from headstream.reports.blocks import Figure, Heading, Prose, Terms
from headstream.reports.closing import limits
from headstream.reports.headline import headline
from headstream.reports.induction import induction
from headstream.reports.sections import sections
from headstream.reports.study import Study
from headstream.reports.tables import Table
from headstream.reports.write import render_report


@pytest.fixture(scope="module")
def found() -> InductionResult:
    return measure(load("constructed-induction"), n=8)


@pytest.fixture(scope="module")
def decoy() -> InductionResult:
    return measure(load("decoy-2l-rotary"), n=6, distances=[16, 32])


@pytest.fixture(scope="module")
def decoy_pair() -> tuple[HeadsResult, InductionResult]:
    model = load("decoy-2l")
    return heads(model, n=6), measure(model, n=6)


def study(*results: Result) -> Study:
    return Study.of("a title", list(results))


def blocks_of(section, kind):
    return [block for block in section.blocks if isinstance(block, kind)]


def rows_of(section) -> dict[str, list]:
    (drawn,) = blocks_of(section, Table)
    return {row[0].text: row for group in drawn.groups for row in group.rows}


def test_it_stands_in_the_page_after_the_census(samples, found) -> None:
    assert induction(study(samples.heads())) is None
    page = sections(study(samples.heads(), samples.sinks(), found))
    slugs = [part.slug for part in page]
    assert slugs[slugs.index("heads") :][:3] == ["heads", "induction", "sinks"]
    assert not any(part.broken for part in page)


def test_the_figure_shows_the_score_and_both_controls(found) -> None:
    (chart,) = blocks_of(induction(study(found)), Figure)
    names = [trace["name"] for trace in chart.spec["data"]]
    assert names == ["L1H2", "L1H2, other content", "L1H2, content elsewhere", "chance"]
    assert chart.spec["data"][0]["x"] == [10, 14, 18, 22]
    assert min(chart.spec["data"][0]["y"]) > 0.999
    assert max(chart.spec["data"][1]["y"] + chart.spec["data"][2]["y"]) < 1e-3
    assert chart.caption.startswith("L1H2: induction head. Mean over 8 sequences")
    assert "L1H2 1.00 to 1.00" in chart.alt


def test_the_table_names_only_what_was_shown(found) -> None:
    rows = rows_of(induction(study(found)))
    assert len(rows) == 8
    assert rows["L1H2"][1].evidence is Evidence.CAUSAL
    assert rows["L1H2"][1].note == "induction head"
    assert [cell.text for cell in rows["L1H2"][2:4]] == ["1.00", "1.00"]
    assert (rows["L0H1"][1].text, rows["L0H1"][1].evidence) == ("previous-token", None)
    assert rows["L0H0"][1].text == "none"
    assert rows["L0H0"][7].text == rows["L0H0"][8].text == "–", "it was not cut"
    (terms,) = blocks_of(induction(study(found)), Terms)
    words = {term.word: term.text for term in terms.terms}
    assert words["Cut together"].startswith("L1H2: +3.495 nats")
    assert "decides nothing" in words["Other heads"]
    assert "L0H1 (previous-token)" in words["Other heads"]
    assert words["Fixed distances"] == (
        "looked for from 3 to 39 tokens, in 16 random sequences of 48"
    )
    assert "that of a uniform guess 3.466" in words["Loss on what repeats predict"]


def test_a_decoy_is_drawn_with_controls_as_high_as_its_score(decoy) -> None:
    section = induction(study(decoy))
    (chart,) = blocks_of(section, Figure)
    lines = {trace["name"]: trace for trace in chart.spec["data"]}
    assert "L1H3: fixed-distance copier" in chart.caption
    assert lines["L1H3"]["y"][0] < 0.05 < 0.9 < lines["L1H3"]["y"][1]
    assert lines["L1H3, other content"]["y"][1] > 0.9
    assert lines["L1H3, content elsewhere"]["y"][1] > 0.9
    row = rows_of(section)["L1H3"]
    assert row[1].evidence is Evidence.MEASURED
    assert row[1].note == "fixed-distance copier"
    assert row[5].note == "32 tokens"
    (said, *_) = blocks_of(section, Prose)
    assert said.text.startswith("No induction head")


def test_the_page_opens_with_it_and_says_what_was_cut(found, decoy) -> None:
    assert "L1H2 is an induction head" in str(headline(study(found)))
    assert "No intervention was run" not in str(headline(study(found)))
    (bullets, *_) = limits(study(found), []).blocks
    assert ("No patching.", "Heads were cut; nothing was restored from another run.") in (
        bullets.items
    )
    page = render_report([decoy])
    assert "copies from a fixed distance of 32 tokens" in page


def test_it_is_small(found) -> None:
    """A standard page has 2.3 MB in all; this part may take 20 kB of it."""
    base = measure(load("constructed-and"), n=6)
    assert len(render_report([found, base])) - len(render_report([base])) < 20_000


def test_a_study_that_found_nothing_to_cut_cut_nothing() -> None:
    nothing = measure(load("constructed-and"), n=6)
    assert "No intervention was run" in str(headline(study(nothing)))
    (bullets, *_) = limits(study(nothing), []).blocks
    assert any(lead == "No intervention." for lead, _ in bullets.items)


def test_the_census_leaves_distances_to_it(samples, found) -> None:
    census = samples.heads()
    alone = next(part for part in sections(study(census)) if part.slug == "heads")
    beside = next(part for part in sections(study(census, found)) if part.slug == "heads")
    assert len(blocks_of(alone, Figure)) == len(blocks_of(beside, Figure)), "another model's"
    same = replace(found, provenance=census.provenance)
    beside = next(part for part in sections(study(census, same)) if part.slug == "heads")
    assert len(blocks_of(alone, Figure)) == len(blocks_of(beside, Figure)) + 1


def test_the_census_says_what_the_study_calls_a_head(decoy_pair) -> None:
    census, found = decoy_pair
    part = next(part for part in sections(study(census, found)) if part.slug == "heads")
    said = [block.text for block in blocks_of(part, Prose)]
    assert said[0].startswith("Current-token: L0H0, L0H1")
    assert said[1] == (
        "The induction study calls L0H0 a fixed-distance copier (here current-token); calls L1H0 "
        "a fixed-distance copier (here no label)."
    )
    alone = next(part for part in sections(study(census)) if part.slug == "heads")
    assert not any("induction study" in block.text for block in blocks_of(alone, Prose))
    # Another model's study says nothing of these heads.
    other = replace(found, provenance=replace(found.provenance, weights_sha256="0" * 64))
    apart = next(part for part in sections(study(census, other)) if part.slug == "heads")
    assert not any("induction study" in block.text for block in blocks_of(apart, Prose))
    # Two studies are told apart by number; one that agrees is silent.
    agrees = found.data.copy(deep=True)
    agrees["label"] = census.data["label"]
    two = sections(study(census, replace(found, data=agrees), found))
    said = [b.text for b in blocks_of(next(p for p in two if p.slug == "heads"), Prose)]
    assert sum("nduction study" in text for text in said) == 1
    assert said[1].startswith("Induction study 2 calls L0H0 a")
    # By the number that the section on induction shows, another model's study counted.
    page = sections(study(census, other, found))
    (first, second, *_) = blocks_of(next(p for p in page if p.slug == "induction"), Heading)
    assert (first.text[:8], second.text[:8]) == ("Study 1:", "Study 2:")
    said = [b.text for b in blocks_of(next(p for p in page if p.slug == "heads"), Prose)]
    assert said[1].startswith("Induction study 2 calls L0H0 a")


def test_labels_that_are_no_label_and_several_heads(decoy_pair) -> None:
    census, found = decoy_pair
    data = found.data.copy(deep=True)
    data["label"] = (("layer", "head"), [["none"] * 2, ["induction head of a set"] * 2])
    part = sections(study(census, replace(found, data=data)))
    said = [b.text for b in blocks_of(next(p for p in part if p.slug == "heads"), Prose)]
    assert said[1] == (
        "The induction study has no label for L0H0 and L0H1 (here current-token); calls L1H0 and "
        "L1H1 induction heads of a set (here no label)."
    )


def test_one_distance_has_one_control_on_the_page() -> None:
    found = measure(load("constructed-induction"), n=6, distances=[16])
    section = induction(study(found))
    (drawn,) = blocks_of(section, Table)
    heads = [column.heading for column in drawn.columns]
    assert heads[2:5] == ["score", "at random gaps", "control"]
    assert rows_of(section)["L1H2"][4].note == ""
    (chart,) = blocks_of(section, Figure)
    assert "Dotted: the control, the same positions when the block is other tokens; and" in (
        chart.caption
    )


def test_a_standard_study_says_once_what_a_head_does() -> None:
    model = load("constructed-induction")
    results = {result.kind: result for result in standard_study(model, n=6, progress=False)}
    assert "induction.L1H2" in {claim.id for claim in results["induction"].claims}
    said = {claim.id for claim in results["heads"].claims}
    assert said == {"heads.L0H1"}, "neither the pattern again, nor that it is open"


def test_a_model_that_repeats_nothing_is_asked_as_well_and_nothing_is_cut() -> None:
    results = standard_study(load("backcopy-1l"), n=6, progress=False)
    (found,) = [result for result in results if result.kind == "induction"]
    assert found.details["joint"] is None
    assert "no induction head" in found.summary()
