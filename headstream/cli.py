"""The command line. Nothing here loads torch: commands import what they need when they run.

Exit codes: 0 done; 1 done, but a check failed; 2 usage; 3 input that cannot be used; 130 stopped.
A traceback means a bug in headstream (or `--debug`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

import headstream
from headstream.console import complain, warnings_as_notes
from headstream.models.errors import HeadstreamError, StoreError
from headstream.models.zoo.registry import path_of


@dataclass(frozen=True)
class Options:
    """What every command takes."""

    as_json: bool
    seed: int
    quiet: bool
    debug: bool

    @property
    def progress(self) -> bool:
        return not self.quiet


class Model(click.ParamType[str]):
    """A zoo name or a model folder, checked before anything heavy is loaded."""

    name = "model"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> str:
        from pathlib import Path

        if not str(value):
            self.fail("the name of a model is empty", param, context)
        if (Path(value) / "config.json").is_file():
            return str(value)
        if Path(value).is_dir():
            self.fail(f"folder '{value}' holds no model: it has no config.json", param, context)
        try:
            path_of(str(value))
        except StoreError as error:
            self.fail(str(error), param, context)
        return str(value)


class Output(click.ParamType[str]):
    """Where to write. A name that looks like an option is a slip, not a file."""

    name = "output"

    def __init__(self, *, stdout: bool = False) -> None:
        self.stdout = stdout

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> str:
        name = str(value)
        if not name:
            self.fail("the name to write to is empty", param, context)
        if name.startswith("-") and not (name == "-" and self.stdout):
            self.fail(
                f"'{name}' looks like an option; for a file of that name write ./{name}",
                param,
                context,
            )
        return name


@click.group(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "HEADSTREAM",
        "max_content_width": 100,
    }
)
@click.version_option(headstream.__version__, prog_name="headstream")
def cli() -> None:
    """Take a decoder-only transformer apart, and say how well each statement about it is known.

    MODEL is a name that `headstream models` lists, or a folder written by `save` or `train`.
    Start with: headstream report induction-2l -o report.html
    """


def with_commands() -> click.Group:
    """`cli` with every command in it: importing a command registers it."""
    from headstream.commands import (  # noqa: F401
        audit,
        circuits,
        heads,
        induction,
        models,
        patch,
        report,
        sinks,
        train,
    )

    return cli


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every command takes; the command gets them as one `Options`."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout, nothing else.")
    @click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed of everything that is drawn.",
    )
    @click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def wrapped(as_json: bool, seed: int, quiet: bool, debug: bool, **arguments: Any) -> Any:
        options = Options(as_json, seed, quiet, debug)
        click.get_current_context().find_root().obj["options"] = options
        return function(options, **arguments)

    return wrapped


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run the command and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed, not raised."""

    parsed: dict[str, Options] = {}
    try:
        with warnings_as_notes():
            code = with_commands().main(
                args=list(arguments), prog_name="headstream", standalone_mode=False, obj=parsed
            )
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        usage = context.command_path if context else "headstream"
        as_json = _wants("as_json", parsed, arguments)
        complain(error.format_message(), f"see {usage} --help", "UsageError", as_json=as_json)
        return 2
    except (click.Abort, KeyboardInterrupt):
        as_json = _wants("as_json", parsed, arguments)
        complain("stopped", "", "Interrupted", as_json=as_json)
        return 130
    except (HeadstreamError, OSError) as error:
        if _wants("debug", parsed, arguments):
            raise
        as_json = _wants("as_json", parsed, arguments)
        if isinstance(error, HeadstreamError):
            complain(error.message, error.hint, type(error).__name__, as_json=as_json)
        else:
            complain(_reason(error), "", type(error).__name__, as_json=as_json)
        return 3


def _wants(field: str, parsed: Mapping[str, Options], arguments: Sequence[str]) -> bool:
    """Whether --json or --debug was given: as parsed, or as it reads where parsing failed."""
    if "options" in parsed:
        return bool(getattr(parsed["options"], field))
    word = {"as_json": "--json", "debug": "--debug"}[field]
    before = ["", *arguments]
    return any(
        given == word and last not in ("-o", "--output")
        for last, given in zip(before, arguments, strict=False)
    )


def _reason(error: OSError) -> str:
    """What the system said, as one line: "'/x/y': Permission denied"."""
    where = f"'{error.filename}': " if error.filename else ""
    return where + (error.strerror or str(error) or type(error).__name__)
