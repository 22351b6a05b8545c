"""Where in a row a cell lies: a position, a role, the whole row, an edge of the pattern.

Positions are real positions: 0 is a row's first real token, -1 its last, whatever is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from headstream.analyses.patching.task import Task
from headstream.models.errors import TaskError, nearest

_FORMS = "'all', 'each', 'roles'"
_EDGES = ", 'edges'"


@dataclass(frozen=True)
class Place:
    """Where in a row a cell lies.

    Attributes:
        name: the position, the role, the edge, or None for the whole row.
        columns: the columns of each row that belong to it; -1 where a row has none.
        keys: of an edge, the column that is read; `columns` is then the one that reads.
    """

    name: int | str | None
    columns: Int[Tensor, "example slot"]
    keys: Int[Tensor, "example slot"] | None = None


def whole_numbers(argument: str, given: Any) -> tuple[int, ...]:
    listed = isinstance(given, (Sequence, range)) and not isinstance(given, str)
    if not listed or any(isinstance(i, bool) or not isinstance(i, int) for i in given):
        raise TaskError(f"{argument} must be a list of whole numbers, got {given!r}")
    values = tuple(given)
    if not values:
        raise TaskError(f"{argument} is empty")
    if len(set(values)) < len(values):
        raise TaskError(f"{argument} names one twice: {list(values)}")
    return values


def places_of(task: Task, positions: Any, *, edges: bool = False) -> tuple[str, tuple[Place, ...]]:
    """What `positions` names, and the kind of axis that makes: all, each, roles, edges, listed.

    Args:
        edges: whether the site has edges, as the pattern does.
    Raises:
        TaskError: if `positions` is not of a known form, or names what the task lacks.
    """
    columns = task.columns
    longest = columns.shape[1]
    if isinstance(positions, str):
        if positions == "all":
            return "all", (Place(None, columns),)
        if positions == "each":
            return "each", tuple(Place(r, columns[:, r : r + 1]) for r in range(longest))
        if positions == "roles":
            return "roles", _roles(task)
        if positions == "edges" and edges:
            return "edges", tuple(
                _edge(task, query, key) for query in range(longest) for key in range(query + 1)
            )
        raise TaskError(
            f"positions must be {_FORMS}{_EDGES if edges else ''} or a list of positions, "
            f"got {positions!r}",
            hint=nearest(positions, ("all", "each", "roles", "edges")[: 4 if edges else 3]),
        )
    if _pairs(positions):
        if not edges:
            raise TaskError(
                f"positions holds the edge {positions[0]!r}, and only site 'pattern' has edges",
                hint="give single positions",
            )
        found = tuple(_edge(task, query, key) for query, key in positions)
        names = [edge.name for edge in found]
        if len(set(names)) < len(names):
            raise TaskError(f"positions names an edge twice: {names}")
        return "edges", found
    listed = []
    for place in whole_numbers("positions", positions):
        listed.append(Place(place, _column(task, place)))
    return "listed", tuple(listed)


def _pairs(positions: Any) -> bool:
    return (
        isinstance(positions, Sequence)
        and len(positions) > 0
        and all(
            isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
            for pair in positions
        )
    )


def _edge(task: Task, query: Any, key: Any) -> Place:
    """The edge from a key to the query that reads it, each a position or the name of a role."""
    at, read = _named_column(task, query), _named_column(task, key)
    # Columns of real tokens rise with their position.
    backwards = (at >= 0) & (read > at)
    if bool(backwards.any()):
        pair = int(backwards.nonzero()[0, 0])
        raise TaskError(
            f"edge ({query!r}, {key!r}) reads a later position in pair {pair}",
            hint="an edge is (query, key), and the key stands at or before the query",
        )
    missing = (at < 0) | (read < 0)
    return Place(f"{query}<-{key}", at.masked_fill(missing, -1), read.masked_fill(missing, -1))


def _named_column(task: Task, place: Any) -> Tensor:
    if not isinstance(place, str):
        (number,) = whole_numbers("positions", [place])
        return _column(task, number)
    if place not in task.roles:
        raise TaskError(
            f"positions names role {place!r}, and the task has {', '.join(task.roles) or 'none'}",
            hint=nearest(place, task.roles),
        )
    return task.columns.gather(1, task.roles[place][:, None])


def _roles(task: Task) -> tuple[Place, ...]:
    if not task.roles:
        raise TaskError(
            "positions='roles' needs roles, and the task names none",
            hint="pass Task(..., roles={'query': -1, ...})",
        )
    return tuple(
        Place(name, task.columns.gather(1, place[:, None])) for name, place in task.roles.items()
    )


def _column(task: Task, place: int) -> Tensor:
    """Column of a real position, counted from each row's end where negative; -1 if absent."""
    longest = task.columns.shape[1]
    if not -longest <= place < longest:
        raise TaskError(
            f"positions holds {place}, but the longest prompt has {longest} real tokens"
        )
    index = torch.full((len(task),), place) if place >= 0 else task.lengths + place
    found = task.columns.gather(1, index.clamp(min=0)[:, None])
    return torch.where(index[:, None] < 0, -1, found)
