"""What several commands do: load a model, make sure of a place to write, print a value."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.models.errors import StoreError

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


def load_model(name: str) -> Decoder:
    from headstream.models.store import load
    from headstream.models.threads import use_one_thread_if_small

    model = load(name)
    use_one_thread_if_small(model)
    return model


def require_writable(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise click.UsageError(f"'{path}' exists; choose another name, or --force")
    if not path.parent.is_dir():
        raise click.UsageError(f"folder '{path.parent}' does not exist")
    if path.is_dir():
        raise click.UsageError(f"'{path}' is a folder; name a file")
    require_room(path.parent)


def require_room(folder: Path) -> None:
    """Raise StoreError, before anything is computed, unless files can be made in `folder`.

    Where it does not exist, in the nearest folder above it that does.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise StoreError(f"cannot write in '{folder}': {error.strerror or error}") from None


def number(value: Any) -> str:
    """Three decimals, or a dash for a value that is not applicable."""
    given = float(value)
    return "-" if given != given else f"{given:.3f}"


def in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value)
