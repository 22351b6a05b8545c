"""A report in a real browser, from disk, offline: drawn, quiet, saved, themed, printed, bare."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import sys
import time
import zlib
from pathlib import Path

import pytest

from headstream.reports.tokens import visible
from headstream.reports.write import write_report

pytestmark = pytest.mark.browser

SAMPLES = Path(__file__).resolve().parents[1] / "report_samples.py"
HOSTILE = [
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    '<a href="javascript:alert(1)">x</a>',
    "<s>",
    "<b>",
    "&lt;",
    "$x$",
    "the",
    "the",
    "",
]


@pytest.fixture(scope="module")
def samples():
    spec = importlib.util.spec_from_file_location("report_samples", SAMPLES)
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_samples"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(samples, tmp_path_factory) -> Path:
    return write_report(samples.everything(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def drawn(browser, report):
    """The report in the light theme, every figure drawn, and what was logged on the way."""
    browser.size(1280, 900)
    browser.open(report)
    browser.scroll_through()
    return {"messages": browser.messages(), "requests": browser.requests()}


def corner(browser) -> str:
    """Colour of the first pixel of a screenshot: the one sample that no PNG filter changes."""
    data = base64.b64decode(browser.command("Page.captureScreenshot", format="png")["data"])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = b"", 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            chunks += data[at + 8 : at + 8 + size]
        at += 12 + size
    return "#" + zlib.decompress(chunks)[1:4].hex()


def lightness(browser) -> float:
    """Brightness of the page's background, 0 to 1."""
    code = """
        const probe = document.createElement('canvas').getContext('2d');
        const read = (colour) => { probe.fillStyle = colour; return probe.fillStyle; };
        return read(getComputedStyle(document.documentElement).backgroundColor);
    """
    colour = browser.run(code)
    return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / (3 * 255)


# Opened from disk


def test_every_figure_is_drawn(browser, drawn) -> None:
    plots = browser.run("return document.querySelectorAll('.plot').length")
    assert plots == 10
    shown = browser.run(
        "return [...document.querySelectorAll('.plot')].map("
        "(p) => p.querySelectorAll('.main-svg').length > 0 && p.clientHeight > 100)"
    )
    assert shown == [True] * plots


def test_console_is_silent_and_nothing_is_asked_for(report, drawn) -> None:
    assert drawn["messages"] == []
    outside = [
        url for url in drawn["requests"] if not url.startswith((report.as_uri(), "data:", "blob:"))
    ]
    assert outside == []
    assert report.as_uri() in drawn["requests"], "the log that should hold requests holds none"


def test_a_request_is_refused_by_the_policy(browser, drawn) -> None:
    browser.run(
        "window.violations = [];"
        "document.addEventListener('securitypolicyviolation',"
        " (e) => window.violations.push(e.effectiveDirective));"
        "fetch('https://example.org/').catch(() => {});"
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        "document.head.append(s);"
    )
    browser.wait("window.violations.length >= 2", seconds=5)
    assert set(browser.run("return window.violations")) >= {"connect-src", "script-src-elem"}
    assert browser.run("return window.ran") is None
    browser.messages()


def test_toolbar_offers_no_upload(browser, drawn) -> None:
    names = browser.run(
        "return [...document.querySelectorAll('.modebar-btn')].map("
        "(b) => (b.dataset.title || b.getAttribute('aria-label') || '').toLowerCase())"
    )
    assert names
    assert not [name for name in names if "share" in name or "cloud" in name or "edit" in name]


def test_drawn_pictures_have_a_role_and_a_name(browser, drawn) -> None:
    pictures = browser.run(
        "return [...document.querySelectorAll('.plot')].map((p) => {"
        " const s = [...p.querySelectorAll('.main-svg')];"
        " return [s[0].getAttribute('role'), s[0].getAttribute('aria-label'),"
        "  s.slice(1).every((x) => x.getAttribute('aria-hidden') === 'true')]; })"
    )
    for role, name, rest_hidden in pictures:
        assert role == "img"
        assert len(name) > 40
        assert rest_hidden


