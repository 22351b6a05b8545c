"""The shipped models, by name. Reads cards only: listing them loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstream.models.errors import StoreError, nearest

_CHECKPOINTS = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True)
class ModelCard:
    """What is known about a shipped model.

    Attributes:
        name: what `load` takes.
        path: folder of its files.
        card: task, recipe, losses, vocabulary, known circuit.
        weights_sha256: hash of its weights, as `Decoder.weights_sha256` computes it.
    """

    name: str
    path: Path
    card: Mapping[str, Any]
    weights_sha256: str

    def __str__(self) -> str:
        return f"{self.name}: {self.card['purpose']}"


def list_models() -> tuple[ModelCard, ...]:
    """The shipped models, sorted by name."""
    found = []
    for file in sorted(_CHECKPOINTS.glob("*/card.json")):
        card = json.loads(file.read_text(encoding="utf-8"))
        found.append(ModelCard(card["name"], file.parent, card, card["weights_sha256"]))
    return tuple(found)


def path_of(name: str) -> Path:
    """Folder of the shipped model `name`.

    Raises:
        StoreError: if there is none of that name; the shipped ones and the nearest are named.
    """
    names = [model.name for model in list_models()]
    if name not in names:
        close = nearest(name, names)
        raise StoreError(
            f"no model {name!r}: it is neither a folder nor one of {', '.join(names) or 'none'}",
            hint=close,
        )
    return _CHECKPOINTS / name
