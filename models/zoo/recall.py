"""Key-value recall as training data, and its vocabulary; the sequences are `recall_sequences`'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Generator

from headstream.models.decoder import Decoder
from headstream.models.zoo.recall_facts import recall_facts
from headstream.models.zoo.recall_sequences import N_KEYS, N_VALUES, Span, recall_sequences
from headstream.models.zoo.recipe import Drawn


@dataclass(frozen=True)
class Recall:
    """Recall as training data; what counts is answers.

    Attributes:
        pairs: smallest and largest number of pairs, both included.
        every_answer: count answers that were given before as well. They are found by the same
            circuit and are many, which helps it to appear; but they can be copied from the first
            answer, so that the data segment may be forgotten after it.
        task_pairs: pairs of the task's prompts.
    """

    pairs: Span
    every_answer: bool = False
    task_pairs: int = 12

    def draw(self, batch: int, length: int, generator: Generator) -> Drawn:
        """Sequences; answers count."""
        made = recall_sequences(batch, length, generator=generator, pairs=self.pairs)
        return Drawn(made.tokens, made.needle >= 0 if self.every_answer else made.counted)

    def described(self) -> dict[str, Any]:
        """The number of pairs, as a card lists it."""
        return {"pairs": list(self.pairs), "every_answer": self.every_answer}

    def words(self) -> list[str]:
        """Markers, keys `k00 ..`, values `v00 ..`."""
        keys = [f"k{index:02}" for index in range(N_KEYS)]
        return ["<bos>", "<data>", "<inst>", *keys, *(f"v{index:02}" for index in range(N_VALUES))]

    def facts(self, model: Decoder, seed: int) -> dict[str, Any]:
        """Losses and accuracies by depth and by number of pairs; heads by what they attend to."""
        return recall_facts(model, self.pairs, self.task_pairs, seed)