def test_no_colour_means_zero(browser, drawn) -> None:
    scale, low, high = browser.run(
        "const t = document.querySelector('#figure-patching-3').data[0];"
        "return [t.colorscale, t.zmin, t.zmax]"
    )
    assert scale[2] == [0.5, "#ffffff"]
    assert low == -high


def test_json_button_saves_the_bytes_whose_hash_is_shown(browser, drawn) -> None:
    button = "document.querySelector('button[data-save]')"
    name = browser.run(f"return {button}.dataset.save")
    browser.run(f"{button}.click()")
    path = browser.downloads / name
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest in browser.run("return document.querySelector('#data').textContent")
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "headstream.report/1"
    assert browser.messages() == []


def test_tables_sort_by_the_exact_value(browser, drawn) -> None:
    table = "document.querySelector('#effects table[data-sortable]')"
    places = f"return [...{table}.tBodies[0].rows].map((r) => r.cells[0].textContent.trim())"
    before = browser.run(places)
    browser.run(f"{table}.querySelectorAll('th .sort')[1].click()")
    assert browser.run(f"return {table}.querySelectorAll('thead th')[1].ariaSort") == "descending"
    down = browser.run(places)
    assert down[0] == "L1H2"
    assert down[-1] == "L1H0"
    browser.run(f"{table}.querySelectorAll('th .sort')[1].click()")
    assert browser.run(places)[0] == "L1H0"
    assert sorted(before) == sorted(down)


def test_what_can_be_pressed_is_large_enough(browser, drawn) -> None:
    small = browser.run(
        "return [...document.querySelectorAll('button, summary')].filter((b) => {"
        " const r = b.getBoundingClientRect();"
        " return r.width && (r.height < 24 || r.width < 20); }).map((b) => b.textContent)"
    )
    assert small == []


def test_scroll_regions_take_the_focus(browser, drawn) -> None:
    loose = browser.run(
        "return [...document.querySelectorAll('main *')].filter((e) =>"
        " e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === 'auto'"
        " && e.tabIndex < 0).length"
    )
    assert loose == 0


# Themes, sizes, paper


def test_theme_button_turns_page_and_figures(browser, report) -> None:
    browser.size(1280, 900)
    browser.open(report)
    browser.run("document.querySelector('#figure-patching-3').scrollIntoView()")
    browser.wait("document.querySelector('#figure-patching-3').dataset.drawn === 'yes'")
    assert lightness(browser) > 0.9
    zero = "return document.querySelector('#figure-patching-3').data[0].colorscale[2][1]"
    assert browser.run(zero) == "#ffffff"
    for expected in ("light", "dark", "automatic"):
        browser.run("document.querySelector('#theme').click()")
        assert browser.run("return document.querySelector('#theme').textContent") == (
            f"Theme: {expected}"
        )
        if expected == "dark":
            assert lightness(browser) < 0.2
            assert browser.run(zero) != "#ffffff"
    assert browser.run(zero) == "#ffffff"
    assert browser.messages() == []


def test_dark_where_the_reader_prefers_it(browser, report) -> None:
    browser.size(1280, 900)
    browser.open(report)
    assert corner(browser) == "#fafaf8"
    browser.open(report, dark=True)
    browser.scroll_through()
    assert lightness(browser) < 0.2
    assert corner(browser) == "#14171a"
    text = browser.run("return document.querySelector('#figure-patching-3 .xtick text').style.fill")
    assert text == "rgb(231, 230, 226)"
    assert browser.messages() == []


@pytest.mark.parametrize("width", [320, 1280])
def test_page_never_scrolls_sideways(browser, report, width) -> None:
    browser.size(width, 800)
    browser.open(report)
    browser.scroll_through()
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.messages() == []


