"""What a worker of a long sweep does: open the sweep once, from its folder, and run blocks of it.

A task that is sent names a folder, a sweep and some blocks; model and prompts are read from the
folder. So an executor needs only `submit`, and tasks may be lost, repeated or run anywhere that
sees the folder. What a worker has opened stays with its thread: threads of one process share no
model, which the hooked engine changes while it runs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstream.analyses.patching.metrics import Metric
from headstream.analyses.patching.sweeps.plan_values import plan_from_values
from headstream.analyses.patching.sweeps.plans import Opened, Piece, open_plan, work_of
from headstream.analyses.patching.sweeps.store import MODEL, manifest_sha256, read_manifest
from headstream.models.errors import SweepError
from headstream.models.store import load

# Of each thread: the sweep that it has open.
_held = threading.local()


@dataclass(frozen=True)
class Job:
    """A sweep as a worker gets it.

    Attributes:
        folder: where manifest and model lie; every worker must see it.
        sweep: the manifest's hash.
        metric: the task's, where it is none of our own.
    """

    folder: str
    sweep: str
    metric: Metric | None = None


def run_blocks(job: Job, indices: tuple[int, ...]) -> list[np.ndarray]:
    """Effects `[metric, cell, example]` of some blocks, float64.

    Raises:
        SweepError: if the folder is not there, or holds another sweep or model.
    """
    opened, work, threads = _opened(job)
    # For good: threads of one process that each put it back would disturb one another.
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return [opened.run(work[index]) for index in indices]


_Opened = tuple[Opened, tuple[Piece, ...], int]


def _opened(job: Job) -> _Opened:
    key = (job.folder, job.sweep)
    if getattr(_held, "key", None) != key:
        # Let go of the last one before the next is recorded.
        _held.key = _held.opened = None
        _held.opened = _open(job)
        _held.key = key
    opened: _Opened = _held.opened
    return opened


def _open(job: Job) -> _Opened:
    if not Path(job.folder).is_dir():
        raise SweepError(
            f"a worker does not see the sweep's folder '{job.folder}'",
            hint="give resume=FOLDER on a disk that all workers share",
        )
    manifest = read_manifest(job.folder)
    if manifest_sha256(manifest) != job.sweep:
        raise SweepError(f"a worker finds another sweep in '{job.folder}'")
    run: dict[str, Any] = manifest["run"]
    torch.set_num_threads(run["threads"])
    model = load(Path(job.folder) / MODEL, device=run["device"])
    if model.weights_sha256() != manifest["model"]["weights_sha256"]:
        raise SweepError(
            f"a worker finds another model in '{job.folder}'", hint="begin anew elsewhere"
        )
    model.backend = run["backend"]
    plan = plan_from_values(manifest["plan"], job.metric)
    return open_plan(model, plan, run["engine"]), work_of(plan, model.config), run["threads"]


@contextmanager
def one_number_of_threads(threads: int) -> Iterator[None]:
    """torch computes with `threads` in this process for as long as the block runs."""
    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if before != threads:
            torch.set_num_threads(before)


@contextmanager
def local_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """`workers` processes of this machine, one thread each, that end with this process.

    For a process that owns its environment, as the command line does: what libraries read as they
    load must be set before a worker starts.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin) as pool:
            yield pool
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin() -> None:
    # Ctrl-C reaches the whole group: the parent answers, workers just end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's worker waits for work forever, also for that of a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
