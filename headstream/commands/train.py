"""headstream train: a model of the zoo by its recipe, held to the recipe's bars."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.cli import Options, Output, cli, common
from headstream.commands.shared import require_room, writing
from headstream.console import answer, table
from headstream.models.zoo.registry import list_models

if TYPE_CHECKING:
    from headstream.models.zoo.recipe import Recipe


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
) -> int:
    """Train a model of the zoo again, by its recipe, and save it to FOLDER.

    RECIPE is the name of a trained model in `headstream models`, such as induction-2l. The model is
    then measured on new sequences and held to the recipe's bars; exit 1 if it misses one. It is
    saved all the same, with a card that says which. Takes half a minute to two minutes.
    """
    target = Path(output)
    if not target.parent.is_dir():
        raise click.UsageError(f"folder '{target.parent}' does not exist")
    if target.exists() and not overwrite:
        raise click.UsageError(f"'{target}' exists; choose another folder, or --overwrite")
    require_room(target.parent)
    from headstream.models.store import save
    from headstream.models.zoo.recipes import find_recipe
    from headstream.models.zoo.training import train as run

    given = context.get_parameter_source("seed") is not click.core.ParameterSource.DEFAULT
    wall, cpu = time.perf_counter(), time.process_time()
    model = run(recipe, seed=options.seed if given else None, progress=options.progress)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    card = model.card or {}
    sha256 = model.weights_sha256()
    value: dict[str, Any] = {
        "path": None,
        "sha256": sha256,
        "shipped": sha256 in {shipped.weights_sha256 for shipped in list_models()},
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "bars": bars_of(find_recipe(recipe), card),
        "card": card,
    }
    # What was measured is said first: a disk that is full by now must not take it along.
    if not options.as_json:
        click.echo(_measured(value))
    try:
        with writing(output, options):
            save(model, target, overwrite=overwrite)
    except click.exceptions.Exit:
        if options.as_json:
            answer(value, "", as_json=True)
        raise
    value["path"] = str(target)
    answer(value, _saved(value), as_json=options.as_json)
    return 0 if all(bar["met"] for bar in value["bars"]) else 1


def bars_of(recipe: Recipe, card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each bar of the recipe: `figure`, what it `means`, `value`, `below` or `above`, `met`."""
    return [{"figure": bar.of, "means": bar.means, **bar.held_to(card)} for bar in recipe.bars]


def bars_table(bars: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, what it had to be, what it is, and whether that is met."""
    rows = [
        [bar["means"], required(bar), decimals(bar["value"]), "met" if bar["met"] else "MISSED"]
        for bar in bars
    ]
    return table(["measured on new sequences", "must be", "reached", ""], rows)


def required(bar: Mapping[str, Any]) -> str:
    """`below 0.02` or `above 3`."""
    side = "below" if "below" in bar else "above"
    return f"{side} {decimals(bar[side])}"


def decimals(value: float) -> str:
    """As many of five decimals as say something: 0.00004, 13.6815, 1."""
    return f"{value:.5f}".rstrip("0").rstrip(".")


def _measured(value: Mapping[str, Any]) -> str:
    name, recipe = value["card"]["name"], value["card"]["recipe"]
    lines = [
        f"{name}, trained for {recipe['steps']} steps from seed {recipe['seed']} "
        f"in {value['seconds']:.0f} s ({value['cpu_seconds']:.0f} s of CPU)",
        "",
        bars_table(value["bars"]),
        "",
    ]
    return "\n".join(lines)


def _saved(value: Mapping[str, Any]) -> str:
    bars, path, name = value["bars"], value["path"], value["card"]["name"]
    missed = sum(not bar["met"] for bar in bars)
    if missed:
        lines = [
            f"MISSED {missed} of {len(bars)}: this is not the {name} of the zoo.",
            f"It is saved to {path}, to be looked into, and its card says so.",
            f'Another --seed may do better; load("{name}") is the shipped one.',
        ]
    else:
        met = "The bar is met." if len(bars) == 1 else f"All {len(bars)} bars are met."
        lines = [f"{met} Saved to {path}; to look at it:", f"  headstream report {path} -o FILE"]
    if value["shipped"]:
        lines.append("Its weights are the shipped ones, bit for bit.")
    else:
        lines.append("Its weights are not the shipped ones: the seed, the kind of machine or the")
        lines.append("version of torch is another.")
    return "\n".join(lines)
