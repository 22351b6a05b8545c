"""Top entries of factored matrices against the sorted dense ones, and what they hold in memory."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_lens.FactoredMatrix import FactoredMatrix

from headstream.circuits.qk_ov import top_entries
from headstream.circuits.qk_ov.top_entries import top_pairs, top_per_row
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.store import load

ORDERS = ("largest", "smallest", "magnitude")


@pytest.fixture(params=[2**26, 3 * 13 * 4], ids=["one block", "blocks of 3 rows"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_entries, "_BYTES", request.param)


def factors(seed: int, whole: bool) -> FactoredMatrix:
    """[11, 13] of rank 2; of small whole numbers, so that most entries tie exactly, or not."""
    draws = torch.Generator().manual_seed(seed)
    if whole:
        return FactoredMatrix(
            torch.randint(-1, 2, (11, 2), generator=draws).float(),
            torch.randint(-1, 2, (2, 13), generator=draws).float(),
        )
    return FactoredMatrix(torch.randn(11, 2, generator=draws), torch.randn(2, 13, generator=draws))


def ranked(dense: Tensor, by: str) -> np.ndarray[Any, Any]:
    keys = {"largest": dense, "smallest": -dense, "magnitude": dense.abs()}[by]
    return np.asarray(np.argsort(-keys.numpy(), axis=-1, kind="stable"))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("by", ORDERS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("k", [1, 5, 40, 143])
def test_top_pairs_are_the_sorted_dense_matrix(by: str, whole: bool, k: int) -> None:
    """Equal values by row, then by column: a stable sort of the flattened matrix."""
    for seed in range(3):
        circuit = factors(seed, whole)
        flat = circuit.AB.flatten()
        found = top_pairs(circuit, k, by=by)
        place = found["row"].values * 13 + found["column"].values
        expected = ranked(flat, by)[:k]
        np.testing.assert_array_equal(place, expected)
        np.testing.assert_allclose(found["value"], flat[torch.tensor(place)], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("by", ORDERS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("k", [1, 4, 13])
def test_top_per_row_are_the_sorted_rows(by: str, whole: bool, k: int) -> None:
    circuit = factors(7, whole)
    expected = ranked(circuit.AB, by)[:, :k]
    found = top_per_row(circuit, k, by=by)
    np.testing.assert_array_equal(found["column"], expected)
    values = circuit.AB.gather(1, torch.tensor(expected))
    np.testing.assert_allclose(found["value"], values, rtol=0, atol=1e-6)
    some = top_per_row(circuit, k, rows=[5, 0, 5], by=by)
    np.testing.assert_array_equal(some["column"], expected[[5, 0, 5]])
    assert some["row"].values.tolist() == [5, 0, 5]


def test_by_hand() -> None:
    circuit = FactoredMatrix(torch.eye(2), torch.tensor([[1.0, -5.0], [3.0, 1.0]]))
    found = top_pairs(circuit, 4)
    assert found["value"].values.tolist() == [3, 1, 1, -5]
    assert found["row"].values.tolist() == [1, 0, 1, 0]
    assert found["column"].values.tolist() == [0, 0, 1, 1]
    assert top_pairs(circuit, 1, by="smallest")["value"].item() == -5
    assert top_pairs(circuit, 1, by="magnitude")["value"].item() == -5


def test_constructed_induction_copies_and_matches_itself() -> None:
    """L1H2 raises each token it reads by 10 and no other; BOS is last of its own."""
    model = load("constructed-induction")
    ov = ov_circuit(model, 1, 2)
    found = top_pairs(ov, 32)
    assert found["row"].values.tolist() == found["column"].values.tolist() == list(range(1, 33))
    assert found["value"].values.tolist() == [10.0] * 32
    rows = top_per_row(ov, 1, rows=range(1, 33))
    assert rows["column"].values[:, 0].tolist() == list(range(1, 33))
    # 33 x 33 zeros but for the diagonal: ties go to the first place.
    assert top_pairs(qk_circuit(model, 0, 0), 2)["column"].values.tolist() == [0, 1]


class LargestTensor(TorchDispatchMode):
    """Records the most bytes that one operation returned."""

    most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor):
                self.most = max(self.most, one.numel() * one.element_size())
        return out


@pytest.mark.parametrize("zero", [False, True], ids=["random", "all ties"])
def test_nothing_as_large_as_the_matrix_is_made(
    monkeypatch: pytest.MonkeyPatch, zero: bool
) -> None:
    """4000 x 4000 float32 is 64 MB; with 1 MB of products no tensor passes 2 (places are int64)."""
    monkeypatch.setattr(top_entries, "_BYTES", 2**20)
    draws = torch.Generator().manual_seed(0)
    left, right = torch.randn(4000, 4, generator=draws), torch.randn(4, 4000, generator=draws)
    circuit = FactoredMatrix(0 * left if zero else left, right)
    for function in (lambda: top_pairs(circuit, 20), lambda: top_per_row(circuit, 2)):
        with LargestTensor() as tracer:
            function()
        assert 2**19 < tracer.most <= 2 * 2**20


def test_half_precision_is_widened() -> None:
    circuit = factors(3, whole=False)
    half = FactoredMatrix(circuit.A.bfloat16(), circuit.B.bfloat16())
    wide = FactoredMatrix(half.A.float(), half.B.float())
    assert top_pairs(half, 9).identical(top_pairs(wide, 9))


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(model_a: Decoder) -> None:
    circuit = factors(0, whole=False)
    anything: Any = top_pairs
    with pytest.raises(
        ShapeError, match=r"k must lie in \[1, 143\] = \[1, rows x columns\], got 1"
    ):
        top_pairs(circuit, 144)
    with pytest.raises(ShapeError, match=r"k must lie in \[1, 13\] = \[1, columns\], got 14"):
        top_per_row(circuit, 14)
    with pytest.raises(ShapeError, match="k must be at least 1, got 0"):
        top_pairs(circuit, 0)
    for bad in (True, 2.0, "2"):
        with pytest.raises(ShapeError, match="k must be a whole number, got"):
            anything(circuit, bad)
    with pytest.raises(ConfigError, match="largest, smallest, magnitude, got 'larges'; nearest is"):
        top_pairs(circuit, 1, by="larges")
    with pytest.raises(ShapeError, match="must be a FactoredMatrix, got Tensor; qk_circuit and"):
        anything(circuit.AB, 1)
    batch = FactoredMatrix(torch.zeros(2, 3, 1), torch.zeros(2, 1, 3))
    with pytest.raises(ShapeError, match=r"one matrix \[rows, columns\], got \[2, 3, 3\]"):
        top_pairs(batch, 1)
    for rows in ([11], [-1], [1.0]):
        with pytest.raises(ShapeError, match=r"rows must be whole numbers in \[0, 11\), got"):
            top_per_row(circuit, 1, rows=rows)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="rows is empty, expected at least one"):
        top_per_row(circuit, 1, rows=[])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("function", [top_pairs, top_per_row])
def test_entries_that_are_not_finite_are_refused(value: float, function: Any) -> None:
    circuit = factors(0, whole=False)
    circuit.A[10, 0] = value  # in the last block
    with pytest.raises(ShapeError, match="entries of the circuit must be finite"):
        function(circuit, 2)
