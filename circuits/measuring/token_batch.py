"""A batch of token rows as a measurement sees it: what is real, and which real token comes when.

Positions count everything, padding included; ranks count real tokens only, so that "the first
token" and "two tokens back" mean the same with and without padding, on either side. Queries are
the last `query_pos` positions; they are all of them unless a key/value cache holds earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class TokenBatch:
    """Tokens and what may be read of them.

    Attributes:
        real: [batch, key_pos], True on real tokens: padding asks nothing and is never read.
        tokens: int64 [batch, key_pos]; None where they are not known (an old cache).
        query_pos: how many of the last positions are queries.
    """

    def __init__(
        self,
        real: Bool[Tensor, "batch key_pos"],
        tokens: Int[Tensor, "batch key_pos"] | None = None,
        query_pos: int | None = None,
    ) -> None:
        self.real = real
        self.tokens = tokens
        self.query_pos = real.shape[1] if query_pos is None else query_pos
        self.past = real.shape[1] - self.query_pos

    @cached_property
    def key_rank(self) -> Int[Tensor, "batch key_pos"]:
        """Real tokens before each position: the rank of a real token, 0 for the first."""
        return self.real.long().cumsum(1) - self.real.long()

    @cached_property
    def query_rank(self) -> Int[Tensor, "batch query_pos"]:
        """`key_rank` of the queries."""
        return self.key_rank[:, self.past :]

    @cached_property
    def asks(self) -> Bool[Tensor, "batch query_pos"]:
        """Queries that stand on a real token; the others are never counted."""
        return self.real[:, self.past :]

    @cached_property
    def visible(self) -> Int[Tensor, "batch query_pos"]:
        """n_i: how many keys each query may read, itself included; at least 1."""
        return (self.query_rank + self.asks.long()).clamp(min=1)

    @cached_property
    def length(self) -> Int[Tensor, " batch"]:
        """Real tokens of each row."""
        return self.real.sum(1)

    @cached_property
    def _places(self) -> Int[Tensor, "batch key_pos"]:
        """Positions of the real tokens in order, then those of the padding."""
        return (~self.real).int().argsort(dim=1, stable=True)

    def place(self, rank: Int[Tensor, "batch n"]) -> Int[Tensor, "batch n"]:
        """Position of the real token with this rank; -1 where there is none."""
        exists = (rank >= 0) & (rank < self.length[:, None])
        found = self._places.gather(1, rank.clamp(0, max(0, self.real.shape[1] - 1)))
        return torch.where(exists, found, -1)

    def may_read(self, keys: Int[Tensor, "batch n"]) -> Bool[Tensor, "batch query_pos n"]:
        """Whether each query stands at or after these keys, given by position; -1 is none."""
        own = torch.arange(self.past, self.real.shape[1], device=keys.device)
        return (keys[:, None] >= 0) & (keys[:, None] <= own[:, None])

    @cached_property
    def edges(self) -> Bool[Tensor, "batch query_pos key_pos"]:
        """Real query to real key at or before it: the n x n matrix, for definitions only."""
        own = torch.arange(self.past, self.real.shape[1], device=self.real.device)
        before = torch.arange(self.real.shape[1], device=self.real.device) <= own[:, None]
        return self.asks[:, :, None] & self.real[:, None, :] & before

    # Earlier copies of a query's token, without comparing every pair.

    @cached_property
    def _occurrences(self) -> tuple[Tensor, Tensor, Tensor]:
        """(order, start, earlier), over all real tokens of the batch laid end to end.

        `order` lists positions token by token, each token's in the order of the text; `start` says
        where the list of a position's token begins; `earlier` how many of them come before it.
        """
        assert self.tokens is not None
        row = torch.arange(len(self.tokens), device=self.tokens.device)[:, None]
        # One key for a row's token; padding gets a key of its own for each position.
        values = self.tokens - self.tokens.amin()
        keys = torch.where(self.real, values + row * (values.amax() + 1), -1).flatten()
        order = keys.argsort(stable=True)
        listed = keys[order]
        places = torch.arange(len(order), device=order.device)
        first = torch.ones_like(listed, dtype=torch.bool)
        first[1:] = listed[1:] != listed[:-1]
        begins = torch.where(first, places, 0).cummax(0).values
        start = torch.empty_like(order)
        earlier = torch.empty_like(order)
        start[order] = begins
        earlier[order] = (places - begins).masked_fill(listed < 0, 0)
        return order, start, earlier

    @cached_property
    def earlier_copies(self) -> Int[Tensor, "batch query_pos"]:
        """How many earlier real copies of its token each query has; 0 for padding."""
        return self._occurrences[2].reshape(self.real.shape)[:, self.past :]

    @cached_property
    def copy_share(self) -> float:
        """Pairs of a query and an earlier copy of its token, of all pairs that may be read."""
        return float(self.earlier_copies.sum() / self.visible.sum())

    @cached_property
    def preceding_tokens(self) -> Int[Tensor, "batch key_pos"]:
        """The real token before each real position; -1 where there is none, and on padding."""
        assert self.tokens is not None
        before = self.place(self.key_rank - 1)
        token = self.tokens.gather(1, before.clamp(min=0))
        return torch.where(self.real & (before >= 0), token, -1)

    def copies(self, limit: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Pairs of a query and an earlier copy of its token, about `limit` at a time.

        Yields:
            `(queries, query, key)`: a slice of the queries of all rows laid end to end
            (`batch * query_pos`), the index in it of each pair's query, and the index of its key
            in `batch * key_pos`. A query is not split: one with more pairs makes a larger piece.
        """
        order, start, _ = self._occurrences
        counts = self.earlier_copies.flatten()
        starts = start.reshape(self.real.shape)[:, self.past :].flatten()
        ends = counts.cumsum(0)
        first = 0
        while first < len(counts):
            done = int(ends[first - 1]) if first else 0
            last = int(torch.searchsorted(ends, done + limit, right=True))
            queries = slice(first, max(last, first + 1))
            some = counts[queries]
            query = torch.repeat_interleave(some)
            nth = torch.arange(len(query), device=query.device) - (some.cumsum(0) - some)[query]
            yield queries, query, order[starts[queries][query] + nth]
            first = queries.stop

    @cached_property
    def next_real(self) -> Int[Tensor, " n"]:
        """Of each position of `batch * key_pos`, the next real token in its row; -1 if none."""
        batch, key_pos = self.real.shape
        following = self.place(self.key_rank + self.real.long())
        row = torch.arange(batch, device=following.device)[:, None] * key_pos
        return torch.where(following < 0, -1, following + row).flatten()
