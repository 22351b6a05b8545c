"""The twin: the page's data as one JSON text, which is hashed, shown, saved and drawn from.

    {"schema": "headstream.report/1", "title": ..., "results": [...],
     "shared": {"provenance": [...], "prompts": [...], "arrays": [...]}}

Each result stands as `Result.to_json` writes it, except for what several results of a study have
in common: provenance, prompts and arrays that occur again stand once in `shared`, and where they
were stands `{"shared": index}`. Prompts are written by columns there (`pairs`).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstream.analyses.result import Result
from headstream.analyses.stored import dump_json, result_from_json
from headstream.models.errors import ResultError
from headstream.reports.pairs import as_columns, as_pairs

SCHEMA = "headstream.report/1"

_SHORT = 100  # an array of fewer signs stands where it belongs, even twice


@dataclass(frozen=True)
class Twin:
    """The text as it stands in the page, and its hash; the first 8 digits name the run."""

    text: str
    sha256: str

    @classmethod
    def of(cls, title: str, results: Sequence[Result]) -> Twin:
        """The twin of a page with this title and these results."""
        text = script_json(_packed(title, [result.to_json() for result in results]))
        return cls(text, hashlib.sha256(text.encode("utf-8")).hexdigest())

    @property
    def run(self) -> str:
        return self.sha256[:8]


def results_in(value: Any) -> list[Result]:
    """The results in a twin that was read as JSON.

    Raises:
        ResultError: if it is no twin, is newer, or one of its results cannot be read.
    """
    schema = value.get("schema") if isinstance(value, Mapping) else None
    if schema != SCHEMA:
        raise ResultError(
            f"this is not the data of a report: schema is {schema!r}, expected {SCHEMA!r}"
        )
    try:
        shared = {str(kind): list(items) for kind, items in value["shared"].items()}
        shared["prompts"] = [as_pairs(item) for item in shared.get("prompts", [])]
        packed = list(value["results"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(f"the data of the report is damaged: {error!r}") from None
    return [
        result_from_json(
            _unpacked(item, shared, f"result {place} of a report"),
            source=f"result {place} of a report",
        )
        for place, item in enumerate(packed, 1)
    ]


def _unpacked(item: Any, shared: Mapping[str, list[Any]], source: str) -> Any:
    """One result as `Result.to_json` wrote it; what has not its form is left to its reader."""

    def whole(kind: str, value: Any) -> Any:
        if not isinstance(value, Mapping) or set(value) != {"shared"}:
            return value
        index, known = value["shared"], shared.get(kind, [])
        if not isinstance(index, int) or not 0 <= index < len(known):
            raise ResultError(f"{source} points to {kind} that are missing")
        return known[index]

    return _with_parts(item, whole)


def _with_parts(item: Any, change: Callable[[str, Any], Any]) -> Any:
    """A result's JSON with each part that may be shared replaced by `change(kind, part)`."""
    if not isinstance(item, Mapping):
        return item
    changed = dict(item)
    if "provenance" in changed:
        changed["provenance"] = change("provenance", changed["provenance"])
    details = changed.get("details")
    if isinstance(details, Mapping) and "prompts" in details:
        changed["details"] = {**details, "prompts": change("prompts", details["prompts"])}
    for part in ("coords", "data"):
        if isinstance(changed.get(part), Mapping):
            changed[part] = {name: change("arrays", array) for name, array in changed[part].items()}
    return changed


def script_json(value: Any) -> str:
    """`value` as JSON that may stand inside a script element: no sign can end or open one.

    Lone surrogates, which a byte-level tokenizer can produce and no file can hold, are escaped.
    """
    text = dump_json(value)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _packed(title: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    places: dict[str, dict[str, int]] = {"provenance": {}, "prompts": {}, "arrays": {}}
    shared: dict[str, list[Any]] = {kind: [] for kind in places}
    written = Counter(
        dump_json(array)
        for item in results
        for array in (*item["coords"].values(), *item["data"].values())
    )

    def pointer(kind: str, part: Any) -> Any:
        """Where `part` stands in `shared`, to which it is added if it is new."""
        text = dump_json(part)
        if kind == "prompts" and not (isinstance(part, list) and part):
            return part
        if kind == "arrays" and not (written[text] > 1 and len(text) > _SHORT):
            return part
        if text not in places[kind]:
            places[kind][text] = len(shared[kind])
            shared[kind].append(as_columns(part) if kind == "prompts" else part)
        return {"shared": places[kind][text]}

    packed = [_with_parts(item, pointer) for item in results]
    return {"schema": SCHEMA, "title": title, "shared": shared, "results": packed}
