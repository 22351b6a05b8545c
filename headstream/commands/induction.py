"""headstream induction: heads that follow content, those that follow a distance, what cuts cost."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import replace
from pathlib import Path

import click

from headstream.cli import Model, Options, Output, cli, common
from headstream.commands.shared import answer_and_write, load_model, number, require_writable
from headstream.console import printable, table


@cli.command()
@click.argument("model", type=Model())
@click.option(
    "-n",
    "n",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Sequences of each kind.",
)
@click.option("--length", type=int, metavar="N", help="Tokens of the longest sequences.")
@click.option(
    "--distance",
    "distances",
    type=int,
    multiple=True,
    metavar="D",
    help="A distance of the repeats, in tokens; may be given several times.",
)
@click.option("-o", "--output", type=Output(), metavar="FILE", help="Also write an HTML report.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@common
def induction(
    options: Options,
    model: str,
    n: int,
    length: int | None,
    distances: tuple[int, ...],
    output: str | None,
    force: bool,
) -> None:
    """Which heads of MODEL continue repeats by content, and which only seem to."""
    if output is not None:
        require_writable(Path(output), force)
    from headstream.analyses.studies.induction import induction as study
    from headstream.analyses.studies.induction_claims import fixed_distances

    found = study(
        load_model(model), n=n, seed=options.seed, distances=distances or None, length=length
    )
    words = ["headstream", "induction", model, "--seed", str(options.seed), "-n", str(n)]
    words += [] if length is None else ["--length", str(length)]
    words += [word for distance in distances for word in ("--distance", str(distance))]
    command = shlex.join([*words, "-o", "induction.html"])
    result = replace(found, provenance=replace(found.provenance, command=command))
    data, details = result.data, result.details
    rows = []
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            at = data.sel(layer=layer, head=head)
            # The worst over distances: the least score, the most that a control has.
            cells = [
                number(at["induction"].min()),
                number(at["gapped"]),
                number(at["position_control"].max()),
                number(at["content_control"].max()),
                number(at["copying"]),
                number(at["alone"]),
                number(at["restored"]),
            ]
            rows.append([f"L{layer}H{head}", *cells, str(at["label"].item())])
    scan = details["scan"]
    header = ["head", "least", "gaps", "pos.", "cont.", "copy", "alone", "rest.", "label"]
    shown = ", ".join(map(str, details["distances"]))
    several = len(details["distances"]) > 1
    # One distance has no control that needs another, and nothing to be the least of.
    if several:
        least = f"the least of distances {shown}"
        controls = (
            "pos., cont.: the most at the same positions with other content, and as far back with "
            "the content elsewhere"
        )
    else:
        least = f"at the one distance of {shown}"
        controls = "pos.: at the same positions with other content"
    notes = [
        f"least: mass on the token after the earlier copy, {least}; gaps: the same at random gaps "
        f"in {details['length']} tokens; {controls}",
        f"chance {float(data['chance'].mean()):.3f}; alone: loss in nats when the head is cut; "
        "rest.: share of the joint cut that it takes back, restored alone; fixed distances: "
        f"looked for from {scan['nearest']} to {scan['farthest']} tokens, in {scan['sequences']} "
        f"random sequences of {scan['length']}",
        *details["notes"],
        *(f"{claim.evidence}: {claim.statement} ({claim.reason})" for claim in result.claims[:1]),
        *(
            f"at a fixed distance of {distance} tokens: {', '.join(heads)}"
            for distance, heads in fixed_distances(result).items()
        ),
        result.summary(),
    ]
    lines = [table(header, rows), *(textwrap.fill(printable(note), 80) for note in notes)]

    def write() -> str:
        from headstream.reports.write import write_report

        return str(write_report([result], str(output)))

    answer_and_write(options, result.to_json(), "\n".join(lines), output, write)
