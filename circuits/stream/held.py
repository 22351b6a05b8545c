"""Weights held by reference: to copy them all would outweigh the run they belong to."""

from __future__ import annotations

from torch import Tensor

from headstream.models.errors import ExactnessError


class HeldWeight:
    """A weight of the model as it was in a run, without a copy.

    Moving or casting the model gives it new tensors and leaves this one as it was. A change in
    place is noticed through torch's version counter, which `.data` alone escapes.

    Args:
        weight: the parameter, or a view of one.
        name: for the error.
    """

    def __init__(self, weight: Tensor, name: str) -> None:
        self._name = name
        # An inference tensor counts no versions, so it is copied.
        counted = not weight.is_inference()
        self._tensor = weight.detach() if counted else weight.detach().clone()
        self._version = weight._version if counted else None

    @property
    def value(self) -> Tensor:
        """The weight.

        Raises:
            ExactnessError: if it was written to since.
        """
        if self._version is not None and self._tensor._version != self._version:
            raise ExactnessError(
                f"'{self._name}' was changed after the run that was taken apart",
                hint="decompose again, or form what you need before changing weights",
            )
        return self._tensor
