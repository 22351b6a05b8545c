"""Charts beside the maps: a waterfall of contributions, and lines with their controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstream.analyses.stored import shortest
from headstream.reports import formats
from headstream.reports.figures import Drawing, Spec, figure, hover_text
from headstream.reports.maps import Axis
from headstream.reports.tokens import for_plotly


def waterfall(
    labels: Sequence[str],
    *,
    starts: Sequence[float],
    steps: Sequence[float],
    kinds: Sequence[str],
    lows: Sequence[float],
    highs: Sequence[float],
    hover: Sequence[Sequence[str]],
    unit: str,
) -> Drawing:
    """Bars that each start where the one above ended: bars with a base, not a trace of its own.

    Args:
        starts, steps: where a bar begins and how far it goes.
        kinds: "write", "rest" or "total", one a bar.
        lows, highs: 95% interval of each step; NaN where there is none.
    """
    n = len(labels)
    ends = [start + step for start, step in zip(starts, steps, strict=True)]
    bar: Spec = {
        "type": "bar",
        "orientation": "h",
        "meta": {
            "role": "bars",
            "kinds": [
                "total" if kind == "total" else "up" if step >= 0 else "down"
                for kind, step in zip(kinds, steps, strict=True)
            ],
        },
        "x": [shortest(step) for step in steps],
        "y": list(range(n)),
        "base": [shortest(start) for start in starts],
        "width": 0.62,
        "hovertext": [hover_text(lines) for lines in hover],
        "hoverinfo": "text",
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [shortest(high - step) for step, high in zip(steps, highs, strict=True)],
            "arrayminus": [shortest(step - low) for step, low in zip(steps, lows, strict=True)],
            "thickness": 1.2,
            "width": 3,
        },
        "showlegend": False,
    }
    links: Spec = {
        "type": "scatter",
        "meta": {"role": "links"},
        "mode": "lines",
        "x": [x for end in ends[:-1] for x in (shortest(end), shortest(end), None)],
        "y": [y for i in range(n - 1) for y in (i + 0.31, i + 0.69, None)],
        "hoverinfo": "skip",
        "showlegend": False,
    }
    rows = Axis("", tuple(labels)).spec(reverse=True)
    x_axis = {
        "type": "linear",
        "title": {"text": for_plotly(unit)},
        "showgrid": True,
        "zeroline": True,
        "fixedrange": True,
    }
    return Drawing(
        figure(
            [bar, links],
            {
                "xaxis": x_axis,
                "yaxis": rows
                | {"automargin": True, "tickvals": list(range(n))}
                | {"ticktext": [for_plotly(text) for text in labels]},
                "margin": {"t": 12, "r": 16, "b": 48, "l": 64},
            },
        ),
        height=60 + 27 * n,
        width=820,
    )


@dataclass(frozen=True)
class Line:
    """One line: a name, its points, and whether it is a control (drawn dashed and thin).

    `series` picks the colour: a line and its control share one.
    """

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    series: int
    control: bool = False


def lines(
    items: Sequence[Line], *, x_title: str, y_title: str, y_range: tuple[float, float]
) -> Drawing:
    """Lines over a shared numeric axis, named in a legend."""
    traces: list[Spec] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "meta": {"role": "line", "series": line.series, "control": line.control},
            "name": for_plotly(line.name),
            "x": [shortest(x) for x in line.xs],
            "y": [shortest(y) for y in line.ys],
            "line": {
                "dash": "dot" if line.control else "solid",
                "width": 1.6 if line.control else 2.2,
            },
            "marker": {
                "size": 5 if line.control else 7,
                "symbol": "circle-open" if line.control else "circle",
            },
            "hovertext": [
                hover_text([line.name, f"{x_title}: {x:g}", formats.short(y)])
                for x, y in zip(line.xs, line.ys, strict=True)
            ],
            "hoverinfo": "text",
        }
        for line in items
    ]
    xs = sorted({x for line in items for x in line.xs})
    few = {"tickmode": "array", "tickvals": [shortest(x) for x in xs]} if len(xs) <= 16 else {}
    return Drawing(
        figure(
            traces,
            {
                "xaxis": {
                    "type": "linear",
                    "title": {"text": for_plotly(x_title)},
                    "showgrid": False,
                    "zeroline": False,
                    "fixedrange": True,
                }
                | few,
                "yaxis": {
                    "type": "linear",
                    "title": {"text": for_plotly(y_title)},
                    "range": list(y_range),
                    "showgrid": True,
                    "zeroline": False,
                    "fixedrange": True,
                },
                "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
                "margin": {"t": 40, "r": 16, "b": 52, "l": 56},
            },
        ),
        height=320,
        width=820,
    )
