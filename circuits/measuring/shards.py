"""Rows read in parts: what is known of the attention to one set of keys, and how sets join.

For disjoint sets of keys 1 and 2, with w_g = exp(lse_g - lse) the share of a row that falls on g:

    lse  = log(exp lse_1 + exp lse_2)
    mean = w_1 mean_1 + w_2 mean_2                                 of any values of the keys
    H    = w_1 H_1 + w_2 H_2 - w_1 log w_1 - w_2 log w_2           the chain rule of entropy

so a row may be read shard by shard (the chunks of a key/value cache, the segments of a prompt, the
devices of a cluster) in any order and any grouping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

PerQuery = Float[Tensor, "batch head query_pos"]


@dataclass(frozen=True, eq=False)
class RowSummary:
    """Attention of each query to one set of keys.

    Attributes:
        lse: natural log-sum-exp of the scores; -inf for a row that may read none of the keys.
        entropy: of the row's attention within the set, in nats; 0 for an empty row.
        means: attention-weighted means of some values of the keys, one a column; 0 likewise. With
            the values 1 on a set of keys and 0 elsewhere the mean is the mass on them.

    Example:
        >>> lse, none = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 0)
        >>> one_key = RowSummary(lse, torch.zeros(1, 1, 1), none)
        >>> one_key.merge(one_key).entropy.exp()  # two keys of equal score
        tensor([[[2.]]])
    """

    lse: PerQuery
    entropy: PerQuery
    means: Float[Tensor, "batch head query_pos column"]

    def merge(self, other: RowSummary) -> RowSummary:
        """The same of both sets together; they must be disjoint."""
        empty = torch.isneginf(self.lse) & torch.isneginf(other.lse)
        # logaddexp of two -inf has a NaN gradient: such rows never enter it.
        lse = torch.logaddexp(*(part.lse.masked_fill(empty, 0.0) for part in (self, other)))
        entropy, means = torch.zeros_like(self.entropy), torch.zeros_like(self.means)
        for part in (self, other):
            log_share = (part.lse - lse).masked_fill(empty, -torch.inf)
            share = torch.exp(log_share)
            # 0 log 0 = 0: a share of 0 has a log of -inf.
            log_share = log_share.clamp(min=torch.finfo(lse.dtype).min)
            entropy = entropy + share * (part.entropy - log_share)
            means = means + share[..., None] * part.means
        return RowSummary(lse.masked_fill(empty, -torch.inf), entropy, means)
