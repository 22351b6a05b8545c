"""Figures: the one module that knows plotly.

A figure is built with plotly's Python classes, which check every property, and leaves as plain
JSON values without a template and without colours: the page's script paints it from the style
sheet, so that light, dark and print need one source each. Two habits keep it honest:

* axes are numeric, tokens are tick texts ("4:·John"): equal tokens never merge into one row;
* trace types are few. A type that the library does not know is drawn as a scatter without a word,
  so another type is refused here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstream.models.errors import ResultError
from headstream.reports.packing import pack
from headstream.reports.tokens import for_plotly

TRACE_TYPES = frozenset({"heatmap", "bar", "scatter", "histogram", "box", "violin"})

Spec = dict[str, Any]


@dataclass(frozen=True)
class Library:
    """plotly.js as the installed plotly wheel holds it.

    Attributes:
        text: the script.
        packed: as `packing.pack` packs it, for a data block that the page unpacks.
        version: of plotly.js.
    """

    text: str
    packed: str
    version: str


@functools.cache
def library() -> Library:
    """The drawing library, packed: the same bytes for the same plotly and zlib."""
    from plotly import offline

    text = offline.get_plotlyjs()
    return Library(text, pack(text), offline.get_plotlyjs_version())


@dataclass(frozen=True)
class Drawing:
    """A figure's JSON values with the room it takes, in CSS pixels."""

    spec: Spec
    height: int
    width: int


def figure(traces: list[Spec], layout: Spec) -> Spec:
    """The figure as plain values, every property checked by plotly's own classes.

    Raises:
        ResultError: as `checked`.
    """
    import plotly.graph_objects as go

    base = {"autotypenumbers": "strict", "hovermode": "closest", "dragmode": False}
    built = go.Figure(data=traces, layout=base | layout).to_plotly_json()
    built["layout"].pop("template", None)
    return checked({"data": list(built["data"]), "layout": built["layout"]})


def checked(spec: Spec) -> Spec:
    """`spec`, if the page can draw it truthfully.

    Raises:
        ResultError: for a trace type outside `TRACE_TYPES`, or an axis that is not numeric.
    """
    for trace in spec["data"]:
        if trace.get("type") not in TRACE_TYPES:
            raise ResultError(
                f"a figure has a trace of type {trace.get('type')!r}, a page draws only "
                f"{', '.join(sorted(TRACE_TYPES))}",
                hint="a waterfall is a bar with a base",
            )
    for name, axis in spec["layout"].items():
        if name.startswith(("xaxis", "yaxis")) and axis.get("type") != "linear":
            raise ResultError(
                f"a figure's {name} is of type {axis.get('type')!r}, expected 'linear'",
                hint="put tokens into ticktext: as categories, equal ones merge",
            )
    return spec


def hover_text(texts: Sequence[str]) -> str:
    """Lines of foreign text for the pointer, each made harmless."""
    return "<br>".join(for_plotly(text) for text in texts)
