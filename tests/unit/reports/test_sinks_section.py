"""The section on attention sinks: its map, its table with the cuts, what it must not claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headstream.analyses.evidence import Evidence
from headstream.reports.blocks import Bullets, Figure, Fold, Prose
from headstream.reports.closing import limits
from headstream.reports.headline import headline
from headstream.reports.sections import sections
from headstream.reports.sinks import sinks
from headstream.reports.study import Study
from headstream.reports.tables import Table
from headstream.reports.write import render_report


def study(*results) -> Study:
    return Study.of("a title", list(results))


def blocks_of(section, kind):
    return [block for block in section.blocks if isinstance(block, kind)]


def test_it_stands_in_the_page_and_only_where_there_is_something(samples) -> None:
    assert sinks(study(samples.heads())) is None
    slugs = [part.slug for part in sections(study(samples.heads(), samples.sinks()))]
    assert slugs.index("heads") + 1 == slugs.index("sinks")
    assert not any(part.broken for part in sections(study(samples.sinks())))


def test_the_map_frames_the_head_whose_cut_moves_the_loss(samples) -> None:
    section = sinks(study(samples.sinks()))
    chart, along = blocks_of(section, Figure)
    assert chart.spec["data"][0]["z"][1][2] == 0.9
    (frame,) = chart.spec["layout"]["shapes"]
    assert (frame["x0"], frame["y0"]) == (1.5, 0.5)
    written = {
        (i, j) for i, row in enumerate(chart.spec["data"][0]["text"]) for j in range(4) if row[j]
    }
    struck = set(zip(chart.spec["data"][1]["y"], chart.spec["data"][1]["x"], strict=True))
    assert written == {(1, 2)}, "a number is not struck through"
    assert len(struck) == 7
    assert not struck & written
    assert "Sink rate of all heads: 12.5% at eps = 0.3, T = 8" in chart.caption
    assert chart.alt.startswith("The largest mass on the first token is 0.90, of L1H2")
    names = [trace["name"] for trace in along.spec["data"]]
    assert names[0] == "L1H2"
    assert names[-1] == "chance"
    assert along.spec["data"][0]["x"][0] == 1, "the first token sees itself alone"


def test_the_table_has_both_cuts_with_interval_and_evidence(samples) -> None:
    (rows,) = blocks_of(sinks(study(samples.sinks())), Table)
    (group,) = rows.groups
    found = {row[0].text: row for row in group.rows}
    assert list(found)[-1] == "all heads"
    row = found["L1H2"]
    assert [cell.text for cell in row[1:4]] == ["0.900", "100%", "0.00"]
    assert row[4].text == "0"
    assert (row[5].text, row[5].note) == ("not shown", "not tested, control\u00a00")
    assert (row[6].text, row[6].note) == ("+0.640", "[+0.620, +0.660]")
    assert (row[7].evidence, row[7].note) == (
        Evidence.CAUSAL,
        "p\u00a00.0002, control\u00a0+0.006",
    )
    assert found["L0H0"][3].text == "–", "no value, no drain"


def test_many_heads_fold_their_table(samples) -> None:
    folds = blocks_of(sinks(study(samples.sinks(n_heads=16))), Fold)
    assert folds[0].summary == "All 32 heads as a table"


def test_a_cut_is_an_intervention_and_the_page_says_which(samples) -> None:
    page = study(samples.sinks())
    assert not any("No intervention" in text for text in headline(page).finding)
    assert headline(page).finding[0].startswith("1 of 8 heads rests on the first token")
    (bullets,) = blocks_of(limits(page, []), Bullets)[:1]
    leads = [lead for lead, _ in bullets.items]
    assert "No patching." in leads
    assert "No intervention." not in leads


def test_a_single_head_is_not_told_twice(samples) -> None:
    result = samples.sinks()
    data = result.data.isel(layer=[1], head=[2]).assign_coords(layer=[0], head=[0])
    page = study(replace(result, data=data))
    section = sinks(page)
    assert headline(page).finding[0].startswith("The only head rests on the first token (share ")
    (rows,) = blocks_of(section, Table)
    assert [row[0].text for row in rows.groups[0].rows] == ["L0H0"]
    assert blocks_of(section, Figure)[1].caption.startswith("The only head; mean over sequences")
    (bullets,) = blocks_of(section, Bullets)
    assert "One head at a time." not in dict(bullets.items)


def test_a_model_without_a_sink_and_a_single_sequence_are_drawn(samples) -> None:
    result = samples.sinks()
    for name in ("sink_mass_low", "sink_mass_high"):
        result.data[name][:] = np.nan
    result.data["sink_mass"][:] = 0.1
    section = sinks(study(result))
    assert blocks_of(section, Prose)[0].text.startswith("No head of 8 rests on the first token")


def test_the_page_is_written(samples) -> None:
    text = render_report([samples.sinks()])
    assert "What rests on the first token" in text
    assert "could not be put into words" not in text
