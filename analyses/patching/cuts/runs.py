"""Runs of a model with sets of heads cut: what each set's absence does to every prompt.

    1. record    the uncut run: every head's z, the stream before every layer, how heads attend
    2. cut       from the first layer with a cut head on: the z of the cut heads becomes 0, the mean
                 over prompts, another prompt's, or the pair's other run's
    3. score     the task's metric at the answer, or the mean next-token loss of the row

A head's bias b_O is nobody's, so a head whose z is 0 writes 0. Everything is in real positions, as
in the suffix engine. With `pattern_preserving` every head attends as in the uncut run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstream.analyses.patching import inference
from headstream.analyses.patching.cuts.head_sets import Head
from headstream.analyses.patching.metrics import Metric, evaluate
from headstream.analyses.patching.suffix.state import unembedded
from headstream.analyses.patching.task import Task
from headstream.circuits.attention_run import record_attention
from headstream.circuits.interventions import freeze_attention
from headstream.models.decoder import Decoder
from headstream.models.hooks import capture, edited

CutValues = Literal["zero", "mean", "resample"]
How = Literal["full", "pattern_preserving"]

# Rows run in chunks of at most this many tokens, and as many logits where all are read.
CHUNK_TOKENS = 2**16
LOGIT_ENTRIES = 2**25


@dataclass(frozen=True)
class Prompts:
    """Rows of real tokens, each from its first one on.

    Attributes:
        rows: zeros behind the end of a row.
        lengths: real tokens of each.
    """

    rows: Int[Tensor, "example pos"]
    lengths: Int[Tensor, " example"]


@runtime_checkable
class Score(Protocol):
    """What is read of a run."""

    def read(self, model: Decoder, resid: Tensor, rows: slice) -> Tensor:
        """From the last stream of some rows: what `finish` needs of them."""
        ...

    def finish(self, parts: Sequence[Tensor]) -> Float[np.ndarray, " example"]:
        """One number a row."""
        ...

    @property
    def logits_per_token(self) -> bool:
        """Whether logits are formed at every position."""
        ...


class AnswerScore:
    """The task's metric, at the answer position. The clean run must be scored first."""

    logits_per_token = False

    def __init__(self, task: Task, metric: Metric) -> None:
        self._task, self._metric = task, metric
        self._clean: Tensor | None = None

    def read(self, model: Decoder, resid: Tensor, rows: slice) -> Tensor:
        at = self._task.answer_pos[rows].to(resid.device)
        found = unembedded(model, resid[torch.arange(len(at), device=at.device), at])
        return found.to("cpu", torch.float64)

    def finish(self, parts: Sequence[Tensor]) -> Float[np.ndarray, " example"]:
        logits = torch.cat(list(parts))
        if self._clean is None:
            self._clean = logits
        return evaluate(self._metric, logits, self._task, self._clean)


class LossScore:
    """The mean next-token loss of a row, over targets at or after a position."""

    logits_per_token = True

    def __init__(self, prompts: Prompts, from_pos: int) -> None:
        self._prompts, self._from = prompts, from_pos

    def read(self, model: Decoder, resid: Tensor, rows: slice) -> Tensor:
        targets = self._prompts.rows[rows, 1:].to(resid.device)
        logits = unembedded(model, resid[:, :-1].flatten(0, 1))
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp = logits.to(wide).log_softmax(-1).gather(1, targets.reshape(-1, 1))
        at = torch.arange(1, resid.shape[1])
        counted = (at < self._prompts.lengths[rows, None]) & (at >= self._from)
        loss = -logp.view_as(targets).to("cpu", torch.float64)
        return (loss * counted).sum(1) / counted.sum(1)

    def finish(self, parts: Sequence[Tensor]) -> Float[np.ndarray, " example"]:
        found: np.ndarray = torch.cat(list(parts)).numpy()
        return found


