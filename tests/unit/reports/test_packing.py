"""What is packed into a page comes out again, and can never end the element it stands in."""

from __future__ import annotations

import base64
import gzip
from importlib import resources

import pytest

from headstream.reports.packing import DIGITS, pack, unpack

# From Python's documentation of base64 (b85encode), less three signs that mean something in HTML.
HTML = "<>&"


@pytest.mark.parametrize(
    "text", ["", "a", "naïve \u2028 \N{DIGIT SIX}", "</script>" * 50, "\0\r\n"]
)
def test_what_is_packed_comes_out(text: str) -> None:
    packed = pack(text)
    assert unpack(packed) == text
    assert set(packed) <= set(DIGITS)


def test_every_remainder_of_four_bytes_comes_out() -> None:
    sizes = set()
    for n in range(40):
        text = "".join(chr(33 + (i * i) % 90) for i in range(n))
        assert unpack(pack(text)) == text
        sizes.add(len(pack(text)) % 5)
    assert sizes == {0, 2, 3, 4}, "1 sign alone holds no byte"


def test_no_digit_is_a_sign_of_html_or_of_a_string() -> None:
    assert len(set(DIGITS)) == len(DIGITS) == 85
    assert not set(DIGITS) & set("<>&\"'\\ \n")


def test_digits_are_those_of_base85_but_for_html() -> None:
    data = bytes(range(256)) * 4
    given = base64.b85encode(data).decode()
    assert set(HTML) <= set(given)
    assert set(given) - set(HTML) <= set(DIGITS)


def test_the_page_unpacks_with_the_same_digits() -> None:
    script = resources.files("headstream.reports").joinpath("templates", "page.js").read_text()
    assert f'"{DIGITS}"' in script


def test_no_clock_is_in_the_bytes() -> None:
    packed = pack("text")
    raw = base64.b85decode(packed.translate(str.maketrans(",.:", "<>&")))
    assert raw[4:8] == b"\0\0\0\0"
    assert gzip.decompress(raw) == b"text"


@pytest.mark.parametrize("text", ["abcde", "a b", "\u00e4"])
def test_what_is_not_packed_is_refused(text: str) -> None:
    with pytest.raises((ValueError, OSError)):
        unpack(text)
