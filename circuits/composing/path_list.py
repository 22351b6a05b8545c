"""Which paths there are through the heads of a model, and how many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headstream.models.arguments import check_count
from headstream.models.errors import ShapeError

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig

# Pairs (layer, head), the earliest first; () is the direct path.
Heads = tuple[tuple[int, int], ...]


def allowed_order(config: DecoderConfig, max_order: int | None, limit: int) -> int:
    """The most heads on a path, once it is known that the paths can be counted out."""
    check_count("limit", limit)
    order = config.n_layers if max_order is None else check_count("max_order", max_order, least=0)
    if order > config.n_layers:
        raise ShapeError(
            f"max_order must lie in [0, {config.n_layers}] = [0, n_layers], got {max_order}: a "
            "path goes through at most one head of each layer"
        )
    count = count_paths(config, order)
    if count > limit:
        fit = max(k for k in range(order) if k == 0 or count_paths(config, k) <= limit)
        raise ShapeError(
            f"there are {count:,} paths of up to {order} heads (of (1 + {config.n_heads})^"
            f"{config.n_layers} = {(1 + config.n_heads) ** config.n_layers:,} in all), over the "
            f"limit of {limit:,}",
            hint=f"max_order={fit} keeps {count_paths(config, fit):,}; or raise limit",
        )
    return order


def count_paths(config: DecoderConfig, order: int) -> int:
    return sum(math.comb(config.n_layers, k) * config.n_heads**k for k in range(order + 1))


def list_paths(config: DecoderConfig, order: int) -> list[Heads]:
    """Every path, those with fewer heads first."""
    paths: list[Heads] = [()]
    for layer in range(config.n_layers):
        paths += [
            (*path, (layer, head))
            for path in paths
            if len(path) < order
            for head in range(config.n_heads)
        ]
    return sorted(paths, key=lambda path: (len(path), path))
