"""Sets of sites that are patched together, one cell a set.

    {"both heads": [At("z", 0, 1), At("z", 1, 3)], "source": [At("resid_pre", 0, place=3)]}

Values of all members are those of the giving run as it was, so patching a set is one run with all
of its sites replaced, not one patch after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headstream.analyses.patching.places import places_of
from headstream.analyses.patching.sites import Cell, Edit, find_site, plan, units_of
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError


@dataclass(frozen=True)
class At:
    """One site of a set.

    Attributes:
        site: as in `patch(..., site=name)`.
        layer: of the model.
        head: head, key/value head or neuron; None means every one of the layer.
        place: a position (negative from each row's end), a role, an edge `(query, key)`, or None
            for the whole row.
    """

    site: str
    layer: int
    head: int | None = None
    place: Any = None


@dataclass(frozen=True)
class SetGrid:
    """The cells of one sweep, each a named set of sites.

    Attributes:
        names: of the sets.
        members: the edits of each, in the order of `names`.
    """

    names: tuple[str, ...]
    members: tuple[Cell, ...]
    positions: str = "sets"

    @property
    def name(self) -> str:
        return "sets"

    @property
    def hooks(self) -> list[str]:
        """The hooks of all members, each once."""
        return list(dict.fromkeys(edit.hook for cell in self.members for edit in cell))

    @property
    def coords(self) -> dict[str, np.ndarray]:
        return {"set": np.array(self.names, dtype=np.str_)}

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.names),)

    @property
    def size(self) -> int:
        return len(self.names)

    def cells(self) -> Iterator[Cell]:
        yield from self.members


def plan_sets(config: DecoderConfig, task: Task, sets: Mapping[Any, Any]) -> SetGrid:
    """The grid of `{name: [At(...), ...]}`.

    Raises:
        TaskError: naming the set, and what does not fit this model and task.
    """
    if not sets:
        raise TaskError("the mapping of sets is empty", hint="give {name: [At(site, layer), ...]}")
    members = []
    for name, sites in sets.items():
        if not isinstance(name, str) or not name:
            raise TaskError(f"sets must be named by non-empty strings, got {name!r}")
        listed = isinstance(sites, Sequence) and not isinstance(sites, str)
        if not listed or not sites or not all(isinstance(site, At) for site in sites):
            raise TaskError(
                f"set {name!r} must be a list of At(site, layer, ...), got {sites!r}",
            )
        members.append(tuple(edit for site in sites for edit in _edits(config, task, site)))
    return SetGrid(tuple(sets), tuple(members))


def _edits(config: DecoderConfig, task: Task, at: At) -> Iterator[Edit]:
    site = find_site(at.site, config)
    if at.place is None:
        _, places = places_of(task, "all")
    elif isinstance(at.place, str):
        # A role, by name: the others that the task may have are left out.
        _, roles = places_of(task, "roles")
        places = tuple(place for place in roles if place.name == at.place)
        if not places:
            raise TaskError(
                f"{at} names role {at.place!r}, and the task has {', '.join(task.roles)}"
            )
    else:
        _, places = places_of(task, [at.place], edges=site.name == "pattern")
    heads = None if at.head is None else [at.head]
    grid = plan(config, task, at.site, layers=[at.layer], heads=heads, positions="all")
    units = (None,) if site.heads is None else grid.heads or range(units_of(site, config))
    for unit in units:
        yield Edit(site, grid.layers[0], unit, places[0])
