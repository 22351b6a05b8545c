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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
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

# Seconds that a pool which is ended, and each of its workers, is waited for.
_FORGETTING = 5.0
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
    load must be set before a worker starts. What goes wrong in the block, and Ctrl-C, ends them at
    once: no work under way is waited for.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        context = multiprocessing.get_context("spawn")
        with _Pool(workers, mp_context=context, initializer=_begin) as pool:
            try:
                yield pool
            except BaseException:
                pool.end()
                raise
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Pool(ProcessPoolExecutor):
    """A pool whose workers never see Ctrl-C, and that can be ended at once.

    Ctrl-C reaches the whole group. A worker that answers it does so with a traceback, most likely
    from the midst of an import.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun: set[Any] = set()

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """As any pool's: what starts its processes, one by one."""
        before = set(multiprocessing.active_children())
        with _without_interrupts():
            future = super().submit(fn, *arguments, **options)
            self._begun |= set(multiprocessing.active_children()) - before
        return future

    def end(self) -> None:
        """Forget what is not begun, and end the workers, whatever they are at."""
        with _deaf():
            try:
                last = self.submit(os.getpid)
            except (BrokenExecutor, RuntimeError):
                return  # It has ended already.
            self.shutdown(wait=False, cancel_futures=True)
            # Until the pool's own thread has forgotten the work, in its order: where it finds that
            # workers died, it gives each future an error, and a cancelled one refuses that.
            until = time.monotonic() + _FORGETTING
            while not (last.done() or last.running()) and time.monotonic() < until:
                time.sleep(0.005)
            for process in self._begun:
                process.terminate()
            for process in self._begun:
                process.join(_FORGETTING)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started meanwhile does not get SIGINT; this one gets it at the end.

    The mask of blocked signals passes to what is started. It is one thread's, and the others of
    this process are not masked, so the signal is also kept from the main thread.
    """
    came: list[int] = []
    before: Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
        if before is not None:
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    masked = hasattr(signal, "pthread_sigmask")
    if masked:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        if masked:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if before is not None:
            signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C does nothing: what it asks for is under way."""
    before: Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if before is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _begin() -> None:
    # Blocked until here; now forgotten. The parent answers it, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's worker waits for work forever, also for that of a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
