"""Run a recipe: the trained model and its card.

Training runs on one thread: products this small gain nothing from more, and the same seed then
gives the same weights however many cores there are.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from tqdm import tqdm

from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError
from headstream.models.hooks import edited
from headstream.models.zoo.recipe import Drawn, Phase, Recipe
from headstream.models.zoo.recipes import find_recipe

_WARMUP = 50
# Seconds between looks of the progress bar: a log should not fill with it.
_LOOK, _LOOK_IN_A_LOG = 0.5, 10.0


def train(
    name: str, *, seed: int | None = None, steps: int | None = None, progress: bool = True
) -> Decoder:
    """Train a model of the zoo by its recipe.

    Args:
        name: of the recipe.
        seed: of weights and data; None is the recipe's own. The global random state is not used.
        steps: stop after so many (for trying out; the card says so).
        progress: a bar on stderr.
    Returns:
        The model in eval mode, with its vocabulary and card. The card holds what was reached,
        whether or not it meets the recipe's bars; if it does not, its purpose says so first.
    Raises:
        ConfigError: for an unknown recipe, steps < 1, or a seed from which the weights do not stay
            finite.
    """
    recipe = find_recipe(name)
    if seed is not None:
        recipe = dataclasses.replace(recipe, seed=seed)
    if steps is not None and (isinstance(steps, bool) or steps < 1):
        raise ConfigError(f"steps must be a whole number >= 1, got {steps!r}")
    total = min(recipe.steps, steps or recipe.steps)
    with _one_thread():
        model = _run(recipe, total, progress)
        model.name = recipe.name
        model.vocab = recipe.data.words()
        with torch.no_grad():
            model.card = card_of(model, recipe, total)
    return model


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(recipe: Recipe, total: int, progress: bool) -> Decoder:
    model = _start(recipe).train()
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
    )
    data = Generator().manual_seed(recipe.seed + 1)
    schedule = [phase for phase in recipe.phases for _ in range(phase.steps)]
    bar = tqdm(
        schedule[:total],
        desc=f"training {recipe.name}",
        unit="step",
        mininterval=_LOOK if sys.stderr.isatty() else _LOOK_IN_A_LOG,
        disable=not progress,
    )
    for step, phase in enumerate(bar):
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * _rate(step, recipe.steps)
        loss = _training_loss(model, recipe, phase, data)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimiser.step()
        if step % 50 == 0:
            # Shown at the bar's next look: its count of steps is not up to date before.
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.zero_grad()
    if not all(bool(torch.isfinite(weights).all()) for weights in model.parameters()):
        raise ConfigError(
            f"training {recipe.name} from seed {recipe.seed} ran away: weights are not finite",
            hint="train from another seed",
        )
    return model.eval()


def _start(recipe: Recipe) -> Decoder:
    model = Decoder(recipe.config, seed=recipe.seed)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, factor in recipe.init_scale.items():
            parameters[name].mul_(factor)
    return model


def _rate(step: int, steps: int) -> float:
    """Up over the first steps, level, down to 0 over the last quarter."""
    return min(1.0, (step + 1) / _WARMUP, (steps - step) / (0.25 * steps))


def _training_loss(
    model: Decoder, recipe: Recipe, phase: Phase, data: Generator
) -> Float[Tensor, ""]:
    made = phase.data.draw(recipe.batch, recipe.length, data)
    positions = _turned(recipe, made.tokens, data) if recipe.turn_positions else None
    if not recipe.first_head_alone:
        return mean_loss(model, made, position_ids=positions)
    alone = torch.rand(recipe.batch, generator=data) < recipe.first_head_alone
    others = torch.arange(recipe.config.n_heads) > 0
    kept = (~(alone[:, None] & others)).to(model.dtype)[:, None, :, None]
    with edited(model, {"blocks.0.attn.hook_z": lambda z: z * kept}):
        return mean_loss(model, made, position_ids=positions)


def mean_loss(model: Decoder, made: Drawn, **forward: Any) -> Float[Tensor, ""]:
    """Mean loss in nats over the tokens that count."""
    per_token = model(made.tokens, return_type="loss_per_token", **forward)
    return per_token[made.counted[:, 1:]].mean()


def _turned(
    recipe: Recipe, tokens: Int[Tensor, "batch pos"], data: Generator
) -> Int[Tensor, "batch pos"]:
    batch, length = tokens.shape
    start = torch.randint(recipe.config.n_ctx, (batch, 1), generator=data)
    return (start + torch.arange(length)) % recipe.config.n_ctx


def card_of(model: Decoder, recipe: Recipe, steps: int) -> dict[str, Any]:
    """What is known of a model that this recipe made in `steps` steps, measured on new data."""
    facts = recipe.data.facts(model, recipe.seed + 2)
    card: dict[str, Any] = {"name": recipe.name, "purpose": recipe.purpose, **facts}
    card["bars"] = {bar.of: bar.held_to(card) for bar in recipe.bars}
    missed = [of for of, bar in card["bars"].items() if not bar["met"]]
    if missed:
        # The purpose heads lists and reports: nobody should take this model for what it was to be.
        card["purpose"] = (
            f"misses {len(missed)} of its recipe's {len(recipe.bars)} bars ({', '.join(missed)}); "
            f"meant as {recipe.purpose}"
        )
    card["recipe"] = {
        "steps": steps,
        "of_steps": recipe.steps,
        "phases": [{"steps": phase.steps, **phase.data.described()} for phase in recipe.phases],
        "optimiser": "AdamW",
        "learning_rate": recipe.learning_rate,
        "betas": list(recipe.betas),
        "weight_decay": recipe.weight_decay,
        "clip": recipe.clip,
        "batch": recipe.batch,
        "length": recipe.length,
        "turn_positions": recipe.turn_positions,
        "first_head_alone": recipe.first_head_alone,
        "init_scale": recipe.init_scale,
        "seed": recipe.seed,
    }
    return card | {"norm": recipe.config.norm, "positions": recipe.config.positions}
