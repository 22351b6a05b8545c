"""Attention of one layer under edits (`edits.py`), with and without the n x n matrix.

Attention over some of the keys is attention with another key mask, so flash needs no new kernel.
Queries that miss the same keys are attended together, each with the keys up to its own:

    edges removed, the rest renormalised   attention with the cut keys masked
    edges zeroed, the rest unchanged       z = exp(lse_kept - lse) z_kept
    pattern frozen                         attention from the frozen q and k, with the new v

z_kept and lse_kept are those of attention without the zeroed keys. To form the kept part directly,
instead of subtracting the zeroed one from the whole, loses nothing where the zeroed keys hold
nearly all the mass. In the scores' precision the factor is good to eps * |lse|, as each weight is.

The cost is that of attention for the queries concerned, twice for zeroed edges, on top of the rest;
memory is O(query_pos + key_pos), with gradients too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import masked_scores, widen
from headstream.models.edits import EdgeCut, Edges, FrozenPattern, HeadGroup, group_heads

# Queries that may stand between two of a set before the set is attended in two calls: a call costs
# about what this many rows more cost.
GAP = 64


class EditedAttention:
    """One pass of one layer under its edits.

    Args:
        edits: of the layer.
        q, k: queries and keys of the pass, rotated where positions are rotary.
        scale: what q . k is multiplied by.
        key_mask: keys that may be read; None lets every key be.
        cached: whether earlier keys come from a key/value cache.
    Raises:
        ShapeError, BackendError: if an edit does not fit this pass, or a cut removes nothing.
    """

    def __init__(
        self,
        edits: Sequence[EdgeCut | FrozenPattern],
        q: Float[Tensor, "batch query_pos head d_head"],
        k: Float[Tensor, "batch key_pos kv_head d_head"],
        *,
        scale: float,
        key_mask: Bool[Tensor, "batch key_pos"] | None,
        cached: bool,
    ) -> None:
        self.q, self.k, self.scale, self.key_mask = q, k, scale, key_mask
        self.groups = group_heads(edits, q, k, key_mask=key_mask, cached=cached)
        order = [head for group in self.groups for head in group.heads]
        self._places = (
            None if len(self.groups) == 1 else torch.tensor(order, device=q.device).argsort()
        )

    def scores(self) -> Float[Tensor, "batch head query_pos key_pos"]:
        """Scores with frozen heads in place, and -inf on removed edges: the definition."""
        parts = []
        for group in self.groups:
            q, k, scale, key_mask = self._source(group)
            scores = masked_scores(q, k, scale=scale, key_mask=key_mask)
            for edges in group.removed:
                scores = scores.masked_fill(_square(edges), -torch.inf)
            parts.append(scores)
        return self._assembled(parts, 1)

    def zero(
        self, pattern: Float[Tensor, "batch head query_pos key_pos"]
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """The pattern with 0 on zeroed edges and all else as it was."""
        if not any(group.zeroed for group in self.groups):
            return pattern
        parts = []
        for group in self.groups:
            part = pattern[:, group.heads]
            for edges in group.zeroed:
                part = part.masked_fill(_square(edges), 0.0)
            parts.append(part)
        return self._assembled(parts, 1)

    def flash(
        self, v: Float[Tensor, "batch key_pos kv_head d_value"], *, need_lse_grad: bool
    ) -> tuple[
        Float[Tensor, "batch query_pos head d_value"], Float[Tensor, "batch head query_pos"]
    ]:
        """z and lse without the n x n matrix; arguments and results as in `attend_flash`."""
        z, lse = [], []
        for group in self.groups:
            q, k, scale, key_mask = self._source(group)
            value = self._of_heads(v, group.heads)
            rows = _Rows(q, k, value, scale, key_mask, need_lse_grad)
            z_part, lse_part = rows.attend(group.removed, group.zeroed)
            z.append(z_part)
            lse.append(lse_part)
        return self._assembled(z, 2), self._assembled(lse, 1)

    def _source(self, group: HeadGroup) -> tuple[Tensor, Tensor, float, Tensor | None]:
        """Queries, keys, scale and key mask from which the group's scores are made."""
        of = group.frozen
        if of is None:
            q, k, scale, key_mask = self.q, self.k, self.scale, self.key_mask
        else:
            q, k, scale, key_mask = of.q, of.k, of.scale, of.key_mask
        if len(group.heads) < q.shape[2]:
            k = self._of_heads(k, group.heads)
            q = q[:, :, group.heads]
        return q, k, scale, key_mask

    def _of_heads(
        self, x: Float[Tensor, "batch key_pos kv_head d"], heads: Sequence[int]
    ) -> Float[Tensor, "batch key_pos heads d"]:
        """What these query heads read, one key/value head for each, or all as they are."""
        n_heads = self.q.shape[2]
        if len(heads) == n_heads:
            return x
        group = n_heads // x.shape[2]
        return x[:, :, [head // group for head in heads]]

    def _assembled(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """The groups' heads along `axis`, in the model's order."""
        if self._places is None:
            return parts[0]
        return torch.cat(list(parts), axis).index_select(axis, self._places)


class _Rows:
    """Rows of attention of one group of heads, from which keys may be missing."""

    def __init__(
        self,
        q: Float[Tensor, "batch query_pos head d_head"],
        k: Float[Tensor, "batch key_pos kv_head d_head"],
        v: Float[Tensor, "batch key_pos kv_head d_value"],
        scale: float,
        key_mask: Bool[Tensor, "batch key_pos"] | None,
        need_lse_grad: bool,
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.scale, self.key_mask, self.need_lse_grad = scale, key_mask, need_lse_grad
        scored = q.requires_grad or k.requires_grad
        self.scores_want_grad = torch.is_grad_enabled() and scored
        self.wants_grad = torch.is_grad_enabled() and (scored or v.requires_grad)
        self.past = k.shape[1] - q.shape[1]

    def attend(self, removed: Sequence[Edges], zeroed: Sequence[Edges]) -> tuple[Tensor, Tensor]:
        """z and lse of all rows."""
        cuts = [*removed, *zeroed]

        def attend_span(rows: slice, member: Tensor) -> tuple[Tensor, Tensor]:
            stop = self.past + int(rows.stop)
            split = len(removed)
            missing = _keys_of(cuts[:split], member[:split], stop)
            silenced = _keys_of(cuts[split:], member[split:], stop)
            return self._span(rows, missing, silenced)

        spans = list(_alike(cuts, self.q.shape[1], self.q.device))
        z, lse = [], []
        for places, member in spans:
            rows = slice(int(places[0]), int(places[-1]) + 1)
            z_span, lse_span = self._again(len(spans) > 1, attend_span, rows, member)
            kept = places - rows.start
            z.append(z_span.index_select(1, kept))
            lse.append(lse_span.index_select(2, kept))
        if len(spans) == 1:
            return z[0], lse[0]
        order = torch.cat([places for places, _ in spans]).argsort()
        return torch.cat(z, 1).index_select(1, order), torch.cat(lse, 2).index_select(2, order)

    def _span(
        self, rows: slice, missing: Tensor | None, silenced: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of neighbouring queries, without some of the keys."""
        stop = self.past + int(rows.stop)
        q, k, v = self.q[:, rows], self.k[:, :stop], self.v[:, :stop]
        kept = None if self.key_mask is None else self.key_mask[:, :stop]
        kept = _without(kept, missing)
        if silenced is None:
            return attend_flash(
                q, k, v, scale=self.scale, key_mask=kept, need_lse_grad=self.need_lse_grad
            )
        # The factor takes its gradient through both log-sum-exps.
        want = self.scores_want_grad
        z, lse_kept = attend_flash(
            q, k, widen(v), scale=self.scale, key_mask=_without(kept, silenced), need_lse_grad=want
        )
        _, lse = attend_flash(
            q, k, k, scale=self.scale, key_mask=kept, need_lse_grad=want or self.need_lse_grad
        )
        # -inf less -inf is NaN, so that a row in which nothing is kept never enters.
        nothing = torch.isneginf(lse_kept)
        difference = lse_kept.masked_fill(nothing, 0.0) - lse.masked_fill(nothing, 0.0)
        factor = torch.exp(difference).masked_fill(nothing, 0.0)
        return (z * factor.transpose(1, 2)[..., None]).to(v.dtype), lse

    def _again(
        self, several: bool, function: Callable[..., tuple[Tensor, Tensor]], *given: object
    ) -> tuple[Tensor, Tensor]:
        """`function(*given)`; of several, what a backward pass needs is formed again, not kept.

        Each call would keep a copy of its keys and values, so that many would not be O(n).
        """
        if several and self.wants_grad:
            z, lse = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
            return z, lse
        return function(*given)


def _alike(
    cuts: Sequence[Edges], query_pos: int, device: torch.device
) -> Iterator[tuple[Int[Tensor, " n"], Bool[Tensor, "cut batch"]]]:
    """Queries that the same cuts concern in every row of the batch, in spans without long gaps.

    Yields:
        Places of the queries, ascending, and which cut concerns them in which row.
    """
    everyone = torch.arange(query_pos, device=device)
    if not cuts:
        yield everyone, torch.empty(0, 0, dtype=torch.bool, device=device)
        return
    member = torch.stack([edges.queries for edges in cuts])
    if bool(member.all()):
        yield everyone, member[..., 0]
        return
    columns, which = torch.unique(member.flatten(0, 1).byte(), dim=1, return_inverse=True)
    for number in range(columns.shape[1]):
        places = (which == number).nonzero()[:, 0]
        breaks = ((places[1:] - places[:-1]) > GAP).nonzero()[:, 0] + 1
        for part in places.tensor_split(breaks.cpu()):
            yield part, columns[:, number].bool().unflatten(0, member.shape[:2])


def _keys_of(
    cuts: Sequence[Edges], member: Bool[Tensor, "cut batch"], stop: int
) -> Bool[Tensor, "batch key_pos"] | None:
    """Keys that these cuts take from the queries they concern, row by row; None if none."""
    gone: Tensor | None = None
    for edges, concerned in zip(cuts, member, strict=True):
        if bool(concerned.any()):
            more = edges.keys[:, :stop] & concerned[:, None]
            gone = more if gone is None else gone | more
    return gone


def _without(
    kept: Bool[Tensor, "batch key_pos"] | None, gone: Bool[Tensor, "batch key_pos"] | None
) -> Bool[Tensor, "batch key_pos"] | None:
    """A key mask without the keys that are gone."""
    if gone is None:
        return kept
    return ~gone if kept is None else kept & ~gone


def _square(edges: Edges) -> Bool[Tensor, "batch 1 query_pos key_pos"]:
    """The edges as a mask over the matrix."""
    return (edges.queries[:, :, None] & edges.keys[:, None, :])[:, None]
