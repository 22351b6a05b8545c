"""Layers and heads as a caller names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headstream.models.errors import ShapeError

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


def indices(given: Any, what: str, count: int) -> tuple[int, ...]:
    """Layers or heads that exist, each once, in order; None means all.

    Raises:
        ShapeError: if there are none, or one does not exist.
    """
    if given is None:
        return tuple(range(count))
    listed = list(given) if isinstance(given, Iterable) else [given]
    if not listed:
        raise ShapeError(f"no {what}s were given", hint=f"name {what}s in [0, {count})")
    for number in listed:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise ShapeError(
                f"there is no {what} {number!r}: the model has {count}, 0 to {count - 1}"
            )
    return tuple(sorted(set(listed)))


def heads_by_layer(model: Decoder, heads: Any) -> dict[int, list[int]]:
    """Heads of pairs (layer, head), by layer."""
    pairs = list(heads)
    if not pairs:
        raise ShapeError("no heads were given", hint="give pairs such as [(0, 3)]")
    by_layer: dict[int, list[int]] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ShapeError(f"a head is a pair (layer, head), got {pair!r}")
        (layer,) = indices([pair[0]], "layer", model.config.n_layers)
        (head,) = indices([pair[1]], "head", model.config.n_heads)
        by_layer.setdefault(layer, []).append(head)
    return by_layer
