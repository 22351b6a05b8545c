"""The rows of one layer's attention pattern, from its queries, keys and log-sum-exp.

    one entry            A_ij = exp(s_ij - lse_i)                  d_head products each
    a linear functional  sum_j A_ij phi_j                          attention with other values, phi
    entropy              H_i = lse_i - scale * q_i . (A K)_i       attention with the keys as values
    sum of squares       sum_j A_ij^2 = exp(lse_i(2 s) - 2 lse_i)  a second lse, of doubled scores
    column sums          sum_i A_ij                                the transposed problem

Everything is differentiable where q, k and lse are, and takes O(positions) memory: products are
formed a few positions at a time and dropped. Half-precision inputs are widened to float32.

Precision: an entry, a sum of squares or a column sum has a relative error of about eps * |lse|
(1e-5 in float32 at an lse of 100), since each is the exponential of a difference of two numbers
of that size; where that would pass 1e-3 the layer is read in float64 (`second_pass.precise`).
Source of the log-sum-exp: Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from headstream.circuits.measuring.rows import PerColumn, PerQuery, Rows
from headstream.circuits.measuring.second_pass import Carried, Layer, carry
from headstream.models.attend_blocks import blocks_of, visible_blocks
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import widen

if TYPE_CHECKING:
    from headstream.circuits.measuring.statistic import LinearStatistic

# Elements of one product over batch and heads: 4 MiB in float32, which stays in the cache.
TILE = 2**20

# Pairs of a query and a copy taken at once. Gathering one costs what about thirty scores of a tile
# cost, so where more than one pair in 32 matches, all scores are formed instead.
PAIRS = 4096
DENSE = 1 / 32


class FlashRows(Rows):
    """`Rows` of one layer.

    Args:
        layer: what its pass left behind.
        values: of the linear statistics that will be asked for, by name: one pass for all.
        entropy: whether the entropy will be; it shares that pass.
    """

    def __init__(
        self,
        layer: Layer,
        values: Mapping[str, Float[Tensor, "batch key_pos _"]] | None = None,
        *,
        entropy: bool = False,
    ) -> None:
        self.layer = layer
        self.batch = layer.batch
        self.dtype = layer.lse.dtype
        self._group = layer.q.shape[2] // layer.k.shape[2]
        self._carried = carry(layer, values or {}, entropy=entropy)
        self._log_collision: PerQuery | None = None

    def entries(self, keys: Int[Tensor, "batch query_pos"]) -> PerQuery:
        q, k, lse = self.layer.q, self.layer.k, self.layer.lse
        row = torch.arange(keys.shape[0], device=keys.device)[:, None]
        parts = []
        for some in self._pieces():
            key = k[row, keys[:, some].clamp(min=0)]
            scores = self._scores(q[:, some], key).transpose(1, 2)
            parts.append(_weights(scores, lse[..., some], (keys[:, some] >= 0)[:, None]))
        return torch.cat(parts, -1)

    def columns(self, keys: Int[Tensor, "batch n"]) -> Float[Tensor, "batch head query_pos n"]:
        return torch.cat(list(self._column_pieces(keys)), 2)

    def mass_on(self, keys: Int[Tensor, "batch n"]) -> PerQuery:
        return torch.cat([piece.sum(-1) for piece in self._column_pieces(keys)], 2)

    def _column_pieces(self, keys: Tensor) -> Iterator[Tensor]:
        row = torch.arange(keys.shape[0], device=keys.device)[:, None]
        key = widen(self.layer.k[row, keys.clamp(min=0)])
        may_read = self.batch.may_read(keys)[:, None]
        for some in self._pieces(keys.shape[1]):
            query = widen(self.layer.q[:, some]).unflatten(2, (-1, self._group))
            dots = torch.einsum("bqkgd,bnkd->bkgqn", query, key).flatten(1, 2)
            scores, lse = self.layer.scale * dots, self.layer.lse[..., some, None]
            yield _weights(scores, lse, may_read[:, :, some])

    def copy_mass(self, *, following: bool) -> PerQuery:
        if self.batch.copy_share > DENSE:
            return self._copy_mass_by_tiles(following)
        q, k = self.layer.q.flatten(0, 1), self.layer.k.flatten(0, 1)
        lse = self.layer.lse.transpose(1, 2).flatten(0, 1)

        def mass(q: Tensor, k: Tensor, lse: Tensor, query: Tensor, key: Tensor) -> Tensor:
            logs = self._scores(q[query][None], k[key][None])[0] - lse[query]
            weights = torch.exp(logs.clamp(max=0.0))
            return torch.zeros_like(lse).index_add(0, query, weights)

        parts = []
        for queries, query, copy in self.batch.copies(PAIRS):
            key = self.batch.next_real[copy] if following else copy
            parts.append(self._again(mass, q[queries], k, lse[queries], query, key))
        return torch.cat(parts).unflatten(0, self.layer.q.shape[:2]).transpose(1, 2)

    def _copy_mass_by_tiles(self, following: bool) -> PerQuery:
        """The same where copies are many: every score is formed, a tile at a time."""
        batch, scale = self.batch, self.layer.scale
        query_pos, heads = self.layer.q.shape[1:3]
        q = widen(self.layer.q).unflatten(2, (-1, self._group)).permute(0, 2, 3, 1, 4)
        k = widen(self.layer.k).transpose(1, 2)[:, :, None]
        lse = self.layer.lse.unflatten(1, (-1, self._group))
        assert batch.tokens is not None
        asked = batch.tokens[:, batch.past :]
        held = batch.preceding_tokens if following else batch.tokens.where(batch.real, -1)
        own = torch.arange(batch.past, batch.real.shape[1], device=held.device)

        def mass(q: Tensor, k: Tensor, lse: Tensor, may: Tensor) -> Tensor:
            # Later keys may lie above the row's lse; of those that are read none does.
            logs = (scale * q @ k.mT - lse[..., None]).clamp(max=0.0)
            return (torch.exp(logs) * may).sum(-1)

        size = max(64, int((TILE / (len(held) * heads)) ** 0.5))
        parts = []
        for rows in blocks_of(query_pos, size):
            part = torch.zeros_like(lse[..., rows])
            for cols in visible_blocks(rows, query_pos, k.shape[3], size):
                key_at = torch.arange(cols.start, cols.stop, device=held.device)
                last = own[rows, None] if following else own[rows, None] - 1
                may = (asked[:, rows, None] == held[:, None, cols]) & (key_at <= last)
                weight = may[:, None, None].to(self.dtype)
                given = (q[..., rows, :], k[..., cols, :], lse[..., rows], weight)
                part = part + self._again(mass, *given)
            parts.append(part)
        return torch.cat(parts, -1).flatten(1, 2)

    def _again(self, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """`function(*given)`; its products are formed again in a backward pass, not kept."""
        if not self.layer.wants_grad:
            return function(*given)
        return checkpoint(function, *given, use_reentrant=False)

    def mean_of(self, statistic: LinearStatistic) -> PerColumn:
        name = statistic.name
        if name in self._carried.means:
            return self._carried.means[name]
        return carry(self.layer, {name: statistic.key_values(self.batch, self.dtype)}).means[name]

    def entropy(self) -> PerQuery:
        if self._carried.entropy is None:
            again = carry(self.layer, {}, entropy=True)
            self._carried = Carried(self._carried.means, again.entropy)
        assert self._carried.entropy is not None
        return self._carried.entropy

    def log_collision(self) -> PerQuery:
        if self._log_collision is None:
            layer = self.layer
            _, doubled = attend_flash(
                layer.q,
                layer.k,
                layer.k,
                scale=2 * layer.scale,
                key_mask=layer.key_mask,
                need_lse_grad=layer.wants_grad,
            )
            finite = doubled.masked_fill(torch.isneginf(doubled), 0.0)
            self._log_collision = finite - 2 * layer.lse
        return self._log_collision

    def column_totals(
        self, counted: Bool[Tensor, "batch query_pos"]
    ) -> Float[Tensor, "batch head key_pos"]:
        # sum_i exp(s_ij - lse_i) is the exponential of a log-sum-exp over the queries. Here keys
        # ask and queries are read; -lse_i is one more coordinate of what is read; and reversing
        # the positions turns "queries at or after the key" into the causal mask.
        layer, past = self.layer, self.batch.past
        asking = widen(layer.k).repeat_interleave(self._group, 2)
        asking = torch.cat((asking, torch.ones_like(asking[..., :1])), -1)
        read = torch.cat((layer.scale * widen(layer.q), -layer.lse.transpose(1, 2)[..., None]), -1)
        # A cached position asks nothing.
        read = pad(read, (0, 0, 0, 0, past, 0)).flip(1)
        mask = pad(counted, (past, 0)).flip(1)
        _, totals = attend_flash(
            asking.flip(1),
            read,
            read,
            scale=1.0,
            key_mask=None if bool(mask.all()) else mask,
            need_lse_grad=layer.wants_grad,
        )
        return torch.exp(totals).flip(-1)

    def _pieces(self, columns: int = 1) -> list[slice]:
        """A few queries at a time: `columns` numbers for each, or d_head, whichever is more."""
        batch, query_pos, heads, d_head = self.layer.q.shape
        return blocks_of(query_pos, max(1, TILE // (batch * heads * max(d_head, columns))))

    def _scores(
        self, q: Float[Tensor, "batch n head d_head"], k: Float[Tensor, "batch n kv_head d_head"]
    ) -> Float[Tensor, "batch n head"]:
        """Scaled q . k, position by position."""
        query = widen(q).unflatten(2, (-1, self._group))
        return self.layer.scale * (query * widen(k)[:, :, :, None]).sum(-1).flatten(2)


def _weights(scores: Tensor, lse: Tensor, may: Tensor) -> Tensor:
    """exp(scores - lse) where the entry may be read, 0 elsewhere, with gradient 0; at most 1."""
    return torch.exp((scores - lse).masked_fill(~may, -torch.inf).clamp(max=0.0))
