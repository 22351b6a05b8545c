"""The twin: the page's data as one JSON text, which is hashed, shown, saved and drawn from.

    {"schema": "headstream.report/1", "title": ..., "shared": [...], "results": [...]}

Each result stands as `Result.to_json` writes it, except that prompts, which several results of a
study have in common and which are most of their size, stand once in `shared`; a result's
`details.prompts` then holds `{"shared": index}`.
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
        pointer = item["details"].get("prompts")
        if isinstance(pointer, Mapping):
            index = pointer.get("shared")
            if not isinstance(index, int) or not 0 <= index < len(shared):
                raise ResultError(f"result {place} of a report points to prompts that are missing")
            item = {**item, "details": {**item["details"], "prompts": shared[index]}}
        results.append(result_from_json(item, source=f"result {place} of a report"))
    return results


def script_json(value: Any) -> str:
    """`value` as JSON that may stand inside a script element: no sign can end or open one.

    Lone surrogates, which a byte-level tokenizer can produce and no file can hold, are escaped.
    """
    text = dump_json(value)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _packed(title: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    shared: list[Any] = []
    texts: list[str] = []
    packed = []
    for item in results:
        details = dict(item["details"])
        if details.get("prompts"):
            text = dump_json(details["prompts"])
            if text not in texts:
                texts.append(text)
                shared.append(details["prompts"])
            details["prompts"] = {"shared": texts.index(text)}
        packed.append({**item, "details": details})
    return {"schema": SCHEMA, "title": title, "shared": shared, "results": packed}
