"""A result survives the disk unchanged, and what is not one is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from headstream.analyses.evidence import measured, proven
from headstream.analyses.kinds import AuditResult, DecompositionResult, HeadsResult
from headstream.analyses.result import Provenance
from headstream.analyses.stored import (
    dump_json,
    load_result,
    result_from_json,
    shortest,
    write_whole,
)
from headstream.models.errors import ResultError

PROVENANCE = Provenance(
    model="toy",
    weights_sha256="ab" * 32,
    config={"n_layers": 1},
    backend="auto",
    dtype="float32",
    device="cpu",
    seed=0,
    versions={"python": "3.11"},
)


def heads_result() -> HeadsResult:
    labels = np.array([["none", "previous-token"], ["induction pattern", "none"]])
    return HeadsResult(
        title="heads",
        data=xr.Dataset(
            {
                "value": (("score", "layer", "head"), np.array([[[0.1, np.nan], [1 / 3, np.inf]]])),
                "label": (("layer", "head"), labels),
                "tested": (("layer", "head"), np.array([[True, False], [True, True]])),
            },
            coords={"score": ["induction"], "layer": [0, 1], "head": [0, 1]},
        ),
        provenance=PROVENANCE,
        claims=(
            measured("h", "s", value=1 / 3, unit="mass", n=4, interval=(0.1, 0.5)),
            proven("B2", "sum", error=1e-16, bound=1e-10),
        ),
        details={"n": 4, "nested": {"list": [1, 2.5, None, True, "x"]}, "tuple": (1, 2)},
    )


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    result = heads_result()
    path = result.save(tmp_path / "result.json")
    back = load_result(path)
    assert isinstance(back, HeadsResult)
    assert dump_json(back.to_json()) == dump_json(result.to_json()) == path.read_text()
    assert back.summary() == "previous-token: L0H1; induction pattern: L1H0"
    assert back.provenance == PROVENANCE
    assert back.claims[0].interval == pytest.approx((0.1, 0.5))
    value = back.data["value"].values
    assert np.isnan(value[0, 0, 1])
    assert np.isnan(value[0, 1, 1]), "infinities are no JSON: they come back as NaN"
    assert value[0, 1, 0] == pytest.approx(1 / 3, abs=1e-7)
    assert back.data["tested"].dtype == bool
    assert back.data["layer"].values.tolist() == [0, 1]


def test_numbers_are_shortest_float32() -> None:
    assert shortest(1 / 3) == 0.33333334
    assert shortest(0.1) == 0.1
    assert shortest(float("nan")) is None
    assert shortest(float("-inf")) is None


def test_frame_has_one_row_a_cell() -> None:
    frame = heads_result().to_frame()
    assert len(frame) == 4
    assert {"layer", "head", "label", "value"} <= set(frame.columns)


def test_decomposition_says_the_largest_writes() -> None:
    result = DecompositionResult(
        title="writes",
        data=xr.Dataset(
            {
                "mean": ("component", [0.5, -1.0, 3.0]),
                "total": ("example", [2.0, 3.0]),
            },
            coords={"component": ["embed", "L0H0", "L1H1"]},
        ),
        provenance=PROVENANCE,
    )
    assert result.summary() == (
        "largest direct writes L1H1 +3.00, L0H0 -1.00, embed +0.50 of +2.50 nats in all (n = 2)"
    )


@pytest.mark.parametrize(
    ("means", "words"),
    [
        ([10.0, 0.0, -5.0], "largest direct writes embed +10.00, L1H1 -5.00 of +5.00 nats in all"),
        ([10.0, 9e-3, 0.0], "largest direct writes embed +10.00 of +5.00 nats in all"),
        ([0.0, 0.0, 0.0], "largest direct writes none of +5.00 nats in all"),
    ],
)
def test_a_part_that_writes_nothing_is_not_among_the_largest(
    means: list[float], words: str
) -> None:
    result = DecompositionResult(
        title="writes",
        data=xr.Dataset(
            {"mean": ("component", means), "total": ("example", [5.0, 5.0])},
            coords={"component": ["embed", "L0H0", "L1H1"]},
        ),
        provenance=PROVENANCE,
    )
    assert result.summary() == f"{words} (n = 2)"


def test_a_census_without_labels_says_no_more_than_that() -> None:
    census = heads_result()
    census.data["label"][:] = "none"
    assert census.summary() == "no head of 4 has a label"


def test_audit_counts_what_passed() -> None:
    good = proven("a", "a", error=0.0, bound=1e-10)
    bad = proven("b", "b", error=1.0, bound=1e-10)
    result = AuditResult("audit", xr.Dataset(), PROVENANCE, claims=(good, bad))
    assert result.failed
    assert result.summary() == "1 of 2 checks passed"
    assert not AuditResult("audit", xr.Dataset(), PROVENANCE, claims=(good,)).failed


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "is not a headstream result: schema is None"),
        ({"schema": "other/1"}, "schema is 'other/1'"),
        ({"schema": "headstream.result/2"}, "this version reads 'headstream.result/1'"),
        ({"schema": "headstream.result/1", "kind": "head"}, "unknown kind 'head'; nearest is"),
        ({"schema": "headstream.result/1", "kind": "heads"}, "damaged heads result"),
    ],
)
def test_what_is_not_a_result_is_refused(value: object, words: str) -> None:
    with pytest.raises(ResultError, match=words):
        result_from_json(value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot read a result from"):
        load_result(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ResultError, match="is not a saved result"):
        load_result(tmp_path / "broken.json")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "\ud800")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    with pytest.raises(ResultError, match="does not exist; create it first"):
        write_whole(tmp_path / "no" / "out.json", "x")
    with pytest.raises(ResultError, match="it is a folder; name a file in it"):
        write_whole(tmp_path, "x")


def test_details_hold_plain_values_only(tmp_path: Path) -> None:
    result = AuditResult("audit", xr.Dataset(), PROVENANCE, details={"bad": object()})
    with pytest.raises(ResultError, match="a result cannot hold a object"):
        result.save(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_repr_is_one_line() -> None:
    text = repr(heads_result())
    assert text.startswith("<heads: previous-token")
    assert "\n" not in text


def test_json_is_json(tmp_path: Path) -> None:
    text = heads_result().save(tmp_path / "r.json").read_text()
    assert json.loads(text)["schema"] == "headstream.result/1"
    assert "NaN" not in text


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("data", 5, "data must be a JSON dict, got int"),
        ("coords", 5, "coords must be a JSON dict, got int"),
        ("details", 5, "details must be a JSON dict, got int"),
        ("details", {}, "KeyError.'n'"),
        ("claims", {}, "claims must be a JSON list, got dict"),
        ("title", None, "title must be a JSON str, got NoneType"),
        ("provenance", {"model": 5}, "provenance.model must be a JSON str, got int"),
        ("data", {}, "data.label"),
        ("data", {"label": 5}, "damaged heads result"),
        ("kind", [], r"unknown kind \[\]"),
    ],
)
def test_every_damage_is_a_result_error(part: str, value: object, words: str) -> None:
    whole = heads_result().to_json()
    with pytest.raises(ResultError, match=words):
        result_from_json(whole | {part: value})
