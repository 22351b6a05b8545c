"""headstream models: what is shipped, and the card of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from headstream.cli import Model, Options, cli, common
from headstream.commands.shared import in_words
from headstream.console import answer, table
from headstream.models.errors import StoreError
from headstream.models.zoo.registry import list_models, path_of


@cli.command()
@click.argument("name", required=False, type=Model())
@common
def models(options: Options, name: str | None) -> None:
    """List the shipped models, or show the card of one."""
    if name is None:
        cards = list_models()
        rows = [[card.name, str(card.card["purpose"])] for card in cards]
        value = [{"name": card.name, "sha256": card.weights_sha256, **card.card} for card in cards]
        answer(value, table(["name", "what it is for"], rows), as_json=options.as_json)
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
    lines = [f"{key}: {in_words(value)}" for key, value in card.items()]
    answer(card, "\n".join(lines), as_json=options.as_json)
