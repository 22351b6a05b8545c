"""From what a caller names to hook points that exist."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable

from headstream.models.errors import HookError, nearest


def resolve(known: Iterable[str], name: str | Callable[[str], bool]) -> list[str]:
    """The hook names that `name` means, in firing order: one, a glob's, or a predicate's.

    Args:
        known: names that exist.
        name: an exact name, a glob ("blocks.*.attn.hook_z"), or a predicate on names.
    Raises:
        HookError: if nothing matches; the nearest names are given.
    """
    names = list(known)
    if callable(name):
        matches = [candidate for candidate in names if name(candidate)]
        if not matches:
            raise HookError(
                f"the predicate on hook names matches none of {len(names)} hooks",
                hint=f"names look like '{names[0]}'",
            )
        return matches
    if not isinstance(name, str):
        raise HookError(f"a hook name is a string or a predicate, got {type(name).__name__}")
    if name in names:
        return [name]
    matches = fnmatch.filter(names, name)
    if not matches:
        close = nearest(name, names) or f"names look like '{names[0]}'"
        raise HookError(f"no hook matches {name!r}", hint=close)
    return matches
