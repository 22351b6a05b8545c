"""The report of a shipped model, by the command a newcomer types: its size and what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Of a toy's page; most of it is the drawing library, packed.
LARGEST = 2_300_000


def test_the_page_is_small_and_the_command_says_what_it_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "headstream", "report", "induction-2l", "-o", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size <= LARGEST
    assert "One head restores the answer: L0H0" in done.stdout
    assert "; four more restore part of it: L1H2" in done.stdout
    assert "Warning:" not in done.stderr
