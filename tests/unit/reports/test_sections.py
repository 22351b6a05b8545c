"""Sections: which are there, what they say, and that none is dropped."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headstream.analyses.evidence import Evidence
from headstream.models.errors import ResultError
from headstream.reports import sections as module
from headstream.reports.baselines import baselines
from headstream.reports.blocks import Bullets, Figure, Fold, Prose, Terms
from headstream.reports.cells import Cells
from headstream.reports.census import census
from headstream.reports.closing import audit, limits
from headstream.reports.effects import effects
from headstream.reports.opening import claims, model
from headstream.reports.prompts import prompts
from headstream.reports.sections import BUILDERS, sections
from headstream.reports.study import Study
from headstream.reports.tables import Cell, Column, Table, table
from headstream.reports.writes import writes


def study(*results) -> Study:
    return Study.of("a title", list(results))


def blocks_of(section, kind):
    found, stack = [], list(section.blocks)
    while stack:
        block = stack.pop(0)
        if isinstance(block, kind):
            found.append(block)
        if isinstance(block, Fold):
            stack = list(block.blocks) + stack
    return found


def text_of(section) -> str:
    words = [section.reading]
    for block in blocks_of(section, (Prose, Bullets, Terms, Figure, Table)):
        if isinstance(block, Prose):
            words.append(block.text)
        elif isinstance(block, Bullets):
            words += [f"{lead} {text}" for lead, text in block.items]
        elif isinstance(block, Terms):
            words += [f"{term.word} {term.text}" for term in block.terms]
        elif isinstance(block, Figure):
            words += [block.alt, block.caption]
        else:
            for group in block.groups:
                words += [f"{cell.text} {cell.note}" for row in group.rows for cell in row]
    return "\n".join(words)


# Which sections there are


def test_order_of_the_page(samples) -> None:
    slugs = [section.slug for section in sections(study(*samples.everything()))]
    assert slugs == [
        "claims",
        "model",
        "prompts",
        "metric",
        "effects",
        "paths",
        "sets",
        "heads",
        "circuits",
        "sinks",
        "writes",
        "audit",
        "limits",
    ]


def test_absent_kinds_have_no_section(samples) -> None:
    assert [s.slug for s in sections(study(samples.heads()))] == [
        "claims",
        "model",
        "heads",
        "limits",
    ]
    assert [s.slug for s in sections(study(samples.decomposition()))] == [
        "model",
        "writes",
        "limits",
    ]


def test_every_section_says_how_to_read_it(samples) -> None:
    for section in sections(study(*samples.everything())):
        assert section.broken == ""
        assert len(section.reading) > 60 or section.slug == "limits"


def test_a_section_that_breaks_stays_with_the_errors_words(samples, monkeypatch) -> None:
    def explode(_: Study) -> None:
        raise ZeroDivisionError("nothing to divide by")

    builders = (BUILDERS[0], ("effects", "Effects", explode), BUILDERS[1])
    monkeypatch.setattr(module, "BUILDERS", builders)
    built = sections(study(samples.heads()))
    assert [s.slug for s in built] == ["claims", "effects", "model", "limits"]
    assert built[1].broken == "ZeroDivisionError: nothing to divide by"
    assert "“Effects” is missing. ZeroDivisionError: nothing to divide by." in text_of(built[-1])


def test_limits_that_break_stay_too(samples, monkeypatch) -> None:
    def explode(*_):
        raise ValueError("no limits")

    monkeypatch.setattr(module, "limits", explode)
    assert sections(study(samples.heads()))[-1].broken == "ValueError: no limits"


# Claims


def test_claims_stand_by_evidence_with_findings_first(samples) -> None:
    section = claims(study(*samples.everything()))
    (listed,) = blocks_of(section, Table)
    labels = [row[1].evidence for group in listed.groups for row in group.rows]
    order = [Evidence.CAUSAL, Evidence.MEASURED, Evidence.UNKNOWN, Evidence.PROVEN]
    assert [e for i, e in enumerate(labels) if labels.index(e) == i] == order


def test_failed_claims_come_first(samples) -> None:
    section = claims(study(samples.patching(), samples.audit(failing=True)))
    (listed,) = blocks_of(section, Table)
    assert listed.groups[0].rows[0][0].note == "B2"
    assert listed.groups[0].rows[0][1].evidence is Evidence.FAILED


def test_a_claim_row_holds_value_interval_n_reason_and_a_link(samples) -> None:
    section = claims(study(samples.audit(), samples.patching(), samples.patching()))
    (listed,) = blocks_of(section, Table)
    row = listed.groups[0].rows[0]
    assert [cell.text for cell in row] == [
        "z of L1H2 restores the answer.",
        "",
        "+0.850 of the gap",
        "p = 0.0002",
        "map 1",
    ]
    assert row[0].note == "z.L1H2 · denoising, all positions at once"
    assert row[2].note == "[+0.830, +0.870], n = 12"
    assert row[2].value == pytest.approx(0.85)
    assert row[4].href == "#patching-2"


# Model and run


def test_model_section_holds_what_is_needed_to_run_it_again(samples) -> None:
    text = text_of(model(study(samples.heads())))
    for part in ("toy-2l", "ab" * 32, "two layers · 4 heads of width 8", "float32", "2.13.0"):
        assert part in text
    assert "repeat a block of tokens" in text
    assert "steps: 3000" in text


def test_the_command_is_the_one_typed_or_one_that_would_do(samples) -> None:
    def command(result) -> str:
        return next(b.text for b in model(study(result)).blocks if type(b).__name__ == "Command")

    assert command(samples.heads()) == "headstream report toy-2l --seed 0 -o report.html"
    assert command(samples.heads(command="headstream report x -n 8")) == "headstream report x -n 8"
    odd = samples.heads(model="my model; rm -rf")
    assert "report 'my model; rm -rf' --seed" in command(odd)


def test_two_models_are_told_apart(samples) -> None:
    text = model(study(samples.heads(), samples.heads(model="other", weights_sha256="cd" * 32)))
    headings = [b.text for b in text.blocks if type(b).__name__ == "Heading"]
    assert headings == ["Model 1: toy-2l", "Model 2: other"]


# Prompts


def test_changed_tokens_are_marked_where_they_stand(samples) -> None:
    section = prompts(study(samples.patching()))
    first = blocks_of(section, Table)[0]
    rows = first.groups[0].rows
    assert [cell.text for cell in rows[0]] == ["position", "0", "1", "2", "3", "4", "5"]
    for version, token in ((rows[1], "John"), (rows[2], "Tom")):
        assert [i for i, cell in enumerate(version[1:]) if cell.changed] == [4]
        assert version[5].tokens == (("·", True), (token, False))
    assert [cell.note for cell in rows[3][1:]] == [
        "",
        "",
        "source",
        "",
        "",
        "query, answer read here",
    ]
    assert first.caption == "Pair 1 of 12. Answer: ·Mary, against ·John"


def test_long_prompts_are_broken_into_lines_of_equal_width(samples) -> None:
    pair = samples.prompt([f"t{i}" for i in range(40)])
    section = prompts(study(samples.patching(prompts=[pair])))
    (strip,) = blocks_of(section, Table)
    assert len(strip.groups) == math.ceil(40 / (len(strip.columns) - 1))
    shown = [cell.text for group in strip.groups for cell in group.rows[0][1:] if cell.text]
    assert shown == [str(i) for i in range(40)]


def test_padding_is_set_apart_in_every_row(samples) -> None:
    pair = samples.prompt() | {"mask": [0, 0, 1, 1, 1, 1]}
    section = prompts(study(samples.patching(prompts=[pair, pair])))
    strip, everything = blocks_of(section, Table)
    for row in strip.groups[0].rows[:3]:
        assert [cell.pad for cell in row[1:]] == [True, True, False, False, False, False]
    assert everything.groups[0].rows[0][1].text == "·Mary ·and ·John ·went"


def test_lists_that_do_not_line_up_are_an_error(samples) -> None:
    pair = samples.prompt() | {"clean_tokens": samples.TOKENS[:5]}
    words = "pair 2 has lists of different lengths: clean 6, corrupted 6, clean_tokens 5"
    with pytest.raises(ResultError, match=words):
        prompts(study(samples.patching(prompts=[samples.prompt(), pair])))


def test_the_same_prompts_are_shown_once(samples) -> None:
    one = prompts(study(samples.patching(), samples.patching(direction="noise")))
    assert len([b for b in one.blocks if isinstance(b, Table)]) == 1
    other = samples.patching(prompts=[samples.prompt(new=" Ann")])
    assert (
        len([b for b in prompts(study(samples.patching(), other)).blocks if isinstance(b, Table)])
        == 2
    )


def test_the_table_of_pairs_ends_and_says_so(samples) -> None:
    section = prompts(study(samples.patching(prompts=[samples.prompt()] * 130)))
    (fold,) = blocks_of(section, Fold)
    assert fold.summary == "The first 100 pairs"
    assert fold.blocks[0].text == ("Shown are the first 100; all 130 are in the page's JSON.")
    assert fold.blocks[1].n_rows == 100


# Metric and baselines


def test_baselines_give_both_runs_and_every_control(samples) -> None:
    section = baselines(study(samples.patching()))
    runs, controls = blocks_of(section, Table)
    row = runs.groups[0].rows[0]
    assert [cell.text for cell in row[3:]] == ["+5.000", "12", "nats"]
    low, high = (float(x) for x in row[1].note.strip("[]").replace("+", "").split(","))
    assert low < row[1].value < high
    control = controls.groups[0].rows[0]
    assert control[1].note == "bound 0: held"
    assert (control[2].text, control[2].note) == ("+0.425 nats", "L1H2")
    assert control[3].text == "0.120 nats"
    assert (control[4].text, control[4].note) == ("7", "4096 sign flips")
    assert "logit[answer] - logit[wrong]" in text_of(section)


def test_a_self_patch_that_moves_is_said(samples) -> None:
    result = samples.patching()
    result.details["self_patch_max"] = 0.5
    (_, controls) = blocks_of(baselines(study(result)), Table)
    assert controls.groups[0].rows[0][1].note == "bound 0: NOT HELD"


def test_only_directions_that_were_run_are_explained(samples) -> None:
    assert "Noising" not in text_of(baselines(study(samples.patching())))
    both = text_of(baselines(study(samples.patching(), samples.patching(direction="noise"))))
    assert "Denoising" in both
    assert "Noising" in both


# Effect maps


def test_maps_of_one_metric_share_their_scale(samples) -> None:
    small = samples.by_position()
    figures = blocks_of(effects(study(samples.patching(), small)), Figure)
    limits = [(f.spec["data"][0]["zmin"], f.spec["data"][0]["zmax"]) for f in figures]
    assert limits == [(-4.25, 4.25), (-4.25, 4.25)]
    other = {"name": "probability", "formula": "p", "unit": "share", "noun": "it"}
    figures = blocks_of(
        effects(study(samples.patching(), samples.by_position(metric=other))), Figure
    )
    assert [f.spec["data"][0]["zmax"] for f in figures] == [4.25, 2.0]


def test_map_is_said_in_one_sentence(samples) -> None:
    (figure,) = blocks_of(effects(study(samples.patching())), Figure)
    assert figure.alt == (
        "2 by 4 cells: largest +4.250 nats at L1H2; lowest −1.250 nats at L1H0; "
        "4 of 7 tested cells not distinguishable from no effect."
    )


def test_a_map_of_nothing_or_of_one_cell_is_not_said_as_one_of_many(samples) -> None:
    (figure,) = blocks_of(
        effects(study(samples.patching(mean=np.zeros((2, 4)), causal=[]))), Figure
    )
    assert figure.alt.startswith("2 by 4 cells: every effect is zero; ")
    one = samples.patching(mean=np.array([[1.5]]), coords={"layer": [1], "head": [0]}, causal=[])
    (figure,) = blocks_of(effects(study(one)), Figure)
    assert figure.alt.startswith("One cell: largest +1.500 nats at L1H0; the one tested cell ")


def test_caption_says_direction_n_unit_scale_and_what_is_hidden(samples) -> None:
    (figure,) = blocks_of(effects(study(samples.patching())), Figure)
    for words in (
        "Denoising, all positions at once: mean",
        "(n = 12) in nats",
        "from −4.250 to +4.250",
        "p > 0.05",
        "12 ",
    ):
        assert words in figure.caption
    assert figure.caption.endswith("Nothing is hidden.")
    mean = np.array([[0.5, np.nan, 1.5, 2.0]])
    part = samples.patching(mean=mean, coords={"layer": [1], "head": [0, 1, 2, 3]}, causal=[])
    (figure,) = blocks_of(effects(study(part)), Figure)
    assert figure.caption.endswith(
        "Not shown: grey is one cell that could not be computed; 1 of 2 layers were not patched."
    )


def test_cells_are_struck_framed_or_numbered(samples) -> None:
    (figure,) = blocks_of(effects(study(samples.patching())), Figure)
    effect_map, strokes = figure.spec["data"]
    assert effect_map["text"] == [["", "+2.50", "", ""], ["−1.25", "", "+4.25", ""]]
    assert sorted(zip(strokes["y"], strokes["x"], strict=True)) == [(0, 0), (0, 3), (1, 1), (1, 3)]
    assert [(s["x0"], s["y0"]) for s in figure.spec["layout"]["shapes"]] == [
        (0.5, -0.5),
        (1.5, 0.5),
    ]


def test_below_six_pairs_nothing_is_tested_struck_or_framed(samples) -> None:
    (figure,) = blocks_of(effects(study(samples.patching(n=4))), Figure)
    assert [trace["meta"]["role"] for trace in figure.spec["data"]] == ["diverging"]
    assert not figure.spec["layout"].get("shapes")
    assert "No cell was tested" in figure.caption


def test_pointer_table_and_json_give_the_same_number(samples) -> None:
    result = samples.patching()
    section = effects(study(result))
    (figure,) = blocks_of(section, Figure)
    (cells,) = blocks_of(section, Table)
    row = next(row for row in cells.groups[0].rows if row[0].text == "L1H2")
    assert row[1].value == float(result.data["mean"].sel(layer=1, head=2)) == 4.25
    assert f"effect {row[1].text} nats {row[1].note}" in figure.spec["data"][0]["hovertext"][1][2]
    assert figure.spec["data"][0]["z"][1][2] == 4.25


def test_table_keeps_the_sign_in_its_order(samples) -> None:
    (cells,) = blocks_of(effects(study(samples.patching())), Table)
    places = [row[0].text for row in cells.groups[0].rows]
    assert places[:2] == ["L1H2", "L0H1"]
    assert places[-1] == "L1H0"
    assert len(places) == 8


def test_large_maps_have_a_short_table_and_a_whole_one(samples) -> None:
    tokens = [f"t{i}" for i in range(30)]
    section = effects(study(samples.by_position(tokens)))
    short, whole = blocks_of(section, Table)
    assert (short.n_rows, whole.n_rows) == (12, 60)
    assert short.groups[0].rows[0][0].text == "L1@29"
    assert isinstance(section.blocks[-1], Fold)


def test_huge_maps_are_a_grid_of_means(samples) -> None:
    tokens = [f"t{i}" for i in range(400)]
    section = effects(study(samples.by_position(tokens)))
    _, grid = blocks_of(section, Table)
    assert (grid.n_rows, len(grid.columns)) == (2, 401)
    assert "every 10th label" in blocks_of(section, Figure)[0].caption


@pytest.mark.parametrize(
    ("coords", "names"),
    [
        ({"layer": [0, 3]}, ["L0", "L3"]),
        ({"layer": [1], "kv_head": [0, 1]}, ["L1KV0", "L1KV1"]),
        ({"layer": [0], "role": ["source", "query"]}, ["L0@source", "L0@query"]),
        ({"role": ["a", "b"], "layer": [2]}, ["L2@a", "L2@b"]),
        ({"layer": [0], "head": [1], "pos": [4, 5]}, ["L0H1@4", "L0H1@5"]),
    ],
)
def test_places_of_every_kind_of_site(samples, coords, names) -> None:
    mean = np.linspace(1.5, 2.5, 2).reshape([len(c) for c in coords.values()])
    result = samples.patching(mean=mean, coords=coords, causal=[])
    cells = Cells.of(study(result).items[0])
    assert [name for row in cells.names for name in row] == names
    assert cells.mean.ravel().tolist() == [1.5, 2.5]


def test_an_axis_that_no_map_knows_is_an_error(samples) -> None:
    result = samples.patching(
        mean=np.ones((1, 2)), coords={"layer": [0], "expert": [1, 2]}, causal=[]
    )
    with pytest.raises(ResultError, match=r"map of effects has axes .*got \['layer', 'expert'\]"):
        Cells.of(study(result).items[0])


def test_refused_shares_have_no_column(samples) -> None:
    section = effects(study(samples.patching(refused="the gap is within its own noise")))
    (cells,) = blocks_of(section, Table)
    assert "share of the gap" not in [column.heading for column in cells.columns]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_precisions_are_drawn(samples, dtype) -> None:
    (figure,) = blocks_of(effects(study(samples.patching(dtype=dtype))), Figure)
    assert figure.spec["data"][0]["z"][1][2] == 4.25


# Head census


def test_census_names_scores_chance_and_labels(samples) -> None:
    section = census(study(samples.heads()))
    scores, by_distance = blocks_of(section, Table)
    assert [column.heading for column in scores.columns][:3] == ["head", "label", "previous token"]
    assert {column.note for column in scores.columns[2:]} == {"chance 0.06"}
    row = next(row for row in scores.groups[0].rows if row[0].text == "L1H2")
    assert row[1].text == "induction pattern"
    assert (row[5].text, row[5].note) == ("0.94", "[0.93, 0.95]")
    assert [row[0].text for row in by_distance.groups[0].rows] == ["L1H2", "L1H2 control"]
    assert "What induction measures." in text_of(section)


def test_census_marks_what_does_not_stand_clear_of_chance(samples) -> None:
    heatmap = blocks_of(census(study(samples.heads())), Figure)[0]
    scores, strokes = heatmap.spec["data"]
    assert (scores["zmin"], scores["zmax"]) == (-1.0, 1.0)
    struck = set(zip(strokes["y"], strokes["x"], strict=True))
    assert (0, 1) not in struck
    assert (3, 6) not in struck
    assert len(struck) == 7 * 8 - 3
    assert "induction 0.94 at L1H2" in heatmap.alt


def test_induction_is_shown_by_distance_beside_its_control(samples) -> None:
    figure = blocks_of(census(study(samples.heads())), Figure)[1]
    assert figure.spec["data"][0]["x"] == [4.0, 8.0, 16.0, 24.0]
    assert figure.alt == "L1H2: lowest score over all distances 0.92, highest control 0.02."


def test_many_heads_are_folded(samples) -> None:
    section = census(study(samples.heads(n_heads=20)))
    tables = blocks_of(section, Table)
    assert tables[0].n_rows == 2
    assert tables[1].n_rows == 40


# Decomposition


def test_waterfall_ends_at_the_measured_value(samples) -> None:
    result = samples.decomposition()
    (figure,) = blocks_of(writes(study(result)), Figure)
    bar = figure.spec["data"][0]
    total = float(result.data["total"].mean())
    assert bar["meta"]["kinds"][-1] == "total"
    assert bar["base"][-1] == 0.0
    assert bar["x"][-1] == pytest.approx(total, abs=1e-6)
    # float32 on the page: the last write ends where the measured bar does.
    assert bar["base"][-2] + bar["x"][-2] == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize(
    ("bias", "part", "words"),
    [
        (True, True, "The last bar is the whole measured value; b_U, the output bias, is a part"),
        (True, False, "The last bar is the measured value, less the part that the output bias"),
        (False, False, "The last bar is the whole measured value. "),
    ],
)
def test_the_caption_says_what_the_last_bar_holds(samples, bias, part, words) -> None:
    result = samples.decomposition()
    names = [str(name) for name in result.data["component"].values]
    if part:
        result = replace(result, data=result.data.assign_coords(component=[*names[:-1], "b_U"]))
    config = result.provenance.config | {"unembed_bias": bias}
    result = replace(result, provenance=replace(result.provenance, config=config))
    (figure,) = blocks_of(writes(study(result)), Figure)
    assert words in figure.caption


def test_small_writes_are_added_into_one_bar(samples) -> None:
    result = samples.decomposition(n_parts=40)
    section = writes(study(result))
    (figure,) = blocks_of(section, Figure)
    bar = figure.spec["data"][0]
    assert figure.spec["layout"]["yaxis"]["ticktext"][-2:] == ["26 others", "measured"]
    assert len(bar["x"]) == 16
    assert bar["base"][-2] + bar["x"][-2] == pytest.approx(bar["x"][-1], abs=1e-5)
    assert "26 smallest parts" in figure.caption
    (whole,) = blocks_of(section, Table)
    assert whole.n_rows == 40


def test_decomposition_says_what_was_held_fixed(samples) -> None:
    text = text_of(writes(study(samples.decomposition())))
    assert "held fixed at its value in the run" in text
    assert "within 2.4e−07 on every prompt (bound 1.0e−05)" in text


# Audit, limits


def test_audit_puts_failures_first_and_keeps_what_does_not_apply(samples) -> None:
    (checks,) = blocks_of(audit(study(samples.audit(failing=True))), Table)
    rows = [[cell.text for cell in row] for row in checks.groups[0].rows]
    assert [row[0] for row in rows] == ["B2", "M1", "F1"]
    assert [row[-1] for row in rows] == ["FAILED", "passed", "does not apply"]
    assert rows[0][2:4] == ["0.030", "1.0e−05"]
    assert checks.groups[0].rows[0][1].note == "layer 1, position 4"
    assert rows[2][2:5] == ["–", "–", "no MLP in this model"]


def test_checks_of_other_results_are_rows_too(samples) -> None:
    (checks,) = blocks_of(audit(study(samples.patching())), Table)
    row = [cell.text for cell in checks.groups[0].rows[0]]
    assert row[0] == "self_patch.z"
    assert row[2:4] == ["0", "0"]
    assert row[-1] == "passed"


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (1, "n = 1. Below six pairs no p-value can reach 0.05"),
        (12, "n = 12. With fewer than 64 prompt pairs the 95% intervals are too narrow"),
    ],
)
def test_limits_say_what_few_pairs_mean(samples, n, words) -> None:
    assert words in text_of(limits(study(samples.patching(n=n)), []))


def test_limits_of_enough_pairs_say_nothing_of_them(samples) -> None:
    assert "n = 64" not in text_of(limits(study(samples.patching(n=64)), []))


def test_limits_say_what_was_not_run(samples) -> None:
    text = text_of(limits(study(samples.patching()), []))
    for words in ("Denoising only.", "No census.", "No audit.", "No decomposition."):
        assert words in text
    text = text_of(limits(study(samples.patching(direction="noise")), []))
    assert "Noising only." in text
    both = limits(study(samples.patching(), samples.patching(direction="noise")), [])
    assert "only." not in text_of(both)
    assert "No intervention." in text_of(limits(study(samples.heads()), []))


def test_limits_carry_warnings_once_and_every_unknown(samples) -> None:
    one, other = samples.patching(), samples.patching(direction="noise")
    for result in (one, other):
        result.details["warnings"].append("3 of 12 pairs have a small gap")
    text = text_of(limits(study(one, other), []))
    assert text.count("3 of 12 pairs have a small gap.") == 1
    assert "z.L1H0. z of L1H0 pushes away from the answer." in text
    refused = text_of(limits(study(samples.patching(refused="the gap may be zero")), []))
    assert "No shares of the gap: the gap may be zero." in refused


def test_a_row_must_fit_its_table() -> None:
    with pytest.raises(ResultError, match="'Things' has 2 columns and a row of 1 cells"):
        table("Things", [Column("a"), Column("b")], [[Cell("x")]])
