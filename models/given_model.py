"""The first argument of nearly every public function: a model, and not its name.

`@takes_model` stands above a function whose first parameter is `model`, so that whoever passes a
name, a folder, None or another library's module reads what to pass instead of a missing attribute.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from headstream.models.errors import ShapeError

P = ParamSpec("P")
R = TypeVar("R")


def check_model(model: object) -> None:
    """Raise ShapeError, saying how to get one, unless `model` is a `Decoder`."""
    # The decoder stands on modules whose functions take models.
    from headstream.models.decoder import Decoder

    if isinstance(model, Decoder):
        return
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        raise ShapeError(
            f"model must be a Decoder, got the name {name!r}", hint=f"pass load({name!r})"
        )
    kind = type(model).__name__
    raise ShapeError(
        f"model must be a Decoder, got {kind}",
        hint='load("induction-2l") gives one by its name in the zoo, load(folder) one that was '
        "saved",
    )


def takes_model(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, with its first argument (or the keyword `model`) checked before anything runs.

    Raises:
        ShapeError: from the function returned, as `check_model`.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if args:
            check_model(args[0])
        elif "model" in kwargs:
            check_model(kwargs["model"])
        return function(*args, **kwargs)

    return checked
