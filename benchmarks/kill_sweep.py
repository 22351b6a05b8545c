"""Is a sweep that is killed again and again the sweep that was left alone?

    python benchmarks/kill_sweep.py [--kills 20] [--pairs 24]

One sweep (z by position, 4 layers x 8 heads x 64 positions, d_model 256) is run without
interruption. Then it is begun again in a resume folder and ended by SIGKILL at random moments,
while it starts or while it computes, in one process and with two workers by turns, each time going
on from the folder. Last, a fresh one runs on a Dask cluster of two workers, one of which is killed.
Every number of each must be that of the first to the bit, and no finished block may be written
twice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.sweeps.workers import local_pool
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.store import load

SIZES = dict(n_layers=4, n_heads=8, d_model=256, d_head=32, d_mlp=1024, d_vocab=1000, n_ctx=64)


def make_task(n: int) -> Task:
    draws = torch.Generator().manual_seed(0)
    clean = torch.randint(0, 1000, (n, 64), generator=draws)
    corrupted = clean.clone()
    corrupted[:, 10] = (clean[:, 10] + 7) % 1000
    return Task(clean, corrupted, clean[:, 10], corrupted[:, 10])


def digest(result: Any) -> str:
    """Of every array to the bit, and of what is saved."""
    found = hashlib.sha256(json.dumps(result.to_json()).encode())
    for name in sorted(result.data.data_vars):
        found.update(np.ascontiguousarray(result.data[name].values).tobytes())
    return found.hexdigest()


def child(model: str, pairs: int, workers: int, resume: str | None) -> None:
    """One run; prints when it has loaded everything, and at the end what it found."""
    torch.set_num_threads(1)
    loaded, task = load(model), make_task(pairs)
    print("loaded", flush=True)
    began = time.perf_counter()
    options: dict[str, Any] = {"positions": "each", "progress": False, "resume": resume}
    if workers:
        with local_pool(workers) as pool:
            result = patch(loaded, task, "z", **options, executor=pool)
    else:
        result = patch(loaded, task, "z", **options)
    seconds = time.perf_counter() - began
    print(json.dumps({"sha256": digest(result), "seconds": seconds}), flush=True)


def start(model: Path, pairs: int, workers: int, resume: Path | None) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "--child", str(model), "--pairs", str(pairs)]
    words += ["--workers", str(workers)] + ([] if resume is None else ["--resume", str(resume)])
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    assert process.returncode == 0, "a run failed"
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def finished(folder: Path) -> dict[str, int]:
    """Finished blocks, and when each was written."""
    return {p.name: p.stat().st_mtime_ns for p in (folder / "blocks").glob("*.block")}


def group_ends(group: int) -> bool:
    """Whether the workers of a killed run end by themselves."""
    for _ in range(300):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return False


def kill_one(
    model: Path, pairs: int, workers: int, folder: Path, delay: float, early: bool
) -> tuple[float, bool]:
    """Start a run and kill it; seconds it lived, and whether its workers ended with it."""
    before = len(finished(folder)) if folder.exists() else 0
    began = time.perf_counter()
    process = start(model, pairs, workers, folder)
    if not early:
        assert process.stdout is not None
        process.stdout.readline()
        while len(finished(folder)) == before and process.poll() is None:
            time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    lived = time.perf_counter() - began
    if process.stdout is not None:
        process.stdout.close()
    return lived, group_ends(process.pid)


def killed_dask_worker(model: Path, pairs: int, folder: Path, delay: float) -> dict[str, Any]:
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"positions": "each", "progress": False, "resume": folder}
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
        Client(cluster) as client,
    ):
        pid = sorted(client.run(os.getpid).values())[0]
        at: dict[str, Any] = {}

        def kill() -> None:
            while len(finished(folder)) == 0:
                time.sleep(0.01)
            time.sleep(delay)
            at["before"] = len(finished(folder))
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        torch.set_num_threads(1)
        result = patch(
            load(model), make_task(pairs), "z", **options, executor=client.get_executor()
        )
        thread.join()
        at["restarted"] = pid not in client.run(os.getpid).values()
    return at | {"sha256": digest(result), "blocks": len(finished(folder))}


def main(kills: int, pairs: int) -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        model, folder = Path(name) / "model", Path(name) / "sweep"
        Decoder(DecoderConfig(**SIZES), seed=0).save(model)
        began = time.perf_counter()
        alone = finish(start(model, pairs, 0, None))
        loading = time.perf_counter() - began - alone["seconds"]
        print(
            f"Python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} cores; "
            f"left alone: {alone['seconds']:.1f} s after {loading:.1f} s of loading\n"
        )
        print("| kill | run | moment | after | blocks before | blocks after | workers ended |")
        print("|---|---|---|---|---|---|---|", flush=True)
        share = alone["seconds"] / (kills + 1)
        written: dict[str, int] = {}
        twice = 0
        for kill in range(kills):
            workers, early = 2 * (kill % 2), kill % 5 == 4
            delay = draw.uniform(0, loading) if early else draw.uniform(0, 1.6 * share)
            lived, ended = kill_one(model, pairs, workers, folder, delay, early)
            there = finished(folder)
            twice += sum(there.get(block) != moment for block, moment in written.items())
            print(
                f"| {kill + 1} | {f'{workers} workers' if workers else 'one process'} "
                f"| {'starting' if early else 'sweeping'} | {lived:.1f} s "
                f"| {len(written)} | {len(there)} | {'yes' if ended else 'NO'} |",
                flush=True,
            )
            written = there
        last = finish(start(model, pairs, 0, folder))
        there = finished(folder)
        twice += sum(there.get(block) != moment for block, moment in written.items())
        print(
            f"\nlast run: {len(there) - len(written)} of {len(there)} blocks in "
            f"{last['seconds']:.1f} s; blocks lost or written twice: {twice}; result identical to "
            f"the bit: {'yes' if last['sha256'] == alone['sha256'] else 'NO'}"
        )
        delay = draw.uniform(0, 0.4 * alone["seconds"])
        dask = killed_dask_worker(model, pairs, Path(name) / "dask", delay)
        print(
            f"Dask, two workers, one killed after {dask['before']} of {dask['blocks']} blocks "
            f"(started anew: {'yes' if dask['restarted'] else 'no'}); identical to the bit: "
            f"{'yes' if dask['sha256'] == alone['sha256'] else 'NO'}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--child")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--resume")
    given = parser.parse_args()
    if given.child:
        child(given.child, given.pairs, given.workers, given.resume)
    else:
        main(given.kills, given.pairs)
