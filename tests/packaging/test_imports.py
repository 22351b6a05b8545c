"""Imports point down, and the front door opens without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# From the ground up; a folder may import itself and what stands before it.
FLOORS = ["models", "circuits", "analyses", "reports", "headstream"]
# What only one floor may import: the figures' library above, the models' libraries below.
RESERVED = {
    "plotly": {"reports"},
    "jinja2": {"reports"},
    "click": {"headstream"},
    "torch": {"models", "circuits", "analyses"},
    "transformer_lens": {"models", "circuits"},
    "safetensors": {"models"},
}


def sources() -> list[tuple[str, Path]]:
    found = [(floor, path) for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    assert len(found) > 30
    return found


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(str(node.module))
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize(("floor", "path"), sources(), ids=lambda x: getattr(x, "name", x))
def test_imports_point_down(floor: str, path: Path) -> None:
    allowed = FLOORS[: FLOORS.index(floor) + 1]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "headstream" or len(parts) < 2:
            continue
        target = parts[1] if parts[1] in FLOORS else "headstream"
        assert target in allowed, f"{floor}/{path.name} imports {name}, which lies above it"


@pytest.mark.parametrize(("floor", "path"), sources(), ids=lambda x: getattr(x, "name", x))
def test_each_library_has_its_floor(floor: str, path: Path) -> None:
    for name in imported(path):
        owners = RESERVED.get(name.split(".")[0])
        assert owners is None or floor in owners, f"{floor}/{path.name} imports {name}"


def test_no_circles_among_modules() -> None:
    """No module needs itself to be imported first, imports inside functions apart."""
    graph: dict[str, set[str]] = {}
    for floor, path in sources():
        name = module_name(floor, path)
        graph[name] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headstream"):
                graph[name].add(str(node.module))
    state: dict[str, str] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == "done" or name not in graph:
            return
        assert state.get(name) != "open", " -> ".join((*trail, name))
        state[name] = "open"
        for target in sorted(graph[name]):
            visit(target, (*trail, name))
        state[name] = "done"

    for name in graph:
        visit(name, ())


def module_name(floor: str, path: Path) -> str:
    parts = path.relative_to(ROOT / floor).with_suffix("").parts
    names = ["headstream", *([] if floor == "headstream" else [floor]), *parts]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


@pytest.mark.parametrize(
    "statement",
    [
        "import headstream",
        "import headstream.cli; headstream.cli.run(['--help'])",
        "import headstream.cli; headstream.cli.run(['--version'])",
        "import headstream.cli; headstream.cli.run(['models'])",
        "import headstream.cli; headstream.cli.run(['report', 'no-such-model', '-o', 'x.html'])",
        "import headstream.cli; headstream.cli.run(['heads', '--no-such-option'])",
        "import headstream.analyses.result, headstream.analyses.kinds",
        "import headstream.analyses.patching.result",
        "import headstream.reports.write",
    ],
)
def test_loads_no_torch(statement: str, tmp_path: Path) -> None:
    code = (
        f"import sys; {statement}; "
        "heavy = {'torch', 'transformer_lens', 'transformers'} & set(sys.modules); "
        "sys.exit('loaded ' + ', '.join(sorted(heavy)) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
