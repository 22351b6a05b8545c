"""headstream audit: the ledger of identities, run on one model."""

from __future__ import annotations

import click

from headstream.cli import Model, Options, cli, common
from headstream.commands.shared import load_model
from headstream.console import answer, table


@cli.command()
@click.argument("model", type=Model())
@common
def audit(options: Options, model: str) -> int:
    """Check on MODEL what algebra says of every decoder; exit 1 if a check fails."""
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
    answer(result.to_json(), f"{text}\n{result.summary()}, in float64", as_json=options.as_json)
    return 1 if result.failed else 0
