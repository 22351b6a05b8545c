"""Numbers in words: digits, signs, and what stands where there is no number."""

from __future__ import annotations

import math

import pytest

from headstream.reports import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (0.98113, "0.981"),
        (12.3456, "12.35"),
        (123.456, "123.5"),
        (-1.5, "−1.500"),
        (4.8e-7, "4.8e−07"),
        (2.5e6, "2.5e+06"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert formats.number(value) == text


def test_a_change_has_its_sign() -> None:
    assert formats.number(1.5, sign=True) == "+1.500"
    assert formats.with_unit(1.5, "nats") == "+1.500 nats"
    assert formats.with_unit(0.5, "of the gap") == "+0.500 of the gap"
    assert formats.with_unit(0.94, "attention mass") == "0.940 attention mass"
    assert formats.with_unit(3e-7, "largest absolute error") == "3.0e−07"
    assert formats.with_unit(None, "nats") == "–"


def test_interval() -> None:
    assert formats.interval(0.1, 0.25) == "[0.100, 0.250]"
    assert formats.interval(-0.1, 0.25, sign=True) == "[−0.100, +0.250]"
    assert formats.interval(math.nan, 0.25) == "–"


def test_short() -> None:
    assert formats.short(-0.001, sign=True) == "0.00"
    assert formats.short(-12.345) == "−12.35" or formats.short(-12.345) == "−12.34"
    assert formats.short(12345.0) == "12345.0"
    assert formats.short(None) == "–"


def test_probability_is_never_zero() -> None:
    assert formats.probability(0.61) == "0.610"
    assert formats.probability(0.0002) == "0.0002"
    assert formats.probability(1e-9) == "< 0.0001"
    assert formats.probability(math.nan) == "–"


def test_share_has_no_negative_zero() -> None:
    assert formats.share(-0.001) == "0%"
    assert formats.share(1.304) == "130%"
    assert formats.share(-0.25) == "−25%"


def test_listing_counts_what_it_leaves_out() -> None:
    assert formats.listing([]) == ""
    assert formats.listing(["a"]) == "a"
    assert formats.listing(["a", "b"]) == "a and b"
    assert formats.listing(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"


def test_sentence_leaves_names_alone() -> None:
    assert formats.sentence("the writes sum") == "The writes sum."
    assert formats.sentence("resid_pre of L1 restores it.") == "resid_pre of L1 restores it."
    assert formats.sentence("a head") == "A head."
    assert formats.sentence("") == ""
