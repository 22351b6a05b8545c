"""Bytes as text inside a page: gzipped, five signs for four bytes where base64 takes 5.33.

The 85 digits are Python's own (`base64.b85encode`) but for "<", ">" and "&", which stand for
",", "." and ":" here: no text written in them can end or open an element.
"""

from __future__ import annotations

import base64
import gzip

_PYTHON = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_IN_PAGE = str.maketrans("<>&", ",.:")
_IN_PYTHON = str.maketrans(",.:", "<>&")

DIGITS = _PYTHON.translate(_IN_PAGE)  # page.js holds the same line


def pack(text: str) -> str:
    """`text` gzipped, as signs that may stand in a script element; no time is in the bytes."""
    packed = gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0)
    return base64.b85encode(packed).decode("ascii").translate(_IN_PAGE)


def unpack(packed: str) -> str:
    """The text that `pack` packed.

    Raises:
        ValueError, OSError: if it is not one of ours.
    """
    return gzip.decompress(base64.b85decode(packed.translate(_IN_PYTHON))).decode("utf-8")
