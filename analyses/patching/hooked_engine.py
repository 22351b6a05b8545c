"""The definition of a sweep: one hooked forward pass a cell, over the whole batch of pairs.

    1. record     both runs, with the site's activations at every layer
    2. donor      the values that a cell receives: another row's, zero, or a mean
    3. sweep      for each cell: run, replace that cell by the donor's values, read the logits at
                  the answer position

Any faster engine must give these numbers. Nothing is edited in place, and only the logits at the
answer position are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.sites import Grid, Place
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.hooks import capture, edited

# Pairs run in chunks of at most this many tokens and this many logits (0.5 GB in float32). The
# chunks depend on task and model alone, so the numbers do too.
CHUNK_TOKENS = 2**16
LOGIT_ENTRIES = 2**27


@dataclass(frozen=True)
class Run:
    """One unpatched run.

    Attributes:
        logits: at the answer position, float64 on the CPU.
        activations: the site at each layer of the grid, `[example, pos, (head,) width]`.
    """

    logits: Float[Tensor, "example d_vocab"]
    activations: tuple[Tensor, ...]


# (index of the layer in the grid, head or None, place) -> values [example, slot, width], and in
# which rows and slots there are any [example, slot].
Donor = Callable[[int, int | None, Place], tuple[Tensor, Tensor]]


def record(model: Decoder, task: Task, tokens: Tensor, grid: Grid, backend: str | None) -> Run:
    """Run `tokens` unpatched and keep the site's activations."""
    logits, activations = [], []
    for rows in _chunks(model, task):
        output, kept = capture(
            model,
            tokens[rows].to(model.device),
            grid.hooks,
            attention_mask=_mask(task, rows),
            backend=backend,
        )
        logits.append(_at_answer(output, task, rows))
        activations.append([kept[name] for name in grid.hooks])
    return Run(torch.cat(logits), tuple(torch.cat(parts) for parts in zip(*activations)))


def sweep(
    model: Decoder, task: Task, tokens: Tensor, grid: Grid, donor: Donor, backend: str | None
) -> Iterator[tuple[Float[Tensor, "example d_vocab"], Bool[Tensor, " example"]]]:
    """Patch `tokens` cell by cell, in the order layer, head, place.

    Yields:
        For each cell, the logits at the answer position, and which rows were patched at all.
    """
    for layer, hook in enumerate(grid.hooks):
        for head in (None,) if grid.heads is None else grid.heads:
            for place in grid.places:
                values, present = donor(layer, head, place)
                present = present & (place.columns >= 0)
                logits = []
                for rows in _chunks(model, task):
                    write = _writer(values[rows], present[rows], place.columns[rows], head)
                    with edited(model, {hook: write}):
                        output = model(
                            tokens[rows].to(model.device),
                            attention_mask=_mask(task, rows),
                            backend=backend,
                        )
                    logits.append(_at_answer(output, task, rows))
                yield torch.cat(logits), present.any(1)


def rows_of_run(run: Run, rows: Int[Tensor, " example"]) -> Donor:
    """Row i receives what row `rows[i]` of `run` has at the same place; -1 gives nothing."""

    def give(layer: int, head: int | None, place: Place) -> tuple[Tensor, Tensor]:
        columns = place.columns[rows.clamp(min=0)]
        values = _read(run, layer, head, rows.clamp(min=0), columns)
        return values, (columns >= 0) & (rows >= 0)[:, None]

    return give


def zero_of_run(run: Run) -> Donor:
    """Every row receives zeros."""

    def give(layer: int, head: int | None, place: Place) -> tuple[Tensor, Tensor]:
        values = _read(run, layer, head, torch.arange(len(place.columns)), place.columns)
        return torch.zeros_like(values), place.columns >= 0

    return give


def mean_of_run(run: Run) -> Donor:
    """Every row receives the mean over the pairs of `run`, position by position (or by role)."""

    def give(layer: int, head: int | None, place: Place) -> tuple[Tensor, Tensor]:
        values = _read(run, layer, head, torch.arange(len(place.columns)), place.columns)
        present = place.columns >= 0
        weights = (present / present.sum(0).clamp(min=1)).to(values)
        mean = (weights[:, :, None] * values).sum(0)
        return mean.expand_as(values), present

    return give


def _read(
    run: Run,
    layer: int,
    head: int | None,
    rows: Int[Tensor, " example"],
    columns: Int[Tensor, "example slot"],
) -> Float[Tensor, "example slot width"]:
    activation = run.activations[layer]
    if head is not None:
        activation = activation[:, :, head]
    return activation[rows[:, None], columns.clamp(min=0)]


def _writer(
    values: Float[Tensor, "row slot width"],
    present: Bool[Tensor, "row slot"],
    columns: Int[Tensor, "row slot"],
    head: int | None,
) -> Callable[[Tensor], Tensor]:
    """The edit that puts `values` into their columns, where present."""
    row, slot = present.nonzero(as_tuple=True)
    at = (row, columns[row, slot]) if head is None else (row, columns[row, slot], head)
    return partial(_written, at=at, values=values[row, slot])


def _written(activation: Tensor, *, at: tuple[Any, ...], values: Tensor) -> Tensor:
    patched = activation.clone()
    patched[at] = values
    return patched


def _chunks(model: Decoder, task: Task) -> list[slice]:
    n, length = task.clean.shape
    step = max(1, min(CHUNK_TOKENS, LOGIT_ENTRIES // model.config.d_vocab) // length)
    return [slice(start, start + step) for start in range(0, n, step)]


def _mask(task: Task, rows: slice) -> Tensor | None:
    return None if task.attention_mask is None else task.attention_mask[rows]


def _at_answer(output: Tensor, task: Task, rows: slice) -> Float[Tensor, "row d_vocab"]:
    columns = task.answer_columns[rows]
    kept = output[torch.arange(len(columns)), columns]
    return kept.detach().to("cpu", torch.float64)
