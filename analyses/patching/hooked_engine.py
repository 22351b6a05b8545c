"""The definition of a sweep: one hooked forward pass a cell, over the whole batch of pairs.

    1. record     both runs, with the site's activations at every layer
    2. donor      the values that an edit receives: another row's, zero, or a mean
    3. sweep      for each cell: run, replace what its edits name by the donor's values, read the
                  logits at the answer position

Any faster engine must give these numbers. Nothing is edited in place, and only the logits at the
answer position are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.site_sets import SetGrid
from headstream.analyses.patching.sites import Cell, Edit, Grid
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
        activations: by hook, `[example, pos, (head,) width]`; the pattern `[example, head, query,
            key]`.
        columns: the column of each real position of a row; -1 past its end.
    """

    logits: Float[Tensor, "example d_vocab"]
    activations: Mapping[str, Tensor]
    columns: Int[Tensor, "example longest"]


# An edit -> values [example, slot, width], and in which rows and slots there are any
# [example, slot]. The width of the pattern counts real key positions, or is the one of an edge.
Donor = Callable[[Edit], tuple[Tensor, Tensor]]


def record(
    model: Decoder, task: Task, tokens: Tensor, grid: Grid | SetGrid, backend: str | None
) -> Run:
    """Run `tokens` unpatched and keep the activations at the grid's hooks."""
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
        activations.append(kept)
    return Run(
        torch.cat(logits),
        {name: torch.cat([kept[name] for kept in activations]) for name in activations[0]},
        task.columns,
    )


def sweep(
    model: Decoder,
    task: Task,
    tokens: Tensor,
    cells: Iterable[Cell],
    donor: Donor,
    backend: str | None,
) -> Iterator[tuple[Float[Tensor, "example d_vocab"], Bool[Tensor, " example"]]]:
    """Patch `tokens` cell by cell.

    Yields:
        For each cell, the logits at the answer position, and which rows were patched at all. A row
        that lacks one of a cell's places is patched at the others.
    """
    for cell in cells:
        gifts = [(edit, *donor(edit)) for edit in cell]
        patched = torch.stack([_target(edit, present).any(1) for edit, _, present in gifts])
        logits = []
        for rows in _chunks(model, task):
            edits: dict[str, list[Callable[[Tensor], Tensor]]] = {}
            for edit, values, present in gifts:
                write = _writer(edit, values, present, task.columns, rows)
                edits.setdefault(edit.hook, []).append(write)
            with edited(model, {hook: partial(_in_turn, writes) for hook, writes in edits.items()}):
                output = model(
                    tokens[rows].to(model.device),
                    attention_mask=_mask(task, rows),
                    backend=backend,
                )
            logits.append(_at_answer(output, task, rows))
        yield torch.cat(logits), patched.any(0)


def rows_of_run(run: Run, rows: Int[Tensor, " example"]) -> Donor:
    """Row i receives what row `rows[i]` of `run` has at the same place; -1 gives nothing."""

    def give(edit: Edit) -> tuple[Tensor, Tensor]:
        values = _read(run, edit, rows.clamp(min=0))
        columns = edit.place.columns[rows.clamp(min=0)]
        return values, (columns >= 0) & (rows >= 0)[:, None]

    return give


def zero_of_run(run: Run) -> Donor:
    """Every row receives zeros."""

    def give(edit: Edit) -> tuple[Tensor, Tensor]:
        values = _read(run, edit, torch.arange(len(run.columns)))
        return torch.zeros_like(values), edit.place.columns >= 0

    return give


def mean_of_run(run: Run) -> Donor:
    """Every row receives the mean over the pairs of `run`, position by position (or by role).

    The pattern's keys are matched by position too; a key that a row lacks counts as unread there.
    """

    def give(edit: Edit) -> tuple[Tensor, Tensor]:
        values = _read(run, edit, torch.arange(len(run.columns)))
        present = edit.place.columns >= 0
        weights = present.to(values) / present.sum(0).clamp(min=1)
        mean = (weights[:, :, None] * values).sum(0)
        return mean.expand_as(values), present

    return give


def _read(
    run: Run, edit: Edit, rows: Int[Tensor, " example"]
) -> Float[Tensor, "example slot width"]:
    """What `rows` of the run have at the edit's place; anything where they lack it."""
    activation, columns = run.activations[edit.hook], edit.place.columns[rows].clamp(min=0)
    if edit.site.name != "pattern":
        kept = activation[rows[:, None], columns]
        if edit.head is None:
            return kept
        return kept[..., edit.head, None] if kept.ndim == 3 else kept[:, :, edit.head]
    keys = _keys(edit, run.columns)[rows]
    read = activation[rows[:, None, None], edit.head, columns[:, :, None], keys[:, None].clamp(0)]
    return read.masked_fill((keys < 0)[:, None], 0.0)


def _keys(edit: Edit, columns: Int[Tensor, "example longest"]) -> Int[Tensor, "example key"]:
    """The columns of the keys that an edit of the pattern reaches; -1 where a row has none."""
    return columns if edit.place.keys is None else edit.place.keys


def _target(edit: Edit, present: Bool[Tensor, "row slot"]) -> Bool[Tensor, "row slot"]:
    return present & (edit.place.columns >= 0)


def _writer(
    edit: Edit,
    values: Float[Tensor, "example slot width"],
    present: Bool[Tensor, "example slot"],
    columns: Int[Tensor, "example longest"],
    rows: slice,
) -> Callable[[Tensor], Tensor]:
    """The edit that puts `values` of these rows into their columns, where present."""
    values, present = values[rows], _target(edit, present)[rows]
    at = edit.place.columns[rows]
    if edit.site.name == "pattern":
        keys = _keys(edit, columns)[rows]
        # Causal, whatever the row that gives could read.
        reach = present[:, :, None] & (keys >= 0)[:, None] & (keys[:, None] <= at[:, :, None])
        row, slot, key = reach.nonzero(as_tuple=True)
        where: tuple[Any, ...] = (row, edit.head, at[row, slot], keys[row, key])
        return partial(_written, at=where, values=values[row, slot, key])
    row, slot = present.nonzero(as_tuple=True)
    where = (row, at[row, slot]) if edit.head is None else (row, at[row, slot], edit.head)
    given = values[row, slot]
    return partial(_written, at=where, values=given[:, 0] if edit.site.one_wide else given)


def _written(activation: Tensor, *, at: tuple[Any, ...], values: Tensor) -> Tensor:
    patched = activation.clone()
    patched[at] = values
    return patched


def _in_turn(writes: Iterable[Callable[[Tensor], Tensor]], activation: Tensor) -> Tensor:
    for write in writes:
        activation = write(activation)
    return activation


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
