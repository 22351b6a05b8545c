"""The shares of one query, key or value: every write through the norm and the head's matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.stream.residual import rounding
from headstream.circuits.stream.writes import Stream, WriteGroup
from headstream.models.errors import ExactnessError
from headstream.models.norms import LayerNorm, NoNorm

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@dataclass(frozen=True, eq=False)
class Shares:
    """[write, example, pos, d_head] in float64, what they miss the run by, and the bound."""

    labels: list[str]
    values: Float[Tensor, "write example pos d_head"]
    error: float
    bound: float


class ShareReader:
    """One layer's reading of the stream in a run, its norm's scale frozen.

    Args:
        model: the decoder.
        layer: which.
        groups: the writes that make `stream`.
        stream: `hook_resid_pre` of the layer.
        acts: of the run: `ln1.hook_scale` and `hook_shortformer_pos`, where there are such.
    Attributes:
        scale: what the norm divides by, [example, pos, 1] float64; 1 without a norm.
        centred: whether the norm takes the mean off.
    """

    def __init__(
        self,
        model: Decoder,
        layer: int,
        groups: Sequence[WriteGroup],
        stream: Stream,
        acts: Mapping[str, Tensor],
    ) -> None:
        self._config, self._layer, self._groups = model.config, layer, groups
        self._attn, self._norm = model.blocks[layer].attn, model.blocks[layer].ln1
        self._dtype = stream.dtype
        self._shortformer = acts.get("hook_shortformer_pos")
        self.centred = isinstance(self._norm, LayerNorm)
        ones = torch.ones(*stream.shape[:2], 1, dtype=torch.float64, device=stream.device)
        self.scale = acts.get(f"blocks.{layer}.ln1.hook_scale", ones).double()
        self._size = torch.zeros_like(stream, dtype=torch.float64)
        for group in groups:
            self._size += group.sums()[1]
        if self.centred:
            # |write - its mean| <= |write| + mean |write|
            self._size += self._size.mean(-1, keepdim=True)

    def matrix(self, letter: str, head: int) -> Float[Tensor, "d_model d_head"]:
        """What a write goes through, up to the scale: centring, gain, then W; float64."""
        weight = self._gain(letter, head)
        return weight - weight.mean(0) if self.centred else weight

    def shares(
        self, letter: str, head: int, real: Float[Tensor, "example pos head_or_kv d_head"]
    ) -> Shares:
        """Shares of "q", "k" or "v".

        Args:
            head: query head for q, key/value head for k and v.
            real: all of the run's, to compare with.
        Raises:
            ExactnessError: if they do not sum to the real one within the bound.
        """
        matrix = self.matrix(letter, head)
        labels = [label for group in self._groups for label in group.labels]
        parts = [group.read(matrix[None]) / self.scale for group in self._groups]
        constants = self._constants(letter, head)
        like = parts[0]
        parts += [value.expand_as(like) for value in constants.values()]
        values = torch.cat(parts)
        through = self._size / self.scale @ self._gain(letter, head).abs()
        through = through + self._constants_size(letter, head)
        # Rounded twice on the way: the stream, and the product with W.
        rounded = 2 * rounding(self._config, self._dtype, self._config.d_model)
        bound = float(through.max()) * rounded
        error = float((real[:, :, head].double() - values.sum(0)).abs().max())
        # Infinite weights make the bound infinite, and everything is under it.
        if not (math.isfinite(bound) and error <= bound):
            raise ExactnessError(
                f"the shares of {letter} do not sum to that of layer {self._layer}, head {head}: "
                f"largest error {error:.1e}; the bound is {bound:.1e}"
            )
        return Shares([*labels, *constants], values, error, bound)

    def _constants(self, letter: str, head: int) -> dict[str, Tensor]:
        """What does not come from the stream: shift, shortformer vectors, bias."""
        weight = self._weight(letter, head)
        found = {name: row @ weight for name, row in self._added(letter).items()}
        bias: Tensor | None = getattr(self._attn, f"b_{letter.upper()}")
        if bias is not None:
            found[f"b_{letter.upper()}"] = bias[head].detach().double()
        return found

    def _constants_size(self, letter: str, head: int) -> Tensor:
        """The sum of the moduli of all products that the constants are made of."""
        weight = self._weight(letter, head).abs()
        bias: Tensor | None = getattr(self._attn, f"b_{letter.upper()}")
        size = weight.new_zeros(weight.shape[1]) if bias is None else bias[head].detach().abs()
        for row in self._added(letter).values():
            size = size + row.abs() @ weight
        return size

    def _added(self, letter: str) -> dict[str, Tensor]:
        """What is added to the normalised stream before W."""
        found: dict[str, Tensor] = {}
        if isinstance(self._norm, LayerNorm):
            found["ln1.b"] = self._norm.b.detach().double()
        if self._shortformer is not None and letter != "v":
            found["shortformer_pos"] = self._shortformer.double()
        return found

    def _gain(self, letter: str, head: int) -> Float[Tensor, "d_model d_head"]:
        weight = self._weight(letter, head)
        if isinstance(self._norm, NoNorm):
            return weight
        return self._norm.w.detach().double()[:, None] * weight

    def _weight(self, letter: str, head: int) -> Float[Tensor, "d_model d_head"]:
        found: Tensor = getattr(self._attn, f"W_{letter.upper()}")[head].detach().double()
        return found
