"""The last step: whole or not at all, and refused before any work."""

from __future__ import annotations

import os
import re

import pytest

from headstream.models.errors import ResultError
from headstream.reports import write
from headstream.reports.write import render_report, write_report


def test_writes_the_page_and_says_where(samples, tmp_path) -> None:
    results = [samples.audit()]
    path = write_report(results, tmp_path / "report.html", title="T")
    assert path == tmp_path / "report.html"
    assert path.read_bytes().decode("utf-8") == render_report(results, "T")
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.fixture
def _no_work(monkeypatch) -> None:
    def refuse(*_):
        raise AssertionError("rendered before the path was checked")

    monkeypatch.setattr(write, "render_report", refuse)


@pytest.mark.usefixtures("_no_work")
def test_missing_folder_is_refused_before_any_work(samples, tmp_path) -> None:
    words = f"folder '{tmp_path / 'no'}' does not exist; create it first"
    with pytest.raises(ResultError, match=re.escape(words)):
        write_report([samples.audit()], tmp_path / "no" / "report.html")


@pytest.mark.usefixtures("_no_work")
def test_a_folder_is_no_file(samples, tmp_path) -> None:
    with pytest.raises(ResultError, match="it is a folder; name a file in it"):
        write_report([samples.audit()], tmp_path)


@pytest.mark.usefixtures("_no_work")
def test_existing_file_is_kept_when_asked(samples, tmp_path) -> None:
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(ResultError, match="exists already; name another file, or force it"):
        write_report([samples.audit()], path, force=False)
    assert path.read_text() == "mine"


def test_existing_file_is_replaced_by_default(samples, tmp_path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report([samples.audit()], path)
    assert path.read_text().startswith("<!doctype html>")


def test_failed_rendering_leaves_nothing(samples, tmp_path) -> None:
    with pytest.raises(ResultError):
        write_report([], tmp_path / "report.html")
    assert os.listdir(tmp_path) == []


def test_large_page_warns_and_names_the_largest_result(samples, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(write, "_LARGE", 1000)
    with pytest.warns(UserWarning, match="largest result is 'Causal patching of z' with"):
        write_report([samples.audit(), samples.patching()], tmp_path / "report.html")
