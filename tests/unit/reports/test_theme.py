"""Contrast in both themes, computed: an automated check of the page cannot judge all of it."""

from __future__ import annotations

import re
from importlib import resources

import pytest

TEXT = [
    ("ink", "page"),
    ("ink", "surface"),
    ("ink", "tint"),
    ("muted", "page"),
    ("muted", "surface"),
    ("muted", "tint"),
    ("accent", "page"),
    ("accent", "surface"),
    ("mark-ink", "mark"),
    *((name, f"{name}-tint") for name in ("proven", "causal", "measured", "unknown", "failed")),
]
MARKS = [
    *((f"series-{n}", "page") for n in range(1, 7)),
    *((f"bar-{name}", "page") for name in ("up", "down", "total")),
    ("frame", "zero"),
    ("muted", "zero"),
    ("accent", "page"),
]


def colours(theme: str) -> dict[str, str]:
    text = resources.files("headstream.reports").joinpath("templates", f"{theme}.css").read_text()
    return dict(re.findall(r"--([a-z0-9-]+):(#[0-9a-f]{6});", text))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("front", "back"), TEXT)
def test_text_can_be_read(theme: str, front: str, back: str) -> None:
    found = colours(theme)
    assert contrast(found[front], found[back]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("front", "back"), MARKS)
def test_marks_can_be_seen(theme: str, front: str, back: str) -> None:
    found = colours(theme)
    assert contrast(found[front], found[back]) >= 3.0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("side", ["up", "down"])
def test_scale_is_monotone_from_zero_to_each_end(theme: str, side: str) -> None:
    found = colours(theme)
    steps = [luminance(found[name]) for name in ("zero", f"{side}-1", f"{side}-2")]
    assert steps == sorted(steps, reverse=theme == "light")


def test_zero_is_white_in_the_light_theme() -> None:
    assert colours("light")["zero"] == "#ffffff"


def test_both_themes_name_the_same_colours() -> None:
    assert colours("light").keys() == colours("dark").keys()
