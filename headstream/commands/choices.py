"""Values that options take: numbers, positions, names; and help that groups options by question."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click


class Numbers(click.ParamType[list[int]]):
    """`0,2,5-7`, negative ones by themselves: `-1,-2`."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> list[int]:
        found: list[int] = []
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(-?\d{1,9})(?:-(\d{1,9}))?\s*", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last or last - first > 10**6:
                self.fail(f"expected numbers like 0,2,5-7, got '{value}'", param, context)
            found += range(first, last + 1)
        return found


class Positions(Numbers):
    """A word, or numbers."""

    name = "positions"
    words = ("all", "each", "roles", "edges")

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> str | list[int]:
        if str(value) in self.words:
            return str(value)
        if str(value).strip()[:1].isalpha() or not str(value).strip():
            self.fail(
                f"expected {', '.join(self.words)} or numbers like 0,-1, got '{value}'",
                param,
                context,
            )
        return super().convert(value, param, context)


class Names(click.ParamType[list[str]]):
    """`L0H1,L1H2`: names of heads and other components; whether they exist the model says."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> list[str]:
        if isinstance(value, list):
            return value
        found = [part.strip() for part in str(value).split(",")]
        if not all(found) or any(name.startswith("-") for name in found):
            self.fail(f"expected names like L0H1,L1H2, got '{value}'", param, context)
        return found


# Options that every command takes.
_OTHERS = "Every command"


class _Option(click.Option):
    def __init__(self, *names: Any, group: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.group = group


class Grouped(click.Command):
    """A command whose help lists its options under the headings that `option` gave them."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(context):
            record = param.get_help_record(context)
            if isinstance(param, click.Option) and record is not None:
                groups.setdefault(getattr(param, "group", _OTHERS), []).append(record)
        for name in [*(name for name in groups if name != _OTHERS), _OTHERS]:
            with formatter.section(name):
                formatter.write_dl(groups[name])


def option(group: str, *names: str, **options: Any) -> Callable[..., Any]:
    """`click.option`, under a heading of the help."""
    return click.option(*names, cls=_Option, group=group, **options)
