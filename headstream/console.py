"""What the commands print: tables and one-line errors. stdout is the answer, stderr the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def _is_number(rows: Sequence[Sequence[str]], column: int) -> bool:
    values = [row[column].rstrip("%*") for row in rows if row[column] not in ("", "-")]
    try:
        [float(value) for value in values]
    except ValueError:
        return False
    return bool(values)
