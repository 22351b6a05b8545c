"""What several commands do: load a model, make sure of a place to write, print a value."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.models.errors import StoreError

if TYPE_CHECKING:
    from headstream.analyses.patching.task import Task
    from headstream.cli import Options
    from headstream.models.decoder import Decoder


def load_model(name: str) -> Decoder:
    from headstream.models.store import load
    from headstream.models.threads import use_one_thread_if_small

    model = load(name)
    use_one_thread_if_small(model)
    return model


def read_pairs(path: str, model: Decoder, options: Options, metric: str | None = None) -> Task:
    """A task from the user's own pairs; by default the metric that they allow.

    Without a wrong answer there is nothing to take a difference to.
    """
    from headstream.analyses.patching.task import Task

    chosen = metric or ("logit_difference" if _names_wrong(Path(path)) else "log_prob")
    task = Task.from_jsonl(path, model, metric=chosen)
    if metric is None and chosen == "log_prob" and options.progress:
        click.echo("no pair names 'wrong': the metric is log_prob of the answer", err=True)
    return task


def _names_wrong(pairs: Path) -> bool:
    """Whether any line gives `wrong`; lines that are damaged are left to who reads them."""
    try:
        lines = pairs.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return True
    for line in lines:
        try:
            pair = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(pair, dict) and "wrong" in pair:
            return True
    return False


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
