"""Statistics of how a row is spread: entropy, sum of squares, and how far back it looks.

They are of a row as a distribution. One that an edit left summing to less than 1 (under naive,
inside `cut_edges` without renormalising) is divided by its sum; one in which nothing is left has
entropy, sum of squares, keys and distance 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
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

# Rows with fewer keys are left out of the normalised entropy: log n_i says little about them.
FEWEST_KEYS = 8


@dataclass(eq=False)
class Entropy(Statistic):
    """Entropy of each row, -sum_j A_ij log A_ij, in nats: mean over all real queries.

    Rows differ in how many keys n_i they may read, and so in the largest entropy they can have,
    log n_i, which is chance here. `normalized` divides each row by it and leaves out rows of fewer
    than 8 keys; chance is then 1. Low entropy is no fault by itself: sinks have it too.

    Precision: by the identity lse - scale * q . (A K) to 1e-5 nats in float32 (1e-11 in float64)
    while every |lse| of the layer is below 28 (15000); beyond that by the centred accumulator of
    the block loop, as exact as the definition is in that precision (2e-5 at an lse of 420, 1e-4 at
    4200) and about three times slower. What rounding puts below 0 is set to 0.
    """

    normalized: bool = False
    needs_entropy: ClassVar[bool] = True
    unit: ClassVar[str] = "nats"

    @property
    def default_name(self) -> str:
        return "normalized_entropy" if self.normalized else "entropy"

    @property
    def why_none(self) -> str:  # type: ignore[override]
        return f"no query has {FEWEST_KEYS} keys to read" if self.normalized else super().why_none

    def counted(self, batch: TokenBatch) -> Counted:
        return batch.asks & (batch.visible >= FEWEST_KEYS) if self.normalized else batch.asks

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        # 0 log 0 = 0; the log of 1 there keeps the gradient finite.
        shares = _shares(pattern)
        logs = torch.where(shares > 0, shares, 1.0).log()
        return self._scaled(-(shares * logs).sum(-1), batch)

    def from_rows(self, rows: Rows) -> Values:
        return self._scaled(rows.entropy().clamp(min=0.0), rows.batch)

    def _scaled(self, entropy: Float[Tensor, "batch head query_pos"], batch: TokenBatch) -> Values:
        if not self.normalized:
            return entropy
        most = batch.visible.clamp(min=FEWEST_KEYS).to(entropy.dtype).log()
        return entropy / most[:, None]


@dataclass(eq=False)
class Collision(Statistic):
    """Sum of squares of each row, sum_j A_ij^2: mean over all real queries.

    The chance that two draws from the row agree: 1 for one key, 1 / n_i for uniform attention.
    Precision: a relative error of about 4 eps * |lse|.
    """

    unit: ClassVar[str] = "probability"
    cost: ClassVar[str] = "one more attention pass, shared with EffectiveKeys"

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        return _shares(pattern).square().sum(-1)

    def from_rows(self, rows: Rows) -> Values:
        return rows.log_collision().exp()


@dataclass(eq=False)
class EffectiveKeys(Statistic):
    """How many keys a row is spread over, 1 / sum_j A_ij^2: mean over all real queries.

    1 for one key, n_i for uniform attention (chance); never more than exp(entropy). The mean of
    the inverse is not the inverse of the mean `Collision`. Precision: as there.
    """

    unit: ClassVar[str] = "keys"
    cost: ClassVar[str] = "one more attention pass, shared with Collision"

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        squares = _shares(pattern).square().sum(-1)
        return (squares > 0) / torch.where(squares > 0, squares, 1.0)

    def from_rows(self, rows: Rows) -> Values:
        return (-rows.log_collision()).exp()


@dataclass(eq=False)
class ExpectedDistance(LinearStatistic):
    """How far back a row looks, sum_j A_ij (i - j) in real tokens: mean over all real queries.

    Chance: the mean of i / 2. Precision: about n * eps tokens, 0.01 in float32 at n = 131072.
    """

    unit: ClassVar[str] = "tokens"

    def values(
        self, batch: TokenBatch, dtype: torch.dtype
    ) -> Float[Tensor, "batch key_pos column"]:
        return batch.key_rank[..., None].to(dtype)

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        back = batch.query_rank[:, :, None] - batch.key_rank[:, None, :]
        return (_shares(pattern) * back[:, None]).sum(-1)

    def from_rows(self, rows: Rows) -> Values:
        rank = rows.batch.query_rank[:, None].to(rows.dtype)
        return rank - super().from_rows(rows)


def _shares(pattern: Pattern) -> Pattern:
    """The rows divided by their sums; an empty row stays 0."""
    sums = pattern.sum(-1, keepdim=True)
    return pattern / torch.where(sums > 0, sums, 1.0)
