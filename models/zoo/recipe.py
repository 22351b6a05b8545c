"""What a recipe is made of: phases on some kind of data, an optimiser, bars to meet.

The kinds of data are values of their own, each in its file: `Repeats` (`repeats`), `Backcopy`
(`backcopy`), `Recall` (`recall`). A kind says what is drawn, which tokens' loss counts, and what a
card reports about a model that was trained on it. `training` runs any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Int
from torch import Generator, Tensor

from headstream.models.config import DecoderConfig
from headstream.models.errors import ConfigError

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


class Drawn(NamedTuple):
    """Sequences, and the tokens of them whose loss counts (column 0, BOS, never does)."""

    tokens: Int[Tensor, "batch pos"]
    counted: Bool[Tensor, "batch pos"]


@runtime_checkable
class Data(Protocol):
    """One kind of training data."""

    def draw(self, batch: int, length: int, generator: Generator) -> Drawn:
        """`batch` sequences of `length` tokens."""
        ...

    def described(self) -> dict[str, Any]:
        """What a card says of it, as JSON values."""
        ...

    def words(self) -> list[str]:
        """The vocabulary."""
        ...

    def facts(self, model: Decoder, seed: int) -> dict[str, Any]:
        """Measured on held-out sequences: `task`, `loss`, `circuit`, `measured`, `vocabulary`."""
        ...


@dataclass(frozen=True)
class Phase:
    """Some optimiser steps on one kind of data."""

    steps: int
    data: Data


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a figure of the card must be.

    Attributes:
        of: where it stands in the card, by keys joined with dots: `loss.on_repeats`.
        means: what the figure is, for who has not read the card: "loss on answers (nats)".
        below, above: exactly one is given; the figure must lie strictly on that side.
    """

    of: str
    means: str
    below: float | None = None
    above: float | None = None

    def __post_init__(self) -> None:
        if (self.below is None) == (self.above is None):
            raise ConfigError(
                f"a bar is either below or above something, got below={self.below} and "
                f"above={self.above} for {self.of!r}"
            )

    def held_to(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """The card's figure, the bar, and whether it is met.

        Raises:
            ConfigError: if the card has no such figure.
        """
        value: Any = card
        for key in self.of.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise ConfigError(f"the card has no figure {self.of!r} to hold to its bar")
            value = value[key]
        met = value < self.below if self.below is not None else value > (self.above or 0.0)
        side = {"above": self.above} if self.below is None else {"below": self.below}
        return {"value": value, **side, "met": bool(met)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data and its training. It stops after the last phase, whatever was reached.

    Attributes:
        name, purpose: of the model.
        config: architecture. Training sequences have `config.n_train` tokens.
        phases: run one after the other; the card measures on the data of the last.
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
        bars: what the card of a trained model must show.
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
    bars: tuple[Bar, ...]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def length(self) -> int:
        """Tokens of a training sequence."""
        return self.config.n_train or self.config.n_ctx

    @property
    def data(self) -> Data:
        """What the card measures on."""
        return self.phases[-1].data
