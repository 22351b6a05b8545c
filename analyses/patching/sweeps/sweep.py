"""All blocks of a plan, over sites or over paths: here or by any executor, with progress.

A folder, if one is given, keeps what is finished.

    describe     the sweep as values (`plan_values`), its hash, its folder (`store`)
    read         blocks that are finished already
    run          the others, in this process or by workers (`executor`, `workers`); each
                 is written as it comes
    collect      effects by pass

On many machines, with a folder on a disk that all of them see:

    with Client("tcp://scheduler:8786") as client:  # dask.distributed, the extra [dask]
        patch(model, task, "z", executor=client.get_executor(), resume="/shared/sweep")

Blocks depend on nothing but model and plan, so what is put together is the same to the bit for any
order, executor or interruption, on one kind of machine. The number of threads a process computes
with changes the rounding: a sweep keeps the one it was begun with, which for workers is 1.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from tqdm import tqdm

from headstream.analyses.patching.metrics import Metric
from headstream.analyses.patching.sweeps.executor import Found, Runner, Stopped, by_executor
from headstream.analyses.patching.sweeps.plan_values import code_sha256, function_of, own_metric
from headstream.analyses.patching.sweeps.plans import (
    Opened,
    Piece,
    Plan,
    name_of,
    open_plan,
    size_of,
    work_of,
)
from headstream.analyses.patching.sweeps.store import MANIFEST, SweepStore, describe
from headstream.analyses.patching.sweeps.workers import Job, one_number_of_threads
from headstream.models.decoder import Decoder
from headstream.models.errors import HeadstreamError, HookError, SweepError, TaskError


@dataclass(frozen=True, eq=False)
class Swept:
    """What a sweep found.

    Attributes:
        base: by run (`clean`, `corrupted`), its metrics `[metric, example]`.
        passes: by kind of pass, effects `[metric, cell, example]`, NaN where nothing was patched;
            the cells are those of the plan's kind (`plans`).
    """

    base: dict[str, Float[np.ndarray, "metric example"]]
    passes: dict[str, Float[np.ndarray, "metric cell example"]]


def run_sweep(
    model: Decoder,
    plan: Plan,
    engine: str = "suffix",
    *,
    executor: Any = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
    check: Callable[[dict[str, Float[np.ndarray, "metric example"]]], None] | None = None,
) -> Swept:
    """Run a plan.

    Args:
        executor: a `concurrent.futures.Executor` whose workers have headstream; None runs here.
        resume: a folder that keeps finished blocks and gives them back.
        progress: show a bar on stderr, if that is a terminal.
        check: sees the unpatched runs' metrics before anything is swept, and may refuse them.
    Raises:
        SweepError: if a worker dies, the folder is another sweep's, or the disk is full. Finished
            blocks stay in `resume`.
        TaskError: if `executor` is none, or the task's metric cannot travel or be resumed.
        HookError: if hooks or edits are on a model that must travel or be resumed.
        TokenError, ShapeError, StoreError: on a plan or a model that does not fit.
    """
    _require_executor(executor)
    if executor is not None or resume is not None:
        _require_plain(model, "executor" if resume is None else "resume")
    if resume is not None:
        _require_folder(resume)
        _require_known_code(plan.task.metric)
    work = work_of(plan, model.config)
    n, metrics = len(plan.task), len(plan.metrics)
    with ExitStack() as stack:
        store, threads = None, torch.get_num_threads()
        if resume is not None or executor is not None:
            folder = resume or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="headstream-", ignore_cleanup_errors=True)
            )
            store = _store(folder, model, plan, engine, 1 if executor is not None else threads)
            threads = _threads(store, executor)
        stack.enter_context(one_number_of_threads(threads))
        opened = open_plan(model, plan, engine)
        base = opened.base
        if check is not None:
            check(base)
        passes: dict[str, np.ndarray] = {
            kind: np.full((metrics, size_of(plan, kind, model.config), n), np.nan)
            for kind in dict.fromkeys(block.kind for block in work)
        }
        left = dict.fromkeys(work)
        for block, effects in () if store is None else store.finished(work, (metrics, n)):
            passes[block.kind][:, list(block.cells)] = effects
            del left[block]
        if executor is None or store is None:
            runner = _here(opened)
        else:
            # Workers open it themselves: what was recorded here need not be held meanwhile.
            del opened
            store.save_model(model)
            runner = by_executor(executor, _job(store, plan.task.metric))
        keeps = store if resume is not None else None
        total = sum(len(block.cells) for block in work)
        with (
            tqdm(
                total=total,
                initial=total - sum(len(block.cells) for block in left),
                desc=f"patch {name_of(plan, model.config)}",
                disable=None if progress else True,
            ) as bar,
            _kept(keeps, len(work)),
            closing(runner(tuple(left))) as found,
        ):
            for block, effects in found:
                if keeps is not None:
                    keeps.add(block, effects)
                passes[block.kind][:, list(block.cells)] = effects
                bar.update(len(block.cells))
    return Swept(base, passes)


def _store(
    folder: str | os.PathLike[str], model: Decoder, plan: Plan, engine: str, threads: int
) -> SweepStore:
    work = work_of(plan, model.config)
    return SweepStore(folder, describe(model, plan, engine, work, threads))


def _threads(store: SweepStore, executor: Any) -> int:
    """The number that the sweep was begun with."""
    begun: int = store.manifest["run"]["threads"]
    if executor is not None and begun != 1:
        raise SweepError(
            f"resume folder '{store.folder}' was begun in one process of {begun} threads, and "
            "workers have one: their rounding differs",
            hint="go on without an executor, or begin anew in another folder",
        )
    return begun


def finished_blocks(
    resume: str | os.PathLike[str],
    model: Decoder,
    plan: Plan,
    engine: str,
    workers: int | None = None,
) -> int:
    """How many blocks of a sweep a folder holds; 0 if nothing was begun there.

    Raises:
        SweepError: if the folder is another sweep's.
    """
    if not (Path(resume) / MANIFEST).exists():
        return 0
    threads = torch.get_num_threads() if workers is None else 1
    store, work = _store(resume, model, plan, engine, threads), work_of(plan, model.config)
    return sum(1 for _ in store.finished(work, (len(plan.metrics), len(plan.task))))


def _here(opened: Opened) -> Runner:
    def run(left: Sequence[Piece]) -> Found:
        for block in left:
            yield block, opened.run(block)

    return run


@contextmanager
def _kept(store: SweepStore | None, total: int) -> Iterator[None]:
    """Say of whatever stops a sweep what of it is kept, and how it goes on."""
    try:
        yield
    except HeadstreamError:
        raise
    except BaseException as error:
        if store is None:
            words = "what was finished is lost: resume=FOLDER keeps finished blocks"
        else:
            words = (
                f"{store.count()} of {total} blocks are kept in '{store.folder}', and the same "
                "call goes on from there"
            )
        if isinstance(error, Stopped):
            raise SweepError(f"{error}; {words}", hint=error.hint) from error.__cause__
        error.add_note(words)
        raise


def _job(store: SweepStore, metric: Metric) -> Job:
    folder = str(store.folder.resolve())
    return Job(folder, store.sha256, None if own_metric(metric) else metric)


def _require_executor(executor: Any) -> None:
    if executor is None or isinstance(executor, Executor):
        return
    raise TaskError(
        f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}",
        hint="Dask gives one by Client.get_executor()",
    )


def _require_folder(resume: Any) -> None:
    if not isinstance(resume, (str, os.PathLike)) or not os.fspath(resume):
        raise TaskError(f"resume must be the path of a folder, got {resume!r}")


def _require_plain(model: Decoder, argument: str) -> None:
    """A model that goes by its weights must be nothing but its weights."""
    if model.hooks_active() or any(block.attn.edits for block in model.blocks):
        raise HookError(
            f"hooks or edits are on the model, and {argument}= knows a model by its weights alone",
            hint=f"take them off, or run without {argument}",
        )


def _require_known_code(metric: Metric) -> None:
    if not own_metric(metric) and code_sha256(function_of(metric)) is None:
        raise TaskError(
            f"resume cannot tell whether metric {metric.name!r} is still the same: its code alone "
            "does not say what it computes",
            hint="make it a plain function without default or outer values",
        )
