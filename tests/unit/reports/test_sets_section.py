"""The section on sets: one by one against together, a circuit beside random ones, cuts."""

from __future__ import annotations

from headstream.analyses.evidence import Evidence
from headstream.analyses.stored import result_from_json
from headstream.reports.blocks import Fold, Terms
from headstream.reports.closing import audit, limits
from headstream.reports.headline import headline
from headstream.reports.sections import sections
from headstream.reports.sets import sets
from headstream.reports.study import Study
from headstream.reports.tables import Table
from headstream.reports.write import render_report


def study(*results) -> Study:
    return Study.of("a title", list(results))


def blocks_of(section, kind):
    return [block for block in section.blocks if isinstance(block, kind)]


def rows_of(table):
    return {row[0].text: row for group in table.groups for row in group.rows}


def terms(block: Terms) -> dict[str, str]:
    return {term.word: term.text for term in block.terms}


def test_it_stands_after_the_paths(samples) -> None:
    assert sets(study(samples.paths())) is None
    parts = sections(study(samples.faithful(), samples.paths(), samples.ablation()))
    slugs = [part.slug for part in parts]
    assert slugs[slugs.index("paths") + 1] == "sets"
    assert not any(part.broken for part in parts)


def test_one_by_one_against_together_and_put_back_alone(samples) -> None:
    section = sets(study(samples.redundant()))
    (table,) = blocks_of(section, Table)
    found = rows_of(table)
    whole = found["all 3 cut together"]
    assert [cell.text for cell in whole[1:4]] == ["−4.000", "0.0002", "–"]
    assert whole[1].note == "[−4.100, −3.900]"
    assert whole[4].evidence is Evidence.CAUSAL
    member, other = found["L1H2"], found["L1H3"]
    assert [cell.text for cell in member[1:4]] == ["−0.500", "0.200", "81%"]
    assert member[3].note == "[78%, 84%]"
    assert member[1].note.startswith("[−0.5"), "an interval over prompts"
    assert member[4].evidence is Evidence.CAUSAL
    assert other[4].evidence is Evidence.UNKNOWN
    assert other[4].note == "restoring it alone recovers 4%"
    assert "gives back at least 20% can stand in" in table.caption
    (said,) = blocks_of(section, Terms)
    assert terms(said)["In its place"] == "zero"
    assert "moves it by −0.125 nats" in terms(said)["Controls"]


def test_a_set_without_the_label_says_why(samples) -> None:
    (table,) = blocks_of(sets(study(samples.redundant(causal=False))), Table)
    whole = rows_of(table)["all 3 cut together"][4]
    assert (whole.evidence, whole.note) == (Evidence.UNKNOWN, "p = 0.3 > 0.05")


def test_a_circuit_beside_random_sets_with_its_six_choices(samples) -> None:
    section = sets(study(samples.faithful()))
    (table,) = blocks_of(section, Table)
    enough, complete = rows_of(table).values()
    assert [cell.text for cell in enough[1:4]] == ["0.970", "0.100", "100%"]
    assert [cell.note for cell in enough[1:4]] == ["[0.950, 0.990]", "", "none do as well"]
    assert [cell.text for cell in complete[1:4]] == ["0.010", "0.600", "75%"]
    assert complete[3].note == "5 do as well"
    assert complete[4].evidence is Evidence.CAUSAL
    assert table.columns[2].note == "mean of 20"
    (choices,) = blocks_of(section, Terms)
    page = sections(study(samples.faithful()))
    (claimed,) = blocks_of(page[0], Table)
    assert rows_of(claimed)["The circuit L0H1, L1H2 carries the answer."][3].text == "p = 0.0002"
    assert list(terms(choices)) == [
        *("Unit", "Nodes or edges", "Values", "Positions", "Direction", "Circuit or complement"),
    ]


def test_a_circuit_whose_share_is_refused(samples) -> None:
    (table,) = blocks_of(sets(study(samples.faithful(refused="within its noise"))), Table)
    enough, _ = rows_of(table).values()
    assert [cell.text for cell in enough[1:4]] == ["–", "0.100", "–"]


def test_cuts_by_their_harm_and_a_set_by_its_heads(samples) -> None:
    section = sets(study(samples.ablation()))
    (table,) = blocks_of(section, Table)
    assert table.n_rows == 9
    first, second, *_ = table.groups[0].rows
    assert (first[0].text, first[0].note) == ("pair", "L0H1 and L0H2")
    assert first[5].note == "the corrupted prompts lose as much: −0.45 nats"
    assert [cell.text for cell in second[:5]] == ["L0H1", "−4.000", "80%", "0.0002", "−0.400"]
    assert second[5].evidence is Evidence.CAUSAL
    preserving = sets(study(samples.ablation(how="pattern_preserving")))
    assert "values alone" in terms(blocks_of(preserving, Terms)[0])["All that follows"]


def test_many_cuts_are_folded(samples) -> None:
    section = sets(study(samples.ablation(cuts=24)))
    (table,) = blocks_of(section, Table)
    assert table.n_rows == 12
    (fold,) = blocks_of(section, Fold)
    assert fold.summary == "All 25 cuts as a table"
    assert fold.blocks[0].n_rows == 25


def test_a_control_with_own_values_is_a_check_with_its_bound(samples) -> None:
    (table,) = blocks_of(audit(study(samples.redundant())), Table)
    ((row,),) = [group.rows for group in table.groups]
    assert [cell.text for cell in row[2:4]] == ["0", "0.003"]
    assert row[4].text == "heads cut together"


def test_the_top_of_the_page_names_the_set(samples) -> None:
    found = headline(study(samples.patching(), samples.redundant())).finding[-1]
    assert found.startswith(
        "The set L1H0, L1H2 and L1H3 is needed for the answer: cutting all 3 heads moves it by "
        "−4.00 nats"
    )
    alone = headline(study(samples.faithful())).finding
    assert alone[0].startswith("The circuit of 2 heads keeps 0.97")
    assert not any("No intervention" in text for text in alone)
    items = dict(limits(study(samples.faithful()), []).blocks[0].items)
    assert "No patching." in items
    assert "No intervention." not in items


def test_the_page_is_that_of_the_saved_results(samples) -> None:
    results = [samples.redundant(), samples.faithful(), samples.ablation()]
    again = [result_from_json(result.to_json()) for result in results]
    assert render_report(again) == render_report(results)
