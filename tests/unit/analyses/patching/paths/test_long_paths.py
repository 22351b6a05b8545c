"""Long sweeps over paths: any order, executor or interruption gives the same bits."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstream.analyses.patching import sweep_plan
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.paths.engines import open_paths
from headstream.analyses.patching.paths.path_patch import path_patch, planned_paths
from headstream.analyses.patching.paths.plan import path_blocks
from headstream.analyses.patching.paths.result import PathResult
from headstream.analyses.patching.paths.sweep import PathSweep
from headstream.analyses.patching.sweeps.plan_values import plan_from_values, plan_to_values
from headstream.analyses.patching.sweeps.sweep import finished_blocks, run_sweep
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError, SweepError

MakeTask = Callable[..., Task]
MakeExecutor = Callable[..., Executor]
# Two layers of receivers, an MLP among them; 2 x 3 x 4 paths, with places and without.
ENDS: dict[str, Any] = {
    "senders": ["embed", "L0H1", "L0MLP", "L1H2"],
    "receivers": ["L0H1.k", "L1H0", "L1MLP", "logits"],
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two paths, for sweeps of many blocks."""
    monkeypatch.setattr(sweep_plan, "BLOCK_TOKENS", 2 * 4 * 7)


@pytest.fixture
def task(model: Decoder, make_task: MakeTask) -> Task:
    return make_task(model, 4, roles={"source": 2, "last": -1})


def sweep(model: Decoder, task: Task, **options: Any) -> PathResult:
    return path_patch(model, task, **{**ENDS, "n_flips": 9, "progress": False} | options)


