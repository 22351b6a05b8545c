"""Workers that are processes: spawned ones, Dask's, and ones that are killed.

Starting one takes seconds, most of them to load torch, so the pools are shared.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.paths.path_patch import path_patch
from headstream.analyses.patching.result import PatchingResult
from headstream.analyses.patching.sweep_plan import Block
from headstream.analyses.patching.sweeps import workers as sweep_workers
from headstream.analyses.patching.sweeps.executor import Stopped, by_executor
from headstream.analyses.patching.sweeps.workers import Job, local_pool, run_blocks
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.errors import SweepError, TaskError

MakeTask = Callable[..., Task]
ARGUMENTS: dict[str, Any] = {"site": "z", "positions": "each", "n_flips": 9}
Bits = dict[str, bytes]


def bits(result: PatchingResult) -> Bits:
    """Every array to the bit: what is saved holds float32 only."""
    return {str(name): array.values.tobytes() for name, array in result.data.items()}


@pytest.fixture(scope="module")
def task(model: Decoder, make_task: MakeTask) -> Task:
    """Of 200 pairs, 37 blocks."""
    return make_task(model, 200, length=12)


@pytest.fixture(scope="module")
def here(model: Decoder, task: Task) -> Bits:
    """The sweep in this process, without interruption."""
    assert torch.get_num_threads() == 1
    return bits(patch(model, task, **ARGUMENTS))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module of the user's that workers can import."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "a_users_metrics.py").write_text(
        "def first_minus_second(logits, task):\n    return logits[:, 1] - logits[:, 2]\n"
    )
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(modules: None) -> Iterator[Executor]:
    before = os.environ.get("OMP_NUM_THREADS")
    with local_pool(2) as executor:
        assert os.environ["OMP_NUM_THREADS"] == "1"
        yield executor
    assert os.environ.get("OMP_NUM_THREADS") == before


@pytest.mark.slow
class TestSpawned:
    def test_the_same_numbers_to_the_bit(
        self, model: Decoder, task: Task, here: Bits, pool: Executor, tmp_path: Path
    ) -> None:
        assert bits(patch(model, task, **ARGUMENTS, executor=pool)) == here
        assert pool.submit(torch.get_num_threads).result() == 1
        kept = patch(model, task, **ARGUMENTS, executor=pool, resume=tmp_path)
        assert bits(kept) == here
        for file in sorted((tmp_path / "blocks").iterdir())[::2]:
            file.unlink()
        # The other half by this process, and all of it from the folder.
        assert bits(patch(model, task, **ARGUMENTS, resume=tmp_path)) == here

    def test_paths_too(self, model: Decoder, task: Task, pool: Executor, tmp_path: Path) -> None:
        arguments: dict[str, Any] = {"senders": "heads", "n_flips": 9}
        paths = bits(path_patch(model, task, **arguments))
        assert bits(path_patch(model, task, **arguments, executor=pool, resume=tmp_path)) == paths
        for file in sorted((tmp_path / "blocks").iterdir())[::2]:
            file.unlink()
        assert bits(path_patch(model, task, **arguments, resume=tmp_path)) == paths

    def test_a_named_metric_travels(
        self, model: Decoder, task: Task, pool: Executor, tmp_path: Path
    ) -> None:
        from a_users_metrics import first_minus_second  # type: ignore[import-not-found]

        own = Task(task.clean, task.corrupted, task.answer, metric=first_minus_second)
        one = patch(model, own, "z", n_flips=9)
        assert bits(patch(model, own, "z", n_flips=9, executor=pool)) == bits(one)
        kept = patch(model, own, "z", n_flips=9, executor=pool, resume=tmp_path)
        assert bits(kept) == bits(one)

    def test_a_lambda_does_not(self, model: Decoder, task: Task, pool: Executor) -> None:
        own = Task(
            task.clean, task.corrupted, task.answer, metric=lambda logits, task: logits[:, 0]
        )
        with pytest.raises(
            TaskError, match="metric '<lambda>' cannot be sent to workers: "
        ) as caught:
            patch(model, own, "z", n_flips=9, executor=pool)
        assert caught.value.hint.startswith("make it a named function of a module that workers can")
        assert caught.value.hint.endswith("or run without an executor")

    def test_zz_a_killed_worker(
        self, model: Decoder, task: Task, here: Bits, pool: Executor, tmp_path: Path
    ) -> None:
        """The last one: it breaks the pool."""
        pid = pool.submit(os.getpid).result()
        killed = kill_once(tmp_path / "blocks", pid)
        with pytest.raises(
            SweepError, match=r"a worker died \(.*; \d+ of \d+ blocks are kept in '"
        ):
            patch(model, task, **ARGUMENTS, executor=pool, resume=tmp_path)
        assert killed()
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "blocks").iterdir()}
        assert bits(patch(model, task, **ARGUMENTS, resume=tmp_path)) == here
        after = {path: path.stat().st_mtime_ns for path in times}
        assert after == times, "finished blocks are not computed again"


def kill_once(folder: Path, pid: int) -> Callable[[], list[str]]:
    """Kill a process as soon as some blocks are finished; returns what gives their names."""
    seen: list[str] = []

    def watch() -> None:
        for _ in range(6000):
            if folder.is_dir() and len(names := os.listdir(folder)) >= 3:
                seen.extend(names)
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()

    def found() -> list[str]:
        thread.join()
        return seen

    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_dask_goes_on_when_a_worker_is_killed(
    model: Decoder, task: Task, here: Bits, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = list(client.run(os.getpid).values())
        killed = kill_once(tmp_path / "blocks", pids[0])
        found = patch(model, task, **ARGUMENTS, executor=client.get_executor(), resume=tmp_path)
        assert killed()
        assert bits(found) == here
        assert pids[0] not in client.run(os.getpid).values()


# One process that loads torch, and forks the sweeps that it kills.
KILLS = """
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from headstream import load, patch, Task
    from headstream.analyses.patching import sweep_plan

    folder = Path(sys.argv[1])
    sweep_plan.BLOCK_TOKENS = 512
    model = load("constructed-induction")
    task = Task.for_model(model, 24)
    options = dict(positions="each", n_flips=9, progress=False)
    began = time.perf_counter()
    here = patch(model, task, "z", **options)
    took = time.perf_counter() - began
    draw = random.Random(0)
    told = []
    for kill in range(3):
        child = os.fork()
        if child == 0:
            patch(model, task, "z", **options, resume=folder)
            os._exit(0)
        time.sleep(draw.uniform(0.1, 0.45) * took)
        os.kill(child, signal.SIGKILL)
        died = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        files = {p.name: p.stat().st_mtime_ns for p in (folder / "blocks").glob("*.block")}
        told.append([died, files])
    again = patch(model, task, "z", **options, resume=folder)
    last = {p.name: p.stat().st_mtime_ns for p in (folder / "blocks").glob("*.block")}
    alike = [again.data[k].values.tobytes() == here.data[k].values.tobytes() for k in here.data]
    print(json.dumps([told, last, all(alike)]))
