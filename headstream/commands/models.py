"""headstream models: what is shipped, and the card of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headstream.cli import Model, Options, cli, common
from headstream.console import answer, printable, table
from headstream.models.errors import StoreError
from headstream.models.zoo.card_words import Part, card_parts, reached
from headstream.models.zoo.registry import list_models, path_of


@cli.command()
@click.argument("name", required=False, type=Model())
@common
def models(options: Options, name: str | None) -> None:
    """List the shipped models, or show the card of one."""
    if name is None:
        cards = list_models()
        rows = [[card.name, *reached(card.card), str(card.card["purpose"])] for card in cards]
        value = [{"name": card.name, "sha256": card.weights_sha256, **card.card} for card in cards]
        header = ["name", "loss (nats)", "best possible", "what it is for"]
        answer(value, table(header, rows), as_json=options.as_json)
        return
    folder = Path(name) if (Path(name) / "config.json").is_file() else path_of(name)
    try:
        card: Any = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"'{folder}' has no readable card.json: {error}") from None
    if not isinstance(card, dict):
        raise StoreError(
            f"'{folder / 'card.json'}' must hold a JSON object, got {type(card).__name__}"
        )
    answer(card, "\n".join(_lines(card_parts(card))), as_json=options.as_json)


def _lines(parts: Sequence[Part]) -> list[str]:
    """One line a part that is one thing; the rows of others below it, indented and aligned."""
    single = max((len(part.word) for part in parts if part.text), default=0)
    lines = []
    for part in parts:
        if part.text:
            lines.append(printable(f"{part.word.ljust(single)}  {part.text}"))
            continue
        width = max((len(name) for name, _ in part.rows), default=0)
        lines.append(printable(part.word))
        if part.table:
            header, *rows = ([cell or "-" for cell in row] for row in part.table)
            lines += [f"  {line}" for line in table(header, rows).splitlines()]
        lines += [printable(f"  {name.ljust(width)}  {text}") for name, text in part.rows]
    return lines
