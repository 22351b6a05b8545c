"""Maps: a grid of signed numbers in colour.

The scale has both limits set by hand, the same size on either side, so that no colour means zero;
a cell without a number is grey, not white.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headstream.analyses.stored import shortest
from headstream.models.errors import ResultError
from headstream.reports.figures import Drawing, Spec, figure, hover_text
from headstream.reports.tokens import for_plotly

_MOST_TICKS = 40
_FIXED_WIDTH = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"

Grid = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Axis:
    """One axis of a figure: its title and what is at 0, 1, 2, ... on it.

    `tokens` sets the labels in the fixed-width face.
    """

    title: str
    labels: tuple[str, ...]
    tokens: bool = False

    @property
    def step(self) -> int:
        """Every how many places a label is drawn; 1 is all of them."""
        return max(1, math.ceil(len(self.labels) / _MOST_TICKS))

    def spec(self, *, reverse: bool) -> Spec:
        n = len(self.labels)
        ends = [n - 0.5, -0.5] if reverse else [-0.5, n - 0.5]
        font = {"tickfont": {"family": _FIXED_WIDTH}} if self.tokens else {}
        return {
            "type": "linear",
            "title": {"text": for_plotly(self.title)},
            "tickmode": "array",
            "tickvals": list(range(0, n, self.step)),
            "ticktext": [for_plotly(text) for text in self.labels[:: self.step]],
            "range": ends,
            "showgrid": False,
            "zeroline": False,
            "fixedrange": n <= 24,
        } | font


def symmetric_limit(grids: Sequence[Grid]) -> float:
    """The largest size in all `grids`, so that panels that are compared share one scale.

    NaN and infinite cells are left out; 1.0 where nothing is left or everything is zero.
    """
    sizes = [abs(v) for grid in grids for row in grid for v in row if math.isfinite(v)]
    return max(sizes, default=0.0) or 1.0


def heatmap(
    values: Grid,
    *,
    rows: Axis,
    columns: Axis,
    limit: float,
    unit: str,
    hover: Sequence[Sequence[Sequence[str]]],
    texts: Sequence[Sequence[str]],
    faint: Sequence[tuple[int, int]] = (),
    framed: Sequence[tuple[int, int]] = (),
) -> Drawing:
    """A grid of signed numbers, no colour at zero, the same limit on both sides.

    Args:
        values: [row][column]; a cell that is not finite stays empty.
        limit: the value at either end of the scale; see `symmetric_limit`.
        hover: [row][column] lines of text for the pointer.
        texts: [row][column] what is written into a cell; "" leaves it out.
        faint: cells (row, column) struck by a thin line: not distinguishable from no effect.
        framed: cells with a frame: the label CAUSAL.
    """
    n_rows, n_columns = len(rows.labels), len(columns.labels)
    for name, grid in (("values", values), ("hover", hover), ("texts", texts)):
        if len(grid) != n_rows or any(len(row) != n_columns for row in grid):
            got = f"{len(grid)} rows of {sorted({len(row) for row in grid})}"
            raise ResultError(
                f"heatmap has {n_rows} row labels and {n_columns} column labels, {name} has {got}"
            )
    wide = n_columns > 24
    traces: list[Spec] = [
        {
            "type": "heatmap",
            "meta": {"role": "diverging"},
            "x": list(range(n_columns)),
            "y": list(range(n_rows)),
            "z": [[shortest(value) for value in row] for row in values],
            "zmin": -limit,
            "zmax": limit,
            "text": [[for_plotly(text) for text in row] for row in texts],
            "texttemplate": "%{text}",
            "hovertext": [[hover_text(lines) for lines in row] for row in hover],
            "hoverinfo": "text",
            "hoverongaps": False,
            "xgap": 1 if wide else 2,
            "ygap": 1 if n_rows > 24 else 2,
            "colorbar": {
                "orientation": "h",
                "thickness": 8,
                "len": 190,
                "lenmode": "pixels",
                "x": 1,
                "xanchor": "right",
                "y": 1,
                "yanchor": "bottom",
                "ypad": 6,
                "outlinewidth": 0,
                "tickvals": [-limit, 0, limit],
                "ticktext": [_tick(-limit), f"0 {for_plotly(unit)}", _tick(limit)],
                "ticklen": 0,
            },
        }
    ]
    empty = [[None if math.isfinite(value) else 1 for value in row] for row in values]
    if any(value for row in empty for value in row):
        traces.append(
            {
                "type": "heatmap",
                "meta": {"role": "empty"},
                "x": list(range(n_columns)),
                "y": list(range(n_rows)),
                "z": empty,
                "showscale": False,
                "hoverinfo": "skip",
                "hoverongaps": False,
                "xgap": traces[0]["xgap"],
                "ygap": traces[0]["ygap"],
            }
        )
    cell = _cell_height(n_rows)
    if faint:
        traces.append(
            {
                "type": "scatter",
                "meta": {"role": "faint"},
                "mode": "markers",
                "x": [column for _, column in faint],
                "y": [row for row, _ in faint],
                "marker": {
                    "symbol": "line-ne-open",
                    "size": max(3, min(9, cell // 4, _cell_width(n_columns) // 4)),
                },
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    shapes = [
        {
            "type": "rect",
            "name": "causal",
            "x0": column - 0.5,
            "x1": column + 0.5,
            "y0": row - 0.5,
            "y1": row + 0.5,
        }
        for row, column in framed
    ]
    labels = max((len(text) for text in columns.labels), default=1)
    steep = n_columns // columns.step * (labels + 2) > 110
    x_axis = columns.spec(reverse=False) | {"tickangle": -60 if steep else 0}
    x_axis["title"] = x_axis["title"] | {"standoff": 28 if not steep else 14}
    bottom = 58 + (7 * min(labels, 18) if steep else 0)
    top = 48
    return Drawing(
        figure(
            traces,
            {
                "xaxis": x_axis,
                "yaxis": rows.spec(reverse=True) | {"automargin": True},
                "shapes": shapes,
                "margin": {"t": top, "r": 12, "b": bottom, "l": 64},
            },
        ),
        height=top + bottom + cell * n_rows,
        width=max(420, min(1040, 150 + n_columns * max(_cell_width(n_columns), 6 * labels))),
    )


def _tick(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")


def _cell_height(rows: int) -> int:
    return 44 if rows <= 4 else 34 if rows <= 12 else 24 if rows <= 24 else 18


def _cell_width(columns: int) -> int:
    return 84 if columns <= 10 else 52 if columns <= 20 else 28 if columns <= 40 else 14
