"""The words for what a site does to the answer, by direction and share of the gap."""

from __future__ import annotations

from collections.abc import Mapping
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


def verb(details: Mapping[str, Any], share: float | None, *, many: bool | None) -> str:
    """The verb and its object by the (largest) share moved; `many` is None for the infinitive."""
    form = {False: 0, True: 1, None: 2}[many]
    if share is None or not np.isfinite(share):
        words = ("moves", "move", "move")[form]
    else:
        much = "most" if share >= _MOST_OF_IT else "part" if share > 0 else "against"
        words = _VERBS[details["direction"], much][form]
    return f"{words} {details['metric']['noun']}"


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
