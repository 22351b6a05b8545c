"""The blocks of a sweep by a `concurrent.futures.Executor`, and what goes wrong there, in words.

Nothing is asked of an executor but `submit` and futures that `as_completed` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, as_completed, wait
from typing import Any

import numpy as np

from headstream.analyses.patching.metrics import Metric
from headstream.analyses.patching.sweeps.plans import Piece
from headstream.analyses.patching.sweeps.workers import Job, run_blocks
from headstream.models.errors import HeadstreamError, TaskError

# What runs the blocks that are left: gives each with its effects, in any order.
Found = Generator[tuple[Piece, np.ndarray], None, None]
Runner = Callable[[Sequence[Piece]], Found]

# A sweep is sent in at most about this many tasks: each costs an executor up to some 10 ms.
_TASKS = 256
# Seconds that tasks under way are waited for once another has failed.
_PATIENCE = 60.0


def by_executor(executor: Executor, job: Job) -> Runner:
    """Blocks as workers finish them, in any order.

    Raises (when it runs):
        HeadstreamError: what a worker raised, or a metric that cannot be sent.
        Stopped: if a worker died or the executor takes no work. Any other error is a worker's own.
        Blocks that other workers had finished by then are given first.
    """

    def run(left: Sequence[Piece]) -> Found:
        each = max(1, -(-len(left) // _TASKS))
        sent: dict[Any, Sequence[Piece]] = {}
        error: BaseException | None = None
        try:
            try:
                for start in range(0, len(left), each):
                    part = left[start : start + each]
                    future = executor.submit(run_blocks, job, tuple(block.index for block in part))
                    sent[future] = part
            except Exception as refused:
                error = refused
            for future in as_completed(sent) if error is None else ():
                error = _error_of(future)
                if error is not None:
                    break
                yield from zip(sent.pop(future), future.result())
            if error is None:
                return
            # What other workers have finished, or are about to, is not lost. A pool that broke
            # gives every future an error by itself, and in some versions of Python its thread dies
            # of one that was cancelled meanwhile.
            broken = isinstance(error, BrokenExecutor)
            going = [future for future in sent if broken or not future.cancel()]
            for future in wait(going, timeout=_PATIENCE).done:
                if _error_of(future) is None:
                    yield from zip(sent[future], future.result())
        finally:
            for future in sent:
                future.cancel()
        explained = _explained(error, job.metric)
        if explained is error:
            raise error
        raise explained from error

    return run


def _error_of(future: Any) -> BaseException | None:
    try:
        error: BaseException | None = future.exception()
    except CancelledError as cancelled:
        return cancelled
    return error


class Stopped(Exception):
    """Work that stopped for a reason of the executor's, with a hint."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


def _explained(error: BaseException, metric: Metric | None) -> BaseException:
    """What an executor raised, in words where they are known; else as it is."""
    if isinstance(error, HeadstreamError):
        return error
    # Pools of processes or threads; Dask, of a task whose workers died too often.
    if isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker":
        return Stopped(
            f"a worker died ({error})",
            "workers end for want of memory (fewer of them need less), by a signal, or where a "
            "script starts a pool outside `if __name__ == '__main__':`",
        )
    if metric is not None and "pickle" in f"{type(error).__name__} {error}".lower():
        return TaskError(
            f"metric {metric.name!r} cannot be sent to workers: {error}",
            hint="make it a named function of a module that workers can import, not a lambda or "
            "a function inside a function; or run without an executor",
        )
    if isinstance(error, CancelledError) or "after shutdown" in str(error):
        return Stopped("the executor was shut down", "")
    return error
