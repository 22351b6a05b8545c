"""How each trained model of the zoo is made: architecture, data, optimiser, bar."""

from __future__ import annotations

from dataclasses import dataclass, field

from headstream.models.config import DecoderConfig
from headstream.models.errors import ConfigError, nearest
from headstream.models.zoo.sequences import BOS

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some steps on one kind of repeats; spans are (smallest, largest) tokens, both included.

    Attributes:
        steps: optimiser steps.
        block, gap, lead: of `sequences.repeated_blocks`.
    """

    steps: int
    block: Span
    gap: Span = (0, 0)
    lead: Span = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data and its training. It stops after the last phase, whatever was reached.

    The loss is the mean over the tokens that a repeat predicts. On the others the model guesses,
    and confidently: asked to be uniform there as well, it learns a huge write from BOS that drowns
    all logits through the final norm, and then no head alone can restore an answer.

    Attributes:
        name, purpose: of the model.
        config: architecture. The content tokens are 1 .. d_vocab - 1, 0 is BOS.
        phases: run one after the other, on sequences of `config.n_ctx` tokens.
        init_scale: factors on the decoder's initial weights, by name.
        batch, learning_rate, betas, weight_decay, clip: of AdamW. The rate rises over the first
            50 steps and falls linearly to 0 over the last quarter.
        turn_positions: number each row's positions from a random start, wrapping round at n_ctx.
            Otherwise few sequences first show a block late, and the step from a late position to
            the one before it stays unlearned.
        first_head_alone: share of rows in which all but head 0 of layer 0 are silent, as in
            nested dropout (Rippel et al. 2014). Adam grows all heads alike, so that without it
            four heads of layer 0 share the previous token, none above 0.4.
        seed: of weights and data.
        bar: largest mean loss on repeats, in nats, that a trained model may have.
        task_length: tokens of the task's prompts.
    """

    name: str
    purpose: str
    config: DecoderConfig
    phases: tuple[Phase, ...]
    init_scale: dict[str, float] = field(default_factory=dict)
    batch: int = 64
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    turn_positions: bool = False
    first_head_alone: float = 0.0
    seed: int = 0
    bar: float
    task_length: int = 32

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def n_content(self) -> int:
        return self.config.d_vocab - 1


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="induction-2l",
            purpose="a trained two-layer model that continues repeats at any distance",
            config=DecoderConfig(
                n_layers=2,
                n_heads=4,
                d_model=64,
                d_head=16,
                d_vocab=49,
                n_ctx=64,
                positions="shortformer",
                norm="layernorm",
                bos_token_id=BOS,
                n_train=64,
            ),
            # The first phase makes the circuit appear, the second takes away what position tells.
            phases=(
                Phase(steps=400, block=(8, 28)),
                Phase(steps=1100, block=(2, 24), gap=(0, 20), lead=(0, 20)),
            ),
            # Tokens and positions start at unit size, as the norm makes everything else.
            init_scale={"embed.W_E": 10.0, "pos_embed.W_pos": 10.0},
            turn_positions=True,
            first_head_alone=0.5,
            bar=0.02,
        ),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: if there is none; all names and the nearest are given.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"no recipe {name!r}; there are {', '.join(RECIPES)}",
            hint=nearest(name, RECIPES) or "the zoo's other models are written by hand",
        )
    return RECIPES[name]
