"""headstream train: a model of the zoo by its recipe."""

from __future__ import annotations

from pathlib import Path

import click

from headstream.cli import Options, Output, cli, common
from headstream.commands.shared import in_words, require_room
from headstream.console import answer


@cli.command()
@click.argument("recipe")
@click.option(
    "-o",
    "--output",
    type=Output(),
    required=True,
    metavar="FOLDER",
    help="Where to save the model.",
)
@click.option("--overwrite", is_flag=True, help="Replace a model that is already there.")
@common
@click.pass_context
def train(
    context: click.Context, options: Options, recipe: str, output: str, overwrite: bool
) -> None:
    """Train a model of the zoo again, by its recipe, and save it to FOLDER."""
    target = Path(output)
    if not target.parent.is_dir():
        raise click.UsageError(f"folder '{target.parent}' does not exist")
    if target.exists() and not overwrite:
        raise click.UsageError(f"'{target}' exists; choose another folder, or --overwrite")
    require_room(target.parent)
    from headstream.models.store import save
    from headstream.models.zoo.training import train as run

    given = context.get_parameter_source("seed") is not click.core.ParameterSource.DEFAULT
    model = run(recipe, seed=options.seed if given else None, progress=options.progress)
    save(model, target, overwrite=overwrite)
    card = model.card or {}
    loss = card.get("loss", {})
    answer(
        {"path": str(target), "card": card},
        f"{target}  sha256 {model.weights_sha256()}\nloss: {in_words(loss)}",
        as_json=options.as_json,
    )
