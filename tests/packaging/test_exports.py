"""Public names: each package gives exactly what its stub lists, and nothing misspelt."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import headstream

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "headstream": "headstream",
    "headstream.models": "models",
    "headstream.circuits": "circuits",
    "headstream.analyses": "analyses",
    "headstream.reports": "reports",
}
# The contract that users hold on to, as far as it is built.
FRONT_DOOR = {
    "Decoder",
    "DecoderConfig",
    "HeadstreamError",
    "capture",
    "list_models",
    "load",
}


def listed(folder: str) -> list[str]:
    tree = ast.parse((ROOT / folder / "__init__.pyi").read_text(encoding="utf-8"))
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, f"write `import {alias.name} as {alias.name}`"
                names.append(alias.name)
    return names


@pytest.mark.parametrize(("package", "folder"), PACKAGES.items())
def test_every_listed_name_loads(package: str, folder: str) -> None:
    module = importlib.import_module(package)
    names = listed(folder)
    assert names == sorted(names, key=str.lower) or len(names) == len(set(names))
    assert names, f"{package} lists nothing"
    for name in names:
        value = getattr(module, name)
        assert getattr(value, "__doc__", None), f"{package}.{name} has no docstring"
    assert set(names) <= set(dir(module))


@pytest.mark.parametrize(("package", "folder"), PACKAGES.items())
def test_no_public_name_is_a_module_of_its_package(package: str, folder: str) -> None:
    modules = {path.stem for path in (ROOT / folder).glob("*.py")}
    assert not modules & set(listed(folder))


def test_front_door_holds_the_contract() -> None:
    assert set(listed("headstream")) >= FRONT_DOOR


def test_misspelt_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Decodr"):
        headstream.Decodr  # noqa: B018
