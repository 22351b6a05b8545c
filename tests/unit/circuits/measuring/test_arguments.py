"""What a statistic may be given: whole numbers of any kind, and our own errors for all else."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch

from headstream.circuits.measuring.masses import (
    ColumnMass,
    Offset,
    SinkImportance,
    SinkMass,
    SinkRate,
)
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.measuring.segments import SegmentMass
from headstream.circuits.measuring.spread import Entropy
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError

# A user's Python does not enforce annotations.
pytestmark = pytest.mark.usefixtures("unchecked")

Make = Callable[[], object]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ColumnMass(slice(0, 2)), r"keys \(if not several\) must be a whole number >= 0"),
        (lambda: ColumnMass(2.5), r"keys \(if not several\) must be .* got 2.5"),
        (lambda: ColumnMass("ab"), "keys .* got 'ab'"),
        (lambda: ColumnMass([True]), "each of keys must be a whole number >= 0, got True"),
        (lambda: Offset("a"), "distance must be a whole number >= 0, got 'a'"),
        (lambda: SinkRate(eps="x"), r"eps must lie in \[0, 1\), got 'x'"),
        (lambda: SinkRate(T=3, key=5), "key 5 is not among the first T = 3 tokens"),
        (lambda: SinkImportance([4, 3], T=3), "key 3 is not among the first T = 3 tokens"),
        (lambda: SegmentMass([[0, 1], [0]]), "rows of labels differ in length; give every pos"),
        (lambda: SegmentMass(["a", 1]), "labels must be strings or whole numbers, got both"),
        (lambda: SegmentMass(["", ""]), r'every label is "" \(no segment\); label some segment'),
        (lambda: SegmentMass([0, 1], ["a", "a"]), r"names must be distinct strings.* \['a', 'a'\]"),
        (lambda: SegmentMass([0, 1], "ab"), "names must be distinct strings, at least one, .*'ab'"),
        (
            lambda: SegmentMass([0, 1], []),
            r"names must be distinct strings, at least one, got \[\]",
        ),
    ],
)
def test_parameters_that_mean_nothing(make: Make, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SinkMass, r"a statistic is expected, got .*SinkMass.*; make one: SinkMass\(\)"),
        (lambda: None, r"a statistic is expected, got None; make one, such as Offset\(1\)"),
        (lambda: "sink", "a statistic is expected, got 'sink'"),
        (lambda: [SinkMass(), 3], "a statistic is expected, got 3"),
        (lambda: SinkMass(name="layer"), "cannot be named 'layer': the result has a coordinate of"),
        (lambda: ColumnMass([0], name="key"), "cannot be named 'key': the result has a coord"),
        (lambda: [SinkMass(name="a"), Offset(0, name="chance_a")], "cannot be named 'chance_a': "),
        (lambda: [SinkMass(name="a"), Offset(0, name="queries_a")], "cannot be named 'queries_a'"),
        (lambda: Offset(1, name=3), r"cannot be named 3; give another name='\.\.\.'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_statistic(model_a: Decoder, make: Make, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        measure_attention(model_a, torch.arange(8), make())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys", [np.array([0, 2]), torch.tensor([0, 2]), range(0, 3, 2), (np.int64(0), np.int64(2))]
)
def test_keys_of_any_kind(keys: object) -> None:
    assert ColumnMass(keys).keys == [0, 2]


@pytest.mark.parametrize("key", [np.int64(2), torch.tensor(2), np.uint8(2)])
def test_a_key_of_any_kind(key: object) -> None:
    assert ColumnMass(key).axis is None
    assert ColumnMass(key).keys == 2
    assert SinkMass(np.int64(2)).name == "sink_mass_2"  # type: ignore[arg-type]


def test_rates_of_two_keys_have_two_names(model_a: Decoder) -> None:
    data = measure_attention(model_a, torch.arange(8), [SinkRate(T=4), SinkRate(T=4, key=1)])
    assert list(data) == ["sink_rate_0.3_4", "sink_rate_0.3_4_key_1"]


def test_a_short_row_has_no_normalised_entropy_for_its_own_reason(model_a: Decoder) -> None:
    data = measure_attention(model_a, torch.arange(7), [Entropy(), Entropy(normalized=True)])
    assert data["normalized_entropy"].isnull().all()
    assert data["normalized_entropy"].attrs["not_applicable"] == (
        "no query has 8 keys to read: example 0"
    )
    assert "not_applicable" not in data["entropy"].attrs


def test_labels_of_any_kind_of_array(model_a: Decoder) -> None:
    words = ["a"] * 3 + ["b"] * 5
    expected = measure_attention(model_a, torch.arange(8), SegmentMass(words))
    for labels in (np.array(words), np.array(words, dtype=object), pd.Series(words)):
        assert measure_attention(model_a, torch.arange(8), SegmentMass(labels)).equals(expected)
