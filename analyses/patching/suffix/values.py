"""What patched sites receive, many at once, in real positions.

The same values as the donors of `hooked_engine`: another row's, zeros, or the mean over the pairs
that have the place. A pattern is never recorded: its rows follow from queries, keys and lse,

    A_ij = exp(scale q_i . k_j - lse_i)        in float32 at least, then in the model's precision
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.sites import Site
from headstream.analyses.patching.suffix.state import attention_names
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import widen
from headstream.models.config import DecoderConfig

# Entries of the rows of a pattern that are formed at once.
_ENTRIES = 2**22


@dataclass(frozen=True)
class Values:
    """Where values come from.

    Attributes:
        kind: `rows` takes row i's from row `rows[i]`; `zero`; `mean` over all rows.
        rows: -1 where a row receives nothing.
        activations: of the giving run, by hook.
        lengths: real tokens of each row.
    """

    kind: Literal["rows", "zero", "mean"]
    rows: Int[Tensor, " example"]
    activations: Mapping[str, Tensor]
    lengths: Int[Tensor, " example"]
    config: DecoderConfig

    def present(self, at: Int[Tensor, "example place"]) -> Bool[Tensor, "example place"]:
        """Where a row has the place, and has values to receive there."""
        if self.kind != "rows":
            return at >= 0
        given = at[self.rows.clamp(min=0)]
        return (at >= 0) & (given >= 0) & (self.rows >= 0)[:, None]

    def present_rows(self) -> Bool[Tensor, "example pos"]:
        """The same for whole rows, position by position."""
        length = int(self.lengths.max())
        return self.present(_all_positions(self.lengths, length))

    def at_places(
        self,
        site: Site,
        layer: int,
        at: Int[Tensor, "example place"],
        pair: Int[Tensor, " pair"],
        place: Int[Tensor, " pair"],
    ) -> Float[Tensor, "pair unit width"]:
        """Values of (example `pair`, `place`), every head or neuron of the layer.

        Args:
            at: the position of each place in each row.
        """
        activation = self._units(site, layer)
        if self.kind == "zero":
            return activation.new_zeros(len(pair), *activation.shape[2:])
        if self.kind == "rows":
            given = self.rows[pair]
            return activation[given, at[given, place]]
        rows = torch.arange(len(at), device=at.device)[:, None]
        return _mean(activation[rows, at.clamp(min=0)], at >= 0)[place]

    def at_rows(self, site: Site, layer: int) -> Float[Tensor, "example pos unit width"]:
        """Values of whole rows; anything where a row is not present."""
        activation = self._units(site, layer)
        if self.kind == "zero":
            return torch.zeros_like(activation)
        if self.kind == "rows":
            return activation[self.rows.clamp(min=0)]
        there = _all_positions(self.lengths, activation.shape[1]) >= 0
        return _mean(activation, there.to(activation.device)).expand_as(activation)

    def pattern_rows(
        self,
        layer: int,
        at: Int[Tensor, "example place"],
        pair: Int[Tensor, " pair"],
        place: Int[Tensor, " pair"],
    ) -> Float[Tensor, "pair head key"]:
        """The rows of the pattern that the places receive, over all real positions as keys."""
        queries, keys, _ = self._attention(layer)
        if self.kind == "zero":
            return queries.new_zeros(len(pair), queries.shape[2], keys.shape[1])
        if self.kind == "rows":
            given = self.rows[pair]
            return self._rows_of_pattern(layer, given, at[given, place])
        n, places = at.shape
        total = queries.new_zeros(places, queries.shape[2], keys.shape[1])
        for row in range(n):  # a sum over pairs, so that only one pair's rows are formed at once
            has = at[row] >= 0
            rows = self._rows_of_pattern(layer, torch.full_like(at[row], row), at[row].clamp(min=0))
            total += rows * has[:, None, None]
        mean = total / (at >= 0).sum(0).clamp(min=1)[:, None, None]
        return mean[place]

    def edges(
        self,
        layer: int,
        at: Int[Tensor, "example place"],
        keys: Int[Tensor, "example place"],
        pair: Int[Tensor, " pair"],
        place: Int[Tensor, " pair"],
    ) -> Float[Tensor, "pair head"]:
        """The weights that edges from the positions `keys` to `at` receive."""
        queries, _, _ = self._attention(layer)
        if self.kind == "zero":
            return queries.new_zeros(len(pair), queries.shape[2])
        if self.kind == "rows":
            given = self.rows[pair]
            return self.weights(layer, given, at[given, place], keys[given, place])
        has = at >= 0
        row, column = has.nonzero(as_tuple=True)
        found = self.weights(layer, row, at[row, column], keys[row, column])
        total = found.new_zeros(at.shape[1], found.shape[1]).index_add_(0, column, found)
        return (total / has.sum(0).clamp(min=1)[:, None])[place]

    def weights(
        self, layer: int, row: Tensor, at: Tensor, key: Tensor
    ) -> Float[Tensor, "pair head"]:
        """What the query `at` of a row of this run gives to `key`."""
        queries, keys, lse = self._attention(layer)
        query = queries[row, at].unflatten(1, (keys.shape[2], -1))
        score = torch.einsum("pkxd,pkd->pkx", widen(query), widen(keys[row, key])).flatten(1)
        return torch.exp(score * self.config.scale - lse[row, :, at]).to(query.dtype)

    def pattern_on(
        self, layer: int, v: Float[Tensor, "example pos kv_head d_head"]
    ) -> Float[Tensor, "example pos head d_head"]:
        """What every head puts out if it attends as it receives and reads the values `v`."""
        queries, keys, _ = self._attention(layer)
        if self.kind == "zero":
            return queries.new_zeros(*queries.shape[:3], v.shape[3])
        if self.kind == "rows":
            given = self.rows.clamp(min=0)
            return attend_flash(queries[given], keys[given], v, scale=self.config.scale)[0]
        n, length, heads, _ = queries.shape
        step = max(1, _ENTRIES // (n * heads * length))
        parts = []
        for start in range(0, length, step):
            at = torch.arange(start, min(start + step, length), device=v.device)
            shown = at.expand(n, -1).masked_fill(
                at[None] >= self.lengths.to(at.device)[:, None], -1
            )
            zero = torch.zeros_like(at)
            rows = self.pattern_rows(layer, shown, zero, at - start)
            grouped = rows.unflatten(1, (v.shape[2], -1))
            z = torch.einsum("rkxj,ejkd->erkxd", grouped, v)
            parts.append(z.flatten(2, 3))
        return torch.cat(parts, 1)

    def _rows_of_pattern(self, layer: int, row: Tensor, at: Tensor) -> Tensor:
        """[pair, head, key]: the pattern of the queries `at` of the rows `row` of this run."""
        queries, keys, lse = self._attention(layer)
        query = queries[row, at].unflatten(1, (keys.shape[2], -1))
        if bool((row == row[0]).all()):
            scores = torch.einsum("pkxd,jkd->pkxj", widen(query), widen(keys[row[0]]))
        else:
            scores = torch.einsum("pkxd,pjkd->pkxj", widen(query), widen(keys[row]))
        scores = scores.flatten(1, 2) * self.config.scale
        later = torch.arange(keys.shape[1], device=at.device) > at[:, None]
        scores = scores.masked_fill(later[:, None], -torch.inf)
        return torch.exp(scores - lse[row, :, at][..., None]).to(query.dtype)

    def _attention(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        names = attention_names(self.config, layer)
        lse = self.activations[f"blocks.{layer}.attn.hook_lse"]
        return self.activations[names["q"]], self.activations[names["k"]], lse

    def _units(self, site: Site, layer: int) -> Float[Tensor, "example pos unit width"]:
        activation = self.activations[site.hook.format(layer=layer)]
        if site.one_wide:
            return activation[..., None]
        return activation if site.heads is not None else activation[:, :, None]


def _mean(values: Float[Tensor, "example place *rest"], there: Tensor) -> Tensor:
    """Over the rows that have the place: [place, ...]."""
    weights = there.to(values) / there.sum(0).clamp(min=1)
    return torch.einsum("ep,ep...->p...", weights, values)


def _all_positions(lengths: Int[Tensor, " example"], length: int) -> Int[Tensor, "example pos"]:
    at = torch.arange(length, device=lengths.device).expand(len(lengths), -1)
    return at.masked_fill(at >= lengths[:, None], -1)
