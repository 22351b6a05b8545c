"""Made-up results, and a parser that knows what is on a page."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

SAMPLES = Path(__file__).resolve().parents[2] / "report_samples.py"
VOID = {"meta", "link", "wbr", "br"}


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """The builders of tests/report_samples.py."""
    spec = importlib.util.spec_from_file_location("report_samples", SAMPLES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_samples"] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Element:
    """One element: its tag, its attributes, and all text inside it."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    inside: list[Element] = field(default_factory=list)

    def find(self, tag: str, **attributes: str) -> list[Element]:
        """Every element below with this tag and these attributes (class_ for class)."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        found = []
        for element in self.inside:
            if element.tag == tag and all(
                value in (element.attributes.get(name) or "").split(" ")
                for name, value in wanted.items()
            ):
                found.append(element)
            found += element.find(tag, **attributes)
        return found

    def all(self) -> list[Element]:
        return [found for element in self.inside for found in (element, *element.all())]

    def by_id(self, name: str) -> Element:
        (found,) = [e for e in self.all() if e.attributes.get("id") == name]
        return found


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"<{tag}> names an attribute twice"
        element = Element(tag, dict(attrs))
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment on the page: {data[:80]!r}")


def parse(html: str) -> Element:
    """The page as a tree; elements that do not nest are an error."""
    builder = _Builder()
    builder.feed(html)
    builder.close()
    assert builder.open == [builder.root]
    return builder.root


@pytest.fixture(scope="session", name="parse")
def _parse() -> object:
    return parse
