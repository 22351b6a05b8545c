"""The largest entries of rows that arrive in blocks."""

import pytest
import torch

from headstream.circuits.memory.running_top import RunningTop, blocks


@pytest.mark.parametrize("lowest", [False, True])
@pytest.mark.parametrize("step", [1, 3, 7, 50])
def test_blocks_give_what_the_whole_gives(step: int, lowest: bool) -> None:
    values = torch.randn(4, 23, generator=torch.Generator().manual_seed(0)).double()
    found = RunningTop(5, lowest=lowest)
    for start in range(0, 23, step):
        part = values[:, start : start + step]
        found.add(part, torch.arange(start, start + part.shape[1]))
    kept, places = found.result()
    expected = values.sort(1, descending=not lowest)
    assert torch.equal(kept, expected.values[:, :5])
    assert torch.equal(places, expected.indices[:, :5])


def test_fewer_than_asked_for() -> None:
    found = RunningTop(5)
    found.add(torch.tensor([[1.0, 3.0]]), torch.tensor([8, 9]))
    values, places = found.result()
    assert values.tolist() == [[3.0, 1.0]]
    assert places.tolist() == [[9, 8]]


def test_slices_cover_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstream.circuits.memory.running_top.BLOCK", 12)
    assert list(blocks(10, 4)) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert list(blocks(2, 100)) == [slice(0, 1), slice(1, 2)]
