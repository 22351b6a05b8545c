"""Where a patch can be made, and the grid of cells that one sweep runs through.

    resid_pre resid_mid resid_post   the stream before, inside and after a block    (layer, pos)
    attn_out mlp_out                 what attention and the MLP write to it         (layer, pos)
    z                                output of a head before W_O                    (layer, head)
    q                                queries of a head, before rotation             (layer, head)
    k v                              keys and values of a key/value head            (layer, kv_head)

A cell is one layer, one head where the site has heads, and one place: a real position counted from
the start of each row, a role, or the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest

HeadAxis = Literal["head", "kv_head"]


@dataclass(frozen=True)
class Site:
    """One kind of activation.

    Attributes:
        name: as in `patch(..., site=name)`.
        hook: its hook, with `{layer}` open.
        heads: the axis of heads it has, or None.
        needs_mlp: whether an attention-only model lacks it.
        default_positions: what `positions=None` means.
    """

    name: str
    hook: str
    heads: HeadAxis | None = None
    needs_mlp: bool = False

    @property
    def default_positions(self) -> str:
        return "each" if self.heads is None else "all"


SITES: dict[str, Site] = {
    site.name: site
    for site in (
        Site("resid_pre", "blocks.{layer}.hook_resid_pre"),
        Site("resid_mid", "blocks.{layer}.hook_resid_mid", needs_mlp=True),
        Site("resid_post", "blocks.{layer}.hook_resid_post"),
        Site("attn_out", "blocks.{layer}.hook_attn_out"),
        Site("mlp_out", "blocks.{layer}.hook_mlp_out", needs_mlp=True),
        Site("z", "blocks.{layer}.attn.hook_z", heads="head"),
        Site("q", "blocks.{layer}.attn.hook_q", heads="head"),
        Site("k", "blocks.{layer}.attn.hook_k", heads="kv_head"),
        Site("v", "blocks.{layer}.attn.hook_v", heads="kv_head"),
    )
}


@dataclass(frozen=True)
class Place:
    """Where in a row a cell lies.

    Attributes:
        name: the position, the role, or None for the whole row.
        columns: the columns of each row that belong to it; -1 where a row has none.
    """

    name: int | str | None
    columns: Int[Tensor, "example slot"]


@dataclass(frozen=True)
class Grid:
    """The cells of one sweep: layers x places x heads.

    Attributes:
        site: what is patched.
        layers, heads: indices; heads is None for sites without.
        places: positions, roles, or the whole row once.
        positions: "all", "each", "roles", or "listed" for a given list.
    """

    site: Site
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    places: tuple[Place, ...]
    positions: str

    @property
    def hooks(self) -> list[str]:
        """The hook of each layer."""
        return [self.site.hook.format(layer=layer) for layer in self.layers]

    @property
    def coords(self) -> dict[str, np.ndarray]:
        """Axis names and labels, in the order of a result's dims."""
        axes: dict[str, np.ndarray] = {"layer": np.array(self.layers, dtype=np.int64)}
        if self.heads is not None and self.site.heads is not None:
            axes[self.site.heads] = np.array(self.heads, dtype=np.int64)
        names = [place.name for place in self.places]
        if self.positions == "roles":
            axes["role"] = np.array(names, dtype=np.str_)
        elif self.positions != "all":
            axes["pos"] = np.array(names, dtype=np.int64)
        return axes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(labels) for labels in self.coords.values())

    @property
    def size(self) -> int:
        """Number of cells: hooked forward passes of one sweep."""
        return int(np.prod(self.shape))


def plan(
    config: DecoderConfig,
    task: Task,
    site: str,
    *,
    layers: Any = None,
    heads: Any = None,
    positions: Any = None,
) -> Grid:
    """The grid that the arguments of `patch` ask for.

    Raises:
        TaskError: naming the argument, what was given, and what this model and task allow.
    """
    found = _find(site, config)
    chosen_layers = _indices("layers", layers, config.n_layers, "layer")
    chosen_heads = None
    if found.heads is not None:
        count = config.n_heads if found.heads == "head" else config.kv_heads
        chosen_heads = _heads(found, heads, count, config)
    elif heads is not None:
        raise TaskError(
            f"heads={heads!r} was given, but site {site!r} has no head axis",
            hint="sites with heads are z, q, k and v",
        )
    name, places = _places(task, found.default_positions if positions is None else positions)
    return Grid(found, chosen_layers, chosen_heads, places, name)


def _find(site: object, config: DecoderConfig) -> Site:
    if site == "pattern":
        raise TaskError("site 'pattern' is not there yet", hint=f"sites now are {', '.join(SITES)}")
    if not isinstance(site, str) or site not in SITES:
        raise TaskError(
            f"site must be one of {', '.join(SITES)}, got {site!r}", hint=nearest(str(site), SITES)
        )
    found = SITES[site]
    if found.needs_mlp and not config.has_mlp:
        raise TaskError(
            f"site {site!r} needs an MLP, and this model is attention only",
            hint="the stream after attention is resid_post",
        )
    return found


def _heads(site: Site, given: Any, count: int, config: DecoderConfig) -> tuple[int, ...]:
    if site.heads == "kv_head" and given is not None:
        for head in _whole_numbers("heads", given):
            if count <= head < config.n_heads:
                raise TaskError(
                    f"heads holds {head}, but site {site.name!r} has key/value heads "
                    f"0 to {count - 1}",
                    hint=f"query head {head} reads key/value head {head // config.group_size}, "
                    f"which {config.group_size} query heads share",
                )
    return _indices("heads", given, count, str(site.heads))


def _indices(argument: str, given: Any, count: int, axis: str) -> tuple[int, ...]:
    if given is None:
        return tuple(range(count))
    values = _whole_numbers(argument, given)
    for value in values:
        if not 0 <= value < count:
            raise TaskError(f"{argument} holds {value}, but {axis} runs from 0 to {count - 1}")
    return values


def _whole_numbers(argument: str, given: Any) -> tuple[int, ...]:
    listed = isinstance(given, (Sequence, range)) and not isinstance(given, str)
    if not listed or any(isinstance(i, bool) or not isinstance(i, int) for i in given):
        raise TaskError(f"{argument} must be a list of whole numbers, got {given!r}")
    values = tuple(given)
    if not values:
        raise TaskError(f"{argument} is empty")
    if len(set(values)) < len(values):
        raise TaskError(f"{argument} names one twice: {list(values)}")
    return values


def _places(task: Task, positions: Any) -> tuple[str, tuple[Place, ...]]:
    columns = task.columns
    longest = columns.shape[1]
    if isinstance(positions, str):
        if positions == "all":
            return "all", (Place(None, columns),)
        if positions == "each":
            return "each", tuple(Place(r, columns[:, r : r + 1]) for r in range(longest))
        if positions == "roles":
            return "roles", _roles(task)
        raise TaskError(
            f"positions must be 'all', 'each', 'roles' or a list of positions, got {positions!r}",
            hint=nearest(positions, ("all", "each", "roles")),
        )
    listed = []
    for place in _whole_numbers("positions", positions):
        if not -longest <= place < longest:
            raise TaskError(
                f"positions holds {place}, but the longest prompt has {longest} real tokens"
            )
        listed.append(Place(place, _column(task, place)))
    return "listed", tuple(listed)


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
    index = torch.full((len(task),), place) if place >= 0 else task.lengths + place
    found = task.columns.gather(1, index.clamp(min=0)[:, None])
    return torch.where(index[:, None] < 0, -1, found)
