"""Make the zoo's models again and hold them to their cards' bars.

    python benchmarks/retrain.py                     every model, from its own seed
    python benchmarks/retrain.py induction-2l --seed 1
    python benchmarks/retrain.py constructed-induction --write

Models written by hand must come out bit for bit; trained ones must meet the bar of their recipe
(bits depend on the kind of machine; whether they agree is printed). `--write` replaces
the shipped checkpoint. Exits 1 if a model misses.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from headstream.models.decoder import Decoder
from headstream.models.zoo.constructed import constructed_induction
from headstream.models.zoo.gates import constructed_and, constructed_or
from headstream.models.zoo.recipes import RECIPES
from headstream.models.zoo.registry import list_models
from headstream.models.zoo.training import train

CHECKPOINTS = Path(__file__).resolve().parent.parent / "models" / "zoo" / "checkpoints"
BY_HAND = {
    "constructed-and": constructed_and,
    "constructed-induction": constructed_induction,
    "constructed-or": constructed_or,
}
SHIPPED = {model.name: model.weights_sha256 for model in list_models()}


def make(name: str, seed: int | None) -> tuple[Decoder, bool]:
    """The model, and whether it is as it must be."""
    if name in BY_HAND:
        model = BY_HAND[name]()
        same = model.weights_sha256() == SHIPPED.get(name)
        print(f"{name}: {'equal' if same else 'NOT equal'} to the shipped weights")
        return model, same
    start = time.perf_counter()
    model = train(name, seed=seed)
    seconds = time.perf_counter() - start
    assert model.card is not None
    loss = model.card["loss"]
    met = loss["on_repeats"] < loss["bar_on_repeats"]
    same = model.weights_sha256() == SHIPPED.get(name)
    print(
        f"{name}, seed {model.card['recipe']['seed']}: loss on repeats {loss['on_repeats']:.5f} "
        f"nats (bar {loss['bar_on_repeats']}, best possible {loss['best_possible_on_repeats']}), "
        f"{'met' if met else 'MISSED'}; {seconds:.0f} s; circuit {model.card['circuit']}; "
        f"{'equal to' if same else 'other bits than'} the shipped weights"
    )
    return model, met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    known = [*BY_HAND, *RECIPES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--seed", type=int, help="instead of the recipe's own")
    parser.add_argument("--write", action="store_true", help="replace the shipped checkpoint")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(known)}")
    good = True
    for name in options.names or known:
        model, fine = make(name, options.seed)
        if options.write:
            model.save(CHECKPOINTS / name, overwrite=True)
        else:
            good &= fine
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
