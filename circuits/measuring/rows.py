"""What may be asked of the rows of an attention pattern without forming them.

`FlashRows` answers for a layer from its queries, keys and log-sum-exp; `UniformRows` for a head
that spreads its attention evenly over the keys it may read, which is what chance levels are.
Everything takes O(positions) memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from headstream.circuits.measuring.token_batch import TokenBatch

if TYPE_CHECKING:
    from headstream.circuits.measuring.statistic import LinearStatistic

PerQuery = Float[Tensor, "batch head query_pos"]
PerColumn = Float[Tensor, "batch head query_pos column"]


class Rows(ABC):
    """The rows of one attention pattern; A_ij is the attention of query i to key j."""

    batch: TokenBatch
    dtype: torch.dtype

    @abstractmethod
    def entries(self, keys: Int[Tensor, "batch query_pos"]) -> PerQuery:
        """A_ij for one key a query, given by position: real and not after it, or -1 for 0."""

    @abstractmethod
    def columns(self, keys: Int[Tensor, "batch n"]) -> Float[Tensor, "batch head query_pos n"]:
        """A_ij of every query for the same keys; 0 for a key of -1 or after the query."""

    @abstractmethod
    def mass_on(self, keys: Int[Tensor, "batch n"]) -> PerQuery:
        """`columns` summed over the keys."""

    @abstractmethod
    def copy_mass(self, *, following: bool) -> PerQuery:
        """Mass on earlier copies of the query's token; or on the real tokens following them."""

    @abstractmethod
    def mean_of(self, statistic: LinearStatistic) -> PerColumn:
        """sum_j A_ij phi_j, phi being the statistic's values."""

    @abstractmethod
    def entropy(self) -> PerQuery:
        """Entropy of each row in nats."""

    @abstractmethod
    def log_collision(self) -> PerQuery:
        """log sum_j A_ij^2."""

    @abstractmethod
    def column_totals(
        self, counted: Bool[Tensor, "batch query_pos"]
    ) -> Float[Tensor, "batch head key_pos"]:
        """Sum of A_ij over the counted queries, for every key."""


class UniformRows(Rows):
    """The rows of a head that reads every key it may with equal weight: A_ij = 1 / n_i.

    In float64, with one head; nothing of it needs a pass over the keys.
    """

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch
        self.dtype = torch.float64
        self.weight = batch.visible.to(self.dtype).reciprocal()

    def entries(self, keys: Int[Tensor, "batch query_pos"]) -> PerQuery:
        return (self.weight * (keys >= 0))[:, None]

    def columns(self, keys: Int[Tensor, "batch n"]) -> Float[Tensor, "batch head query_pos n"]:
        return (self.weight[..., None] * self.batch.may_read(keys))[:, None]

    def mass_on(self, keys: Int[Tensor, "batch n"]) -> PerQuery:
        return self.columns(keys).sum(-1)

    def copy_mass(self, *, following: bool) -> PerQuery:
        # Every earlier copy is followed by a token that the query may read: itself, if no other.
        return (self.weight * self.batch.earlier_copies)[:, None]

    def mean_of(self, statistic: LinearStatistic) -> PerColumn:
        sums = statistic.key_values(self.batch, self.dtype).cumsum(1)[:, self.batch.past :]
        return (sums * self.weight[..., None])[:, None]

    def entropy(self) -> PerQuery:
        return -self.weight.log()[:, None]

    def log_collision(self) -> PerQuery:
        return self.weight.log()[:, None]

    def column_totals(
        self, counted: Bool[Tensor, "batch query_pos"]
    ) -> Float[Tensor, "batch head key_pos"]:
        weight = pad(self.weight * counted, (self.batch.past, 0))
        after = weight.flip(1).cumsum(1).flip(1)
        return (after * self.batch.real)[:, None]
