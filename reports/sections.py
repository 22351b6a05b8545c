"""The order of a page, and a guard around each part: what cannot be drawn is said, not dropped."""

from __future__ import annotations

from collections.abc import Callable

from headstream.reports.baselines import baselines
from headstream.reports.blocks import Section
from headstream.reports.census import census
from headstream.reports.circuits import circuits
from headstream.reports.closing import audit, limits
from headstream.reports.effects import effects
from headstream.reports.induction import induction
from headstream.reports.opening import claims, model
from headstream.reports.paths import paths
from headstream.reports.prompts import prompts
from headstream.reports.sets import sets
from headstream.reports.sinks import sinks
from headstream.reports.study import Study
from headstream.reports.tokens import cut
from headstream.reports.writes import writes

_LONGEST = 400

Builder = Callable[[Study], Section | None]

# Slug, heading if it breaks, and what builds it: in the order of the page.
BUILDERS: tuple[tuple[str, str, Builder], ...] = (
    ("claims", "What is claimed, and how well it is known", claims),
    ("model", "Model and run", model),
    ("prompts", "Prompts", prompts),
    ("metric", "Metric and baselines", baselines),
    ("effects", "Where a change moves the answer", effects),
    ("paths", "Which path carries it", paths),
    ("sets", "What heads do together", sets),
    ("heads", "What each head looks at", census),
    ("induction", "Which heads continue repeats", induction),
    ("circuits", "How each head is built", circuits),
    ("sinks", "What rests on the first token", sinks),
    ("writes", "Who writes the answer", writes),
    ("audit", "Checks of the arithmetic", audit),
)


def sections(study: Study) -> list[Section]:
    """All sections that the study has something for, then its limits.

    A part for a kind of result that is absent is left out. A part that raises stays, with the
    error's words, and the limits name it.
    """
    built = []
    for slug, title, build in BUILDERS:
        section = _guarded(slug, title, build, study)
        if section is not None:
            built.append(section)
    broken = [section for section in built if section.broken]
    closing = _guarded("limits", "Limits", lambda s: limits(s, broken), study)
    return built if closing is None else [*built, closing]


def _guarded(slug: str, title: str, build: Builder, study: Study) -> Section | None:
    try:
        return build(study)
    except Exception as error:
        # Any error: one part that cannot be drawn must not take the others with it.
        words = " ".join(str(error).split())
        return Section(slug, title, broken=cut(f"{type(error).__name__}: {words}", _LONGEST))
