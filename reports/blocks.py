"""What a section of a page is made of: plain values, each drawn by one macro of the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstream.reports.tables import Table


@dataclass(frozen=True)
class Prose:
    """A paragraph. `tone` is "" (body), "reading" (how to read this) or "warning"."""

    block = "prose"

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Heading:
    """A heading inside a section, with an id that claims link to."""

    block = "heading"

    text: str
    anchor: str


@dataclass(frozen=True)
class Bullets:
    """A list; each item may start with a few words set in bold."""

    block = "bullets"

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Term:
    """A word and what it stands for; `code` sets the explanation in the fixed-width face."""

    word: str
    text: str
    code: bool = False


@dataclass(frozen=True)
class Terms:
    """A list of words with their explanations."""

    block = "terms"

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Command:
    """A command line to copy."""

    block = "command"

    text: str


@dataclass(frozen=True)
class Legend:
    """The evidence labels with what each may be called."""

    block = "legend"


@dataclass(frozen=True)
class SaveButton:
    """The button that saves the page's JSON."""

    block = "save"

    file_name: str
    bytes: int


@dataclass(frozen=True)
class Figure:
    """A plotly figure: numbers drawn by the page's script, and said in words and in a table.

    Attributes:
        id: unique on the page.
        name: a short name, read out by screen readers.
        alt: the figure in one sentence, made from its data.
        caption: what is drawn, of what, in which unit, and what is hidden.
        spec: plotly's `data` and `layout`, plain JSON values.
        height: of the drawing in CSS pixels, reserved before it is drawn.
        width: the most it may take, in CSS pixels.
    """

    block = "figure"

    id: str
    name: str
    alt: str
    caption: str
    spec: dict[str, Any]
    height: int
    width: int


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens them."""

    block = "fold"

    summary: str
    blocks: tuple[Any, ...]
    is_open: bool = False


Block = Prose | Heading | Bullets | Terms | Command | Legend | SaveButton | Figure | Fold | Table


@dataclass(frozen=True)
class Section:
    """One numbered part of a page.

    Attributes:
        slug: its id on the page.
        title: its heading.
        reading: how to read it, for someone who has read no papers.
        blocks: what it holds.
        broken: the error's words, if it could not be built.
    """

    slug: str
    title: str
    reading: str = ""
    blocks: Sequence[Block] = field(default_factory=tuple)
    broken: str = ""
