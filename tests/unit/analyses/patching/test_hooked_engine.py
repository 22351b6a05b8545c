"""The definition, against patches made by hand through the model's own hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstream.analyses.patching import hooked_engine
from headstream.analyses.patching.hooked_engine import (
    Donor,
    mean_of_run,
    record,
    rows_of_run,
    sweep,
    zero_of_run,
)
from headstream.analyses.patching.sites import Edit, Grid, plan
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.hooks import capture

MakeTask = Callable[..., Task]


def grid_of(model: Decoder, task: Task, site: str, **options: object) -> Grid:
    return plan(model.config, task, site, **options)


def swept(model: Decoder, task: Task, grid: Grid, donor: Donor) -> Tensor:
    """Logits [cell, example, d_vocab] of the corrupted run patched cell by cell."""
    swept = sweep(model, task, task.corrupted, grid.cells(), donor, None)
    return torch.stack([logits for logits, _ in swept])


def patched_by_hand(
    model: Decoder, tokens: Tensor, name: str, index: tuple[object, ...], values: Tensor
) -> Tensor:
    def hook(tensor: Tensor, hook: object) -> Tensor:
        edited = tensor.clone()
        edited[index] = values[index]
        return edited

    logits: Tensor = model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])
    return logits[:, -1].double()


@torch.no_grad()
def test_each_cell_is_one_patched_pass(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 4)
    grid = grid_of(model, task, "z", positions=[2, 6], heads=[1, 3])
    clean = record(model, task, task.clean, grid, None)
    found = swept(model, task, grid, rows_of_run(clean, torch.arange(4)))
    cell = 0
    for layer in range(2):
        name = f"blocks.{layer}.attn.hook_z"
        values = capture(model, task.clean, name)[1][name]
        for head in (1, 3):
            for pos in (2, 6):
                index = (slice(None), pos, head)
                expected = patched_by_hand(model, task.corrupted, name, index, values)
                assert torch.equal(found[cell], expected)
                cell += 1
    assert cell == len(found) == grid.size


@torch.no_grad()
def test_record_is_the_plain_run(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 3, answer_pos=4)
    grid = grid_of(model, task, "resid_post")
    run = record(model, task, task.clean, grid, None)
    logits, cache = model.run_with_cache(task.clean)
    assert torch.equal(run.logits, logits[:, 4].double())
    assert torch.equal(
        run.activations["blocks.1.hook_resid_post"], cache["blocks.1.hook_resid_post"]
    )


@torch.no_grad()
def test_donors_by_hand(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 3)
    grid = grid_of(model, task, "v", positions=[5])
    run = record(model, task, task.clean, grid, None)
    edit = Edit(grid.site, 1, 2, grid.places[0])
    there = run.activations["blocks.1.attn.hook_v"][:, 5, 2]
    values, present = rows_of_run(run, torch.tensor([2, -1, 0]))(edit)
    assert torch.equal(values[[0, 2], 0], there[[2, 0]])
    assert present.tolist() == [[True], [False], [True]]
    values, present = zero_of_run(run)(edit)
    assert torch.equal(values, torch.zeros(3, 1, 4))
    assert present.all()
    values, _ = mean_of_run(run)(edit)
    # A mean of three in another order of summation: float32 rounding.
    torch.testing.assert_close(values, there.mean(0).expand(3, 1, 4), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_role_is_read_where_the_other_row_has_it(model: Decoder, make_task: MakeTask) -> None:
    plain = make_task(model, 3)
    task = Task(plain.clean, plain.corrupted, plain.answer, plain.wrong, roles={"r": [2, 4, 6]})
    grid = grid_of(model, task, "resid_pre", positions="roles")
    run = record(model, task, task.clean, grid, None)
    values, _ = rows_of_run(run, torch.tensor([1, 2, 0]))(Edit(grid.site, 1, None, grid.places[0]))
    stream = run.activations["blocks.1.hook_resid_pre"]
    assert torch.equal(values[:, 0], torch.stack([stream[1, 4], stream[2, 6], stream[0, 2]]))


@torch.no_grad()
def test_the_mean_is_over_the_rows_that_have_the_position(model: Decoder) -> None:
    task = Task([[1, 2], [3, 4, 5]], [[6, 2], [6, 4, 5]], 2, 1)
    grid = grid_of(model, task, "resid_pre", positions="all")
    run = record(model, task, task.clean, grid, None)
    values, present = mean_of_run(run)(Edit(grid.site, 0, None, grid.places[0]))
    stream = run.activations["blocks.0.hook_resid_pre"]
    torch.testing.assert_close(values[0, 0], (stream[0, 0] + stream[1, 0]) / 2)
    assert torch.equal(values[1, 2], stream[1, 2])
    assert present.tolist() == [[True, True, False], [True, True, True]]


@torch.no_grad()
def test_chunks_change_nothing_but_rounding(
    model: Decoder, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(model, 5)
    grid = grid_of(model, task, "resid_mid")

    def run() -> Tensor:
        clean = record(model, task, task.clean, grid, None)
        return swept(model, task, grid, rows_of_run(clean, torch.tensor([1, 2, 3, 4, 0])))

    whole = run()
    monkeypatch.setattr(hooked_engine, "CHUNK_TOKENS", 2 * task.clean.shape[1])
    # Batches of another shape round differently in float32 at unit scale.
    torch.testing.assert_close(run(), whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_without_the_place_are_not_patched(model: Decoder) -> None:
    task = Task([[1, 2], [3, 4, 5]], [[6, 2], [6, 4, 5]], 2, 1)
    grid = grid_of(model, task, "resid_pre", layers=[0], positions=[2])
    clean = record(model, task, task.clean, grid, None)
    base = record(model, task, task.corrupted, grid, None)
    ((logits, patched),) = sweep(
        model, task, task.corrupted, grid.cells(), rows_of_run(clean, torch.arange(2)), None
    )
    assert patched.tolist() == [False, True]
    assert torch.equal(logits[0], base.logits[0])


@torch.no_grad()
def test_a_value_head_reaches_its_own_query_heads(grouped: Decoder, make_task: MakeTask) -> None:
    """FR-44: patching V of key/value head 1 changes z of query heads 2 and 3, in that layer."""
    task = make_task(grouped, 3)
    grid = grid_of(grouped, task, "v", layers=[0], heads=[1])
    clean = record(grouped, task, task.clean, grid, None)
    names = ["blocks.0.attn.hook_z", "blocks.0.attn.hook_v"]
    _, before = capture(grouped, task.corrupted, names)
    after: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: object) -> None:
        after["z"] = tensor.clone()

    with grouped.hooks(fwd_hooks=[(names[0], keep)]):
        swept(grouped, task, grid, rows_of_run(clean, torch.arange(3)))
    changed = (after["z"] != before[names[0]]).any(-1).any(1).all(0)
    assert changed.tolist() == [False, False, True, True]
