"""A set of token positions as a caller names it, checked twice.

Positions are absolute: they count every token of a row from its start, padding and tokens held by a
key/value cache included, so that position p is column p of the tokens. The form of a set is checked
when it is given; whether it fits, when the length of a pass is known.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from headstream.models.errors import ShapeError

FORMS = "a list of positions, a slice, or a boolean tensor [pos] or [batch, pos]"


class PositionSet:
    """Positions given as a list, a slice, or a boolean tensor `[pos]` or `[batch, pos]`.

    Args:
        given: the set. Nothing in it is negative: with padding or a cache "from the end" could
            mean several things.
        what: its name in errors, such as "keys".
    Raises:
        ShapeError: if `given` is none of the three, is empty, or holds a negative position.
    """

    def __init__(self, given: object, what: str) -> None:
        self.what = what
        self.span: slice | None = None
        self.mask: Tensor | None = None
        self.places: list[int] = []
        if isinstance(given, slice):
            self.span = _checked(given, what)
        elif isinstance(given, Tensor) and given.dtype == torch.bool:
            if given.ndim not in (1, 2):
                raise ShapeError(f"{what} is boolean {list(given.shape)}, expected {FORMS}")
            self.mask = given if given.ndim == 2 else given[None]
            if not bool(given.any()):
                raise ShapeError(f"{what} is empty: no position in it is True")
        else:
            self.places = _whole_numbers(given, what)

    def on(
        self, batch: int, length: int, *, partial: bool = False, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "{batch} {length}"]:
        """True at the positions of the set, in rows of `length`.

        Args:
            partial: whether the rows are only the tokens so far, as with a key/value cache: then
                positions still to come are no mistake, and simply are not there yet.
        Raises:
            ShapeError: if the set does not fit such rows, or nothing of it lies in them.
        """
        if self.mask is not None:
            return self._from_mask(self.mask.to(device), batch, length, partial)
        places = self.places
        if self.span is not None:
            start, stop, step = self.span.start or 0, self.span.stop, self.span.step or 1
            if not partial and (start >= length or (stop or 0) > length):
                raise ShapeError(
                    f"{self.what} is slice({start}, {stop}), out of range: the rows of this pass "
                    f"have {length} positions"
                )
            places = list(range(start, length if stop is None else min(stop, length), step))
        beyond = [place for place in places if place >= length]
        if beyond and not partial:
            raise ShapeError(
                f"{self.what} holds position {beyond[0]}, out of range: the rows of this pass "
                f"have {length} positions, 0 to {length - 1}"
            )
        row = torch.zeros(length, dtype=torch.bool, device=device)
        row[[place for place in places if place < length]] = True
        return row.expand(batch, length)

    def _from_mask(self, mask: Tensor, batch: int, length: int, partial: bool) -> Tensor:
        rows, width = mask.shape
        if rows not in (1, batch) or (width != length and not partial):
            raise ShapeError(
                f"{self.what} is boolean {[rows, width]}, but this pass has [batch, pos] = "
                f"{[batch, length]}"
            )
        fitted = torch.zeros(rows, length, dtype=torch.bool, device=mask.device)
        fitted[:, :width] = mask[:, :length]
        return fitted.expand(batch, length)


def _checked(given: slice, what: str) -> slice:
    """The slice, if it is one of whole numbers that run forward from 0 and holds anything."""
    for part in (given.start, given.stop, given.step):
        if part is not None and (isinstance(part, bool) or not isinstance(part, int) or part < 0):
            raise ShapeError(
                f"{what} is {given}, expected whole numbers >= 0",
                hint="count positions from the start of the row",
            )
    if given.step == 0 or (given.stop is not None and (given.start or 0) >= given.stop):
        raise ShapeError(f"{what} is {given}, which is empty")
    return given


def _whole_numbers(given: Any, what: str) -> list[int]:
    """Positions of a list, range, or integer tensor or array of one axis."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise ShapeError(f"{what} is {given!r}, expected {FORMS}")
    places = []
    for place in listed:
        if isinstance(place, bool) or not hasattr(place, "__index__"):
            raise ShapeError(
                f"{what} holds {place!r}, expected whole numbers", hint=f"give {FORMS}"
            )
        places.append(operator.index(place))
    if not places:
        raise ShapeError(f"{what} is empty", hint="name at least one position")
    if min(places) < 0:
        raise ShapeError(
            f"{what} holds position {min(places)}, expected positions >= 0",
            hint="count positions from the start of the row",
        )
    return places
