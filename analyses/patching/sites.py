"""Where a patch can be made, and the grid of cells that one sweep runs through.

    resid_pre resid_mid resid_post   the stream before, inside and after a block    (layer, pos)
    attn_out mlp_out                 what attention and the MLP write to it         (layer, pos)
    z                                output of a head before W_O                    (layer, head)
    q                                queries of a head, before rotation             (layer, head)
    k v                              keys and values of a key/value head            (layer, kv_head)
    pattern                          attention of a head: whole, by query, by edge  (layer, head)
    mlp_post                         neurons after the activation                   (layer, neuron)

A cell is one layer, one head (or neuron) where the site has them, and one place: a real position
counted from the start of each row, a role, the whole row, or for the pattern one edge. A cell of a
`SetGrid` is a set of such sites, patched together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headstream.analyses.patching.places import Place, places_of, whole_numbers
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest

HeadAxis = Literal["head", "kv_head", "neuron"]


@dataclass(frozen=True)
class Site:
    """One kind of activation.

    Attributes:
        name: as in `patch(..., site=name)`.
        hook: its hook, with `{layer}` open.
        heads: the axis of heads (or neurons) it has, or None.
        needs_mlp: whether an attention-only model lacks it.
        default_positions: what `positions=None` means.
    """

    name: str
    hook: str
    heads: HeadAxis | None = None
    needs_mlp: bool = False

    @property
    def one_wide(self) -> bool:
        """Whether a unit of it is one number, as a neuron is."""
        return self.heads == "neuron"

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
        Site("pattern", "blocks.{layer}.attn.hook_pattern", heads="head"),
        Site("mlp_post", "blocks.{layer}.mlp.hook_post", heads="neuron", needs_mlp=True),
    )
}


@dataclass(frozen=True)
class Edit:
    """One activation that a patch replaces: a layer's, a head's where the site has them, a place's.

    Attributes:
        site: what is patched.
        layer: of the model.
        head: head, key/value head or neuron; None for sites without.
        place: where in each row.
    """

    site: Site
    layer: int
    head: int | None
    place: Place

    @property
    def hook(self) -> str:
        return self.site.hook.format(layer=self.layer)


# What one patched run replaces: one activation, or several together.
Cell = tuple[Edit, ...]


@dataclass(frozen=True)
class Grid:
    """The cells of one sweep: layers x places x heads.

    Attributes:
        site: what is patched.
        layers, heads: indices; heads is None for sites without.
        places: positions, roles, or the whole row once.
        positions: "all", "each", "roles", "edges", or "listed" for a given list.
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
        if self.positions == "edges":
            axes["edge"] = np.array(names, dtype=np.str_)
        elif self.positions == "roles":
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

    @property
    def name(self) -> str:
        return self.site.name

    def cells(self) -> Iterator[Cell]:
        """Every cell, in the order of the axes."""
        for layer in self.layers:
            for head in (None,) if self.heads is None else self.heads:
                for place in self.places:
                    yield (Edit(self.site, layer, head, place),)


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
    found = find_site(site, config)
    chosen_layers = _indices("layers", layers, config.n_layers, "layer")
    chosen_heads = None
    if found.heads is not None:
        chosen_heads = _heads(found, heads, units_of(found, config), config)
    elif heads is not None:
        raise TaskError(
            f"heads={heads!r} was given, but site {site!r} has no head axis",
            hint="sites with heads are z, q, k, v and pattern; mlp_post has neurons",
        )
    name, places = places_of(
        task,
        found.default_positions if positions is None else positions,
        edges=found.name == "pattern",
    )
    return Grid(found, chosen_layers, chosen_heads, places, name)


def units_of(site: Site, config: DecoderConfig) -> int:
    """How many heads, key/value heads or neurons a layer has at a site that has them."""
    if site.heads == "neuron":
        assert config.d_mlp is not None
        return config.d_mlp
    return config.n_heads if site.heads == "head" else config.kv_heads


def find_site(site: object, config: DecoderConfig) -> Site:
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
        for head in whole_numbers("heads", given):
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
    values = whole_numbers(argument, given)
    for value in values:
        if not 0 <= value < count:
            raise TaskError(f"{argument} holds {value}, but {axis} runs from 0 to {count - 1}")
    return values
