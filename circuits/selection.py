"""Layers and heads as a caller names them."""

from __future__ import annotations

import operator
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
    # Tensors, arrays and their numbers as plain ones.
    given = given.tolist() if hasattr(given, "tolist") else given
    listed = list(given) if isinstance(given, Iterable) else [given]
    if not listed:
        raise ShapeError(f"no {what}s were given", hint=f"name {what}s in [0, {count})")
    numbers = set()
    for number in listed:
        whole = hasattr(number, "__index__") and not isinstance(number, bool)
        if not whole or not 0 <= operator.index(number) < count:
            raise ShapeError(
                f"there is no {what} {number!r}: the model has {count}, 0 to {count - 1}"
            )
        numbers.add(operator.index(number))
    return tuple(sorted(numbers))


def heads_by_layer(model: Decoder, heads: Any) -> dict[int, list[int]]:
    """Heads of pairs (layer, head), by layer."""
    pairs = list(heads) if isinstance(heads, Iterable) else []
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
