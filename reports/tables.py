"""Tables: every number of a page is in one, readable without scripts and without colour.

A table is a plain value; the template alone knows HTML. Cells hold text that is already rounded
and, where it is a number, the exact stored value for sorting and copying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headstream.analyses.evidence import Evidence
from headstream.models.errors import ResultError
from headstream.reports import formats


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: what is shown.
        note: a second, quieter line (an interval under its value).
        value: the exact number behind `text`, for sorting and copying.
        href: a link inside the page ("#claims").
        evidence: shown as a badge in place of the text.
        code: set in the fixed-width face.
        tokens: token pieces (`tokens.segments`) shown in place of the text.
        changed, pad: a token that differs between clean and corrupted; one outside the mask.
    """

    text: str = ""
    note: str = ""
    value: float | int | None = None
    href: str | None = None
    evidence: Evidence | None = None
    code: bool = False
    tokens: tuple[tuple[str, bool], ...] = ()
    changed: bool = False
    pad: bool = False


@dataclass(frozen=True)
class Column:
    """One column: its heading, a second quieter line under it, and whether it holds numbers."""

    heading: str
    note: str = ""
    numeric: bool = False


@dataclass(frozen=True)
class Group:
    """Rows under a heading of their own; an empty heading is no heading."""

    heading: str
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a caption; the first cell of each row is its heading.

    Attributes:
        caption: says what the rows are.
        columns: one a cell of each row.
        groups: the rows.
        sortable: whether the page may offer to sort it (only tables of one group).
    """

    block = "table"

    caption: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    sortable: bool = True

    def __post_init__(self) -> None:
        for group in self.groups:
            for row in group.rows:
                if len(row) != len(self.columns):
                    raise ResultError(
                        f"table '{self.caption}' has {len(self.columns)} columns "
                        f"and a row of {len(row)} cells"
                    )

    @property
    def has_headings(self) -> bool:
        return any(column.heading for column in self.columns)

    @property
    def n_rows(self) -> int:
        return sum(len(group.rows) for group in self.groups)


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    sortable: bool = True,
) -> Table:
    """A table of one group of rows."""
    group = Group("", tuple(tuple(row) for row in rows))
    return Table(caption, tuple(columns), (group,), sortable and len(rows) > 2)


def number_cell(
    value: float | None,
    *,
    low: float | None = None,
    high: float | None = None,
    sign: bool = False,
) -> Cell:
    """A number and, where both ends are given, its interval on a second line."""
    bounded = low is not None and high is not None
    return Cell(
        formats.number(value, sign=sign),
        note=formats.interval(low, high, sign=sign) if bounded else "",
        value=exact(value),
    )


def exact(value: float | None) -> float | None:
    """`value` if it is a finite number, else None."""
    return float(value) if value is not None and math.isfinite(value) else None
