"""Statistics of repeated tokens: attention to earlier copies, and to what came after them.

Only pairs of a query and an earlier copy of its token are looked at, a few thousand at a time:
about n^2 / (2 d_vocab) of them on uniformly random tokens. Where more than one pair in 32 matches
(a small vocabulary, a text of few words) all scores are formed instead, tile by tile, which costs
about two passes of the fused kernel. Memory stays O(n) either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headstream.circuits.measuring.rows import Rows
from headstream.circuits.measuring.statistic import Counted, Pattern, Statistic, Values
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.circuits.statistics import duplicate_token_targets, prefix_matching_targets


@dataclass(eq=False)
class DuplicateMass(Statistic):
    """Attention to earlier copies of the query's token, the query itself left out.

    Mean over the queries with an earlier copy of the summed mass on all of them. Chance: mean
    over them of (copies) / n_i. Precision: relative, eps * |lse|, as `masses`. Source: Wang
    et al. 2022 (duplicate token heads).
    """

    needs_tokens: ClassVar[bool] = True
    cost: ClassVar[str] = (
        "d_head products a head and pair of equal tokens; about two passes at most"
    )
    why_none: ClassVar[str] = "no token recurs in it"

    def counted(self, batch: TokenBatch) -> Counted:
        return batch.asks & (batch.earlier_copies > 0)

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        assert batch.tokens is not None
        targets = duplicate_token_targets(batch.tokens, batch.real)[:, batch.past :]
        return (pattern * targets[:, None]).sum(-1)

    def from_rows(self, rows: Rows) -> Values:
        return rows.copy_mass(following=False)


@dataclass(eq=False)
class InductionMass(Statistic):
    """Attention to what came after earlier copies of the query's token (prefix matching).

    Mean over the queries with an earlier copy of the summed mass on the next real token after
    each. Chance: mean over them of (copies) / n_i. A high score is a pattern and no mechanism: a
    head that looks back a fixed distance reaches it too (`score_heads` has the control). Precision:
    relative, eps * |lse|, as `masses`. Source: Olsson et al. 2022;
    `prefix_matching_score` says where we differ.
    """

    needs_tokens: ClassVar[bool] = True
    cost: ClassVar[str] = DuplicateMass.cost
    why_none: ClassVar[str] = DuplicateMass.why_none

    def counted(self, batch: TokenBatch) -> Counted:
        return batch.asks & (batch.earlier_copies > 0)

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        assert batch.tokens is not None
        targets = prefix_matching_targets(batch.tokens, batch.real)[:, batch.past :]
        return (pattern * targets[:, None]).sum(-1)

    def from_rows(self, rows: Rows) -> Values:
        return rows.copy_mass(following=True)
