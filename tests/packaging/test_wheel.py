"""What is installed is what the tree holds: nested packages, data files, metadata."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"headstream": "headstream", "models": "headstream/models"} | {
    name: f"headstream/{name}" for name in ("circuits", "analyses", "reports")
}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def in_the_tree() -> set[str]:
    """Files that an installed headstream must have, by their installed path."""
    found = set()
    for folder, target in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(f"{target}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


@pytest.mark.slow
def test_wheel_holds_exactly_the_tree(tmp_path: Path) -> None:
    # A copy, so that building leaves nothing behind in the checkout.
    tree = tmp_path / "tree"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, files):
        source, target = ROOT / name.decode(), tree / name.decode()
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), "."],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == in_the_tree()


def test_every_package_of_the_tree_is_listed() -> None:
    listed = set(project()["tool"]["setuptools"]["packages"])  # type: ignore[index]
    found = set()
    for folder, target in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((*target.split("/"), *parts)))
    assert listed == found


def test_constraints_pin_every_dependency() -> None:
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    needed = {
        name.split(">")[0].split("<")[0].split("=")[0]
        for name in project()["project"]["dependencies"]  # type: ignore[index]
    }
    assert needed <= pinned, needed - pinned


def test_no_pickle_and_no_eval_anywhere() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for word in (
                r"import pickle",
                r"(?<!safetensors\.)torch\.load\(",
                r" eval\(",
                "allow_pickle",
            ):
                assert not re.search(word, text), f"{path} has {word!r}"
