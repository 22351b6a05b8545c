"""A patching result as a grid of named cells: what a map and its table are drawn from.

The last site axis (head, kv_head, neuron, pos, role or edge) runs across, the others together run
down; sets and layers by themselves run down. Every array is [row, column]; a number that the result
does not give is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.result import site_label
from headstream.models.errors import ResultError
from headstream.reports import formats
from headstream.reports.maps import Axis
from headstream.reports.study import Item
from headstream.reports.tokens import label

_ORDER = ("set", "layer", "head", "kv_head", "neuron", "pos", "role", "edge")
_SHORT = {"layer": "L", "head": "H", "kv_head": "KV", "neuron": "N"}


@dataclass(frozen=True, eq=False)
class Cells:
    """The grid of one patching result.

    Attributes:
        rows, columns: the two axes with their labels.
        names: [row][column] names of the places ("L1H4", "L0@query").
        mean, low, high: of the effect, float64 [row, column].
        normalized, normalized_low, normalized_high: share of the gap.
        p_value, q_value, unrelated: the test and the control.
        second: mean effect in the second metric, if there is one.
        counts: examples behind each cell.
        causal: bool [row, column].
        alpha: the level of the test; n: examples; unit: of the effects.
        evidence: label by name, where the result claims something about the place.
    """

    rows: Axis
    columns: Axis
    names: tuple[tuple[str, ...], ...]
    mean: Float[np.ndarray, "row column"]
    low: Float[np.ndarray, "row column"]
    high: Float[np.ndarray, "row column"]
    normalized: Float[np.ndarray, "row column"]
    p_value: Float[np.ndarray, "row column"]
    q_value: Float[np.ndarray, "row column"]
    unrelated: Float[np.ndarray, "row column"]
    normalized_low: Float[np.ndarray, "row column"]
    normalized_high: Float[np.ndarray, "row column"]
    second: Float[np.ndarray, "row column"]
    counts: Int[np.ndarray, "row column"]
    causal: Bool[np.ndarray, "row column"]
    alpha: float
    n: int | None
    unit: str
    evidence: dict[str, Evidence]

    @classmethod
    def of(cls, item: Item) -> Cells:
        """Read the grid out of a patching result.

        Raises:
            ResultError: if its effects have an axis that no map knows.
        """
        data = item.result.data
        dims = [str(dim) for dim in data["mean"].dims]
        unknown = [dim for dim in dims if dim not in _ORDER]
        if unknown or not dims:
            raise ResultError(f"a map of effects has axes {', '.join(_ORDER)}, got {dims}")
        dims.sort(key=_ORDER.index)
        down, across = (dims[:-1], dims[-1:]) if len(dims) > 1 else (dims, [])

        def grid(name: str) -> Float[np.ndarray, "row column"]:
            if name not in data:
                return np.full(shape, np.nan)
            array: xr.DataArray = data[name].transpose(*dims)
            return np.asarray(array.values, dtype=np.float64).reshape(shape)

        coordinates = {dim: data["mean"][dim].values.tolist() for dim in dims}
        row_places = list(product(*(coordinates[dim] for dim in down)))
        column_places = list(product(*(coordinates[dim] for dim in across)))
        shape = (len(row_places), len(column_places))
        tokens = _tokens(item)
        return cls(
            rows=_axis(down, row_places, tokens),
            columns=_axis(across, column_places, tokens),
            names=tuple(
                tuple(
                    site_label(dict(zip(down + across, row + column, strict=True)))
                    for column in column_places
                )
                for row in row_places
            ),
            mean=grid("mean"),
            low=grid("low"),
            high=grid("high"),
            normalized=grid("normalized"),
            p_value=grid("p_value"),
            q_value=grid("q_value"),
            unrelated=grid("unrelated"),
            normalized_low=grid("normalized_low"),
            normalized_high=grid("normalized_high"),
            second=grid("second"),
            counts=np.isfinite(data["effects"].transpose(*dims, "example").values)
            .sum(axis=-1)
            .reshape(shape),
            causal=np.nan_to_num(grid("causal")).astype(bool),
            alpha=float(item.details.get("alpha", 0.05)),
            n=item.n,
            unit=item.unit,
            evidence={
                claim.id.removeprefix(f"{item.site}."): claim.evidence
                for claim in item.result.claims
            },
        )

    @property
    def size(self) -> int:
        return int(self.mean.size)

    def indices(self) -> Iterator[tuple[int, int]]:
        """(row, column) of every cell, row by row."""
        return iter(np.ndindex(*self.mean.shape))

    def computed(self) -> list[tuple[int, int]]:
        """The cells that hold a number."""
        return [(r, c) for r, c in self.indices() if math.isfinite(self.mean[r, c])]

    def tested(self) -> list[tuple[int, int]]:
        """The cells that have a p-value."""
        return [(r, c) for r, c in self.indices() if math.isfinite(self.p_value[r, c])]

    def indistinct(self) -> list[tuple[int, int]]:
        """The tested cells that cannot be told from no effect."""
        return [(r, c) for r, c in self.tested() if self.p_value[r, c] > self.alpha]

    def ranked(self, most: int | None = None) -> list[tuple[int, int]]:
        """The cells that hold a number, from the largest effect down to the most negative.

        With `most`, those that are furthest from zero, still in that order: effects keep their
        sign, so a head that works against the answer is never listed among those that help.
        """
        chosen = sorted(self.computed(), key=lambda cell: -abs(float(self.mean[cell])))[:most]
        return sorted(chosen, key=lambda cell: -float(self.mean[cell]))

    def label(self, r: int, c: int) -> Evidence | None:
        """The evidence that a place carries, if anything is claimed about it."""
        if self.causal[r, c]:
            return Evidence.CAUSAL
        return self.evidence.get(self.names[r][c])

    def hover(self, r: int, c: int) -> list[str]:
        """What the pointer shows: the same numbers as the table, rounded the same way."""
        place = " · ".join(text for text in (self.rows.labels[r], self.columns.labels[c]) if text)
        lines = [
            f"{self.names[r][c]}" + (f"  ({place})" if self.columns.tokens else ""),
            f"effect {formats.number(self.mean[r, c], sign=True)} {self.unit} "
            f"{formats.interval(self.low[r, c], self.high[r, c], sign=True)}",
        ]
        if math.isfinite(self.normalized[r, c]):
            lines.append(f"{formats.share(self.normalized[r, c])} of the gap")
        if math.isfinite(self.p_value[r, c]):
            lines.append(
                f"p {formats.probability(self.p_value[r, c])} over the grid, "
                f"q {formats.probability(self.q_value[r, c])}"
            )
        elif self.mean[r, c] == 0:
            lines.append("exactly zero, not tested")
        if math.isfinite(self.unrelated[r, c]):
            lines.append(
                f"unrelated prompt {formats.number(self.unrelated[r, c], sign=True)} {self.unit}"
            )
        evidence = self.label(r, c)
        if evidence is not None:
            lines.append(f"{evidence.mark} {evidence}")
        return lines


def _axis(dims: list[str], places: list[tuple[Any, ...]], tokens: list[str]) -> Axis:
    if not dims:
        return Axis("", ("",))
    labels = []
    for place in places:
        parts = []
        for dim, value in zip(dims, place, strict=True):
            if dim == "pos":
                known = 0 <= int(value) < len(tokens)
                parts.append(label(int(value), tokens[int(value)]) if known else str(value))
            else:
                parts.append(f"{_SHORT.get(dim, '')}{value}")
        labels.append("".join(parts))
    titles = {
        "kv_head": "key/value head",
        "pos": "position:token",
        "edge": "edge, query <- key",
    }
    title = " and ".join(titles.get(dim, dim) for dim in dims)
    return Axis(title, tuple(labels), tokens="pos" in dims)


def _tokens(item: Item) -> list[str]:
    """Tokens of the first pair's clean prompt, to label positions with."""
    prompts = item.details.get("prompts") or [{}]
    return [str(token) for token in prompts[0].get("clean_tokens", [])]
