"""What a statistic of attention is: a number for each query and head, and which queries count.

A statistic is a small class that says the same thing twice,

    from_pattern   the definition, on the pattern itself (the naive backend)
    from_rows      the same without the n x n matrix, from what `Rows` reads (the flash backend)

and once which queries it is about (`counted`). Its value for an example is the mean over those
queries; an example without any has none: NaN, "not applicable", for the reason `why_none` gives.
Chance is the statistic of a head that spreads its attention evenly over the keys it may read.

One that is a mean of values of the keys says no more than those values:

    @dataclass
    class MassOnToken(LinearStatistic):
        '''Attention to all occurrences of one token.'''

        token: int
        needs_tokens = True

        def values(self, batch, dtype):
            return (batch.tokens == self.token)[..., None].to(dtype)
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.circuits.measuring.rows import Rows
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.errors import ShapeError

Pattern = Float[Tensor, "batch head query_pos key_pos"]
# One number a query and head; or several, along the statistic's own axis.
Values = Float[Tensor, "batch head query_pos"] | Float[Tensor, "batch head query_pos column"]
Counted = Bool[Tensor, "batch query_pos"] | Bool[Tensor, "batch query_pos column"]


@dataclass(eq=False)
class Statistic(ABC):
    """Base of all statistics.

    Attributes:
        name: the variable it becomes; by default the class's name, and parameters if it adds them.
        needs_tokens: whether it compares tokens.
        needs_entropy: whether it asks for the entropy, which then shares a pass with others.
        summed: whether an example's value is the sum over the counted queries, not their mean.
        unit: of its values.
        cost: beyond the forward pass, for each layer and n positions.
        why_none: why an example may have no value.
    """

    name: str = field(default="", kw_only=True)
    needs_tokens: ClassVar[bool] = False
    needs_entropy: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    unit: ClassVar[str] = "fraction of attention"
    cost: ClassVar[str] = "one more attention pass, shared by all that need one"
    why_none: ClassVar[str] = "it has no real token"

    def __post_init__(self) -> None:
        self.check()
        self.name = self.name or self.default_name

    @property
    def default_name(self) -> str:
        """The name where none is given: `MassOnToken` is `mass_on_token`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def axis(self) -> str | None:
        """Name of its own axis ("key", "segment"); None for one number a query and head."""
        return None

    def check(self) -> None:  # noqa: B027
        """Raise ShapeError for parameters that mean nothing."""

    def check_batch(  # noqa: B027
        self, batch: TokenBatch, *, per_position: bool
    ) -> None:
        """Raise ShapeError if it cannot be had on these tokens, or not position by position."""

    @abstractmethod
    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        """The definition. Each row of `pattern` sums to 1, or to 0 where nothing may be read."""

    @abstractmethod
    def from_rows(self, rows: Rows) -> Values:
        """The same, without the pattern."""

    def counted(self, batch: TokenBatch) -> Counted:
        """The queries it is about; every real one unless overridden."""
        return batch.asks

    def coordinates(self, batch: TokenBatch) -> Sequence[object]:
        """What stands along `axis`."""
        return ()

    def totals(self, rows: Rows) -> Float[Tensor, "batch head column"]:
        """Sum over the counted queries; overridden where that takes less than query by query."""
        return total(self.from_rows(rows), self.counted(rows.batch))

    def finish(
        self, value: Float[Tensor, "batch head column"]
    ) -> Float[Tensor, "batch head column"]:
        """From the mean (or sum) over queries to the value of the example."""
        return value

    # What follows is the same for every statistic.

    def queries(self, batch: TokenBatch) -> Int[Tensor, "batch column"]:
        """How many queries count; one column if that is the same along the statistic's axis."""
        return _with_columns(self.counted(batch), 3).sum(1)

    def of(self, rows: Rows, per_position: bool = False) -> Tensor:
        """The measured value [batch, head], then [pos] by position, then the statistic's axis."""
        if per_position:
            return self.reduced(self.from_rows(rows), rows.batch, per_position)
        return self._value(self.totals(rows), rows.batch)

    def reduced(self, values: Values, batch: TokenBatch, per_position: bool = False) -> Tensor:
        """`of`, from the value of every query; NaN at those that do not count."""
        if not per_position:
            return self._value(total(values, self.counted(batch)), batch)
        counted = _with_columns(self.counted(batch), 3)[:, None]
        return self._squeezed(torch.where(counted, _with_columns(values, 4), torch.nan))

    def _value(self, totals: Float[Tensor, "batch head column"], batch: TokenBatch) -> Tensor:
        number = self.queries(batch)[:, None]
        value = self.finish(totals if self.summed else totals / number.clamp(min=1))
        return self._squeezed(value.masked_fill(number == 0, torch.nan))

    def _squeezed(self, values: Float[Tensor, "*axes"]) -> Tensor:
        return values if self.axis else values[..., 0]


@dataclass(eq=False)
class LinearStatistic(Statistic):
    """A mean of values of the keys, weighted by attention: sum_j A_ij phi_j.

    All linear statistics of a call share one pass over the keys with the entropy, if any.
    Precision: that of a weighted mean, eps times the largest value.
    """

    @abstractmethod
    def values(
        self, batch: TokenBatch, dtype: torch.dtype
    ) -> Float[Tensor, "batch key_pos column"]:
        """phi. What it says of padding does not matter."""

    def key_values(
        self, batch: TokenBatch, dtype: torch.dtype
    ) -> Float[Tensor, "batch key_pos column"]:
        """`values`, checked, in this dtype, and 0 on padding.

        Raises:
            ShapeError: if they have another shape, or several columns and no axis to stand along.
        """
        values = self.values(batch, dtype)
        expected = list(batch.real.shape)
        columns = "column" if self.axis else "1"
        if (
            values.ndim != 3
            or list(values.shape[:2]) != expected
            or (self.axis is None and values.shape[2] != 1)
        ):
            raise ShapeError(
                f"values of {self.name!r} are {list(values.shape)}, expected [batch, key_pos, "
                f"{columns}] = [{expected[0]}, {expected[1]}, {columns}]",
                hint="name an axis if a key has several" if values.ndim == 3 else "add [..., None]",
            )
        # A product would not do: 0 times NaN or infinity is NaN.
        return values.to(dtype).masked_fill(~batch.real[..., None], 0.0)

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        return self._squeezed(
            torch.einsum("bhqk,bkc->bhqc", pattern, self.key_values(batch, pattern.dtype))
        )

    def from_rows(self, rows: Rows) -> Values:
        return self._squeezed(rows.mean_of(self))


def total(values: Values, counted: Counted) -> Float[Tensor, "batch head column"]:
    """Sum of the values over the counted queries."""
    chosen = torch.where(_with_columns(counted, 3)[:, None], _with_columns(values, 4), 0.0)
    return chosen.sum(2)


def _with_columns(x: Tensor, ndim: int) -> Tensor:
    return x if x.ndim == ndim else x[..., None]
