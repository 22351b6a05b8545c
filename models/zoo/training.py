"""Run a recipe: the trained model and its card.

Training runs on one thread: products this small gain nothing from more, and the same seed then
gives the same weights however many cores there are.
"""

from __future__ import annotations

import dataclasses
import math
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
from headstream.models.zoo.facts import find_circuit, losses
from headstream.models.zoo.recipes import Phase, Recipe, find_recipe
from headstream.models.zoo.sequences import RepeatedBlocks, repeated_blocks

_WARMUP = 50
_EVALUATED = 512
_CIRCUIT_ON = 128
# Repeat distances that the card reports, with the block length used at each.
_DISTANCES = ((4, 4), (6, 6), (10, 10), (16, 12), (24, 12), (32, 12), (40, 12))


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
        whether or not it meets the recipe's bar.
    Raises:
        ConfigError: for an unknown recipe, or steps < 1.
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
        model.vocab = ["<bos>", *(f"t{token:02}" for token in range(1, recipe.config.d_vocab))]
        model.card = _card(model, recipe, total)
    return model


def draw(recipe: Recipe, phase: Phase, batch: int, generator: Generator) -> RepeatedBlocks:
    """`batch` sequences of the kind that `phase` trains on."""
    return repeated_blocks(
        batch,
        recipe.config.n_ctx,
        recipe.n_content,
        generator=generator,
        block=phase.block,
        gap=phase.gap,
        lead=phase.lead,
    )


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
    bar = tqdm(schedule[:total], desc=recipe.name, disable=not progress)
    for step, phase in enumerate(bar):
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * _rate(step, recipe.steps)
        repeats = _training_loss(model, recipe, phase, data)
        optimiser.zero_grad()
        repeats.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimiser.step()
        if step % 50 == 0:
            bar.set_postfix(loss_on_repeats=f"{repeats.item():.3f}")
    model.zero_grad()
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
    made = draw(recipe, phase, recipe.batch, data)
    positions = _turned(recipe, made.tokens, data) if recipe.turn_positions else None
    if not recipe.first_head_alone:
        return losses(model, made, position_ids=positions)[0]
    alone = torch.rand(recipe.batch, generator=data) < recipe.first_head_alone
    others = torch.arange(recipe.config.n_heads) > 0
    kept = (~(alone[:, None] & others)).to(model.dtype)[:, None, :, None]
    with edited(model, {"blocks.0.attn.hook_z": lambda z: z * kept}):
        return losses(model, made, position_ids=positions)[0]


def _turned(
    recipe: Recipe, tokens: Int[Tensor, "batch pos"], data: Generator
) -> Int[Tensor, "batch pos"]:
    batch, length = tokens.shape
    start = torch.randint(recipe.config.n_ctx, (batch, 1), generator=data)
    return (start + torch.arange(length)) % recipe.config.n_ctx


def _card(model: Decoder, recipe: Recipe, steps: int) -> dict[str, Any]:
    held_out = draw(recipe, recipe.phases[-1], _EVALUATED, Generator().manual_seed(recipe.seed + 2))
    with torch.no_grad():
        repeats, fresh = losses(model, held_out)
    few = RepeatedBlocks(*(part[:_CIRCUIT_ON] for part in held_out))
    names, measured = find_circuit(model, few)
    return {
        "name": recipe.name,
        "purpose": recipe.purpose,
        "task": {
            "kind": "induction",
            "length": recipe.task_length,
            "n_content": recipe.n_content,
        },
        "loss": {
            "on_repeats": round(float(repeats), 5),
            "best_possible_on_repeats": 0.0,
            "bar_on_repeats": recipe.bar,
            "on_fresh_tokens": round(float(fresh), 3),
            "uniform_on_fresh_tokens": round(math.log(recipe.n_content), 3),
            "trained_on": "tokens that a repeat predicts; on fresh tokens the model guesses",
            "unit": "nats",
            "sequences": _EVALUATED,
            "by_distance": _by_distance(model, recipe),
        },
        "circuit": names,
        "measured": {"sequences": _CIRCUIT_ON, **measured},
        "recipe": {
            "steps": steps,
            "of_steps": recipe.steps,
            "phases": [
                {
                    "steps": phase.steps,
                    "block": list(phase.block),
                    "gap": list(phase.gap),
                    "lead": list(phase.lead),
                }
                for phase in recipe.phases
            ],
            "optimiser": "AdamW",
            "learning_rate": recipe.learning_rate,
            "betas": list(recipe.betas),
            "weight_decay": recipe.weight_decay,
            "clip": recipe.clip,
            "batch": recipe.batch,
            "turn_positions": recipe.turn_positions,
            "first_head_alone": recipe.first_head_alone,
            "init_scale": recipe.init_scale,
            "seed": recipe.seed,
        },
        "vocabulary": f"<bos> and {recipe.n_content} tokens without meaning",
        "norm": recipe.config.norm,
        "positions": recipe.config.positions,
    }


def _by_distance(model: Decoder, recipe: Recipe) -> dict[str, float]:
    """Loss on one repeat at each distance: what a model that copies a fixed distance cannot do."""
    found = {}
    for distance, block in _DISTANCES:
        if distance + block + 1 > recipe.config.n_ctx:
            continue
        made = repeated_blocks(
            _EVALUATED // 4,
            distance + block + 1,
            recipe.n_content,
            generator=Generator().manual_seed(recipe.seed + 2),
            block=(block, block),
            gap=(distance - block, distance - block),
        )
        with torch.no_grad():
            found[str(distance)] = round(float(losses(model, made)[0]), 4)
    return found
