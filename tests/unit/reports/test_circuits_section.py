"""The section on circuits: its map, the table of heads, a card a head, what it must not claim."""

from __future__ import annotations

import math

import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.stored import result_from_json
from headstream.models.errors import ResultError
from headstream.reports.blocks import Bullets, Figure, Fold, Heading, Prose, Terms
from headstream.reports.circuits import circuits
from headstream.reports.compositions import Compositions
from headstream.reports.headline import headline
from headstream.reports.sections import sections
from headstream.reports.study import Study
from headstream.reports.tables import Table
from headstream.reports.write import render_report

HOSTILE = ["</script><b>x", "", "\n", "\u202eevil", "{{ 7 * 7 }}", "a" * 90]


def study(*results) -> Study:
    return Study.of("a title", list(results))


def blocks_of(section, kind):
    return [block for block in section.blocks if isinstance(block, kind)]


def cards(section) -> dict[str, Fold]:
    folds = blocks_of(section, Fold)
    return {fold.summary.split(":")[0]: fold for fold in folds if fold.summary.startswith("L")}


def terms(fold: Fold) -> dict[str, str]:
    (listed,) = [block for block in fold.blocks if isinstance(block, Terms)]
    return {term.word: term.text for term in listed.terms}


def prose(section) -> str:
    return "\n".join(block.text for block in blocks_of(section, Prose))


def test_it_stands_between_where_heads_look_and_what_rests(samples) -> None:
    assert circuits(study(samples.heads())) is None
    parts = sections(study(samples.sinks(), samples.circuits(), samples.heads()))
    slugs = [part.slug for part in parts]
    assert slugs[slugs.index("heads") :][:3] == ["heads", "circuits", "sinks"]
    assert not any(part.broken for part in parts)


def test_the_map_shows_the_excess_over_chance_and_strikes_the_rest(samples) -> None:
    (chart,) = blocks_of(circuits(study(samples.circuits())), Figure)
    drawn, struck = chart.spec["data"][:2]
    assert chart.spec["layout"]["xaxis"]["ticktext"] == ["L0H1", "L0H2", "L0H3"], "L0H0 is zero"
    assert chart.spec["layout"]["yaxis"]["ticktext"][6:9] == [
        "L1H2 queries",
        "L1H2 keys",
        "L1H2 values",
    ]
    assert drawn["z"][7] == pytest.approx([0.18, -0.02, -0.02])
    assert drawn["text"][7] == ["+0.18", "", ""]
    assert drawn["zmax"] == pytest.approx(0.18)
    assert len(struck["x"]) == 35
    assert (7, 0) not in set(zip(struck["y"], struck["x"], strict=True))
    assert chart.alt == (
        "1 of 36 stand out; the strongest: L1H2 reads L0H1 through its keys, 0.300; chance is "
        "0.120."
    )
    assert "Nothing is hidden." in chart.caption
    assert "not above 0.200" in chart.caption


def test_noise_about_chance_stays_pale(samples) -> None:
    result = samples.circuits()
    result.details["pairs"][0][3] = 0.125
    (chart,) = blocks_of(circuits(study(result)), Figure)
    assert chart.spec["data"][0]["zmax"] == 0.12
    assert chart.spec["data"][0]["z"][7][0] == pytest.approx(0.005)


def test_the_maps_numbers_stand_in_a_table(samples) -> None:
    section = circuits(study(samples.circuits()))
    (fold,) = [f for f in blocks_of(section, Fold) if f.summary == "The same numbers as a table"]
    (numbers,) = fold.blocks
    row = numbers.groups[0].rows[7]
    assert [cell.text for cell in row] == ["L1H2", "keys", "0.300", "0.100", "0.100"]
    assert [cell.note for cell in row[2:]] == ["stands out", "", ""]


def test_the_table_has_every_number_beside_its_chance(samples) -> None:
    (table,) = blocks_of(circuits(study(samples.circuits())), Table)
    notes = {column.heading: column.note for column in table.columns}
    assert notes["copies"] == "random −0.25 to +0.20"
    assert notes["own first"] == "chance 2%"
    assert notes["copies in runs"] == "chance −0.91 to −0.90"
    rows = {row[0].text: row for row in table.groups[0].rows}
    finder = rows["L1H2"]
    assert finder[1].evidence is Evidence.MEASURED
    assert [cell.text for cell in finder[2:]] == [
        *("+0.98", "96%", "+0.58", "none stands out", "L0H1", "keys: L0H1"),
    ]
    assert finder[4].note == "[+0.56, +0.60]"
    assert finder[6].note == "97%"
    assert (rows["L0H1"][5].text, rows["L0H1"][5].note) == ("the token before", "+9.50")
    assert [cell.text for cell in rows["L0H0"][1:5]] == ["–"] * 4, "idle"


