"""The page: results in, one self-contained HTML text out.

    1. the results become one JSON text, the twin; its hash names the run
    2. the twin is read back: what follows sees only what a saved result would give
    3. head line and sections are built as plain values (`headline`, `sections`)
    4. one template renders them, everything escaped, nothing undefined
    5. the policy allows exactly two scripts by their hashes, and no request at all

No clock, no random id, no path: the same results give the same bytes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from headstream.analyses.evidence import Evidence
from headstream.analyses.result import Result
from headstream.models.errors import ResultError
from headstream.reports import formats, tokens
from headstream.reports.blocks import Figure, Fold, Section
from headstream.reports.closing import data
from headstream.reports.figures import library
from headstream.reports.headline import headline
from headstream.reports.packing import pack
from headstream.reports.sections import sections
from headstream.reports.study import Study
from headstream.reports.twin import SCHEMA, Twin, results_in, script_json

_MEANINGS = {
    Evidence.CAUSAL: "an intervention was made and the output moved",
    Evidence.MEASURED: "seen on this model and these inputs",
    Evidence.UNKNOWN: "not established; the reason says what would settle it",
    Evidence.PROVEN: "follows from the arithmetic, checked here",
    Evidence.FAILED: "should hold, and did not",
}


def render_report(results: Result | Sequence[Any], title: str | None = None) -> str:
    """The page of `results` as HTML text; the same results give the same text.

    Args:
        results: one result, or several in the order in which they are to appear.
        title: heading of the page; None names the models.
    Raises:
        ResultError: if there are no results, or one of them is something else.
    """
    results = [results] if isinstance(results, Result) else list(results)
    if not results:
        raise ResultError("a report needs at least one result, got none")
    for place, result in enumerate(results, 1):
        if not isinstance(result, Result):
            raise ResultError(
                f"result {place} of a report is a {type(result).__name__}, expected a Result",
                hint="read a saved one with load_result",
            )
    if title is None:
        models = list(dict.fromkeys(result.provenance.model for result in results))
        title = f"Inside {formats.listing(models)}"
    twin = Twin.of(title, results)
    value = json.loads(twin.text)
    return _render(Study.of(value["title"], results_in(value)), twin)


def _render(study: Study, twin: Twin) -> str:
    drawing = library()
    parts = sections(study)
    parts.append(
        data(
            study,
            sha256=twin.sha256,
            size=len(twin.text.encode("utf-8")),
            schema=SCHEMA,
            plotly_version=drawing.version,
        )
    )
    figures = list(_figures(parts))
    script = _asset("page.js")
    text: str = (
        _environment()
        .get_template("page.html")
        .render(
            title=study.title,
            headline=headline(study),
            sections=parts,
            meanings=_MEANINGS,
            run=twin.run,
            policy=policy(drawing.text, script),
            style=Markup(_style(figures)),
            script=Markup(script),
            packed=Markup(drawing.packed) if figures else Markup(""),
            figures=Markup(_packed(figures)) if figures else Markup(""),
            twin=Markup(twin.text),
        )
    )
    return text


def policy(*scripts: str) -> str:
    """The Content-Security-Policy that runs exactly `scripts` and makes no request.

    Inline styles stay allowed because plotly sets them on everything it draws.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"
        for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src 'none'; connect-src 'none'; base-uri 'none'; "
        "form-action 'none'"
    )


def _figures(parts: Sequence[Section]) -> Iterator[Figure]:
    stack = [block for part in reversed(parts) for block in reversed(list(part.blocks))]
    while stack:
        block = stack.pop()
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Fold):
            stack += reversed(block.blocks)


def _packed(figures: Sequence[Figure]) -> str:
    """What the page's script draws, by the id of the figure.

    All of it follows from the twin and stands in the tables too, so it need not be read here.
    """
    return pack(script_json({figure.id: figure.spec for figure in figures}))


def _style(figures: Sequence[Figure]) -> str:
    """The style sheet: two sets of colours, the rules, and the room each figure takes."""
    light, dark = _asset("light.css"), _asset("dark.css")
    room = "".join(
        f"#{figure.id}{{height:{figure.height}px;max-width:{figure.width}px}}" for figure in figures
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        '@media screen and (prefers-color-scheme:dark){:root:not([data-theme="light"])'
        f":not([data-printing]){{color-scheme:dark;{dark}}}}}"
        '@media screen{:root[data-theme="dark"]:not([data-printing])'
        f"{{color-scheme:dark;{dark}}}}}{_asset('page.css')}{room}"
    )


@functools.cache
def _asset(name: str) -> str:
    return resources.files("headstream.reports").joinpath("templates", name).read_text("utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    names = ("page.html", "blocks.html")
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({name: _asset(name) for name in names}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(text: str) -> Markup:
    """`text` with places where a line may break: after the dots and underscores of a name."""
    parts = re.split(r"(?<=[._])(?=[^\W\d])", tokens.prose(text))
    return Markup("<wbr>").join(parts)


def _harmless(value: Any) -> Any:
    """Every text that reaches the template: foreign controls made visible, then escaped."""
    return tokens.prose(value) if type(value) is str else value
