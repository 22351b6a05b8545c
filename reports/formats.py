"""Numbers in words: one place decides how many digits, so that every part of a page agrees.

The figure's hover, the table and the sentence use the same functions on the same stored value;
the exact value stays in the page's JSON and in each table cell's `data-value`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

_MINUS = "−"
_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# Units whose zero means "nothing moved": their sign is part of the message.
_SIGNED_UNITS = ("nats", "logit", "gap")


def number(value: float | None, *, sign: bool = False) -> str:
    """`value` with three or four digits that matter; "–" where there is none.

    Example:
        >>> number(0.98113), number(-1.5, sign=True), number(4.8e-7), number(None)
        ('0.981', '−1.500', '4.8e−07', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 0.0005 or size >= 100_000:
        text = f"{value:+.1e}" if sign else f"{value:.1e}"
    else:
        digits = 3 if size < 10 else 2 if size < 100 else 1
        text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", _MINUS)


def short(value: float | None, *, sign: bool = False) -> str:
    """`value` with two decimals, for scores and for cells of a map.

    Example:
        >>> short(0.98113), short(-1.5, sign=True), short(0.0001)
        ('0.98', '−1.50', '0.00')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return number(value, sign=sign)
    text = f"{value:+.2f}" if sign else f"{value:.2f}"
    return "0.00" if text in ("-0.00", "+0.00") else text.replace("-", _MINUS)


def interval(low: float | None, high: float | None, *, sign: bool = False) -> str:
    """`[low, high]`, or "–" where either end is missing."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return "–"
    return f"[{number(low, sign=sign)}, {number(high, sign=sign)}]"


def with_unit(value: float | None, unit: str) -> str:
    """`value` with its unit; signed where the unit measures a change."""
    text = number(value, sign=is_signed(unit))
    if value is None or not math.isfinite(value) or not unit or unit == "largest absolute error":
        return text
    return f"{text} {unit}"


def is_signed(unit: str) -> bool:
    """Whether a value in `unit` is a change, whose sign is part of the message."""
    return any(word in unit for word in _SIGNED_UNITS)


def probability(value: float | None) -> str:
    """A p- or q-value: three decimals, never "0".

    Example:
        >>> probability(0.0002), probability(0.5)
        ('0.0002', '0.500')
    """
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.4f}" if value >= 1e-4 else "< 0.0001"


def share(value: float | None) -> str:
    """A ratio as a percentage.

    Example:
        >>> share(0.923), share(-0.04)
        ('92%', '−4%')
    """
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{100 * value:.0f}%"
    return "0%" if text == "-0%" else text.replace("-", _MINUS)


def count(many: int, one: str, more: str | None = None) -> str:
    """A small number in words with its noun: "two heads", "14 heads".

    Example:
        >>> count(1, "head"), count(2, "head"), count(14, "pass", "passes")
        ('one head', 'two heads', '14 passes')
    """
    noun = one if many == 1 else more or one + "s"
    return f"{_COUNTS[many] if many < len(_COUNTS) else many} {noun}"


def listing(items: Sequence[str], *, most: int = 6) -> str:
    """`items` as a list inside a sentence; beyond `most` the rest is counted.

    Example:
        >>> listing(["a", "b", "c"]), listing(["a", "b", "c", "d"], most=2)
        ('a, b and c', 'a, b and 2 more')
    """
    shown = list(items[:most])
    if len(items) > most:
        return f"{', '.join(shown)} and {len(items) - most} more"
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def sentence(text: str) -> str:
    """`text` with a capital in front and one full stop behind; names of things keep their case.

    Example:
        >>> sentence("two heads restore it"), sentence("z of L1H4 restores it")
        ('Two heads restore it.', 'z of L1H4 restores it.')
    """
    text = text.strip()
    if not text:
        return ""
    first = text.split(maxsplit=1)[0].rstrip(",.:;")
    is_word = (
        first.replace("-", "").isalpha() and first.islower() and (len(first) > 1 or first == "a")
    )
    head = text[0].upper() if is_word else text[0]
    return head + text[1:] + ("" if text[-1] in ".!?…" else ".")


def summary(text: str) -> str:
    """A result's own summary as a sentence of the page: minus signs, and "n = 64" on one line.

    Example:
        >>> summary("one head works against it: L1H0 (-0.25 [-0.27, -0.23])")
        'One head works against it: L1H0 (−0.25 [−0.27, −0.23]).'
    """
    return minus(sentence(text)).replace("n = ", "n\u00a0=\u00a0")


def minus(text: str) -> str:
    """`text` with minus signs for the hyphens in front of numbers; names keep their hyphens.

    Example:
        >>> minus("from -0.25 to 1e-05 in induction-2l")
        'from −0.25 to 1e-05 in induction-2l'
    """
    return re.sub(r"(?<![\w.-])-(?=\d)", _MINUS, text)


def finite(values: Iterable[float]) -> list[float]:
    """Those of `values` that are numbers."""
    return [float(value) for value in values if math.isfinite(value)]
