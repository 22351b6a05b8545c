"""What may be done to one layer's attention from outside: edges cut, a pattern held.

An edit is a small value on `Attention.edits`, put there and taken off by
`headstream.circuits.interventions`. It is resolved anew for each pass, when batch and length are
known. Edits commute:

    scores   of a head whose pattern is frozen come from the frozen queries and keys;
             edges cut with renormalisation are -inf
    pattern  softmax of these scores; edges cut without renormalisation are then 0

so the order in which they were made does not matter. `hook_lse` shows the log-sum-exp of those
scores: it knows of frozen queries and of edges cut with renormalisation, and not of the others,
which belong to the pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.models.errors import BackendError, ShapeError
from headstream.models.position_set import PositionSet


@dataclass
class EdgeCut:
    """Edges from a set of keys to a set of queries, to be removed.

    Attributes:
        keys, queries: absolute positions; queries None means all.
        heads: query heads.
        renormalise: whether the rest of a row takes over the removed weight.
        where: name of the layer, for errors.
        passes, effective: passes that met the cut, and those in which it removed an edge.
    """

    keys: PositionSet
    queries: PositionSet | None
    heads: tuple[int, ...]
    renormalise: bool
    where: str
    passes: int = 0
    effective: int = 0


@dataclass
class FrozenPattern:
    """The queries and keys of another run: with them a head attends as it did there.

    Attributes:
        q, k: as they entered the scores, rotated where positions are rotary.
        key_mask: keys that run let be read; None if all.
        scale: what its q . k was multiplied by.
        heads: query heads that are held.
        where: name of the layer, for errors.
        passes: passes that met it.
    """

    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv_head d_head"]
    key_mask: Bool[Tensor, "batch pos"] | None
    scale: float
    heads: tuple[int, ...]
    where: str
    passes: int = 0

    def check(self, q: Tensor, k: Tensor, *, cached: bool) -> None:
        """Raise unless its pattern fits a pass with these queries and keys.

        Raises:
            BackendError: with a key/value cache, whose pass is a part of a row.
            ShapeError: if the two runs differ in batch, length or heads; or in dtype or device.
        """
        if cached:
            raise BackendError(
                f"attention of {self.where} is frozen to a whole run, and a pass with kv_cache is "
                "a part of one",
                hint="run all tokens in one pass, without a cache",
            )
        held, given = ([*a.shape[:3], b.shape[2]] for a, b in ((self.q, self.k), (q, k)))
        if held != given:
            raise ShapeError(
                f"attention of {self.where} is frozen to a run of [batch, pos, head, kv_head] = "
                f"{held}, but this pass has {given}",
                hint="both runs must have as many rows, of equal length, and the same heads",
            )
        if (self.q.dtype, self.q.device) != (q.dtype, q.device):
            raise ShapeError(
                f"attention of {self.where} is frozen to a run in {self.q.dtype} on "
                f"{self.q.device}, but this pass is {q.dtype} on {q.device}",
                hint="record the run after moving the model",
            )


class Edges(NamedTuple):
    """The product of a set of queries and a set of keys, row by row; causality is apart."""

    queries: Bool[Tensor, "batch query_pos"]
    keys: Bool[Tensor, "batch key_pos"]


@dataclass
class HeadGroup:
    """Query heads that share their edits, and so can be attended together.

    Attributes:
        heads: ascending.
        frozen: where their queries and keys come from, or None for the pass's own.
        removed, zeroed: edges cut from the scores; edges cut from the pattern.
    """

    heads: list[int]
    frozen: FrozenPattern | None
    removed: list[Edges] = field(default_factory=list)
    zeroed: list[Edges] = field(default_factory=list)


def group_heads(
    edits: Sequence[EdgeCut | FrozenPattern],
    q: Float[Tensor, "batch query_pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    *,
    key_mask: Bool[Tensor, "batch key_pos"] | None,
    cached: bool,
) -> list[HeadGroup]:
    """The edits of one pass, by head. Of two patterns frozen for one head the later one holds.

    Raises:
        ShapeError, BackendError: if an edit does not fit this pass, or a cut removes nothing.
    """
    batch, query_pos, heads = q.shape[:3]
    key_pos = k.shape[1]
    frozen: dict[int, int] = {}
    cuts: dict[int, list[int]] = {head: [] for head in range(heads)}
    edges: dict[int, Edges] = {}
    for number, edit in enumerate(edits):
        edit.passes += 1
        if isinstance(edit, FrozenPattern):
            edit.check(q, k, cached=cached)
            frozen |= dict.fromkeys(edit.heads, number)
            continue
        found = _edges(edit, batch, query_pos, key_pos, key_mask, cached, q.device)
        if found is not None:
            edges[number] = found
            for head in edit.heads:
                cuts[head].append(number)
    groups: dict[tuple[int | None, tuple[int, ...]], HeadGroup] = {}
    for head in range(heads):
        key = (frozen.get(head), tuple(cuts[head]))
        if key not in groups:
            source = None if key[0] is None else edits[key[0]]
            assert not isinstance(source, EdgeCut)
            groups[key] = HeadGroup([], source)
            for number in cuts[head]:
                edit = edits[number]
                assert isinstance(edit, EdgeCut)
                group = groups[key]
                (group.removed if edit.renormalise else group.zeroed).append(edges[number])
        groups[key].heads.append(head)
    return list(groups.values())


def _edges(
    cut: EdgeCut,
    batch: int,
    query_pos: int,
    key_pos: int,
    key_mask: Tensor | None,
    cached: bool,
    device: torch.device,
) -> Edges | None:
    """The edges of a cut in this pass; None if, with a cache, none of them lies in it."""
    past = key_pos - query_pos
    keys = cut.keys.on(batch, key_pos, partial=cached, device=device)
    if cut.queries is None:
        queries = torch.ones(batch, query_pos, dtype=torch.bool, device=device)
    else:
        queries = cut.queries.on(batch, key_pos, partial=cached, device=device)[:, past:]
    # An edge exists in a row if its first readable key of the cut does not come after its last
    # query of the cut. (A frozen pattern may have another mask; then this is the new run's.)
    readable = keys if key_mask is None else keys & key_mask
    place = torch.arange(key_pos, device=device)
    first_key = torch.where(readable, place, key_pos).amin(1)
    last_query = torch.where(queries, place[past:], -1).amax(1)
    if bool((first_key <= last_query).any()):
        cut.effective += 1
        return Edges(queries, keys)
    if cached:
        return None
    raise ShapeError(
        f"the cut in {cut.where} removes no edge: in every row its keys are padding or come after "
        "its queries",
        hint="a query reads keys at or before its own position only",
    )
