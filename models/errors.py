"""Every error that headstream raises on purpose.

    HeadstreamError
    |-- ConfigError      a configuration that no decoder can have, or a feature not there yet
    |-- ShapeError       an argument of the wrong rank, size, dtype or device
    |-- TokenError       a token, string or vocabulary that does not fit the model
    |-- HookError        an unknown name, a hook that never fired, an edit that cannot be honoured
    |-- BackendError     something asked of an attention backend that it cannot give
    |-- StoreError       a checkpoint that is missing, damaged or does not fit its configuration
    |-- ExactnessError   an identity that should hold to rounding and did not
    |-- TaskError        clean/corrupted pairs, answers or metrics that cannot carry an analysis
    |-- SweepError       a long sweep that cannot go on: its workers, its resume folder, its disk
    |-- ResultError      a saved result or report that cannot be read

Each message says what was given and what was expected; `hint` says what to do. A traceback of
anything else is a bug in headstream.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadstreamError(Exception):
    """Root of the tree. `message` says what is wrong, `hint` what to do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(HeadstreamError, ValueError):
    """A configuration that no decoder can have, or a feature that is not there yet."""


class ShapeError(HeadstreamError, ValueError):
    """An argument of the wrong rank, size, dtype or device."""


class TokenError(HeadstreamError, ValueError):
    """A token, string or vocabulary that does not fit the model."""


class HookError(HeadstreamError, ValueError):
    """An unknown hook name, a hook that never fired, or an edit that cannot be honoured."""


class BackendError(HeadstreamError, ValueError):
    """Something asked of an attention backend that it cannot give."""


class StoreError(HeadstreamError, OSError):
    """A checkpoint that is missing, damaged or does not fit its configuration."""


class ExactnessError(HeadstreamError, ArithmeticError):
    """An identity that should hold to rounding and did not."""


class TaskError(HeadstreamError, ValueError):
    """Clean/corrupted pairs, answers or metrics that cannot carry an analysis."""


class SweepError(HeadstreamError, RuntimeError):
    """A long sweep that cannot go on: its workers, its resume folder, its disk."""


class ResultError(HeadstreamError, ValueError):
    """A saved result or report that cannot be read."""


def nearest(name: str, known: Iterable[str], *, n: int = 3) -> str:
    """A hint that names what `name` may have meant: "nearest is 'a', 'b'"; "" if nothing is near.

    Example:
        >>> nearest("indction-2l", ["induction-2l", "constructed-induction"])
        "nearest is 'induction-2l'"
    """
    close = difflib.get_close_matches(name, list(known), n=n, cutoff=0.6)
    return "nearest is " + ", ".join(repr(match) for match in close) if close else ""
