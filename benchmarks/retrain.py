"""Make the zoo's models again and hold them to their cards' bars.

    python benchmarks/retrain.py                     every model, from its own seed
    python benchmarks/retrain.py induction-2l --seed 1
    python benchmarks/retrain.py induction-2l --seed 1 --record
    python benchmarks/retrain.py constructed-induction --write
    python benchmarks/retrain.py induction-2l --measure --write
    python benchmarks/retrain.py --table             what `headstream train` takes and gives

Models written by hand must come out bit for bit; trained ones must meet the bars of their recipe
(bits depend on the kind of machine; whether they agree is printed). Seconds are this process's CPU
time. `--table` runs the command on every trained model, each in a process of its own, and prints a
table in Markdown with that process's seconds. `--write` replaces the shipped checkpoint, `--record`
notes in its card what the other seed gave, `--measure` trains nothing and measures the shipped
weights again. Exits 1 if a model misses.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headstream.commands.train import bars_of, bars_table, decimals, required
from headstream.models.decoder import Decoder
from headstream.models.store import load
from headstream.models.zoo.constructed import constructed_induction
from headstream.models.zoo.gates import constructed_and, constructed_or
from headstream.models.zoo.recipes import RECIPES, find_recipe
from headstream.models.zoo.registry import list_models
from headstream.models.zoo.training import card_of, train

CHECKPOINTS = Path(__file__).resolve().parent.parent / "models" / "zoo" / "checkpoints"
BY_HAND = {
    "constructed-and": constructed_and,
    "constructed-induction": constructed_induction,
    "constructed-or": constructed_or,
}
SHIPPED = {model.name: model.weights_sha256 for model in list_models()}


def make(name: str, seed: int | None, measure: bool = False) -> tuple[Decoder, bool]:
    """The model, and whether it is as it must be."""
    if name in BY_HAND:
        model = BY_HAND[name]()
        same = model.weights_sha256() == SHIPPED.get(name)
        print(f"{name}: {'equal' if same else 'NOT equal'} to the shipped weights")
        return model, same
    start = time.process_time()
    model = measured(name) if measure else train(name, seed=seed)
    seconds = time.process_time() - start
    assert model.card is not None
    bars = bars_of(find_recipe(name), model.card)
    same = model.weights_sha256() == SHIPPED.get(name)
    print(f"{name}, seed {model.card['recipe']['seed']}, {seconds:.0f} s of CPU:")
    print(bars_table(bars))
    print(f"  circuit {model.card['circuit']}")
    print(f"  {'equal to' if same else 'other bits than'} the shipped weights")
    return model, all(bar["met"] for bar in bars)


def measured(name: str) -> Decoder:
    """The shipped weights with a card measured anew."""
    recipe = find_recipe(name)
    model = load(name)
    before = model.card or {}
    with torch.no_grad():
        model.card = card_of(model, recipe, before["recipe"]["steps"])
    model.card |= {key: before[key] for key in ("retrained",) if key in before}
    return model


def tabulate(names: list[str], seed: int | None) -> bool:
    """Run `headstream train` on each and print a row when it is done; whether all bars are met."""
    print(
        "| model | seed | seconds | of CPU | reached (bar) | weights |\n|---|---|---|---|---|---|"
    )
    good = True
    for name in names:
        said, wall, cpu = command(name, seed)
        bars = "<br>".join(
            f"{bar['means']}: {decimals(bar['value'])} ({required(bar)}"
            f"{'' if bar['met'] else ', **missed**'})"
            for bar in said["bars"]
        )
        weights = "the shipped ones" if said["shipped"] else "others"
        drawn = said["card"]["recipe"]["seed"]
        print(f"| `{name}` | {drawn} | {wall:.0f} | {cpu:.0f} | {bars} | {weights} |", flush=True)
        good &= all(bar["met"] for bar in said["bars"])
    return good


def command(name: str, seed: int | None) -> tuple[dict[str, Any], float, float]:
    """What `headstream train NAME` says, and its process's seconds: by the clock, of CPU."""
    chosen = [] if seed is None else ["--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["train", name, "-o", str(Path(folder) / name), "--json", *chosen]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headstream", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stdout)
    if "bars" not in said:
        raise SystemExit(f"{name}: {said['error']['message']}")
    return said, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def record(name: str, other: Decoder) -> None:
    """Note in the shipped card of `name` what another seed gave."""
    assert other.card is not None
    shipped = load(name)
    assert shipped.card is not None
    seed = other.card["recipe"]["seed"]
    if seed == shipped.card["recipe"]["seed"]:
        raise SystemExit(f"{name}: seed {seed} is its own; --record is for another one")
    shipped.card["retrained"] = {
        "seed": seed,
        "bars": other.card["bars"],
        "circuit": other.card["circuit"],
    }
    shipped.save(CHECKPOINTS / name, overwrite=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    known = [*BY_HAND, *RECIPES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--seed", type=int, help="instead of the recipe's own")
    parser.add_argument("--write", action="store_true", help="replace the shipped checkpoint")
    parser.add_argument("--record", action="store_true", help="note the seed's figures in the card")
    parser.add_argument("--measure", action="store_true", help="train nothing: new cards")
    parser.add_argument("--table", action="store_true", help="time the command, and nothing else")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(known)}")
    if options.table:
        return 0 if tabulate(options.names or list(RECIPES), options.seed) else 1
    good = True
    for name in options.names or known:
        model, fine = make(name, options.seed, options.measure)
        if options.write:
            model.save(CHECKPOINTS / name, overwrite=True)
        if options.record:
            record(name, model)
        good &= fine or options.write
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
