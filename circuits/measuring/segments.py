"""Attention by segment of the prompt: instruction, data, answer, or whatever is labelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.circuits.measuring.statistic import Counted, LinearStatistic
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.errors import ShapeError


@dataclass(eq=False)
class SegmentMass(LinearStatistic):
    """Attention to each segment of the prompt: mean over all real queries of the mass on its keys.

    The masses of a partition sum to 1. Queries before a segment count, with the 0 that the causal
    mask gives them, so read it beside chance: the mean over queries of (its keys so far) / n_i.
    Precision: that of a weighted mean, about eps.

    Args:
        labels: [pos] or [batch, pos], one a position, padding included: strings, or whole numbers.
            "" or -1 is in no segment.
        names: what the numbers stand for, `names[k]` for k; by default the numbers that occur.
    Raises:
        ShapeError: if labels do not fit the tokens, or no example has a real token of a segment.
            An example without one has no value for it.
    Source:
        The group mass of Hung et al. 2024 (arXiv 2411.00348), of every query instead of the last.
    """

    labels: Any
    names: Sequence[str] | None = None
    why_none: ClassVar[str] = "it has no real token in that segment"

    def check(self) -> None:
        given = self.labels.cpu() if isinstance(self.labels, Tensor) else self.labels
        array = _array(given)
        if array.ndim not in (1, 2) or array.size == 0:
            raise ShapeError(
                f"labels have shape {list(array.shape)}, expected [pos] or [batch, pos]"
            )
        if array.dtype.kind == "U":
            if self.names is not None:
                raise ShapeError("names are for labels that are numbers; these are strings")
            words = [str(word) for word in array.ravel()]
            self._names: list[object] = [word for word in dict.fromkeys(words) if word]
            if not self._names:
                raise ShapeError('every label is "" (no segment)', hint="label some segment")
            numbers = [self._names.index(word) if word else -1 for word in words]
            array = np.array(numbers).reshape(array.shape)
        elif array.dtype.kind in "iu":
            if self.names is not None:
                self._check_names(self.names)
            most = int(array.max())
            if int(array.min()) < -1 or most < 0 or (self.names and most >= len(self.names)):
                limit = len(self.names) - 1 if self.names else "any"
                raise ShapeError(
                    f"labels must be whole numbers from -1 (no segment) to {limit}, with some "
                    f"segment among them, got {int(array.min())} to {most}"
                )
            if self.names is None:
                found = np.unique(array[array >= 0])
                self._names = [int(number) for number in found]
                array = np.where(array >= 0, np.searchsorted(found, array), -1)
            else:
                self._names = [str(name) for name in self.names]
        else:
            raise ShapeError(f"labels must be strings or whole numbers, got {array.dtype}")
        self._numbers = torch.from_numpy(array.astype(np.int64))

    def _check_names(self, names: Sequence[str]) -> None:
        given = [names] if isinstance(names, str) else list(names)
        if isinstance(names, str) or not given or len(set(given)) < len(given):
            raise ShapeError(f"names must be distinct strings, at least one, got {names!r}")

    def check_batch(self, batch: TokenBatch, *, per_position: bool) -> None:
        expected = list(batch.real.shape)
        given = list(self._numbers.shape)
        if given != expected[-len(given) :]:
            raise ShapeError(
                f"labels of {self.name!r} have shape {given}, expected [pos] or [batch, pos] = "
                f"{expected}",
                hint="give every position a label, padding and cached tokens included",
            )
        for name, any_key in zip(self._names, self._members(batch).any(1).any(0), strict=True):
            if not any_key:
                raise ShapeError(f"segment {name!r} of {self.name!r} has no real token")

    @property
    def axis(self) -> str | None:
        return "segment"

    def coordinates(self, batch: TokenBatch) -> Sequence[object]:
        return self._names

    def counted(self, batch: TokenBatch) -> Counted:
        present = self._members(batch).any(1)
        return batch.asks[..., None] & present[:, None]

    def values(self, batch: TokenBatch, dtype: torch.dtype) -> Float[Tensor, "batch key_pos _"]:
        return self._members(batch).to(dtype)

    def _members(self, batch: TokenBatch) -> Bool[Tensor, "batch key_pos _"]:
        numbers = self._numbers.to(batch.real.device).expand(batch.real.shape)
        segments = torch.arange(len(self._names), device=numbers.device)
        return (numbers[..., None] == segments) & batch.real[..., None]


def _array(labels: Any) -> npt.NDArray[Any]:
    """The labels as an array; strings and numbers are not mixed into strings."""
    try:
        array = np.asarray(labels)
    except ValueError:
        raise ShapeError(
            "rows of labels differ in length", hint="give every position a label, padding included"
        ) from None
    flat = np.asarray(labels, dtype=object).ravel().tolist()
    if array.dtype.kind not in "UO" or not any(isinstance(label, str) for label in flat):
        return array
    if not all(isinstance(label, str) for label in flat):
        raise ShapeError("labels must be strings or whole numbers, got both")
    return array.astype(str)
