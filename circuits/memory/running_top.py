"""The largest entries of rows that arrive a block of columns at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Entries of a block that is formed at once: 32 MB in float64.
BLOCK = 2**22


class RunningTop:
    """The `count` largest entries of each row, and where they stood.

    Of equal entries at the edge of the top, either may stay.

    Args:
        count: entries a row.
        lowest: keep the smallest instead, the smallest first.
    """

    def __init__(self, count: int, *, lowest: bool = False) -> None:
        self.count = count
        self.lowest = lowest
        self._values: Tensor | None = None
        self._places: Tensor | None = None

    def add(self, values: Float[Tensor, "row column"], places: Int[Tensor, " column"]) -> None:
        """Take in a block; `places` says which columns these are."""
        spread = places.expand(values.shape[0], -1)
        if self._values is not None and self._places is not None:
            values = torch.cat((self._values, values), 1)
            spread = torch.cat((self._places, spread), 1)
        kept = values.topk(min(self.count, values.shape[1]), dim=1, largest=not self.lowest)
        self._values, self._places = kept.values, spread.gather(1, kept.indices)

    def result(self) -> tuple[Float[Tensor, "row rank"], Int[Tensor, "row rank"]]:
        """Entries in order, and their places."""
        assert self._values is not None
        assert self._places is not None
        return self._values, self._places


def blocks(total: int, height: int) -> Iterator[slice]:
    """Slices of `total` columns such that a block of `height` rows stays within `BLOCK`."""
    step = max(1, BLOCK // max(1, height))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