def test_printing_draws_and_opens_everything(browser, report) -> None:
    browser.size(1280, 600)
    browser.open(report, dark=True)
    browser.wait("window.Plotly")
    browser.run(
        "addEventListener('beforeprint', () => { window.atPrint = {"
        " drawn: document.querySelectorAll('.plot[data-drawn]').length,"
        " closed: document.querySelectorAll('details:not([open])').length,"
        " zero: document.querySelector('.plot').data[0].colorscale[2][1] }; });"
    )
    paper = base64.b64decode(browser.command("Page.printToPDF", printBackground=True)["data"])
    assert paper.startswith(b"%PDF")
    assert browser.run("return window.atPrint") == {"drawn": 10, "closed": 0, "zero": "#ffffff"}
    assert browser.run("return document.querySelectorAll('details[open]').length") == 0
    assert lightness(browser) < 0.2
    assert browser.messages() == []


# Without scripts, and with hostile text


def test_without_scripts_words_and_tables_are_there(browser, report) -> None:
    browser.size(1280, 900)
    browser.open(report, scripts=False)
    try:
        root = browser.command("DOM.getDocument", depth=-1)["root"]["nodeId"]

        def boxes(selector: str) -> int:
            found = browser.command("DOM.querySelectorAll", nodeId=root, selector=selector)
            seen = 0
            for node in found["nodeIds"]:
                try:
                    box = browser.command("DOM.getBoxModel", nodeId=node)["model"]
                except Exception:  # a node that takes no room has no box
                    continue
                seen += box["height"] > 0
            return seen

        assert boxes(".finding") == 4
        assert boxes("#claims tbody tr") > 10
        assert boxes("#effects table") == 3
        assert boxes("#audit table") == 1
        assert boxes("#prompts .strip mark") == 2
        assert boxes("figcaption") == 10
        assert boxes("noscript p") == 10
        assert boxes(".plot") == 0
        assert boxes("button") == 0
        assert browser.messages() == []
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


def test_hostile_tokens_are_drawn_as_they_are(browser, samples, tmp_path) -> None:
    result = samples.by_position(HOSTILE, model="<img src=x onerror=alert(2)>")
    cards = samples.circuits(tokens=HOSTILE)
    path = write_report([result, cards], tmp_path / "r.html", title="<script>alert(3)</script>")
    browser.size(1280, 900)
    browser.open(path)
    browser.scroll_through()
    ticks = browser.run(
        "return [...document.querySelectorAll('#figure-patching-1 .xtick text')]"
        ".map((t) => t.textContent)"
    )
    assert len(ticks) == len(HOSTILE)
    for index, (tick, token) in enumerate(zip(ticks, HOSTILE, strict=True)):
        shown = visible(token)
        assert tick == f"{index}:{shown}" or (len(shown) > 14 and tick.startswith(f"{index}:"))
    assert browser.run("return document.querySelectorAll('img, iframe, .plot a').length") == 0
    assert browser.run("return document.title") == "<script>alert(3)</script>"
    strip = browser.run("return document.querySelector('.strip').textContent")
    for token in HOSTILE:
        assert visible(token) in strip
    assert browser.messages() == []


def test_pointer_shows_what_the_table_shows(browser, drawn, report) -> None:
    browser.size(1280, 900)
    browser.open(report)
    browser.run("document.querySelector('#figure-patching-3').scrollIntoView({block: 'center'})")
    browser.wait("document.querySelector('#figure-patching-3').dataset.drawn === 'yes'")
    x, y = browser.run(
        "const p = document.querySelector('#figure-patching-3');"
        "const { xaxis, yaxis } = p._fullLayout; const box = p.getBoundingClientRect();"
        "return [box.left + xaxis._offset + xaxis.l2p(2), box.top + yaxis._offset + yaxis.l2p(1)]"
    )
    for step in (2, 0):
        browser.command("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
    browser.wait("document.querySelector('#figure-patching-3 .hoverlayer text')")
    text = browser.run(
        "return document.querySelector('#figure-patching-3 .hoverlayer').textContent"
    )
    assert "L1H2" in text
    assert "+4.250 nats [+4.150, +4.350]" in text
    assert "⇄ CAUSAL" in text
