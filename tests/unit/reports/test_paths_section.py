"""The section on paths: what stands out, its map, what was held, and the sentence at the top."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.stored import result_from_json
from headstream.reports.blocks import Figure, Fold, Prose
from headstream.reports.closing import limits
from headstream.reports.headline import headline
from headstream.reports.paths import paths
from headstream.reports.sections import sections
from headstream.reports.study import Study
from headstream.reports.tables import Table
from headstream.reports.write import render_report


def study(*results) -> Study:
    return Study.of("a title", list(results))


def blocks_of(section, kind):
    return [block for block in section.blocks if isinstance(block, kind)]


def rows_of(table):
    return {row[0].text: row for group in table.groups for row in group.rows}


def prose(section) -> str:
    return "\n".join(block.text for block in blocks_of(section, Prose))


def test_it_stands_after_the_maps_of_places(samples) -> None:
    assert paths(study(samples.patching())) is None
    parts = sections(study(samples.paths(), samples.patching(), samples.heads()))
    slugs = [part.slug for part in parts]
    assert slugs[slugs.index("effects") :][:3] == ["effects", "paths", "heads"]
    assert not any(part.broken for part in parts)


def test_the_first_table_has_what_stands_out_with_its_label(samples) -> None:
    first, _ = blocks_of(paths(study(samples.paths())), Table)
    found = rows_of(first)
    assert list(found) == ["L0H1 → L1H2.k", "L1H2 → logits", "L0H2 → L1H2.k"]
    row = found["L0H1 → L1H2.k"]
    assert row[0].note == "into the keys of L1H2"
    assert [cell.text for cell in row[1:5]] == ["+4.000", "80%", "0.0002", "+0.400"]
    assert [cell.note for cell in row[1:3]] == ["[+3.900, +4.100]", "[78%, 82%]"]
    assert row[5].evidence is Evidence.CAUSAL
    assert found["L1H2 → logits"][0].note == "straight to the answer"
    assert first.columns[3].note == "over all 31 paths"
    assert first.caption == ("The 3 paths that stand out, denoising, all positions at once, n = 12")


def test_a_path_without_the_label_says_which_condition_failed(samples) -> None:
    first, _ = blocks_of(paths(study(samples.paths())), Table)
    last = rows_of(first)["L0H2 → L1H2.k"][-1]
    assert last.evidence is Evidence.UNKNOWN
    assert "unrelated prompt" in last.note
    assert "−0.75" in last.note


def test_no_share_where_the_gap_is_too_small(samples) -> None:
    section = paths(study(samples.paths(refused="the gap is below its noise")))
    first, _ = blocks_of(section, Table)
    assert "share of the gap" not in [column.heading for column in first.columns]
    assert "+4.00" in headline(study(samples.paths(refused="too small"))).finding[1]


def test_one_path_is_not_called_paths(samples) -> None:
    result = samples.paths()
    one = [claim for claim in result.claims if claim.id in ("path.L0H1->L1H2.k", "self_patch.path")]
    first, _ = blocks_of(paths(study(replace(result, claims=tuple(one)))), Table)
    assert first.caption == "The one path that stands out, denoising, all positions at once, n = 12"


def test_a_path_that_carries_little_makes_no_headline(samples) -> None:
    """CAUSAL at 1% of the gap is a row of the table, not what a page begins with."""
    little = samples.paths()
    little.data["normalized"] = little.data["normalized"] / 80
    assert headline(study(samples.patching(), little)).finding[1].replace("\u00a0", " ") == (
        "No path of 27 from one part to another carries a tenth of the gap (n = 12)."
    )
    little.data["normalized"] = -12 * little.data["normalized"]  # 0.12, against
    assert ": −0.12 " in headline(study(samples.patching(), little)).finding[1]


def test_the_map_has_receivers_down_and_leaves_the_logits_to_the_table(samples) -> None:
    (chart,) = blocks_of(paths(study(samples.paths())), Figure)
    drawn, struck = chart.spec["data"][:2]
    assert chart.spec["layout"]["xaxis"]["ticktext"] == ["L0H0", "L0H1", "L0H2"]
    assert chart.spec["layout"]["yaxis"]["ticktext"][3:6] == [
        *("L1H0 keys", "L1H1 keys", "L1H2 keys"),
    ]
    assert drawn["z"][5] == [0.02, 4.0, -0.75]
    assert drawn["text"][5] == ["", "+4.00", "−0.75"]
    assert len(struck["x"]) == 25, "27 cells, two of which are told from no effect"
    (frame,) = chart.spec["layout"]["shapes"]
    assert (frame["x0"], frame["y0"]) == (0.5, 4.5)
    assert chart.alt == (
        "27 paths from one part to another: the strongest is L0H1 to L1H2.k, +4.000 nats; 25 are "
        "not distinguishable from no effect."
    )
    assert "Paths straight to the logits are in the table below." in chart.caption
    assert "Grey" not in chart.caption


def test_every_number_of_the_map_is_in_the_folded_table(samples) -> None:
    (fold,) = blocks_of(paths(study(samples.paths())), Fold)
    (numbers,) = fold.blocks
    row = rows_of(numbers)["L1H2 keys"]
    assert [cell.text for cell in row[1:]] == ["+0.020", "+4.000", "−0.750"]
    assert row[2].note == "[+3.900, +4.100]"


def test_direct_beside_total(samples) -> None:
    _, totals = blocks_of(paths(study(samples.paths())), Table)
    found = rows_of(totals)
    assert [cell.text for cell in found["L1H2"][1:4]] == ["+3.500", "+3.500", "–"]
    assert found["L1H2"][4].evidence is Evidence.CAUSAL
    assert [cell.text for cell in found["L0H1"][1:]] == [
        *("+0.020", "+4.180", "L1H2 keys", "no claim"),
    ]


def test_only_paths_to_the_logits_make_no_map(samples) -> None:
    section = paths(study(samples.paths(receivers=["logits"])))
    assert blocks_of(section, Figure) == []
    said = " ".join(headline(study(samples.paths(receivers=["logits"]))).finding)
    assert "strongest leads" not in said


@pytest.mark.parametrize(
    ("frozen", "words"),
    [(True, "So does every other MLP."), (False, "MLPs between the two are recomputed")],
)
def test_what_was_held_is_said_once(samples, frozen, words) -> None:
    config = samples.provenance().config | {"d_mlp": 64}
    result = samples.paths(freeze_mlps=frozen, config=config)
    text = prose(paths(study(result)))
    assert text.count(words) == 1
    assert "every other head stays at what it wrote in the corrupted run" in text
    assert "MLP" not in prose(paths(study(samples.paths()))), "a model without any"
    assert "in the clean run" in prose(paths(study(samples.paths(direction="noise"))))


def test_senders_by_role_are_columns_of_their_own(samples) -> None:
    section = paths(study(samples.paths(roles=["source", "query"])))
    (chart,) = blocks_of(section, Figure)
    assert chart.spec["layout"]["xaxis"]["ticktext"][2:4] == ["L0H1@source", "L0H1@query"]
    assert chart.spec["data"][0]["z"][5][2:4] == [4.0, 2.0]
    _, totals = blocks_of(section, Table)
    assert rows_of(totals)["L0H1@query"][2].text == "+2.090"


def test_too_few_pairs_make_no_cause(samples) -> None:
    first, _ = blocks_of(paths(study(samples.paths(n=4))), Table)
    shown = [row[-1] for row in rows_of(first).values()]
    assert {cell.evidence for cell in shown} == {Evidence.UNKNOWN}
    assert "n = 4" in shown[0].note
    assert headline(study(samples.paths(n=4))).alarms[0].startswith("Only 4 prompt pairs")


def test_the_top_of_the_page_names_the_strongest_edge_and_what_the_census_calls_its_ends(
    samples,
) -> None:
    found = headline(study(samples.patching(), samples.heads(), samples.paths())).finding
    assert found[1].replace("\u00a0", " ") == (
        "Among 27 paths from one part to another the strongest leads from L0H1 (previous-token) "
        "into the keys of L1H2 (induction pattern): +0.80 [0.78, 0.82] of the gap, CAUSAL "
        "(n = 12)."
    )
    other = samples.heads(weights_sha256="cd" * 32)
    assert "previous-token" not in headline(study(samples.paths(), other)).finding[1]


def test_a_page_of_paths_alone_has_its_prompts_metric_and_limits(samples) -> None:
    alone = study(samples.paths())
    assert [part.slug for part in sections(alone)][:5] == [
        *("claims", "model", "prompts", "metric", "paths"),
    ]
    said = dict(limits(alone, []).blocks[0].items)
    assert said["Single places."].endswith("What sets of heads do together was not tested.")
    both = limits(study(samples.paths(), samples.redundant()), []).blocks[0].items
    assert "Single places." not in dict(both)
    assert "No intervention." not in said


def test_the_page_is_that_of_the_saved_result(samples) -> None:
    result = samples.paths()
    assert render_report([result_from_json(result.to_json())]) == render_report([result])