def bits(result: PathResult) -> dict[str, bytes]:
    """Every array to the bit: what is saved holds float32 only."""
    return {str(name): array.values.tobytes() for name, array in result.data.items()}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the blocks of paths that the fast engine computes, as it does."""
    seen: list[int] = []
    run = PathSweep.run

    def counting(self: PathSweep, block: Any) -> Any:
        seen.append(block.index)
        return run(self, block)

    monkeypatch.setattr(PathSweep, "run", counting)
    return seen


def test_blocks_hold_every_path_once_and_every_total(model: Decoder, task: Task) -> None:
    plan = planned_paths(model, task, positions="roles")
    work = path_blocks(plan, model.config)
    assert [block.index for block in work] == list(range(len(work)))
    senders, receivers, places = plan.shape
    exist = [
        (s * receivers + r) * places + p
        for s, sender in enumerate(plan.senders)
        for r, receiver in enumerate(plan.receivers)
        for p in range(places)
        if sender.before(receiver)
    ]
    for kind, cells in (
        ("effects", exist),
        ("unrelated", exist),
        ("total", list(range(senders * places))),
    ):
        found = [cell for block in work if block.kind == kind for cell in block.cells]
        assert sorted(found) == cells, kind
    # The self-patch runs one sender of each receiver, at one place.
    own = [cell for block in work if block.kind == "self" for cell in block.cells]
    assert sorted(cell // places % receivers for cell in own) == list(range(receivers))
    assert all(len(block.cells) <= 2 for block in work)


PLANS: dict[str, dict[str, Any]] = {
    "suffix": {"positions": "roles"},
    "recomputed": {"freeze_mlps": False, "direction": "noise"},
    "hooks": {"engine": "hooks", "receivers": ["L1H0.k", "logits"]},
}


@pytest.mark.parametrize("options", PLANS.values(), ids=list(PLANS))
def test_order_executor_and_folder_change_no_bit(
    model: Decoder, task: Task, tmp_path: Path, now: MakeExecutor, options: dict[str, Any]
) -> None:
    here = bits(sweep(model, task, **options))
    engine = options.get("engine", "suffix")
    plan = planned_paths(model, task, **{**ENDS, **options})
    swept = run_sweep(model, plan, engine, progress=False)
    opened = open_paths(model, plan, engine)
    for block in reversed(path_blocks(plan, model.config)):
        found = swept.passes[block.kind][:, list(block.cells)]
        assert np.array_equal(opened.run(block), found, equal_nan=True), block
    for long in (
        {"executor": now()},
        {"resume": tmp_path / "a"},
        {"resume": tmp_path / "a"},
        {"resume": tmp_path / "b", "executor": now()},
    ):
        assert bits(sweep(model, task, **options, **long)) == here, long


def test_threads_share_no_model(model: Decoder, task: Task) -> None:
    with ThreadPoolExecutor(3) as pool:
        for engine in ("suffix", "hooks"):
            options: dict[str, Any] = {"engine": engine, "receivers": ["L1H0.k", "logits"]}
            here = sweep(model, task, **options)
            assert sweep(model, task, **options, executor=pool).to_json() == here.to_json()


def test_finished_blocks_are_not_run_again(
    model: Decoder, task: Task, tmp_path: Path, ran: list[int]
) -> None:
    here = bits(sweep(model, task, resume=tmp_path))
    of_paths = list(ran)
    files = sorted((tmp_path / "blocks").iterdir())
    assert len(files) > len(of_paths), "those of the totals are kept too"
    ran.clear()
    assert bits(sweep(model, task, resume=tmp_path)) == here
    assert ran == []
    files[3].unlink()
    files[5].write_bytes(files[5].read_bytes()[:-8])  # cut short
    files[-1].unlink()  # of the totals
    assert bits(sweep(model, task, resume=tmp_path)) == here
    assert ran == [3, 5]


def test_ctrl_c_keeps_what_is_finished(
    model: Decoder, task: Task, tmp_path: Path, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bits(sweep(model, task))
    of_paths, counting = list(ran), PathSweep.run

    def stopped(self: PathSweep, block: Any) -> Any:
        if block.index == 5:
            raise KeyboardInterrupt
        return counting(self, block)

    ran.clear()
    monkeypatch.setattr(PathSweep, "run", stopped)
    with pytest.raises(KeyboardInterrupt) as caught:
        sweep(model, task, resume=tmp_path)
    plan = planned_paths(model, task, **ENDS)
    total = len(path_blocks(plan, model.config))
    assert caught.value.__notes__ == [
        f"5 of {total} blocks are kept in '{tmp_path}', and the same call goes on from there"
    ]
    assert finished_blocks(tmp_path, model, plan, "suffix") == 5
    monkeypatch.setattr(PathSweep, "run", counting)
    assert bits(sweep(model, task, resume=tmp_path)) == here
    assert ran == of_paths


def test_a_dead_worker_is_an_error_and_the_sweep_goes_on_later(
    model: Decoder, task: Task, tmp_path: Path, now: MakeExecutor, ran: list[int]
) -> None:
    here = bits(sweep(model, task))
    of_paths = list(ran)
    ran.clear()
    words = (
        r"a worker died \(a process ended abruptly\); 4 of \d+ blocks are kept in "
        rf"'{tmp_path}', and the same call goes on from there; workers end for want of memory"
    )
    with pytest.raises(SweepError, match=words):
        sweep(model, task, resume=tmp_path, executor=now(lasts=4))
    assert bits(sweep(model, task, resume=tmp_path, executor=now())) == here
    assert ran == of_paths
    with pytest.raises(SweepError, match=r"lost: resume=FOLDER keeps finished blocks"):
        sweep(model, task, executor=now(lasts=4))


def test_a_full_disk(
    model: Decoder, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bits(sweep(model, task))
    write, room = Path.write_bytes, [8]

    def filling(self: Path, data: bytes) -> int:
        room[0] -= 1
        if room[0] < 0:
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", filling)
    words = r"cannot write block 7 to '.*blocks': No space left on device; 7 finished blocks are"
    with pytest.raises(SweepError, match=words):
        sweep(model, task, resume=tmp_path)
    assert len(os.listdir(tmp_path / "blocks")) == 7
    monkeypatch.setattr(Path, "write_bytes", write)
    assert bits(sweep(model, task, resume=tmp_path)) == here


class TestAnotherSweep:
    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"senders": ["embed", "L0H1"]}, "other senders"),
            ({"receivers": ["logits", "L1H0.k"]}, "other receivers"),
            ({"freeze_mlps": False}, "freeze_mlps true there, false here"),
            ({"positions": "roles"}, "positions all there, roles here"),
            ({"direction": "noise"}, "direction denoise there, noise here"),
            ({"seed": 4}, "seed 0 there, 4 here"),
            ({"engine": "hooks"}, "engine suffix there, hooks here"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_arguments(
        self,
        model: Decoder,
        task: Task,
        tmp_path: Path,
        now: MakeExecutor,
        changed: dict[str, Any],
        words: str,
    ) -> None:
        with pytest.raises(SweepError):  # one block, and no more
            sweep(model, task, resume=tmp_path, executor=now(lasts=1))
        with pytest.raises(SweepError) as caught:
            sweep(model, task, resume=tmp_path, **changed)
        assert f"resume folder '{tmp_path}' belongs to another sweep: " in caught.value.message
        assert words in caught.value.message
        assert caught.value.hint.startswith("name another folder, or repeat the call")

    def test_model_task_and_kind(
        self, model: Decoder, task: Task, make_task: MakeTask, tmp_path: Path, now: MakeExecutor
    ) -> None:
        with pytest.raises(SweepError):
            sweep(model, task, resume=tmp_path, executor=now(lasts=1))
        other = Decoder(model.config, seed=7)
        other.backend = model.backend
        with pytest.raises(SweepError, match=r"sweep: model weights .* there, .* here; name"):
            sweep(other, task, resume=tmp_path)
        with pytest.raises(SweepError, match="another sweep: other clean prompts; other corrupted"):
            sweep(model, make_task(model, 4, seed=9, roles=task.roles), resume=tmp_path)
        with pytest.raises(
            SweepError,
            match="another sweep: what is swept paths there, sites here; other division into",
        ):
            patch(model, task, "z", resume=tmp_path, progress=False)


def test_there_and_back(model: Decoder, task: Task) -> None:
    plan = planned_paths(
        model, task, ["heads", "embed"], ["k", "logits"], positions=(2, -1), direction="noise"
    )
    values = json.loads(json.dumps(plan_to_values(plan)))
    again = plan_from_values(values)
    assert plan_to_values(again) == values
    assert path_blocks(again, model.config) == path_blocks(plan, model.config)


@pytest.mark.parametrize("argument", ["executor", "resume"])
def test_a_model_that_is_more_than_its_weights(
    model: Decoder, task: Task, tmp_path: Path, now: MakeExecutor, argument: str
) -> None:
    given = {argument: now() if argument == "executor" else tmp_path}
    with model.hooks([("blocks.0.attn.hook_z", lambda z, hook: 2 * z)]):
        model(task.clean)  # else the hook never fires, which is an error of its own
        with pytest.raises(HookError, match=f"and {argument}= knows a model by its weights alone"):
            sweep(model, task, engine="hooks", **given)
