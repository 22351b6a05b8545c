"""The words for what a site does to the answer, by direction and share of the gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

# From this share of the gap on a site "restores the answer"; below, "part of the answer".
_MOST_OF_IT = 0.5
_NUMBERS = ["No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten"]


def sentence(details: Mapping[str, Any], label: str, share: float | None) -> str:
    """The statement of a claim about one site; `share` is the part of the gap that it moved.

    Denoising shows that a site suffices to restore, noising that it is needed: the verb says which.
    Below half of the gap it does so in part.
    """
    return f"{details['site']} of {label} {verb(details, share, many=False)}"


# (direction, what the share is) -> the verb for one site, for many, and after "to".
_VERBS = {
    ("denoise", "most"): ("restores", "restore", "restore"),
    ("denoise", "part"): ("restores part of", "restore part of", "restore part of"),
    ("denoise", "against"): ("pushes away from", "push away from", "push away from"),
    ("noise", "most"): ("is needed for", "are needed for", "be needed for"),
    ("noise", "part"): ("is partly needed for", "are partly needed for", "be partly needed for"),
    ("noise", "against"): ("works against", "work against", "work against"),
}


def verb(
    details: Mapping[str, Any], share: float | None, *, many: bool | None, noun: str | None = None
) -> str:
    """The verb and its object by the share moved; `many` is None for the infinitive.

    Args:
        noun: the object, if it is not what the metric calls it.
    """
    form = {False: 0, True: 1, None: 2}[many]
    if share is None or not np.isfinite(share):
        words = ("moves", "move", "move")[form]
    else:
        much = "most" if share >= _MOST_OF_IT else "part" if share > 0 else "against"
        words = _VERBS[details["direction"], much][form]
    return f"{words} {details['metric']['noun'] if noun is None else noun}"


def told(
    details: Mapping[str, Any],
    found: Sequence[tuple[float, str]],
    noun: tuple[str, str],
    *,
    most: int,
    of: str = "",
) -> str:
    """Who does what to the answer; those that do it in part are told apart from those that do it.

    Args:
        found: share of the gap and words of each, from most towards the other run to most against;
            where a share is NaN, no direction is said.
        noun: what they are called: one, and many.
        most: how many that move the same way are named.
        of: what follows the noun: ` of 81`.
    """
    whole = [pair for pair in found if pair[0] >= _MOST_OF_IT]
    partly = [pair for pair in found if 0 < pair[0] < _MOST_OF_IT]
    against = [pair for pair in reversed(found) if pair[0] <= 0]
    neither = [pair for pair in found if np.isnan(pair[0])]
    parts = []
    for group in filter(None, (whole, partly, against, neither)):
        many, more = len(group) > 1, group is partly and whole
        moves = verb(details, group[0][0], many=many, noun="it" if more else None)
        who = f"{count(len(group), ('more', 'more'))}" if more else f"{count(len(group), noun)}{of}"
        # Those that do it in part share the room with those before them; two have some always.
        room = max(most - len(whole), 2) if more else most
        shown = [words for _, words in group[:room]]
        if len(group) > room:
            shown.append(f"{len(group) - room} {'others' if more else 'more'}")
        parts.append(f"{who} {moves}: {', '.join(shown)}")
    return "; ".join([*parts[:1], *(part[0].lower() + part[1:] for part in parts[1:])])


# Below this a number prints as 0.00: it moves neither way.
_LEAST_PRINTED = 0.005
# Metrics of ours that are better the lower; all others of ours the higher.
_LOWER_IS_BETTER = frozenset({"loss"})
_HIGHER_IS_BETTER = frozenset({"logit_difference", "log_prob", "prob", "kl"})


def opposed(details: Mapping[str, Any], mean: float, second: float) -> bool:
    """Whether the second metric's mean effect says the opposite of the first's.

    A function of the user's is better towards its clean value; with no gap to tell that by, nothing
    is said.
    """
    name = details["metric"].get("name")
    if name in _HIGHER_IS_BETTER:
        better = 1.0
    elif name in _LOWER_IS_BETTER:
        better = -1.0
    elif details["normalized_refused"] is None:
        better = float(np.sign(details["gap"]["mean"]))
    else:
        return False
    return bool(abs(second) >= _LEAST_PRINTED and better * mean * second < 0)


def second_effect(details: Mapping[str, Any], mean: float, second: float) -> str:
    """`log_prob +0.53 nats`, or that it moves the other way; empty if none was measured."""
    metric = details.get("second_metric")
    if not metric or not np.isfinite(second):
        return ""
    moves = " moves the other way," if opposed(details, mean, second) else ""
    return f"{metric['name']}{moves} {second:+.2f} {metric['unit']}"


def second_moves(details: Mapping[str, Any], data: xr.Dataset) -> str:
    """`log_prob, moves by up to +4.86 nats`: the largest mean effect; empty if that prints as 0."""
    metric = details.get("second_metric")
    if not metric or "second" not in data:
        return ""
    second = np.nan_to_num(data["second"].values).ravel()
    largest = float(second[np.abs(second).argmax()]) if second.size else 0.0
    if abs(largest) < _LEAST_PRINTED:
        return ""
    return f"{metric['name']}, moves by up to {largest:+.2f} {metric['unit']}"


def all_zero(details: Mapping[str, Any], data: xr.Dataset, what: str) -> str:
    """The warning of a sweep that moves its metric nowhere: it may yet move the second one.

    Args:
        what: what does not move the metric, as a clause.
    """
    second = second_moves(details, data)
    beside = f"; its second metric, {second}" if second else ""
    return f"every effect is exactly zero; {what}{beside}"


def none_moves(details: Mapping[str, Any], data: xr.Dataset) -> str:
    """The same in a summary."""
    second = second_moves(details, data).replace(", moves", " moves", 1)
    return "every effect is zero" + (f", but {second}" if second else "")


def nouns(data: xr.Dataset) -> tuple[str, str]:
    """What the cells are: one, and many."""
    dims = set(data["mean"].dims)
    if "set" in dims:
        return "set", "sets"
    if "edge" in dims:
        return "edge", "edges"
    if "pos" in dims or "role" in dims:
        return "site", "sites"
    if "neuron" in dims:
        return "neuron", "neurons"
    if "head" in dims:
        return "head", "heads"
    if "kv_head" in dims:
        return "key/value head", "key/value heads"
    return "layer", "layers"


def count(n: int, noun: tuple[str, str]) -> str:
    """The number as a word up to ten, with its noun."""
    number = _NUMBERS[n] if n < len(_NUMBERS) else str(n)
    return f"{number} {noun[0] if n == 1 else noun[1]}"
