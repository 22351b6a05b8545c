"""Heads and sets of heads as a caller names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest
from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.analyses.kinds import HeadsResult

Head = tuple[int, int]


def all_heads(config: DecoderConfig) -> tuple[Head, ...]:
    """Every head, in the order of a pass."""
    return tuple((layer, h) for layer in range(config.n_layers) for h in range(config.n_heads))


def heads_of(config: DecoderConfig, argument: str, given: Any) -> tuple[Head, ...]:
    """Heads named by pairs (layer, head) or as `L0H1`, each once, in the order of a pass.

    Raises:
        TaskError: naming the argument: for no heads, one that does not exist or one named twice.
    """
    known = {head_name(*head): head for head in all_heads(config)}
    listed = [given] if isinstance(given, str) or _is_pair(given) else given
    if not isinstance(listed, Iterable) or isinstance(listed, Mapping):
        raise TaskError(f"{argument} must be heads such as 'L0H1' or (0, 1), got {given!r}")
    found = []
    for item in listed:
        name = head_name(*(int(i) for i in item)) if _is_pair(item) else item
        if not isinstance(name, str):
            raise TaskError(f"{argument} must be heads such as 'L0H1' or (0, 1), got {item!r}")
        if name not in known:
            layers, heads = config.n_layers, config.n_heads
            raise TaskError(
                f"{argument} holds {_as_given(item)}, and the model has layers 0 to {layers - 1} "
                f"of heads 0 to {heads - 1}",
                hint=nearest(name, known),
            )
        found.append(known[name])
    if not found:
        raise TaskError(f"{argument} is an empty set of heads")
    if len(set(found)) < len(found):
        twice = next(head for head in found if found.count(head) > 1)
        raise TaskError(f"{argument} names {head_name(*twice)} twice")
    return tuple(sorted(found))


def sets_of(config: DecoderConfig, given: Any) -> dict[str, tuple[Head, ...]]:
    """Named sets of heads `{name: heads}`.

    Raises:
        TaskError: as `heads_of`; for something that is no mapping, and for a set named as a head.
    """
    if not isinstance(given, Mapping) or not given:
        raise TaskError(f"sets must map names to heads, got {given!r}")
    single = {head_name(*head) for head in all_heads(config)}
    found = {}
    for name, heads in given.items():
        if not isinstance(name, str) or not name or name in single:
            raise TaskError(f"sets must be named by strings that are no head's name, got {name!r}")
        found[name] = heads_of(config, f"set {name!r}", heads)
    return found


def labelled_heads(census: HeadsResult, label: str = "induction pattern") -> list[Head]:
    """The heads that a census gives a label: candidates for `redundant_set`.

    A label of the census is a measured pattern, and says nothing yet of what a head does.

    Raises:
        TaskError: if no head of the census has it; the labels there are stand in the message.
    Example:
        >>> from headstream.analyses import heads
        >>> from headstream.models import load
        >>> labelled_heads(heads(load("constructed-induction")))
        [(1, 2)]
    """
    labels = census.data["label"]
    found = [
        (int(labels["layer"].values[layer]), int(labels["head"].values[head]))
        for layer, head in np.argwhere(labels.values == label)
    ]
    if not found:
        there = sorted({str(value) for value in labels.values.ravel()} - {"none"})
        known = f"its labels are {', '.join(there)}" if there else "it labels no head"
        raise TaskError(
            f"no head of the census has the label {label!r}; {known}",
            hint=nearest(str(label), there),
        )
    return found


def names_of(heads: Iterable[Head]) -> list[str]:
    return [head_name(*head) for head in heads]


def _as_given(item: Any) -> str:
    """The head in the caller's words; numpy's integers as the numbers they are."""
    return repr(type(item)(int(i) for i in item) if _is_pair(item) else item)


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, (tuple, list))
        and len(item) == 2
        and all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in item)
    )
