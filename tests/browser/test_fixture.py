"""Where there is no browser the tests say so, and fail where one is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_a_missing_browser_is_never_silent(tmp_path: Path, required: str, outcome: str) -> None:
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text("def test_it(browser): ...\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path), "HEADSTREAM_REQUIRE_BROWSER": required},
        cwd=tmp_path,
    )
    assert outcome in done.stdout
    assert "BROWSER TESTS NOT RUN: there is no chromium" in done.stdout
