"""The whole page: policy, structure, the same bytes, and text that cannot become markup."""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import itertools
import json
import re
import subprocess
import sys
import time

import pytest

from headstream.analyses.stored import load_result, result_from_json
from headstream.models.errors import ResultError
from headstream.reports import sections
from headstream.reports.figures import library
from headstream.reports.packing import unpack
from headstream.reports.page import render_report
from headstream.reports.tokens import prose, visible
from headstream.reports.twin import Twin, results_in, script_json

# Text that has broken viewers of this kind; every slot of a result gets each of them.
HOSTILE = [
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='x",
    "</script><script>alert(1)</script>",
    '<a href="javascript:alert(1)">x</a>',
    "<!--<script>",
    "{{ 7 * 7 }}{% raw %}",
    "<s></s><b>&lt;&amp;",
    "]]><svg/onload=alert(1)>",
    "\u202eevil\u0000\u001b[31m",
    "$x$ %{y} %{customdata}",
    "\ud83d alone",
    "a\nb\tc",
]
# Strings that say what a value is; a result with others is refused before anything is drawn.
STRUCTURE = {"schema", "kind", "type", "dims", "evidence", "direction", "positions", "where"}


@pytest.fixture(scope="module")
def results(samples):
    return samples.everything()


@pytest.fixture(scope="module")
def text(results) -> str:
    return render_report(results)


@pytest.fixture(scope="module")
def root(text, parse):
    return parse(text)


