"""What plotly is given: the library once and whole, known traces, numeric axes, honest scales."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly import offline

from headstream.models.errors import ResultError
from headstream.reports.charts import Line, lines, waterfall
from headstream.reports.figures import checked, library
from headstream.reports.maps import Axis, heatmap, symmetric_limit
from headstream.reports.packing import unpack

HOSTILE = ["<s>", "</s>", "<b>", "<u>", "<|endoftext|>", "a<b", "&lt;", "$x$"]


def grid(values, *, columns=None, rows=None, **options):
    n_rows, n_columns = len(values), len(values[0])
    columns = columns or [f"H{c}" for c in range(n_columns)]
    rows = rows or [f"L{r}" for r in range(n_rows)]
    blank = [[""] * n_columns for _ in range(n_rows)]
    options.setdefault("limit", symmetric_limit([values]))
    drawing = heatmap(
        values,
        rows=Axis("layer", tuple(rows)),
        columns=Axis("head", tuple(columns)),
        unit="nats",
        hover=[[[f"{rows[r]}{columns[c]}"] for c in range(n_columns)] for r in range(n_rows)],
        texts=blank,
        **options,
    )
    return drawing.spec


def test_library_unpacks_to_plotlys_own_bytes() -> None:
    assert unpack(library().packed) == offline.get_plotlyjs()
    assert library().version == offline.get_plotlyjs_version()


def test_library_may_stand_in_a_script_element() -> None:
    text = library().text.lower()
    assert "</script" not in text
    assert "<!--" not in text
    assert "\r" not in text, "the parser would change it, and its hash with it"


def test_unknown_trace_type_is_refused() -> None:
    spec = {"data": [{"type": "waterfall"}], "layout": {}}
    with pytest.raises(ResultError, match=r"trace of type 'waterfall'.*bar with a base"):
        checked(spec)


@pytest.mark.parametrize("kind", [None, "category", "date", "log"])
def test_axis_that_is_not_numeric_is_refused(kind: str | None) -> None:
    spec = {"data": [], "layout": {"xaxis": {"type": kind}}}
    with pytest.raises(ResultError, match=r"xaxis is of type .*, expected 'linear'"):
        checked(spec)


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ([[-0.1, 2.0]], 2.0),
        ([[0.5, 2.0]], 2.0),
        ([[-3.0, -0.5]], 3.0),
        ([[0.0, 0.0]], 1.0),
        ([[math.nan, 0.25]], 0.25),
        ([[math.nan, math.nan]], 1.0),
        ([[math.inf, -0.5]], 0.5),
    ],
)
def test_zero_is_the_middle_of_the_scale(values: list[list[float]], limit: float) -> None:
    trace = grid(values)["data"][0]
    assert (trace["zmin"], trace["zmax"]) == (-limit, limit)
    assert "zmid" not in trace
    assert trace["colorbar"]["tickvals"] == [-limit, 0, limit]


def test_compared_panels_share_one_limit() -> None:
    assert symmetric_limit([[[0.1, -0.2]], [[1.5, math.nan]], [[-4.0]]]) == 4.0


def test_equal_tokens_keep_their_cells() -> None:
    labels = [f"{index}:{token}" for index, token in enumerate("ABABA")]
    spec = grid([[float(r * 5 + c) for c in range(5)] for r in range(5)], columns=labels)
    trace = spec["data"][0]
    assert trace["x"] == trace["y"] == [0, 1, 2, 3, 4]
    assert sum(len(row) for row in trace["z"]) == 25
    assert spec["layout"]["xaxis"]["ticktext"] == ["0:A", "1:B", "2:A", "3:B", "4:A"]
    assert spec["layout"]["xaxis"]["type"] == "linear"


def test_labels_that_look_like_tags_are_shown_as_they_are() -> None:
    labels = [f"{index}:{token}" for index, token in enumerate(HOSTILE)]
    spec = grid([[1.0] * len(labels)], columns=labels)
    assert spec["layout"]["xaxis"]["ticktext"] == [
        "0:&lt;s&gt;",
        "1:&lt;/s&gt;",
        "2:&lt;b&gt;",
        "3:&lt;u&gt;",
        "4:&lt;|endoftext|&gt;",
        "5:a&lt;b",
        "6:&amp;lt;",
        "7:$x$",
    ]
    assert spec["data"][0]["hovertext"][0][0] == "L00:&lt;s&gt;"


def test_missing_cells_are_drawn_as_missing_not_as_zero() -> None:
    spec = grid([[1.0, math.nan], [0.0, -1.0]])
    effects, empty = spec["data"]
    assert effects["z"] == [[1.0, None], [0.0, -1.0]]
    assert empty["meta"] == {"role": "empty"}
    assert empty["z"] == [[None, 1], [None, None]]
    assert all(trace["meta"]["role"] != "empty" for trace in grid([[1.0, 0.0]])["data"])


def test_struck_and_framed_cells_stand_on_their_cells() -> None:
    spec = grid([[1.0, 2.0], [3.0, 4.0]], faint=[(0, 1)], framed=[(1, 0)])
    strokes = spec["data"][1]
    assert (strokes["x"], strokes["y"]) == ([1], [0])
    (frame,) = spec["layout"]["shapes"]
    assert (frame["x0"], frame["x1"], frame["y0"], frame["y1"]) == (-0.5, 0.5, 0.5, 1.5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_half_precision_costs_no_more(dtype: type) -> None:
    values = np.linspace(-1, 1, 64).reshape(8, 8).astype(dtype)
    trace = grid(values.tolist())["data"][0]
    assert len(json.dumps(trace["z"])) < 64 * 16
    assert np.array_equal(np.array(trace["z"], dtype=np.float32), values.astype(np.float32))


def test_labels_must_fit_the_grid() -> None:
    with pytest.raises(ResultError, match="1 row labels and 3 column labels, values has 1 rows"):
        heatmap(
            [[1.0, 2.0]],
            rows=Axis("", ("L0",)),
            columns=Axis("", ("a", "b", "c")),
            limit=1.0,
            unit="nats",
            hover=[[["x"]] * 3],
            texts=[[""] * 3],
        )


def test_many_labels_are_thinned_and_say_so() -> None:
    axis = Axis("pos", tuple(str(i) for i in range(100)))
    assert axis.step == 3
    spec = axis.spec(reverse=False)
    assert spec["tickvals"] == list(range(0, 100, 3))
    assert spec["ticktext"] == [str(i) for i in range(0, 100, 3)]


def test_no_template_travels_with_a_figure() -> None:
    assert "template" not in grid([[1.0]])["layout"]
    assert len(json.dumps(grid([[0.5] * 12 for _ in range(12)]))) < 6_000


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=8))
def test_waterfall_ends_where_its_steps_lead(steps: list[float]) -> None:
    starts = [sum(steps[:i], 0.0) for i in range(len(steps))]
    nothing = [math.nan] * len(steps)
    drawing = waterfall(
        [f"part {i}" for i in range(len(steps))],
        starts=starts,
        steps=steps,
        kinds=["write"] * len(steps),
        lows=nothing,
        highs=nothing,
        hover=[[""]] * len(steps),
        unit="nats",
    )
    bar = drawing.spec["data"][0]
    assert bar["type"] == "bar"
    for i in range(len(steps) - 1):
        # float32 on the page: two sums of at most eight numbers up to 5.
        assert bar["base"][i + 1] == pytest.approx(bar["base"][i] + bar["x"][i], abs=1e-5)
    assert bar["error_x"]["array"] == [None] * len(steps)


def test_waterfall_colours_by_direction() -> None:
    drawing = waterfall(
        ["a", "<b>", "measured"],
        starts=[0.0, 2.0, 0.0],
        steps=[2.0, -0.5, 1.5],
        kinds=["write", "write", "total"],
        lows=[1.5, -0.7, math.nan],
        highs=[2.5, -0.3, math.nan],
        hover=[["a"], ["<b>"], ["measured"]],
        unit="nats",
    )
    bar, links = drawing.spec["data"]
    assert bar["meta"]["kinds"] == ["up", "down", "total"]
    assert bar["error_x"]["array"][0] == pytest.approx(0.5)
    assert bar["hovertext"] == ["a", "&lt;b&gt;", "measured"]
    assert drawing.spec["layout"]["yaxis"]["ticktext"] == ["a", "&lt;b&gt;", "measured"]
    # The line from each bar's end to the next bar.
    assert links["x"] == [2.0, 2.0, None, 1.5, 1.5, None]


def test_lines_show_a_control_as_a_control() -> None:
    items = [
        Line("L1H2", (4.0, 8.0), (0.9, 0.95), 0),
        Line("L1H2 control", (4.0, 8.0), (0.02, math.nan), 0, control=True),
    ]
    spec = lines(items, x_title="distance", y_title="score", y_range=(0.0, 1.0)).spec
    kept, control = spec["data"]
    assert (kept["line"]["dash"], control["line"]["dash"]) == ("solid", "dot")
    assert control["y"] == [0.02, None]
    assert kept["hovertext"][0] == "L1H2<br>distance: 4<br>0.90"
    assert spec["layout"]["xaxis"]["tickvals"] == [4.0, 8.0]
