"""A model's card in plain words, part by part, for the command line and for reports.

Loads no torch. Cards of the zoo have parts of a known form; whatever a user's own card holds is
written out as it is, so that no card is too strange to be shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Keys of a part that stand beside another figure of it, and what they are called there.
_BESIDE = {"best_possible_": "best possible", "uniform_": "uniform guessing"}
_SIZES = ("sequences", "questions", "prompts")
_TASK = {
    "length": "{} tokens long",
    "n_content": "{} content tokens to draw from",
    "n_fillers": "{} fillers to draw from",
    "pairs": "{} key-value pairs each",
    "distance": "a repeat {} tokens back",
}
_CORRUPTED = {
    "earlier_query": "the earlier copy of the last token replaced in the corrupted prompt",
    "answer": "the answer replaced in the corrupted prompt",
    "last": "the last token replaced in the corrupted prompt",
}
# Keys that are no words by themselves.
_WORDS = {
    "attention_from_the_question_to_the_needles_value": (
        "attention from the question to the value asked for"
    ),
}
_LONGEST_RUN = 12  # values that stand in one line


@dataclass(frozen=True)
class Part:
    """One part of a card.

    Attributes:
        word: what it is called.
        text: the whole of it, if it is one thing.
        rows: name and text of what it consists of otherwise.
        table: figures head by head, the first row their names; before the rows.
    """

    word: str
    text: str = ""
    rows: tuple[tuple[str, str], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()

    @property
    def line(self) -> str:
        """The part in one line; a table figure by figure, which says the fewest words."""
        said = [
            (name, ", ".join(f"{row[0]} {row[at]}" for row in self.table[1:] if row[at]))
            for at, name in enumerate(self.table[0] if self.table else ())
            if at
        ]
        return self.text or "; ".join(f"{name}: {text}" for name, text in (*said, *self.rows))


def card_parts(card: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts of a card that hold anything, in the card's order.

    Example:
        >>> card = {"loss": {"on_repeats": 4e-05, "best_possible_on_repeats": 0.0, "unit": "nats"}}
        >>> card_parts(card)[0].line
        'on repeats: 0.00004 nats, best possible 0'
    """
    parts = []
    for key, value in card.items():
        if isinstance(value, Mapping):
            heads, value = _by_head(value) if key == "measured" else ((), value)
            rows = tuple(_ROWS.get(str(key), _plain_rows)(value, card))
            part = Part(words(str(key)), rows=tuple(row for row in rows if row[1]), table=heads)
        else:
            part = Part(words(str(key)), text=plain(value))
        if part.line:
            parts.append(part)
    return tuple(parts)


def reached(card: Mapping[str, Any]) -> tuple[str, str]:
    """The first loss of a card that has a best possible one beside it, and that; or dashes."""
    loss = card.get("loss")
    if not isinstance(loss, Mapping):
        return "-", "-"
    for key, value in loss.items():
        if f"best_possible_{key}" in loss:
            return plain(value), plain(loss[f"best_possible_{key}"])
    return "-", "-"


def words(key: str) -> str:
    """A key as words; the name of a weight, `embed.W_E`, stays as it is."""
    return key if "." in key else _WORDS.get(key, key.replace("_", " "))


