"""A stream taken apart: its writes, and what is asked of them.

What is kept of a run is each head's z and each MLP's output, not [pos, head, d_model] for every
layer: writes are formed when they are asked for, and attributions without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.stream.attribution import (
    Readout,
    TokenIds,
    accumulate,
    attribute,
    plain_array,
)
from headstream.circuits.stream.writes import WriteGroup, stream_place
from headstream.models.errors import ExactnessError, ShapeError

# Refuse to build more than this many bytes.
LIMIT = 8 * 2**30


@dataclass(frozen=True, eq=False, repr=False)
class ResidualDecomposition:
    """Writes that sum to the residual stream.

    It holds the run's activations and refers to the model's output weights: to use it after they
    were changed in place is an error. What was formed before stays valid.

    Attributes:
        groups: the writes, unformed: a layer's heads together.
        stream: [example, pos, d_model] at `at`, as the model computed it.
        remainder: `stream` minus the sum of the writes: rounding, and nothing else.
        at: hook name of the stream.
        largest_error, bound: largest |remainder|, and what it was held to.
        value_bias: "inside" the heads, "separate", or "none" in this model.
        norm: what `logit_attribution` does about the final norm.
    """

    groups: tuple[WriteGroup, ...]
    stream: xr.DataArray
    remainder: xr.DataArray
    at: str
    largest_error: float
    bound: float
    value_bias: str
    norm: str
    readout: Readout | None

    def __repr__(self) -> str:
        size = self.stream.sizes
        return (
            f"<{len(self.components)} writes to '{self.at}', {size['example']} examples x "
            f"{size['pos']} positions; largest error {self.largest_error:.1e}, "
            f"bound {self.bound:.1e}>"
        )

    @property
    def components(self) -> list[str]:
        """Labels in the order of the sum: `embed`, `pos_embed` (learned or sinusoidal positions),
        and for each layer its heads `L0H0` .., `L0bO`, `L0MLP` (or its neurons `L0N0` ..),
        `L0bout`. A head's write carries its share of b_V, or `L0bV` does (`value_bias`)."""
        return [label for group in self.groups for label in group.labels]

    @cached_property
    def writes(self) -> xr.DataArray:
        """All writes, [component, example, pos, d_model]: formed on first use, then kept.

        Raises:
            ShapeError: if they take more than 8 GiB; `layer_writes` forms a layer's.
        """
        return self._formed(self.groups)

    def layer_writes(self, layer: int | None) -> xr.DataArray:
        """The writes of one layer, or with None those before the first; formed anew, not kept.

        Raises:
            ShapeError: for a layer that does not write to this stream, or over 8 GiB.
        """
        found = tuple(group for group in self.groups if group.layer == layer)
        if not found:
            raise ShapeError(
                f"no writes of layer {layer!r} to '{self.at}': it has those of layers 0 to "
                f"{stream_place(self.at)[0]}",
                hint="None gives the embeddings",
            )
        return self._formed(found)

    def write_norms(self) -> xr.DataArray:
        """Euclidean norm of every write, [component, example, pos]."""
        norms = [
            torch.linalg.vector_norm(group.form(slice(start, start + 64)), dim=-1)
            for group in self.groups
            for start in range(0, len(group.labels), 64)
        ]
        return labelled(torch.cat(norms), ("component", "example", "pos"), self.components)

    def logit_attribution(
        self,
        answer: TokenIds,
        wrong: TokenIds | None = None,
        pos: TokenIds | None = -1,
        *,
        by: str = "component",
    ) -> xr.DataArray:
        """What each write adds to a logit, or to a logit difference, in nats.

        The final norm's scale stays frozen at its value in the run, so the rows sum to the logit
        (difference) that the model computed. Two rows follow the components where the model has
        them: `ln_final.b`, the norm's shift, and `b_U`. No write is formed for it.

        Args:
            answer: the token, or one for each example.
            wrong: token to subtract, or one for each example; None for the logit itself.
            pos: position that predicts, or one for each example; negative counts from the end.
                None takes every position.
            by: "component"; "sublayer" sums each layer's heads and b_O to `L0attn_out`, its
                MLP to `L0mlp_out`; "layer" sums all a layer writes to `L0`.
        Returns:
            [component, example] float64 (with `pos=None` [component, example, pos]), with
            attributes `unit` and `norm`.
        Raises:
            ExactnessError: if the writes are not those of the whole stream, or the weights were
                changed since.
            TokenError, ShapeError: for a token or a position that does not exist.
            ConfigError: for another `by`.
        Source:
            Elhage et al. 2021. TransformerLens' `direct_logit_attribution` agrees where the final
            norm is folded (`fold`); where it is not, that one leaves the gain out.
        """
        return attribute(self._readout(), self.groups, answer, wrong, pos, by)

    def accumulated_logits(
        self,
        answer: TokenIds,
        wrong: TokenIds | None = None,
        pos: TokenIds | None = -1,
        *,
        scale: str = "frozen",
    ) -> xr.DataArray:
        """The logit (difference) read off the stream after each write, in the order of the sum.

        The norm's shift and b_U count from the start; the last entry is what the model computed.

        Args:
            answer, wrong, pos: as in `logit_attribution`.
            scale: "frozen" divides by the run's final scale, so steps are the attributions; "own"
                lets each partial stream be normalised by itself, as if the model stopped there.
        Returns:
            [component, example] float64 (with `pos=None` [component, example, pos]).
        Raises:
            ExactnessError, TokenError, ShapeError: as `logit_attribution`.
            ConfigError: if `scale` is neither.
        """
        return accumulate(self._readout(), self.groups, answer, wrong, pos, scale)

    def _readout(self) -> Readout:
        if self.readout is None:
            raise ExactnessError(
                f"logit attribution needs all writes to the stream, these end at '{self.at}'",
                hint="decompose with at='final'",
            )
        return self.readout

    def _formed(self, groups: Sequence[WriteGroup]) -> xr.DataArray:
        labels = [label for group in groups for label in group.labels]
        size = self.stream.sizes
        require_room(
            len(labels) * self.stream.nbytes,
            f"{len(labels)} writes for {[size['example'], size['pos']]} positions of width "
            f"{size['d_model']}",
            hint="take layer_writes(layer), or fewer examples at a time",
        )
        values = np.empty((len(labels), *self.stream.shape), self.stream.dtype)
        start = 0
        for group in groups:
            end = start + len(group.labels)
            values[start:end] = plain_array(group.form())
            start = end
        coords = dict(self.stream.coords) | {"component": labels}
        return xr.DataArray(values, dims=("component", *self.stream.dims), coords=coords)


def labelled(
    values: Tensor, dims: Sequence[str], components: Sequence[str] | None = None
) -> xr.DataArray:
    """Values of these dims, with positions and examples counted and components named."""
    array = plain_array(values)
    sizes = dict(zip(dims, array.shape, strict=True))
    coords: dict[str, object] = {name: np.arange(sizes[name]) for name in ("example", "pos")}
    if components is not None:
        coords["component"] = list(components)
    return xr.DataArray(array, dims=tuple(dims), coords=coords)


def require_room(needed: int, what: str, hint: str = "take fewer examples at a time") -> None:
    """Raise ShapeError if `what` takes more than 8 GiB."""
    if needed > LIMIT:
        raise ShapeError(f"{what} take {needed:,} bytes, over the limit of {LIMIT:,}", hint=hint)
