"""What is run together, and what is new where: the two values that the engine's files pass on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from headstream.analyses.patching.suffix.layers import Layer

if TYPE_CHECKING:
    from headstream.analyses.patching.suffix.writes import Writes

# Positions that are run together: products of this many rows are fast, and what is between them
# stays in the cache. Measured on two cores, and not sharp.
BAND_ROWS = 2048


@dataclass(frozen=True)
class Band:
    """Pairs at a place each, run together, with the same units of a site patched at each.

    Attributes:
        example, at: the row and the patched position of each pair (the first one of whole rows).
        read: the position where the metric reads.
        start, end: the positions that are run; every `at` and `read` lies in [start, end).
    """

    example: Int[Tensor, " pair"]
    at: Int[Tensor, " pair"]
    read: Int[Tensor, " pair"]
    start: int
    end: int

    def part(self, which: slice | Tensor) -> Band:
        """Some of the pairs."""
        return Band(self.example[which], self.at[which], self.read[which], self.start, self.end)

    @property
    def span(self) -> Int[Tensor, " pos"]:
        return torch.arange(self.start, self.end, device=self.at.device)

    def rows(self, layer: Layer) -> Int[Tensor, "pair row"]:
        """The positions whose output matters: in the last layer only those that are read."""
        return self.read[:, None] if layer.is_last else self.span.expand(len(self.at), -1)

    def of(self, kept: Tensor | None) -> Tensor:
        """An activation of the unpatched run, by pair: [pair, pos, ...]."""
        assert kept is not None, "the engine records every layer that a patch reaches"
        return kept.expand(len(self.at), *kept.shape[1:]) if len(kept) == 1 else kept[self.example]

    def at_rows(self, kept: Tensor | None, rows: Int[Tensor, "pair row"]) -> Tensor:
        """The same at some positions: [pair, row, ...]."""
        assert kept is not None, "the engine records every layer that a patch reaches"
        return kept[self.example[:, None], rows]

    def at_place(self, kept: Tensor | None) -> Tensor:
        """The same at the patched position: [pair, ...]."""
        return self.at_rows(kept, self.at[:, None])[:, 0]


@dataclass(frozen=True)
class Changed:
    """Positions whose `resid_pre` is new in a layer, and what the layer makes of them.

    Attributes:
        k, v: [pair, unit, kv_head, d_head], k rotated where positions are.
        mid: the stream after the layer's attention, [pair, unit, d_model].
        writes: of the layer's heads in the unpatched run, where it pays to form them.
        post: then, the MLP's neurons, [pair, unit, d_mlp].
    """

    k: Tensor
    v: Tensor
    mid: Tensor
    writes: Writes | None = None
    post: Tensor | None = None

    def part(self, pairs: slice, units: slice) -> Changed:
        k, v, mid = (x[pairs, units] for x in (self.k, self.v, self.mid))
        post = None if self.post is None else self.post[pairs, units]
        return Changed(k, v, mid, self.writes, post)
