"""The twin: the page's data as one JSON text, which is hashed, shown, saved and drawn from.

    {"schema": "headstream.report/1", "title": ..., "results": [...],
     "shared": {"prompts": [...], "provenance": [...]}}

Each result stands as `Result.to_json` writes it, except for what several results of a study have
in common and what is most of their size: prompts and provenance stand once in `shared`, and a
result's `details.prompts` and `provenance` hold `{"shared": index}`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstream.analyses.result import Result, dump_json, result_from_json
from headstream.models.errors import ResultError

SCHEMA = "headstream.report/1"


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
    shared = value["shared"]
    results = []
    for place, item in enumerate(value["results"], 1):
        source = f"result {place} of a report"
        whole = {**item, "provenance": _restored(item["provenance"], shared, "provenance", source)}
        if "prompts" in item["details"]:
            prompts = _restored(item["details"]["prompts"], shared, "prompts", source)
            whole["details"] = {**item["details"], "prompts": prompts}
        results.append(result_from_json(whole, source=source))
    return results


def _restored(value: Any, shared: Mapping[str, list[Any]], kind: str, source: str) -> Any:
    """What a pointer into `shared` points to; a value that is no pointer as it is."""
    if not isinstance(value, Mapping) or set(value) != {"shared"}:
        return value
    index, known = value["shared"], shared.get(kind, [])
    if not isinstance(index, int) or not 0 <= index < len(known):
        raise ResultError(f"{source} points to {kind} that are missing")
    return known[index]


def script_json(value: Any) -> str:
    """`value` as JSON that may stand inside a script element: no sign can end or open one.

    Lone surrogates, which a byte-level tokenizer can produce and no file can hold, are escaped.
    """
    text = dump_json(value)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _packed(title: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    shared: dict[str, list[Any]] = {"prompts": [], "provenance": []}
    packed = []
    for item in results:
        details = dict(item["details"])
        if details.get("prompts"):
            details["prompts"] = _pointer(details["prompts"], shared["prompts"])
        provenance = _pointer(item["provenance"], shared["provenance"])
        packed.append({**item, "provenance": provenance, "details": details})
    return {"schema": SCHEMA, "title": title, "shared": shared, "results": packed}


def _pointer(value: Any, known: list[Any]) -> dict[str, int]:
    """Where `value` stands in `known`, to which it is added if it is new."""
    if value not in known:
        known.append(value)
    return {"shared": known.index(value)}
