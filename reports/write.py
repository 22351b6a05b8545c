"""The last step: the page to disk, whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstream.analyses.result import Result
from headstream.analyses.stored import dump_json, write_whole
from headstream.models.errors import ResultError
from headstream.reports.page import render_report

__all__ = ["render_report", "write_report"]

_LARGE = 10_000_000


def write_report(
    results: Result | Sequence[Any],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    force: bool = True,
) -> Path:
    """Write one self-contained HTML file about `results`.

    The page opens from disk, without a network; its JSON holds every result, and the same results
    give the same bytes. The file appears whole or not at all.

    Args:
        results: one result, or several in the order in which the page shows them.
        path: the file to write; its folder must exist.
        title: heading of the page; None names the models.
        force: whether a file that is there already is replaced.
    Returns:
        The path written.
    Raises:
        ResultError: if the folder is missing, `path` is a folder, the file exists and `force` is
            False, or there is nothing to report.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ResultError(
            f"cannot write '{path}': folder '{path.parent}' does not exist", hint="create it first"
        )
    if path.is_dir():
        raise ResultError(f"cannot write '{path}': it is a folder", hint="name a file in it")
    if path.exists() and not force:
        raise ResultError(f"'{path}' exists already", hint="name another file, or force it")
    text = render_report(results, title)
    if len(text) > _LARGE:
        parts = [results] if isinstance(results, Result) else results
        sizes = [(len(dump_json(result.to_json())), result.title) for result in parts]
        size, name = max(sizes)
        warnings.warn(
            f"the report is {len(text) / 1e6:.1f} MB; its largest result is '{name}' with "
            f"{size / 1e6:.1f} MB, leave it out or restrict its positions",
            stacklevel=2,
        )
    return write_whole(path, text)
