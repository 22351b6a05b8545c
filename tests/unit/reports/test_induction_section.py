"""The section on induction: its figure with both controls, its table, and what it must not say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.kinds import InductionResult
from headstream.analyses.result import Result
from headstream.analyses.standard import standard_study
from headstream.analyses.studies.induction import induction as measure
from headstream.models.store import load
from headstream.reports.blocks import Figure, Prose, Terms
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