def test_a_card_says_what_stands_out_first(samples) -> None:
    found = cards(circuits(study(samples.circuits())))
    assert found["L1H2"].summary == "L1H2: looks for its own token in what L0H1 wrote, copies"
    assert found["L0H1"].summary == "L0H1: prefers the token before, read by L1H2"
    assert found["L1H3"].summary == "L1H3: nothing stands out"
    said = terms(found["L1H2"])
    assert said["Looks for its own token"].endswith("L0H1 97% and L0H2 5% of tokens (chance 2%)")
    assert said["Reads"] == "keys: L0H1 0.300"
    assert said["Scores come from"].startswith("content × content 93%")
    assert said["Copies"] == (
        "eigenvalues +0.98 (random heads −0.25 to +0.20); 96% of tokens raise themselves most "
        "(chance 2%); +0.58 [+0.56, +0.60] in runs, chance −0.90"
    )
    assert "Reads" not in terms(found["L0H1"])
    assert terms(found["L0H1"])["Is read by"] == "keys: L1H2 0.300"


def test_a_cards_tokens_are_pieces_and_unequal_halves_stay_apart(samples) -> None:
    found = cards(circuits(study(samples.circuits())))
    (pairs,) = [block for block in found["L1H2"].blocks if isinstance(block, Table)]
    _, second, third = pairs.groups[0].rows
    assert third[1].tokens == (("·", True), ("went", False))
    assert [cell.text for cell in second[2:]] == ["+0.83", "–", "–", "–"]
    assert "what earlier heads wrote about them is not in it" in pairs.caption


def test_idle_heads_share_one_line(samples) -> None:
    section = circuits(study(samples.circuits()))
    assert "L0H0" not in cards(section)
    assert "Idle: L0H0 hands on nothing, whatever it looks at (OV is zero)." in prose(section)
    assert len(cards(section)) == 7


def test_many_heads_fold_the_table_and_only_those_that_stand_out_get_a_card(samples) -> None:
    section = circuits(study(samples.circuits(layers=12, n_heads=12)))
    assert "All 144 heads as a table" in [fold.summary for fold in blocks_of(section, Fold)]
    assert list(cards(section)) == ["L0H1", "L1H2"]
    assert "Cards of the 2 heads that stand out most of 143" in prose(section)
    (chart,) = blocks_of(section, Figure)
    assert len(chart.spec["data"][0]["z"]) <= 24
    assert "Not shown: 27852 of 28116; the rows and columns with" in chart.caption
    assert chart.spec["data"][0]["zmax"] == pytest.approx(0.18)
    (fold,) = [f for f in blocks_of(section, Fold) if f.summary == "All 144 heads as a table"]
    assert fold.blocks[0].columns[-1].note == "what stands out among the 500 strongest"


def test_one_layer_has_no_map_and_says_why(samples) -> None:
    section = circuits(study(samples.circuits(layers=1)))
    assert blocks_of(section, Figure) == []
    assert "No head reads another here: the model has one layer" in prose(section)
    assert prose(section).startswith("No head copies (weights alone).")


def test_what_is_left_out_stands_once_for_all_layers_and_halves(samples) -> None:
    section = circuits(study(samples.circuits()))
    (fold,) = [f for f in blocks_of(section, Fold) if f.summary == "What these circuits leave out"]
    (bullets,) = fold.blocks
    assert bullets.items == (
        (
            "QK and OV:",
            "The division of 'blocks.0.ln1' and 'blocks.1.ln1' is left out: it differs by "
            "position.",
        ),
        ("OV:", "Only the direct path to the logits."),
    )
    leads = [lead for lead, _ in blocks_of(section, Bullets)[-1].items]
    assert leads == ["Could, not does.", "Pairs of tokens.", "UNKNOWN:"]


def test_what_nobody_asked_is_unknown_once_for_several_models(samples) -> None:
    section = circuits(study(samples.circuits(), samples.circuits(model="other")))
    assert [block.text.split(":")[0] for block in blocks_of(section, Heading)][::2] == [
        "Study 1",
        "Study 2",
    ]
    items = blocks_of(section, Bullets)[-1].items
    assert [text for lead, text in items if lead == "UNKNOWN:"] == [
        "that the model uses these paths for the answer. Weights say what a head could do; "
        "patching the path would settle it."
    ]


def test_without_patching_the_top_of_the_page_says_what_was_found(samples) -> None:
    first, second = headline(study(samples.circuits())).finding
    assert first == "No intervention was run: nothing on this page is about cause."
    assert second == (
        "L1H2 looks for its own token in what L0H1 wrote about earlier tokens and copies what it "
        "finds (weights alone)."
    )


def test_the_page_is_that_of_the_saved_result(samples) -> None:
    result = samples.circuits()
    assert render_report([result_from_json(result.to_json())]) == render_report([result])
    assert math.isnan(Compositions.of(samples.circuits(layers=1).to_json()["details"]).bar)


def test_a_result_without_its_pairs_is_refused(samples) -> None:
    saved = samples.circuits().to_json()
    del saved["details"]["pairs"]
    with pytest.raises(ResultError, match="damaged circuits result: KeyError\\('pairs'\\)"):
        result_from_json(saved)


def test_hostile_tokens_are_text(samples, parse) -> None:
    result = samples.circuits(tokens=HOSTILE)
    root = parse(render_report([result]))
    section = root.by_id("circuits")
    assert section.find("b") == []
    assert section.find("script") == []
    for shown in ("</script><b>x", "∅", "⏎", "U+202Eevil", "{{·7·*·7·}}"):
        assert shown in section.text
    assert "a" * 25 not in section.text, "a long token is cut"
