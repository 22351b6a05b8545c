"""Every example in a docstring runs, by module name (a path would import a second copy)."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["headstream", "models", "circuits", "analyses", "reports"]


def modules() -> list[str]:
    names = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>>" in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                front = ["headstream"] if folder == "headstream" else ["headstream", folder]
                names.append(".".join([*front, *parts]).removesuffix(".__init__"))
    assert len(names) >= 3
    return names


@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
