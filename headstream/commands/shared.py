"""What several commands do: load a model, make sure of a place, print and write what was found."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.console import answer, complain
from headstream.models.errors import HeadstreamError, StoreError

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


def answer_and_write(
    options: Options, value: Any, text: str, output: str | None, write: Callable[[], str]
) -> None:
    """Print the answer, then write `output`, if one is named, and say what `write` says of it.

    In this order: a disk that is full by then must not take the answer with it.
    """
    answer(value, text, as_json=options.as_json)
    if output is None:
        return
    with writing(output, options):
        said = write()
    if not options.as_json:
        click.echo(said)


@contextmanager
def writing(output: str, options: Options) -> Iterator[None]:
    """End the command with code 3 and a line on stderr where `output` cannot be written.

    On stderr with --json too: stdout holds the answer, one value.
    """
    try:
        yield
    except (HeadstreamError, OSError) as error:
        if options.debug:
            raise
        # The file that the system refused may be one beside it, of no name that was given.
        cause = error.__cause__ if isinstance(error, HeadstreamError) else error
        if isinstance(cause, OSError):
            why, hint = f"cannot write '{output}': {cause.strerror or cause}", ""
        elif isinstance(error, HeadstreamError):
            why, hint = error.message, error.hint
        complain(why, hint, type(error).__name__, as_json=False)
        raise click.exceptions.Exit(3) from error


def refuse_n_with_pairs(context: click.Context, name: str, pairs: str | None) -> None:
    """Raise UsageError where both are given: `name` is the parameter of -n."""
    given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    if pairs is not None and given:
        raise click.UsageError("-n does not go with --pairs, of which all are used; leave it out")


def number(value: Any) -> str:
    """Three decimals, or a dash for a value that is not applicable. Zero has no sign."""
    given = float(value)
    return "-" if given != given else f"{given:z.3f}"


def signed(value: Any) -> str:
    """The same, with its sign."""
    given = float(value)
    return "-" if given != given else f"{given:+z.3f}"
