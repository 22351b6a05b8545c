"""The audit on a page: its checks, and under them what was measured where algebra stops."""

from __future__ import annotations

from dataclasses import replace

from headstream.analyses.evidence import measured
from headstream.analyses.kinds import AuditResult
from headstream.reports.closing import audit
from headstream.reports.opening import claims
from headstream.reports.study import Study
from headstream.reports.tables import Table


def with_measurements(samples):
    result = samples.audit()
    seen = (
        measured(
            "B3",
            "deleting a write leaves a remainder",
            value=0.637,
            unit="of the attribution",
            interval=(0.5925, 0.669),
            n=32,
            reason="32 sequences of 24 tokens",
            where="audit",
        ),
        measured("M4", "heads overlap", value=0.5, unit="above chance", n=1, reason="the weights"),
    )
    return replace(result, claims=(*result.claims, *seen))


def tables(section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


def test_measurements_stand_under_the_checks(samples) -> None:
    section = audit(Study.of("a title", [with_measurements(samples)]))
    checks, beside = tables(section)
    assert [row[0].text for row in checks.groups[0].rows] == ["M1", "B2", "F1"]
    first, second = beside.groups[0].rows
    assert first[0].text == "B3"
    assert first[1].text == "Deleting a write leaves a remainder."
    assert first[1].note == "32 sequences of 24 tokens"
    assert first[2].text == "0.637 of the attribution"
    assert first[2].note == "[0.593, 0.669], n = 32"
    assert first[2].value == 0.637
    assert second[2].note == "n = 1", "one pair has no interval"


def test_no_table_of_measurements_where_nothing_was_measured(samples) -> None:
    assert len(tables(audit(Study.of("a title", [samples.audit()])))) == 1
    # What other results measured is in their own sections.
    assert len(tables(audit(Study.of("a title", [samples.audit(), samples.heads()])))) == 1


def test_a_measured_claim_points_to_the_checks(samples) -> None:
    (table,) = tables(claims(Study.of("a title", [with_measurements(samples)])))
    group = next(group for group in table.groups if group.heading.startswith("Seen"))
    assert [(row[-1].text, row[-1].href) for row in group.rows] == [("checks", "#audit")] * 2


def test_measurements_survive_the_file(samples) -> None:
    result = with_measurements(samples)
    again = AuditResult.from_json(result.to_json())
    assert again.measured == result.measured
    assert again.summary() == "2 of 2 checks passed"