def poisoned(value, poison: str, key: str = ""):
    """`value` with `poison` behind every string that is not structure."""
    if isinstance(value, dict):
        return {
            name: item if name in STRUCTURE else poisoned(item, poison, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [poisoned(item, poison, key) for item in value]
    if isinstance(value, str):
        return value + poison
    return value


# Structure


def test_ids_are_unique_and_links_lead_somewhere(root) -> None:
    ids = [e.attributes["id"] for e in root.all() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    inside = [e.attributes["href"] for e in root.find("a")]
    assert {href[1:] for href in inside} <= set(ids)
    labelled = [
        e.attributes[n] for e in root.all() for n in ("aria-labelledby",) if n in e.attributes
    ]
    assert set(labelled) <= set(ids)


def test_nothing_is_fetched_and_nothing_is_inline(root) -> None:
    for element in root.all():
        for name, value in element.attributes.items():
            assert not name.startswith("on"), f"<{element.tag} {name}>"
            assert name not in ("style", "src", "srcset", "action", "formaction", "background")
            if name == "href":
                assert value.startswith("#") or value == "data:,"
            if element.tag != "a":
                assert "http:" not in (value or "")
                assert "https:" not in (value or "")
        assert element.tag not in ("iframe", "object", "embed", "img", "base", "form", "svg")
    assert "url(" not in root.find("style")[0].text
    assert "@import" not in root.find("style")[0].text


def test_policy_allows_the_two_scripts_and_no_request(root) -> None:
    (meta,) = [
        m for m in root.find("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(
        part.strip().split(" ", 1) for part in meta.attributes["content"].split(";") if part.strip()
    )
    (running,) = [s for s in root.find("script") if "type" not in s.attributes]
    wanted = {
        "'sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() + "'"
        for code in (running.text, library().text)
    }
    assert set(rules["script-src"].split()) == wanted
    assert rules["default-src"] == rules["connect-src"] == rules["font-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data: blob:"


def test_the_page_script_never_writes_markup(root) -> None:
    (running,) = [s for s in root.find("script") if "type" not in s.attributes]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
    ):
        assert word not in running.text


def test_library_is_there_once_and_whole(root, text) -> None:
    packed = root.by_id("plotly-packed").text
    assert packed == library().packed
    assert text.count(packed[:200]) == 1
    assert "Plotly.newPlot" not in text.replace(root.find("script")[-1].text, "")


def test_library_is_left_out_of_a_page_without_figures(samples, parse) -> None:
    root = parse(render_report([samples.audit()]))
    assert root.by_id("plotly-packed").text == root.by_id("figures-packed").text == ""


def test_every_figure_has_its_numbers_its_words_and_its_room(root) -> None:
    figures = root.find("figure")
    assert len(figures) == 10
    style = root.find("style")[0].text
    specs = json.loads(unpack(root.by_id("figures-packed").text))
    for figure in figures:
        (plot,) = figure.find("div", class_="plot")
        name = plot.attributes["id"]
        assert set(specs.pop(name)) == {"data", "layout"}
        assert plot.attributes["role"] == "group"
        assert len(plot.attributes["aria-label"]) > 40
        (caption,) = figure.find("figcaption")
        assert caption.text.strip()
        assert re.search(rf"#{name}{{height:\d+px;max-width:\d+px}}", style)
    assert not specs


def test_tables_have_captions_and_headings(root) -> None:
    tables = root.find("table")
    assert len(tables) > 8
    for table in tables:
        assert table.find("caption")[0].text.strip()
        for row in table.find("tr"):
            assert any(cell.attributes.get("scope") for cell in row.find("th"))
    for region in root.find("div", class_="scroll"):
        assert region.attributes["tabindex"] == "0"
        assert region.attributes["aria-label"]


def test_landmarks_and_headings(root) -> None:
    assert len(root.find("h1")) == len(root.find("main")) == 1
    assert root.find("html")[0].attributes["lang"] == "en"
    numbers = [h.find("span", class_="count")[0].text for h in root.find("h2")]
    assert numbers == [str(i) for i in range(1, len(numbers) + 1)]
    levels = [int(e.tag[1]) for e in root.all() if re.fullmatch(r"h\d", e.tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_labels_are_a_mark_and_a_word(root) -> None:
    badges = {badge.text.strip() for badge in root.find("span", class_="badge")}
    assert badges == {"∎ PROVEN", "⇄ CAUSAL", "◴ MEASURED", "? UNKNOWN", "✗ FAILED"}


def test_failure_is_the_first_thing_said(samples, parse) -> None:
    root = parse(render_report([samples.audit(failing=True), samples.patching()]))
    header = root.find("header")[0].text
    assert header.index("Warning: 1 of three checks FAILED") < header.index("Two heads restore")


def test_broken_section_is_on_the_page(samples, parse, monkeypatch) -> None:
    def explode(_):
        raise KeyError("metric <b>")

    builders = (*sections.BUILDERS[:4], ("effects", "Effects", explode))
    monkeypatch.setattr(sections, "BUILDERS", builders)
    root = parse(render_report([samples.patching()]))
    broken = root.by_id("effects")
    assert "could not be drawn: KeyError: 'metric <b>'" in broken.text
    assert not broken.find("b")
    assert "“Effects” is missing." in root.by_id("limits").text


# The twin, and the same bytes


def test_twin_holds_every_result_and_its_hash_is_shown(root, results) -> None:
    twin = root.by_id("headstream-result").text
    value = json.loads(twin)
    assert value["schema"] == "headstream.report/1"
    assert [r.to_json() for r in results_in(value)] == [result.to_json() for result in results]
    digest = hashlib.sha256(twin.encode("utf-8")).hexdigest()
    assert digest in root.by_id("data").text
    assert f"run {digest[:8]}" in root.find("header")[0].text
    (button,) = [b for b in root.find("button") if "data-save" in b.attributes]
    assert button.attributes["data-save"] == f"headstream-{digest[:8]}.json"
    assert f"{len(twin.encode()):,} bytes" in button.text


def test_what_results_share_stands_once(root, samples) -> None:
    value = json.loads(root.by_id("headstream-result").text)
    assert len(value["shared"]["prompts"]) == len(value["shared"]["provenance"]) == 1
    assert set(value["shared"]["prompts"][0]) == {"vocabulary", "columns"}
    assert all(item["provenance"] == {"shared": 0} for item in value["results"])
    pointers = [item["details"].get("prompts") for item in value["results"]]
    assert [p for p in pointers if p] == [{"shared": 0}] * 4
    other = samples.patching(prompts=[samples.prompt(new=" Ann")])
    twin = json.loads(Twin.of("t", [samples.patching(), other, samples.patching()]).text)
    assert [item["details"]["prompts"]["shared"] for item in twin["results"]] == [0, 1, 0]


def test_an_array_that_occurs_again_stands_once(samples) -> None:
    results = [samples.patching(), samples.patching(direction="noise")]
    value = json.loads(Twin.of("t", results).text)
    data = [item["data"] for item in value["results"]]
    assert data[0]["clean"] == data[1]["clean"]
    shared = value["shared"]["arrays"][data[0]["clean"]["shared"]]
    assert shared == results[0].to_json()["data"]["clean"]
    assert data[0]["mean"]["dims"] == data[1]["mean"]["dims"] == ["layer", "head"]
    assert len({json.dumps(array) for array in value["shared"]["arrays"]}) == len(
        value["shared"]["arrays"]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(schema="headstream.report/2"), "schema is 'headstream.report/2'"),
        (
            lambda v: v["shared"].update(prompts=[]),
            "result 1 of a report points to prompts that are missing",
        ),
        (lambda v: v.update(shared={}), "result 1 of a report points to provenance that are"),
        (lambda v: v.update(shared=3), "the data of the report is damaged"),
        (lambda v: v.pop("results"), "the data of the report is damaged: KeyError"),
        (lambda v: v.update(results=[None]), "result 1 of a report is not a headstream result"),
        (
            lambda v: v["shared"]["prompts"][0]["vocabulary"].clear(),
            "the data of the report is damaged: KeyError",
        ),
        (lambda v: v["results"][0].update(kind="x"), "result 1 of a report is of unknown kind"),
    ],
)
def test_damaged_twin_is_an_error(samples, change, words) -> None:
    value = json.loads(Twin.of("t", [samples.patching()]).text)
    change(value)
    with pytest.raises(ResultError, match=words):
        results_in(value)


def test_what_is_no_twin_is_an_error() -> None:
    with pytest.raises(ResultError, match="not the data of a report: schema is None"):
        results_in([1, 2])


def test_same_results_same_bytes(samples, text) -> None:
    assert render_report(samples.everything()) == text


def test_saved_results_give_the_same_page(results, text, tmp_path) -> None:
    paths = [result.save(tmp_path / f"{i}.json") for i, result in enumerate(results)]
    assert render_report([load_result(path) for path in paths]) == text


def test_another_process_gives_the_same_bytes(results, text, tmp_path) -> None:
    paths = [str(result.save(tmp_path / f"{i}.json")) for i, result in enumerate(results)]
    code = (
        "import sys, hashlib\n"
        "from headstream.analyses.stored import load_result\n"
        "from headstream.reports.page import render_report\n"
        "text = render_report([load_result(path) for path in sys.argv[1:]])\n"
        "assert 'torch' not in sys.modules, 'a report loaded torch'\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PATH": "/usr/bin", "TZ": "Asia/Tokyo"},
    )
    assert done.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


def test_title_names_the_models_or_is_the_one_given(results, parse) -> None:
    assert parse(render_report(results[:1])).find("title")[0].text == "Inside toy-2l"
    root = parse(render_report(results[:1], "A < B & {{ C }}"))
    assert root.find("title")[0].text == root.find("h1")[0].text == "A < B & {{ C }}"


def test_one_result_needs_no_list(samples) -> None:
    assert render_report(samples.audit()) == render_report([samples.audit()])


def test_nothing_to_report_is_an_error(samples) -> None:
    with pytest.raises(ResultError, match="needs at least one result, got none"):
        render_report([])
    with pytest.raises(ResultError, match="result 2 of a report is a dict, expected a Result"):
        render_report([samples.audit(), {}])


# Foreign text


@pytest.fixture(scope="module", params=range(len(HOSTILE)), ids=lambda i: f"poison-{i}")
def poison(request) -> str:
    return HOSTILE[request.param]


@pytest.fixture(scope="module")
def allowed(root) -> set:
    """Every element of an ordinary page with the names of its attributes."""
    return {(e.tag, frozenset(e.attributes)) for e in root.all()} | {
        ("i", frozenset()),
        ("wbr", frozenset()),
        ("p", frozenset({"class", "role"})),
    }


def test_no_text_of_a_result_becomes_markup(results, poison, allowed, parse) -> None:
    values = [poisoned(result.to_json(), poison) for result in results]
    rendered = render_report([result_from_json(v) for v in values], f"title {poison}")
    rendered.encode("utf-8")
    root = parse(rendered)
    assert {(e.tag, frozenset(e.attributes)) for e in root.all()} <= allowed
    assert not [s for s in root.find("section") if s.attributes.get("class") == "broken"]
    scripts = [s.attributes.get("type") for s in root.find("script")]
    assert scripts.count(None) == 1
    for element in root.all():
        for name in ("href", "id", "class", "for"):
            assert "alert" not in (element.attributes.get(name) or "")
    assert f"title {prose(poison)}" == root.find("h1")[0].text


def test_hostile_tokens_are_shown_as_they_are(samples, poison, parse) -> None:
    tokens = [poison, "the", poison, "the", "", " "]
    root = parse(render_report([samples.by_position(tokens)]))
    strip = root.by_id("prompts").find("table", class_="strip")[0]
    shown = [span.text for span in strip.find("span", class_="token")]
    assert shown[:6] == [visible(token) for token in tokens]
    spec = json.loads(unpack(root.by_id("figures-packed").text))["figure-patching-1"]
    ticks = spec["layout"]["xaxis"]["ticktext"]
    assert len(ticks) == len(set(ticks)) == 6
    for index, tick in enumerate(ticks):
        assert "<" not in tick
        assert ">" not in tick
        assert html.unescape(tick).startswith(f"{index}:")
    assert spec["data"][0]["x"] == [0, 1, 2, 3, 4, 5]


def test_script_data_cannot_end_its_element() -> None:
    text = script_json({"a": "</script><!-- & \u2028 \ud800"})
    assert not set(text) & set("<>&")
    assert json.loads(text) == {"a": "</script><!-- & \u2028 \ud800"}
    text.encode("utf-8")


# Cost


def test_a_toy_fits_its_budget(text) -> None:
    assert len(text.encode()) < 2_300_000
    ours = len(text) - len(library().packed)
    assert ours < 200_000


def test_a_report_renders_in_seconds(results) -> None:
    start = time.perf_counter()
    render_report(results)
    # Measured 0.2 s once imported; ten times that on a busy machine.
    assert time.perf_counter() - start < 2


def test_twelve_figures_share_one_library(samples, parse) -> None:
    many = [samples.patching(seed=seed) for seed in range(12)]
    text = render_report(many)
    root = parse(text)
    assert len(root.find("figure")) == 12
    assert len(text) < 2_600_000


def test_pure_function_of_the_json(results) -> None:
    before = copy.deepcopy([result.to_json() for result in results])
    render_report(results)
    assert [result.to_json() for result in results] == before
