"""Training data that repeats itself, and what a card says of a model trained on it.

The loss is the mean over the tokens that a repeat predicts. On the others the model guesses, and
confidently: asked to be uniform there as well, it learns a huge write from BOS that drowns all
logits through the final norm, and then no head alone can restore an answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator

from headstream.models.decoder import Decoder
from headstream.models.names import head_name
from headstream.models.zoo.facts import find_circuit, losses, usual_scores
from headstream.models.zoo.recipe import Drawn
from headstream.models.zoo.sequences import RepeatedBlocks, repeated_blocks

Span = tuple[int, int]

_EVALUATED = 512
_CIRCUIT_ON = 128
# Repeat distances that the card reports, with the block length used at each.
_DISTANCES = ((4, 4), (6, 6), (10, 10), (16, 12), (24, 12), (32, 12), (40, 12))
# Block lengths of the usual test, `<bos> BLOCK BLOCK`.
_USUAL = (12, 20, 31, 32)


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Blocks that recur; spans are (smallest, largest) tokens, both included.

    Attributes:
        block, gap, lead: of `sequences.repeated_blocks`.
        n_content: content tokens are 1 .. n_content, 0 is BOS.
        task_length: tokens of the task's prompts.
    """

    block: Span
    gap: Span = (0, 0)
    lead: Span = (0, 0)
    n_content: int = 48
    task_length: int = 32

    @property
    def fixed_distance(self) -> int | None:
        """Tokens between a token and its copy, if that is always the same."""
        least, most = (block + gap for block, gap in zip(self.block, self.gap))
        return least if least == most and self.gap[0] == self.gap[1] else None

    def blocks(self, batch: int, length: int, generator: Generator) -> RepeatedBlocks:
        """The sequences, with where a repeat predicts a token and from where."""
        return repeated_blocks(
            batch,
            length,
            self.n_content,
            generator=generator,
            block=self.block,
            gap=self.gap,
            lead=self.lead,
        )

    def draw(self, batch: int, length: int, generator: Generator) -> Drawn:
        """Sequences; what counts is what a repeat predicts."""
        made = self.blocks(batch, length, generator)
        return Drawn(made.tokens, made.predictable)

    def described(self) -> dict[str, Any]:
        """The spans, as a card lists them."""
        return {"block": list(self.block), "gap": list(self.gap), "lead": list(self.lead)}

    def words(self) -> list[str]:
        """BOS and tokens without meaning."""
        return ["<bos>", *(f"t{token:02}" for token in range(1, self.n_content + 1))]

    def facts(self, model: Decoder, seed: int) -> dict[str, Any]:
        """Losses on repeats and by distance; heads named by what they attend to."""
        length = model.config.n_train or model.config.n_ctx
        held_out = self.blocks(_EVALUATED, length, Generator().manual_seed(seed))
        with torch.no_grad():
            repeats, fresh = losses(model, held_out)
        few = RepeatedBlocks(*(part[:_CIRCUIT_ON] for part in held_out))
        by_distance = {at: self._once(at, block, length, seed) for at, block in _DISTANCES}
        elsewhere = [
            made
            for at, made in by_distance.items()
            if made is not None and at != self.fixed_distance
        ]
        names, measured = find_circuit(model, few, elsewhere)
        with torch.no_grad():
            lost = {
                str(at): round(float(losses(model, made)[0]), 4)
                for at, made in by_distance.items()
                if made is not None
            }
        loss: dict[str, Any] = {
            "on_repeats": round(float(repeats), 5),
            "best_possible_on_repeats": 0.0,
            "on_fresh_tokens": round(float(fresh), 3),
            "uniform_on_fresh_tokens": round(math.log(self.n_content), 3),
            "trained_on": "tokens that a repeat predicts; on fresh tokens the model guesses",
            "unit": "nats",
            "sequences": _EVALUATED,
            "by_distance": lost,
        }
        if self.fixed_distance is not None:
            others = [value for at, value in lost.items() if int(at) != self.fixed_distance]
            loss["least_at_another_distance"] = min(others)
        return {
            "task": self._task(),
            "loss": loss,
            "circuit": names,
            "measured": {
                "sequences": _CIRCUIT_ON,
                **measured,
                "usual_test": self._usual(model, length, seed),
            },
            "vocabulary": f"<bos> and {self.n_content} tokens without meaning",
        }

    def _task(self) -> dict[str, Any]:
        task = {"kind": "induction", "length": self.task_length, "n_content": self.n_content}
        if self.fixed_distance is None:
            return task
        # Such a model does not mind a broken match; what it copies it does mind.
        distance = [self.fixed_distance, self.fixed_distance]
        return {**task, "distance": distance, "corruption": "answer"}

    def _once(self, distance: int, block: int, length: int, seed: int) -> RepeatedBlocks | None:
        """One repeat at that distance: what a model that copies a fixed distance cannot do."""
        if distance + block + 1 > length:
            return None
        return repeated_blocks(
            _EVALUATED // 4,
            distance + block + 1,
            self.n_content,
            generator=Generator().manual_seed(seed),
            block=(block, block),
            gap=(distance - block, distance - block),
        )

    def _usual(self, model: Decoder, length: int, seed: int) -> dict[str, Any]:
        """The best head's score in the usual test, by the length of the block that recurs."""
        best: dict[str, Any] = {
            "what": "<bos> block block: attention one block back plus one, best head"
        }
        for block in _USUAL:
            if 2 * block + 1 > length:
                continue
            scores = usual_scores(model, block, self.n_content, Generator().manual_seed(seed))
            layer, head = divmod(int(scores.argmax()), model.config.n_heads)
            best[str(block)] = round(float(scores.max()), 3)
            best[f"head at {block}"] = head_name(layer, head)
        return best
