"""What taking a run apart costs beside the forward pass, in time and memory.

    python benchmarks/bench_decompose.py          two or three minutes on two cores
    THREADS=1 python ...                          two by default

A decoder of GPT-2's shape with random weights reads 64 tokens. "Forward" is the plain pass with its
logits. "Decomposed" is a pass of its own, every head's write formed at every position and held to
the stream, and what each adds to an answer's logit difference, at every position. The two take
turns in one process, and the fastest of each is compared. Memory is measured apart, one process a
kind: the peak that a second run added to what was held before it (weights and libraries).
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

THREADS = int(os.environ.get("THREADS", "2"))
TURNS = int(os.environ.get("TURNS", "15"))
POSITIONS = 64
SHAPE: dict[str, Any] = {
    "n_layers": 12,
    "n_heads": 12,
    "d_model": 768,
    "d_head": 64,
    "d_mlp": 3072,
    "d_vocab": 50257,
    "n_ctx": 1024,
    "attn_bias": True,
    "mlp_bias": True,
    "tied_embeddings": True,
}
JOBS = {
    "forward": "forward pass with its logits",
    "bare": "forward pass without them, as taking it apart needs",
    "decomposed": "every head's write at every position, checked, and its logit attribution",
    "writes": "the same, and all writes formed at once and kept (only when asked)",
    "neurons": "every neuron's attribution too (36,864 neurons)",
    "sources": "every head by source token at one position",
    "reads": "what the last layer's head reads from each write (q, k, v)",
}


def main() -> None:
    print(f"{cpu_name()}, {THREADS} threads, Python {platform.python_version()}, ", end="")
    print(f"torch {version('torch')}; 12 layers x 12 heads, d_model 768, {POSITIONS} positions")
    print("\n| what | bar | time | beside the forward pass | peak memory added |")
    print("|---|---|---|---|---|")
    times = measured("--time")
    ratios = times.pop("ratios")
    for kind, words in JOBS.items():
        added = min(measured("--memory", kind)["added"] for _ in range(2))
        bar = "<= 2x time" if kind == "decomposed" else ""
        ratio = f"{times[kind] / times['forward']:.2f}x"
        if kind != "forward":
            ratio += f" (median of {TURNS} turns {ratios[kind]:.2f}x)"
        row = (words, bar, f"{1000 * times[kind]:.0f} ms", ratio, f"{added / 2**20:.0f} MB")
        print(f"| {' | '.join(row)} |", flush=True)
    per_layer = 12 * POSITIONS * 768 * 4 / 2**20
    print(
        f"\n[pos, head, d_model] is {per_layer:.1f} MB a layer, {12 * per_layer:.0f} MB for all; "
        f"logits are {POSITIONS * 50257 * 4 / 2**20:.0f} MB."
    )


def measured(*arguments: str) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_times() -> None:
    jobs = {kind: job(kind) for kind in JOBS}
    for work in jobs.values():
        work()
    taken: dict[str, list[float]] = {kind: [] for kind in JOBS}
    for _ in range(TURNS):
        for kind, work in jobs.items():
            start = time.perf_counter()
            work()
            taken[kind].append(time.perf_counter() - start)
    ratios = {
        kind: statistics.median(
            each / plain for each, plain in zip(turns, taken["forward"], strict=True)
        )
        for kind, turns in taken.items()
    }
    print(json.dumps({kind: min(each) for kind, each in taken.items()} | {"ratios": ratios}))


def run_memory(kind: str) -> None:
    work = job(kind)
    work()  # what a first call loads, and the kernels' own buffers, are no part of the cost
    # What was freed since, the allocator still holds on to.
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    reset_peak()
    kept = work()
    added = peak() - before
    del kept
    print(json.dumps({"added": added}))


def job(kind: str) -> Callable[[], Any]:
    import torch

    from headstream import Decoder, DecoderConfig
    from headstream.circuits.stream.reads import residual_reads
    from headstream.circuits.stream.residual import decompose_residual
    from headstream.circuits.stream.sources import source_attribution

    torch.set_num_threads(THREADS)
    if not MODEL:
        MODEL.append(Decoder(DecoderConfig(**SHAPE)))
    model = MODEL[0]
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(SHAPE["d_vocab"], (1, POSITIONS), generator=draws)

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    def bare() -> None:
        with torch.no_grad():
            model(tokens, return_type=None)

    def decomposed() -> Any:
        found = decompose_residual(model, tokens)
        return found, found.logit_attribution(5, 7, pos=None)

    def writes() -> Any:
        found, attribution = decomposed()
        return found.writes, attribution

    def neurons() -> Any:
        return decompose_residual(model, tokens, per_neuron=True).logit_attribution(5, 7, pos=None)

    def sources() -> Any:
        return source_attribution(model, tokens, 5, 7)

    def reads() -> Any:
        return residual_reads(model, tokens, SHAPE["n_layers"] - 1, 0)

    works: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "bare": bare,
        "decomposed": decomposed,
        "writes": writes,
        "neurons": neurons,
        "sources": sources,
        "reads": reads,
    }
    return works[kind]


MODEL: list[Any] = []  # one for all jobs of a process


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_peak() -> None:
    """From here on the peak is that of what follows (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {
        line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line
    }
    return f"{found.get('model name', 'unknown CPU')}, {os.cpu_count()} cores"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--time"]:
        run_times()
    elif sys.argv[1:2] == ["--memory"]:
        run_memory(sys.argv[2])
    else:
        main()
