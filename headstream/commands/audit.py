"""headstream audit: the ledger of identities, run on one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headstream.cli import Model, Options, cli, common
from headstream.commands.shared import load_model
from headstream.console import answer, table

if TYPE_CHECKING:
    from headstream.analyses.evidence import Claim


@cli.command()
@click.argument("model", type=Model())
@common
def audit(options: Options, model: str) -> int:
    """Check on MODEL what algebra says of every decoder; exit 1 if a check fails.

    What stands beside a check because algebra stops there is measured, and listed after the checks.
    """
    from headstream.analyses.claims.ledger import audit as run_audit

    result = run_audit(load_model(model), seed=options.seed)
    rows = []
    for row in result.details["rows"]:
        if not row["applies"]:
            rows.append([row["id"], "-", "-", f"does not apply: {row['reason']}"])
            continue
        label = "PROVEN" if row["passed"] else "FAILED"
        rows.append([row["id"], label, f"{row['largest_error']:.1e}", row["statement"]])
    text = table(["id", "label", "error", "statement"], rows)
    lines = [text, "", *(_measured(claim) for claim in result.measured)]
    lines.append(f"{result.summary()}, in float64")
    answer(result.to_json(), "\n".join(lines), as_json=options.as_json)
    return 1 if result.failed else 0


def _measured(claim: Claim) -> str:
    """One measurement: what, how much with its interval and n, and on what."""
    # One pair of heads, or one sequence, has no interval.
    ends = "" if claim.interval is None else " [{:z.3f}, {:z.3f}]".format(*claim.interval)
    return (
        f"{claim.id}  {claim.evidence}  {claim.statement}:\n"
        f"    {claim.value:z.3f}{ends} {claim.unit}, n = {claim.n}\n"
        f"    on {claim.reason}\n"
    )
