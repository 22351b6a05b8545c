"""What the commands print: tables and one-line errors. stdout is the answer, stderr the rest."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import click


def printable(text: str) -> str:
    """`text` with everything that a terminal would obey, or not show, written as an escape."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first is left-aligned, numbers to the right."""
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(width) if column and _is_number(rows, column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def answer(value: Any, text: str, *, as_json: bool) -> None:
    """Print the answer on stdout: `value` as one JSON value, or `text`."""
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False) if as_json else text)


def complain(message: str, hint: str, kind: str, *, as_json: bool) -> None:
    """Print an error: one line on stderr, or one JSON value on stdout."""
    if as_json:
        body = {"error": {"type": kind, "message": message, "hint": hint}}
        click.echo(json.dumps(body, ensure_ascii=False))
    else:
        click.echo(f"headstream: {printable(message)}" + (f"; {hint}" if hint else ""), err=True)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Show warnings to users as one line each on stderr, when the work is done.

    By then no progress bar stands in the way; words that come twice are said once. Warnings to
    programmers (deprecations and their like) are shown, or not, as Python does.
    """
    notes: dict[str, None] = {}
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category is UserWarning:
                notes[" ".join(str(message).split())] = None
            else:
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = note
        try:
            yield
        finally:
            for text in notes:
                click.echo(f"headstream: warning: {printable(text)}", err=True)


def _is_number(rows: Sequence[Sequence[str]], column: int) -> bool:
    values = [row[column].rstrip("%*") for row in rows if row[column] not in ("", "-")]
    try:
        [float(value) for value in values]
    except ValueError:
        return False
    return bool(values)
