"""Layers and heads as a caller names them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

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
    for given_number in listed:
        number = whole(given_number)
        if number is None or not 0 <= number < count:
            raise ShapeError(
                f"there is no {what} {given_number!r}: the model has {count}, 0 to {count - 1}"
            )
        numbers.add(number)
    return tuple(sorted(numbers))


def whole(given: Any) -> int | None:
    """`given` as an int if it is one whole number, numpy's and torch's included; else None."""
    if isinstance(given, (bool, np.bool_)) or str(getattr(given, "dtype", "")) == "torch.bool":
        return None
    try:
        # Tensors and arrays of other than one whole number have __index__, too, and raise.
        return operator.index(given)
    except (TypeError, ValueError):
        return None


def head_pair(pair: Any) -> tuple[Any, Any]:
    """(layer, head) as given, for the caller to look up.

    Raises:
        ShapeError: if it is no pair.
    """
    listed = pair.tolist() if hasattr(pair, "tolist") else pair
    if not isinstance(listed, (tuple, list)) or len(listed) != 2:
        raise ShapeError(f"a head is a pair (layer, head), got {pair!r}")
    return listed[0], listed[1]


def heads_by_layer(model: Decoder, heads: Any) -> dict[int, list[int]]:
    """Heads of pairs (layer, head), by layer."""
    pairs = list(heads) if isinstance(heads, Iterable) else [] if heads is None else [heads]
    if not pairs:
        raise ShapeError("no heads were given", hint="give pairs such as [(0, 3)]")
    by_layer: dict[int, list[int]] = {}
    for pair in pairs:
        first, second = head_pair(pair)
        (layer,) = indices([first], "layer", model.config.n_layers)
        (head,) = indices([second], "head", model.config.n_heads)
        by_layer.setdefault(layer, []).append(head)
    return by_layer