def plain(value: Any) -> str:
    """Any JSON value in one line.

    Example:
        >>> plain(3e-05), plain(True), plain([8, 28]), plain({"block": [2, 3], "steps": 5})
        ('0.00003', 'yes', '8, 28', 'block 2, 3; steps 5')
    """
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{words(str(key))} {plain(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(item) for item in value)
    return str(value)


def _number(value: float) -> str:
    """Five decimals without idle zeros; what is smaller keeps its digits."""
    if value != 0 and not 1e-5 <= abs(value) < 1e9:
        return f"{value:.3g}"
    text = f"{value:.5f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_Rows = list[tuple[str, str]]


def _plain_rows(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    return [(words(str(key)), plain(item)) for key, item in value.items()]


def _task(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    rest = {key: item for key, item in value.items() if key != "kind"}
    kind = [("kind", plain(value["kind"]))] if "kind" in value else []
    shown = [
        _TASK[key].format(_span(item))
        if key in _TASK
        else _CORRUPTED[item]
        if key == "corruption" and isinstance(item, str) and item in _CORRUPTED
        else f"{words(key)} {_span(item)}"
        for key, item in rest.items()
    ]
    return [*kind, ("prompts", ", ".join(shown))]


def _loss(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    unit = f" {value['unit']}" if isinstance(value.get("unit"), str) else ""
    beside = {prefix + str(key) for prefix in _BESIDE for key in value}
    rows: _Rows = []
    for key, item in value.items():
        if key == "unit" or key in beside:
            continue
        if isinstance(item, float):
            others = [
                f", {what} {plain(value[prefix + key])}"
                for prefix, what in _BESIDE.items()
                if prefix + key in value
            ]
            rows.append((words(key), f"{plain(item)}{unit}{''.join(others)}"))
        elif key in _SIZES:
            rows.append(("measured on", f"{plain(item)} {key}"))
        else:
            rows += _run(words(key), item)
    return rows


def _run(name: str, item: Any) -> _Rows:
    """`by distance`: `4: 0.2, 6: 0.1`; one row a group where values stand in groups."""
    if not isinstance(item, Mapping):
        return [(name, plain(item))]
    if any(isinstance(inner, Mapping) for inner in item.values()):
        return [
            row for key, inner in item.items() for row in _run(f"{name}, {words(str(key))}", inner)
        ]
    values = [f"{words(str(key))}: {plain(inner)}" for key, inner in item.items()]
    cuts = range(0, len(values), _LONGEST_RUN)
    return [(name, ", ".join(values[at : at + _LONGEST_RUN])) for at in cuts]


def _circuit(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    rows = [(words(str(kind)), plain(members)) for kind, members in value.items()]
    measured = card.get("measured")
    bound = measured.get("idle_below") if isinstance(measured, Mapping) else None
    if bound is None:
        return rows
    why = f" (cut one by one and all together, the loss moves by less than {plain(bound)} nats)"
    return [(kind, text + why if kind == "idle" and text else text) for kind, text in rows]


def _by_head(value: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], ...], dict[str, Any]]:
    """What is given head by head as one table, whichever way it is nested; and the rest."""
    columns: dict[str, dict[str, str]] = {}
    rest: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item and all(_is_place(str(name)) for name in item):
            columns[words(key)] = {str(name): plain(figure) for name, figure in item.items()}
        elif isinstance(item, Mapping) and _is_place(str(key)):
            for name, figure in _flat("", item):
                columns.setdefault(name, {})[str(key)] = figure
        else:
            rest[key] = item
    places = list(dict.fromkeys(place for column in columns.values() for place in column))
    body = [(place, *(column.get(place, "") for column in columns.values())) for place in places]
    return (("head", *columns), *body) if body else (), rest


def _measured(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    # The bound is said beside the idle heads.
    shown = {key: item for key, item in value.items() if key != "idle_below"}
    return [
        row
        for key, item in shown.items()
        for row in (_by_block if key == "usual_test" else _run)(words(str(key)), item)
    ]


def _by_block(name: str, item: Any) -> _Rows:
    """A test at several lengths of a block: what it is, then the figure and head of each length."""
    if not isinstance(item, Mapping):
        return _run(name, item)
    lengths = [str(key) for key in item if str(key).isdecimal()]
    told = {"what", *lengths, *(f"head at {length}" for length in lengths)}
    values = []
    for length in lengths:
        head = item.get(f"head at {length}")
        values.append(f"{length}: {plain(item[length])}" + (f" ({plain(head)})" if head else ""))
    rest = {key: inner for key, inner in item.items() if str(key) not in told}
    return [
        *([(name, plain(item["what"]))] if "what" in item else []),
        *([(f"{name} by block length", ", ".join(values))] if values else []),
        *(_run(f"{name}, more", rest) if rest else []),
    ]


def _flat(key: str, item: Any) -> _Rows:
    if not isinstance(item, Mapping):
        return [(words(key).strip(), plain(item))]
    return [row for inner, value in item.items() for row in _flat(f"{key} {inner}", value)]


def _is_place(name: str) -> bool:
    """`L0H1`, or `all induction`."""
    return name.startswith("all ") or (name[:1] == "L" and name[1:].replace("H", "", 1).isdigit())


def _bars(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    rows = []
    for key, bar in value.items():
        if not isinstance(bar, Mapping):
            rows.append((words(str(key)), plain(bar)))
            continue
        sides = [f"must be {side} {plain(bar[side])}" for side in ("below", "above") if side in bar]
        met = ("met" if bar["met"] is True else "MISSED") if "met" in bar else ""
        shown = [plain(bar.get("value")), *sides, met]
        name = str(key).replace("usual_test.", "usual_test.block length ").replace(".", ", ")
        rows.append((words(name), ", ".join(filter(None, shown))))
    return rows


def _recipe(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    rows: _Rows = []
    for key, item in value.items():
        if key == "phases" and isinstance(item, Sequence):
            for number, phase in enumerate(item, 1):
                inner = phase.items() if isinstance(phase, Mapping) else [("", phase)]
                shown = ", ".join(
                    f"{words(str(name))} {_span(what)}".strip() for name, what in inner
                )
                rows.append((f"phase {number}", shown))
        elif key == "of_steps":
            if item != value.get("steps"):
                rows.append(("of steps", plain(item)))
        else:
            rows.append((words(str(key)), plain(item)))
    return rows


def _span(item: Any) -> str:
    """`[8, 28]` as `8 to 28`, `[3, 3]` as `3`."""
    if isinstance(item, list) and len(item) == 2 and all(type(end) is int for end in item):
        return plain(item[0]) if item[0] == item[1] else f"{item[0]} to {item[1]}"
    return plain(item)


def _retrained(value: Mapping[str, Any], card: Mapping[str, Any]) -> _Rows:
    rows: _Rows = []
    for key, item in value.items():
        inner = _ROWS.get(str(key))
        if inner is None or not isinstance(item, Mapping):
            rows.append((words(str(key)), plain(item)))
        else:
            rows += inner(item, {})
    return rows


_ROWS = {
    "task": _task,
    "loss": _loss,
    "accuracy": _loss,
    "circuit": _circuit,
    "measured": _measured,
    "bars": _bars,
    "recipe": _recipe,
    "retrained": _retrained,
}
