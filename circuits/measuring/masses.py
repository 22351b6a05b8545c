"""Statistics that are mass on certain keys: a distance back, the first tokens, chosen tokens.

Positions are those of real tokens: under padding "first" is the first real token of the row and
"two back" skips nothing but padding.

Precision of each: that of its entries A_ij = exp(s_ij - lse_i), a relative error of about
eps * |lse| of the dtype of the scores (float32: 7e-7 at an lse of 6, 5e-4 at 4203), at most 1e-3,
since a layer whose scores are larger still is read in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, SupportsIndex, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.circuits.measuring.rows import Rows
from headstream.circuits.measuring.statistic import (
    Counted,
    LinearStatistic,
    Pattern,
    Statistic,
    Values,
)
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.errors import ShapeError

# More columns than this and one transposed pass gives all of them for less.
FEW_COLUMNS = 16


@dataclass(eq=False)
class Offset(Statistic):
    """Attention to the token `distance` real tokens back: 1 the previous token, 0 the own one.

    Mean of A[i, i - distance] over the queries that have a choice and a token there (the first
    token sees only itself, so it is not counted for distance 0 either). Chance: mean of 1 / n_i
    over them, n_i being the keys a query may read. Precision: relative, eps * |lse| (see the
    module). Source: Olsson et al. 2022 (previous token).
    """

    distance: int = 1
    cost: ClassVar[str] = "n * d_head products a head"
    why_none: ClassVar[str] = "no token has another that far before it"

    def check(self) -> None:
        self.distance = check_whole("distance", self.distance, at_least=0)

    @property
    def default_name(self) -> str:
        return f"offset_{self.distance}"

    def counted(self, batch: TokenBatch) -> Counted:
        return batch.asks & (batch.query_rank >= max(1, self.distance))

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        back = batch.query_rank[:, :, None] - batch.key_rank[:, None, :]
        return _mass(pattern, batch.edges & (back == self.distance))

    def from_rows(self, rows: Rows) -> Values:
        batch = rows.batch
        keys = batch.place(batch.query_rank - self.distance)
        return rows.entries(torch.where(batch.asks, keys, -1))


@dataclass(eq=False)
class SinkMass(Statistic):
    """Attention to the first `first` real tokens: mean over later queries of the mass on them.

    Queries among the first are not counted: the first token can only see itself. Chance: mean
    over them of first / n_i. Precision: relative, eps * |lse| (see the module). Source: mean mass
    on the first key, as Qiu et al. 2025; `SinkRate` is the thresholded measure of Gu et al. 2024,
    `SinkImportance` the number it thresholds.
    """

    first: int = 1
    cost: ClassVar[str] = (
        f"n * d_head products a head and sink token; a pass above {FEW_COLUMNS} tokens"
    )
    why_none: ClassVar[str] = "no token comes after the sink"

    def check(self) -> None:
        self.first = check_whole("first", self.first, at_least=1)

    @property
    def default_name(self) -> str:
        return f"sink_mass_{self.first}"

    def counted(self, batch: TokenBatch) -> Counted:
        return batch.asks & (batch.query_rank >= self.first)

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        return _mass(pattern, batch.edges & (batch.key_rank < self.first)[:, None, :])

    def from_rows(self, rows: Rows) -> Values:
        if self.first > FEW_COLUMNS:
            return rows.mean_of(_AmongFirst(self.first))[..., 0]
        return rows.mass_on(_places(rows.batch, range(self.first)))


@dataclass(eq=False)
class _AmongFirst(LinearStatistic):
    """1 on the first real tokens, 0 elsewhere: `SinkMass` of many, in O(n) memory."""

    first: int

    def values(
        self, batch: TokenBatch, dtype: torch.dtype
    ) -> Float[Tensor, "batch key_pos column"]:
        return (batch.key_rank < self.first)[..., None].to(dtype)


@dataclass(eq=False)
class ColumnMass(Statistic):
    """Attention that a key receives: sum over the queries that may read it, its own included.

    Key k is the k-th real token of the row. Chance: the sum of 1 / n_i over the queries at or
    after k. By position it is the entry A[i, k]. Precision: relative, eps * |lse| (see the module).

    Args:
        keys: one number; or several (a list, a range, a tensor), along an axis `key`; or None for
            every key, which has no value by position: that is the n x n matrix.
    Source:
        The score by which H2O (Zhang et al. 2023) keeps keys in a cache.
    """

    keys: Any = None
    summed: ClassVar[bool] = True
    unit: ClassVar[str] = "queries"
    cost: ClassVar[str] = f"n * d_head products a head and key; a pass above {FEW_COLUMNS} keys"
    why_none: ClassVar[str] = "it has no such token"

    def check(self) -> None:
        if self.keys is None:
            return
        # Tensors, arrays and their numbers as plain ones.
        given = self.keys.tolist() if hasattr(self.keys, "tolist") else self.keys
        if isinstance(given, str) or not isinstance(given, Iterable):
            self.keys = check_whole("keys (if not several)", given, at_least=0)
            return
        self.keys = [check_whole("each of keys", key, at_least=0) for key in given]
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise ShapeError(f"keys must be distinct and at least one, got {self.keys}")

    @property
    def axis(self) -> str | None:
        return None if isinstance(self.keys, int) else "key"

    def check_batch(self, batch: TokenBatch, *, per_position: bool) -> None:
        if self.keys is None and per_position:
            raise ShapeError(
                f"{self.name!r} of every key by position is the n x n matrix itself",
                hint="name some keys, or ask for it without per_position",
            )
        positions = batch.real.shape[1]
        if self.keys is not None and max(_several(self.keys)) >= positions:
            raise ShapeError(
                f"{self.name!r} asks for key {max(_several(self.keys))}, but there are "
                f"{positions} positions",
                hint="keys count from 0",
            )

    def coordinates(self, batch: TokenBatch) -> Sequence[object]:
        return list(self._numbers(batch))

    def counted(self, batch: TokenBatch) -> Counted:
        numbers = torch.tensor(self._numbers(batch), device=batch.real.device)
        exists = numbers < batch.length[:, None]
        sees = batch.query_rank[..., None] >= numbers
        return self._asking(batch)[..., None] & exists[:, None] & sees

    def queries(self, batch: TokenBatch) -> Int[Tensor, "batch column"]:
        # Those of `counted` at or after each key, without a column for each of many keys.
        asking = self._asking(batch).long()
        by_rank = torch.zeros_like(batch.real, dtype=torch.int64)
        by_rank = by_rank.scatter_add(1, batch.query_rank, asking)
        return by_rank.flip(1).cumsum(1).flip(1)[:, self._numbers(batch)]

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        places = _places(batch, self._numbers(batch)).clamp(min=0)
        return torch.stack([p[..., place] for p, place in zip(pattern, places, strict=True)])

    def from_rows(self, rows: Rows) -> Values:
        return rows.columns(_places(rows.batch, self._numbers(rows.batch)))

    def totals(self, rows: Rows) -> Float[Tensor, "batch head column"]:
        numbers = self._numbers(rows.batch)
        if len(numbers) <= FEW_COLUMNS:
            return super().totals(rows)
        # What is summed is what is counted: no query before a key reads it.
        sums = rows.column_totals(self._asking(rows.batch))
        places = _places(rows.batch, numbers).clamp(min=0)
        return sums.gather(2, places[:, None].expand(-1, sums.shape[1], -1))

    def _asking(self, batch: TokenBatch) -> Bool[Tensor, "batch query_pos"]:
        """The queries that are summed over, as far as they may read the key."""
        return batch.asks

    def _numbers(self, batch: TokenBatch) -> list[int]:
        return list(range(batch.real.shape[1]) if self.keys is None else _several(self.keys))


@dataclass(eq=False)
class SinkImportance(ColumnMass):
    """Importance of a key: mean over the queries that may read it, its own included.

    alpha_k = mean over i = k .. T-1 of A[i, k], key k being the k-th real token. It counts the
    key's own row, which is 1 for key 0 and any head, so chance is not small on short prompts: the
    mean of 1 / n_i over i = k .. T-1, which for k = 0 and T = 64 is 0.0741. Precision: relative,
    eps * |lse| (see the module).

    Args:
        keys: as in `ColumnMass`.
        T: how many real tokens to look at, None for all. An example with fewer has no value.
    Source:
        Gu et al. 2024, arXiv 2410.10781.
    """

    keys: Any = 0
    T: int | None = None
    summed: ClassVar[bool] = False
    unit: ClassVar[str] = "fraction of attention"
    why_none: ClassVar[str] = "it has fewer real tokens than that takes, or T stops before the key"

    def check(self) -> None:
        super().check()
        if self.T is None:
            return
        self.T = check_whole("T", self.T, at_least=1)
        least = 0 if self.keys is None else min(_several(self.keys))
        if least >= self.T:
            raise ShapeError(f"key {least} is not among the first T = {self.T} tokens")

    def _asking(self, batch: TokenBatch) -> Bool[Tensor, "batch query_pos"]:
        if self.T is None:
            return batch.asks
        return batch.asks & (batch.query_rank < self.T) & (batch.length >= self.T)[:, None]


@dataclass(eq=False)
class SinkRate(Statistic):
    """Whether a head sinks: 1 where the importance of `key` over T tokens is above eps, else 0.

    The threshold is taken in each example, strictly; the mean over examples, heads and layers,
    times 100, is the published rate. A rate means nothing without its eps and T, so both are in
    the name. Uniform attention is below any eps above 0.0741 at T = 64. No gradient: differentiate
    `SinkImportance`. Precision: exact, but where the importance is within its own error of eps.

    Args:
        eps: 0.3 in the source, 0.8 in Barbero et al. 2025.
        T: real tokens looked at; an example with fewer has no value.
        key: which real token is the sink.
    Source:
        Gu et al. 2024, arXiv 2410.10781: their code, which thresholds each sample; their formula
        would threshold the mean over samples, another number.
    """

    eps: float = 0.3
    T: int = 64
    key: int = 0
    unit: ClassVar[str] = "0 or 1"
    cost: ClassVar[str] = "T * d_head products a head, taken over all n"
    why_none: ClassVar[str] = "it has fewer than T real tokens"

    def check(self) -> None:
        if not isinstance(self.eps, Real) or not 0 <= self.eps < 1:
            raise ShapeError(f"eps must lie in [0, 1), got {self.eps!r}")
        self.key = check_whole("key", self.key, at_least=0)
        self.T = check_whole("T", self.T, at_least=1)
        self._importance: Statistic = SinkImportance(self.key, self.T)

    @property
    def default_name(self) -> str:
        of = f"_key_{self.key}" if self.key else ""
        return f"sink_rate_{self.eps:g}_{self.T}{of}"

    def check_batch(self, batch: TokenBatch, *, per_position: bool) -> None:
        if per_position:
            raise ShapeError(
                f"{self.name!r} is one number an example and head, it has none by position",
                hint="ask for SinkImportance, or without per_position",
            )

    def counted(self, batch: TokenBatch) -> Counted:
        return self._importance.counted(batch)

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        return self._importance.from_pattern(pattern, batch)

    def from_rows(self, rows: Rows) -> Values:
        return self._importance.from_rows(rows)

    def finish(
        self, value: Float[Tensor, "batch head column"]
    ) -> Float[Tensor, "batch head column"]:
        return (value > self.eps).to(value.dtype)


def check_whole(name: str, value: object, *, at_least: int) -> int:
    """`value` as an int; ShapeError unless it is a whole number of at least that."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not whole or operator.index(cast(SupportsIndex, value)) < at_least:
        raise ShapeError(f"{name} must be a whole number >= {at_least}, got {value!r}")
    return operator.index(cast(SupportsIndex, value))


def _mass(
    pattern: Pattern, targets: Bool[Tensor, "batch query_pos key_pos"]
) -> Float[Tensor, "batch head query_pos"]:
    return (pattern * targets[:, None]).sum(-1)


def _places(batch: TokenBatch, ranks: Sequence[int]) -> Int[Tensor, "batch n"]:
    """Positions of the real tokens with these numbers in each row, -1 where there is none."""
    given = torch.tensor(list(ranks), device=batch.real.device)
    return batch.place(given.expand(len(batch.real), -1))


def _several(keys: int | Sequence[int]) -> Sequence[int]:
    return [keys] if isinstance(keys, int) else keys
