"""Long sweeps in one process: order, threads, interruptions and resumed folders change no bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.analyses.patching import engines, sweep_plan
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.suffix.engine import SuffixSweep
from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
from headstream.analyses.patching.sweeps.sweep import run_sweep
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError, SweepError, TaskError

MakeTask = Callable[..., Task]
MakeExecutor = Callable[..., Executor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three cells or so, for sweeps of many blocks."""
    monkeypatch.setattr(sweep_plan, "BLOCK_TOKENS", 3 * 4 * 7)


@pytest.fixture
def task(model: Decoder, make_task: MakeTask) -> Task:
    return make_task(model, 4, roles={"source": 2, "last": -1})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the blocks that the suffix engine computes, as it does."""
    seen: list[int] = []
    run = SuffixSweep.run

    def counting(self: SuffixSweep, block: Any) -> Any:
        seen.append(block.index)
        return run(self, block)

    monkeypatch.setattr(SuffixSweep, "run", counting)
    return seen


def alike(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[kind], other[kind], equal_nan=True) for kind in one
    )


ONE_EACH = {f"L{layer}": [At("z", layer)] for layer in range(2)}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "z": ("suffix", {"site": "z", "positions": "each", "layers": [1]}),
    "pattern": ("suffix", {"site": "pattern", "positions": [(6, 2), (3, 1)], "layers": [1]}),
    "sets": (
        "suffix",
        {"site": {"both": [At("z", 0, 1), At("resid_pre", 1, place="source")]} | ONE_EACH},
    ),
    "hooks": ("hooks", {"site": "z", "positions": "roles", "layers": [1], "heads": [0, 2]}),
}


@pytest.mark.parametrize(("engine", "fields"), PLANS.values(), ids=list(PLANS))
def test_order_executor_and_folder_change_no_bit(
    model: Decoder,
    task: Task,
    tmp_path: Path,
    engine: str,
    fields: dict[str, Any],
    now: MakeExecutor,
) -> None:
    plan = SweepPlan(task, **fields)
    here = run_sweep(model, plan, engine, progress=False)
    opened, work = engines.open_sweep(model, plan, engine), blocks(plan, model.config)
    for block in reversed(work):
        found = here.passes[block.kind][:, list(block.cells)]
        assert np.array_equal(opened.run(block), found, equal_nan=True)
    for options in (
        {"executor": now()},
        {"resume": tmp_path / "a"},
        {"resume": tmp_path / "a"},
        {"resume": tmp_path / "b", "executor": now()},
    ):
        again = run_sweep(model, plan, engine, progress=False, **options)
        assert alike(here.passes, again.passes), options
        assert alike(here.base, again.base), options


@pytest.mark.parametrize("engine", ["suffix", "hooks"])
def test_threads_share_no_model(model: Decoder, task: Task, engine: str) -> None:
    """The hooked engine hangs hooks on its model: two threads on one would patch each other."""
    where: dict[str, Any] = {"positions": "roles", "engine": engine, "n_flips": 9}
    here = patch(model, task, "z", **where)
    with ThreadPoolExecutor(3) as pool:
        there = patch(model, task, "z", **where, executor=pool)
    assert here.to_json() == there.to_json()


def test_finished_blocks_are_not_run_again(
    model: Decoder, task: Task, tmp_path: Path, ran: list[int]
) -> None:
    plan = SweepPlan(task, "z", positions="each", layers=[1], heads=[0, 2])
    here = run_sweep(model, plan, progress=False, resume=tmp_path)
    total = len(blocks(plan, model.config))
    assert ran == list(range(total))
    ran.clear()
    files = sorted((tmp_path / "blocks").iterdir())
    assert len(files) == total
    files[3].unlink()
    files[5].write_bytes(files[5].read_bytes()[:-8])  # cut short
    flipped = bytearray(files[7].read_bytes())
    flipped[-1] ^= 1
    files[7].write_bytes(flipped)  # one bit of a number
    files[9].write_bytes(files[10].read_bytes())  # another block's
    files[11].write_bytes(b"")
    again = run_sweep(model, plan, progress=False, resume=tmp_path)
    assert ran == [3, 5, 7, 9, 11]
    assert alike(here.passes, again.passes)
    ran.clear()
    assert alike(here.passes, run_sweep(model, plan, progress=False, resume=tmp_path).passes)
    assert ran == []


def test_ctrl_c_keeps_what_is_finished(
    model: Decoder, task: Task, tmp_path: Path, ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SweepPlan(task, "z", positions="each", layers=[1], heads=[0, 2])
    here = run_sweep(model, plan, progress=False)
    counting = SuffixSweep.run

    def stopped(self: SuffixSweep, block: Any) -> Any:
        if block.index == 5:
            raise KeyboardInterrupt
        return counting(self, block)

    monkeypatch.setattr(SuffixSweep, "run", stopped)
    ran.clear()
    with pytest.raises(KeyboardInterrupt) as caught:
        run_sweep(model, plan, progress=False, resume=tmp_path)
    total = len(blocks(plan, model.config))
    assert caught.value.__notes__ == [
        f"5 of {total} blocks are kept in '{tmp_path}', and the same call goes on from there"
    ]
    assert ran == list(range(5))
    monkeypatch.setattr(SuffixSweep, "run", counting)
    again = run_sweep(model, plan, progress=False, resume=tmp_path)
    assert ran == list(range(total))
    assert alike(here.passes, again.passes)


def test_a_dead_worker_is_an_error_and_the_sweep_goes_on_later(
    model: Decoder, task: Task, tmp_path: Path, ran: list[int], now: MakeExecutor
) -> None:
    plan = SweepPlan(task, "z", positions="each", layers=[1], heads=[0, 2])
    here = run_sweep(model, plan, progress=False)
    total = len(blocks(plan, model.config))
    ran.clear()
    words = (
        rf"a worker died \(a process ended abruptly\); 4 of {total} blocks are kept in "
        rf"'{tmp_path}', and the same call goes on from there; workers end for want of memory"
    )
    with pytest.raises(SweepError, match=words):
        run_sweep(model, plan, progress=False, resume=tmp_path, executor=now(lasts=4))
    again = run_sweep(model, plan, progress=False, resume=tmp_path, executor=now())
    assert ran == list(range(total))
    assert alike(here.passes, again.passes)
    with pytest.raises(SweepError, match=r"lost: resume=FOLDER keeps finished blocks"):
        run_sweep(model, plan, progress=False, executor=now(lasts=4))


def test_an_executor_that_is_shut_down(model: Decoder, task: Task) -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(SweepError, match="the executor was shut down; what was finished is lost"):
        patch(model, task, "z", executor=pool)


def test_an_error_of_a_worker_is_the_users(
    model: Decoder, make_task: MakeTask, tmp_path: Path, now: MakeExecutor
) -> None:
    calls = iter(range(1000))

    def wild(logits: Tensor, task: Any) -> Tensor:
        """Finite for the two unpatched runs, here and in the worker."""
        return logits[:, 0] if next(calls) < 4 else logits[:, 0] * np.nan

    task = make_task(model, 4, metric=wild)
    with pytest.raises(TaskError, match="metric 'wild' is nan in pair 0"):
        patch(model, task, "z", executor=now())


def test_the_number_of_threads_is_the_folders(
    model: Decoder, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: MakeExecutor
) -> None:
    """Another number rounds otherwise, so a sweep keeps the one it was begun with."""
    plan, used = SweepPlan(task, "z"), []
    run = SuffixSweep.run

    def noting(self: SuffixSweep, block: Any) -> Any:
        used.append(torch.get_num_threads())
        return run(self, block)

    monkeypatch.setattr(SuffixSweep, "run", noting)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    try:
        run_sweep(model, plan, progress=False, resume=tmp_path / "two")
        assert set(used) == {2}
        used.clear()
        with pytest.raises(SweepError, match="begun in one process of 2 threads, and workers have"):
            run_sweep(model, plan, progress=False, resume=tmp_path / "two", executor=now())
        run_sweep(model, plan, progress=False, resume=tmp_path / "one", executor=now())
        assert set(used) == {1}
        assert torch.get_num_threads() == 2, "as it was"
        for file in (tmp_path / "one" / "blocks").iterdir():
            file.unlink()
        used.clear()
        run_sweep(model, plan, progress=False, resume=tmp_path / "one")
        assert set(used) == {1}
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("unchecked")
class TestRefusals:
    def test_what_is_no_executor(self, model: Decoder, task: Task) -> None:
        with pytest.raises(TaskError, match=r"got str; Dask gives one by Client.get_executor\(\)"):
            patch(model, task, "z", executor="dask")

    @pytest.mark.parametrize("resume", ["", 7])
    def test_what_is_no_folder(self, model: Decoder, task: Task, resume: Any) -> None:
        with pytest.raises(TaskError, match=f"resume must be the path of a folder, got {resume!r}"):
            patch(model, task, "z", resume=resume)

    @pytest.mark.parametrize("argument", ["executor", "resume"])
    def test_a_model_that_is_more_than_its_weights(
        self, model: Decoder, task: Task, tmp_path: Path, argument: str, now: MakeExecutor
    ) -> None:
        given = {argument: now() if argument == "executor" else tmp_path}
        hooks = [("blocks.0.attn.hook_z", lambda z, hook: 2 * z)]
        words = f"and {argument}= knows a model by its weights alone"
        with model.hooks(hooks):
            model(task.clean)  # else the hook never fires, which is an error of its own
            with pytest.raises(HookError, match=words):
                patch(model, task, "z", engine="hooks", **given)

    def test_a_metric_that_hides_values(
        self, model: Decoder, make_task: MakeTask, tmp_path: Path
    ) -> None:
        token = 3
        task = make_task(model, 4, metric=lambda logits, task: logits[:, token])
        with pytest.raises(
            TaskError, match="resume cannot tell whether metric '<lambda>' is still"
        ):
            patch(model, task, "z", resume=tmp_path / "folder")
        assert not (tmp_path / "folder").exists()

    def test_a_task_without_a_gap_leaves_the_folder_free(
        self, model: Decoder, task: Task, tmp_path: Path
    ) -> None:
        still = copy.copy(task)
        object.__setattr__(still, "corrupted", task.clean)
        with pytest.raises(TaskError, match="there is no gap to patch"):
            run_sweep(
                model,
                SweepPlan(still, "z"),
                progress=False,
                resume=tmp_path,
                check=_no_gap,
            )
        run_sweep(model, SweepPlan(task, "z"), progress=False, resume=tmp_path)


def _no_gap(base: dict[str, np.ndarray]) -> None:
    assert np.array_equal(base["clean"], base["corrupted"])
    raise TaskError("there is no gap to patch")


def test_progress_starts_where_the_folder_stands(
    model: Decoder, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[dict[str, Any]] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            bars.append(options | {"done": options["initial"]})

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, by: int) -> None:
            bars[-1]["done"] += by

    monkeypatch.setattr("headstream.analyses.patching.sweeps.sweep.tqdm", Bar)
    plan = SweepPlan(task, "z", positions="each", layers=[1], heads=[0, 2])
    cells = 3 * plan.grid(model.config).size
    run_sweep(model, plan, resume=tmp_path)
    gone = blocks(plan, model.config)[2]
    (tmp_path / "blocks" / f"{gone.index:06}.block").unlink()
    run_sweep(model, plan, resume=tmp_path)
    assert [bar["initial"] for bar in bars] == [0, cells - len(gone.cells)]
    assert [bar["total"] for bar in bars] == [cells, cells]
    assert [bar["done"] for bar in bars] == [cells, cells]
    assert bars[0]["disable"] is None
