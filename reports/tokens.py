"""Tokens and other foreign text, made visible and harmless.

A token is whatever a tokenizer says it is: a line break, a zero-width joiner, half of a surrogate
pair, `</script>`, nothing at all. Two jobs are kept apart:

* *visible*: every token has a form that can be seen and told from its neighbours. Spaces, breaks
  and the empty string have stand-ins; what cannot be printed is named by its code point.
* *harmless*: HTML text is escaped by the template, JSON by `page`, and what plotly draws by
  `for_plotly`, because plotly reads a small HTML of its own in every label.
"""

from __future__ import annotations

import html
import unicodedata

_STAND_INS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_EMPTY = "∅"
_CARRIER = "◌"  # what Unicode draws under a combining mark that stands alone
# Controls of the writing direction reorder everything after them, other people's text included.
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_CUT = "…"


def segments(token: str) -> list[tuple[str, bool]]:
    """`token` as pieces to show: (text, whether the text stands in for something invisible).

    Example:
        >>> segments(" the")
        [('·', True), ('the', False)]
    """
    if token == "":
        return [(_EMPTY, True)]
    pieces: list[tuple[str, bool]] = []
    for index, sign in enumerate(token):
        if sign in _STAND_INS:
            piece = (_STAND_INS[sign], True)
        elif _unprintable(sign):
            piece = (f"U+{ord(sign):04X}", True)
        elif index == 0 and unicodedata.category(sign).startswith("M"):
            piece = (_CARRIER + sign, False)
        else:
            piece = (sign, False)
        if pieces and pieces[-1][1] == piece[1]:
            pieces[-1] = (pieces[-1][0] + piece[0], piece[1])
        else:
            pieces.append(piece)
    return pieces


def visible(token: str) -> str:
    """`token` with stand-ins for all that cannot be seen.

    Example:
        >>> visible("a\\nb"), visible(""), visible("\\u200b")
        ('a⏎b', '∅', 'U+200B')
    """
    return "".join(text for text, _ in segments(token))


def label(index: int, token: str, *, width: int = 14) -> str:
    """`token` as an axis label that no other position shares: "4:·John".

    A long token is cut in its middle; the index in front keeps two cut labels apart.
    """
    return f"{index}:{cut(visible(token), width)}"


def cut(text: str, width: int) -> str:
    """`text` in at most `width` signs, both its ends kept."""
    if len(text) <= width:
        return text
    head = (width - 1 + 1) // 2
    tail = width - 1 - head
    return text[:head] + _CUT + (text[-tail:] if tail else "")


def prose(text: str) -> str:
    """Foreign text (a title, a file name, a note) without signs that act on what surrounds them.

    Controls, lone surrogates and changes of writing direction are named by their code points;
    line breaks and tabs are left to the page, which treats them as spaces.
    """
    return "".join(
        f"U+{ord(sign):04X}"
        if sign in _DIRECTION
        or (unicodedata.category(sign) in ("Cc", "Cs") and sign not in ("\n", "\t"))
        else sign
        for sign in text
    )


def for_plotly(text: str) -> str:
    """`text` as plotly must be given it to show it as it is.

    plotly reads `<b>`, `<a href>`, `<br>` and entities in labels and hover texts.
    """
    return html.escape(prose(text), quote=False)


def _unprintable(sign: str) -> bool:
    """Whether `sign` leaves no mark of its own: controls, formats, odd spaces, unassigned."""
    return unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