"""


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLS), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    told, last, identical = json.loads(ran.stdout)
    assert identical
    assert any(died and 0 < len(files) < len(last) for died, files in told), "no kill was in time"
    for _, files in told:
        # Nothing lost, and nothing computed twice.
        assert files.items() <= last.items()


# Work of a minute, on a pool that is new or whose workers have begun; then Ctrl-C.
INTERRUPTED = """
    import sys, time
    from headstream.analyses.patching.sweeps.workers import local_pool

    began = None
    try:
        with local_pool(2) as pool:
            sent = [pool.submit(time.sleep, 0 if sys.argv[1] == "begun" else 60)]
            sent += [pool.submit(time.sleep, 60) for _ in range(9)]
            if sys.argv[1] == "begun":
                sent[0].result()
            print("sent", flush=True)
            try:
                sent[1].result()
            finally:
                began = time.monotonic()
                for future in sent:
                    future.cancel()
    except KeyboardInterrupt:
        took = time.monotonic() - began
        # The pool's own thread may be the one that is told of an end, a moment before we can ask.
        while any(one.is_alive() for one in pool._begun) and time.monotonic() < began + 20:
            time.sleep(0.01)
        print("stopped", took, [one.is_alive() for one in pool._begun])
"""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that runs the tests in the background has SIGINT ignored, in what they start too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("workers", ["new", "begun"])
def test_ctrl_c_ends_workers_at_once_and_without_a_word(workers: str) -> None:
    """New workers are amidst their imports, where an interrupt prints a traceback each."""
    code = textwrap.dedent(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, "-c", code, workers],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=50)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert err == ""
    words = out.split(maxsplit=2)
    # The work would take a minute; on a busy machine the processes themselves take seconds to end.
    assert words[0] == "stopped"
    assert float(words[1]) < 20
    assert words[2] == "[False, False]\n"
    assert process.returncode == 0


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_held_while_a_process_starts() -> None:
    told = []

    def interrupted() -> None:
        with sweep_workers._without_interrupts():
            signal.raise_signal(signal.SIGINT)
            told.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert told == [True], "all of it ran, masked"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Breaks(Executor):
    """A pool that breaks: its thread gives every future an error, one after the other."""

    def __init__(self) -> None:
        self.sent: list[Future[Any]] = []
        self.refused: list[BaseException] = []
        self.thread = threading.Thread(target=self._break)

    def submit(self, fn: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        self.sent.append(Future())
        if len(self.sent) == 3:
            self.thread.start()
        return self.sent[-1]

    def _break(self) -> None:
        for future in self.sent:
            try:
                future.set_exception(BrokenExecutor("a process ended"))
            except Exception as refused:
                self.refused.append(refused)
            time.sleep(0.05)


def test_a_pool_that_breaks_is_left_to_give_its_errors() -> None:
    """A future that was cancelled refuses one, and the pool's thread dies of that."""
    pool = Breaks()
    work = [Block(index, "effects", (index,)) for index in range(3)]
    with pytest.raises(Stopped, match=r"^a worker died \(a process ended\)$"):
        list(by_executor(pool, Job("folder", "0" * 64))(work))
    pool.thread.join()
    assert pool.refused == []


class TestAWorkerThatCannot:
    def test_see_the_folder(self) -> None:
        with pytest.raises(SweepError, match=r"does not see .* 'no/such'; give resume=FOLDER on a"):
            run_blocks(Job("no/such", "0" * 64), (0,))

    def test_find_its_sweep_or_model(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        patch(model, task, "z", n_flips=9, resume=tmp_path)
        with pytest.raises(SweepError, match=f"a worker finds another sweep in '{tmp_path}'"):
            run_blocks(Job(str(tmp_path), "0" * 64), (0,))
        Decoder(model.config, seed=9).save(tmp_path / "model")
        sweep = sweep_workers.manifest_sha256(sweep_workers.read_manifest(tmp_path))
        with pytest.raises(SweepError, match=f"a worker finds another model in '{tmp_path}'"):
            run_blocks(Job(str(tmp_path), sweep), (0,))
