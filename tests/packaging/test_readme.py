"""The README's Python runs as it stands, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ten_lines_of_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = README.split("## Ten lines of Python")[1]
    code = re.findall(r"```python\n(.*?)```", section, re.S)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert "restore" in capsys.readouterr().out
    assert (tmp_path / "mine.html").stat().st_size > 1_000_000


def test_every_other_block_of_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)[1:]
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "head" in capsys.readouterr().out


def test_what_the_readme_shows_is_there() -> None:
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / path).exists(), path
    for folder in re.findall(r"^([a-z]+)/ ", README, re.M):
        assert (ROOT / folder).is_dir(), folder


def test_the_sections_come_in_the_agreed_order() -> None:
    heads = re.findall(r"^## (.+)$", README, re.M)
    assert heads[:3] == ["Two commands", "Ten lines of Python", "Layout"]
    assert heads[-1] == "Changes"
    assert README.index("](docs/report.png)") < README.index("## Two commands")


def test_every_command_of_the_table_exists() -> None:
    from headstream.cli import with_commands

    named = set(re.findall(r"^\| `headstream ([a-z]+)", README, re.M))
    assert named == set(with_commands().commands)