class CutRuns:
    """One set of prompts, run with any set of heads cut.

    Args:
        model: the decoder.
        values: `zero`; `mean` over the prompts that have the position; `resample` from another
            prompt of equal length; `pair` from `other`.
        how: `full`, or `pattern_preserving`.
        other: z of another run of prompts aligned with these, by layer, for `pair`.
    Attributes:
        base: score of the uncut run.
        z: [example, pos, head, d_head] of the uncut run, by layer.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Prompts,
        score: Score,
        *,
        values: str,
        how: str = "full",
        seed: int = 0,
        backend: str | None = None,
        other: Sequence[Tensor] | None = None,
    ) -> None:
        self._model, self._prompts, self._score = model, prompts, score
        self._values, self._backend, self._other = values, backend, other
        layers = range(model.config.n_layers)
        self._last = f"blocks.{layers[-1]}.hook_resid_post"
        names = [f"blocks.{layer}.attn.hook_z" for layer in layers]
        streams = [f"blocks.{layer}.hook_resid_pre" for layer in layers]
        n, length = prompts.rows.shape
        step = CHUNK_TOKENS // length
        if score.logits_per_token:
            step = min(step, LOGIT_ENTRIES // (length * model.config.d_vocab))
        step = max(1, step)
        self._chunks = [slice(start, start + step) for start in range(0, n, step)]
        kept, self._attention = [], []
        with torch.no_grad():
            for rows in self._chunks:
                tokens = prompts.rows[rows].to(model.device)
                wanted = [*names, *streams, self._last]
                kept.append(capture(model, tokens, wanted, backend=backend, return_type=None)[1])
                if how == "pattern_preserving":
                    self._attention.append(record_attention(model, tokens))
            self.z = [torch.cat([found[name] for found in kept]) for name in names]
            self._resid = [torch.cat([found[name] for found in kept]) for name in streams]
            self.base = score.finish(
                [
                    score.read(model, found[self._last], rows)
                    for found, rows in zip(kept, self._chunks)
                ]
            )
        self._partners = torch.from_numpy(inference.partners(prompts.lengths.numpy(), seed=seed))

    def effect(self, heads: Sequence[Head]) -> Float[np.ndarray, " example"]:
        """Score with the heads cut, minus the uncut one; NaN for a prompt without a partner."""
        moved: np.ndarray = self._scored(heads, self._given) - self.base
        if self._values == "resample" and heads:
            moved[(self._partners < 0).numpy()] = np.nan
        return moved

    def self_cut(self, heads: Sequence[Head]) -> float:
        """Largest |effect| when the heads receive the values that they have."""
        moved = self._scored(heads, lambda layer: self.z[layer]) - self.base
        return float(np.abs(moved).max())

    @torch.no_grad()
    def _scored(
        self, heads: Sequence[Head], given: Callable[[int], Tensor]
    ) -> Float[np.ndarray, " example"]:
        if not heads:
            return self.base.copy()
        by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            by_layer.setdefault(layer, []).append(head)
        first = min(by_layer)
        values = {layer: given(layer) for layer in by_layer}
        parts = []
        for number, rows in enumerate(self._chunks):
            edits = {
                f"blocks.{layer}.attn.hook_z": partial(
                    _replaced, heads=cut, values=values[layer][rows]
                )
                for layer, cut in by_layer.items()
            }
            frozen = (
                freeze_attention(
                    self._model,
                    self._attention[number],
                    layers=range(first, self._model.config.n_layers),
                )
                if self._attention
                else nullcontext()
            )
            with frozen, edited(self._model, edits):
                _, kept = capture(
                    self._model,
                    self._resid[first][rows],
                    [self._last],
                    start_at_layer=first,
                    backend=self._backend,
                    return_type=None,
                )
            parts.append(self._score.read(self._model, kept[self._last], rows))
        return self._score.finish(parts)

    def _given(self, layer: int) -> Float[Tensor, "example pos head d_head"]:
        z = self.z[layer]
        if self._values == "zero":
            return torch.zeros_like(z)
        if self._values == "pair":
            assert self._other is not None
            return self._other[layer]
        if self._values == "resample":
            return z[self._partners.clamp(min=0).to(z.device)]
        there = torch.arange(z.shape[1]) < self._prompts.lengths[:, None]
        weights = (there / there.sum(0).clamp(min=1)).to(z)
        return torch.einsum("ep,ephd->phd", weights, z).expand_as(z)


def _replaced(
    z: Float[Tensor, "row pos head d_head"], *, heads: list[int], values: Tensor
) -> Float[Tensor, "row pos head d_head"]:
    cut = z.clone()
    cut[:, :, heads] = values[:, :, heads]
    return cut
