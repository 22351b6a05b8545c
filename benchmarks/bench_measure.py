"""What measuring every head costs beside the forward pass, in time and memory.

    python benchmarks/bench_measure.py            everything, about ten minutes on two cores
    python benchmarks/bench_measure.py 32768 tl   some parts: 32768, 131072, tl, blocks
    THREADS=1 python ...                          two by default

Every run is a process of its own, so that its peak is its own; what is compared takes turns, and
each keeps its fastest of several runs, so that a busy machine disturbs all alike. Memory is the
peak of the whole process, and in brackets what the run added to what was held before it: the
ratios of the added memory are the stricter ones, since Python and torch alone hold some 400 MB.

The bare pass is the same stack of layers with the fused kernel and no unembedding, which
measuring does not need either.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

THREADS = int(os.environ.get("THREADS", "2"))
D_VOCAB = 5000  # n^2 / 10000 pairs of equal tokens, 107 thousand at n = 32768
SHORT = 8.0  # seconds during which a run is repeated; a longer one runs once
SIZES = {"n_heads": 8, "d_model": 256, "d_head": 32}


def main(parts: Sequence[str]) -> None:
    wanted = parts or ("32768", "131072", "tl", "blocks")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformer-lens"))
    print(f"{cpu_name()}, {THREADS} threads, Python {platform.python_version()}, {versions}")
    print("\n| what | bar | measured |\n|---|---|---|")
    for part in wanted:
        for row in PARTS[part]():
            print(f"| {' | '.join(row)} |", flush=True)


def part_32768() -> list[tuple[str, str, str]]:
    runs = compare(["bare", "three", "five"], n=32768, layers=4, repeats=3)
    bare, three, five = (runs[name] for name in ("bare", "three", "five"))
    where = "n = 32768, 4 layers x 8 heads: "
    return [
        (where + "bare pass", "", f"{bare.seconds:.1f} s, {bare.memory}"),
        (
            where + "with sink, previous-token and induction",
            "<= 1.15x time, <= 1.3x memory",
            f"{three.seconds / bare.seconds:.3f}x, {three.against(bare)}",
        ),
        (
            where + "also entropy and mass of three segments",
            "<= 2.2x time",
            f"{five.seconds / bare.seconds:.3f}x, {five.against(bare)}",
        ),
    ]


def part_131072() -> list[tuple[str, str, str]]:
    lengths = (8192, 16384, 32768, 131072)
    runs = [compare(["three"], n=n, layers=2, repeats=1)["three"] for n in lengths]
    spans = zip(lengths[1:], runs[1:], strict=True)
    exponents = [math.log(run.added / runs[0].added) / math.log(n / 8192) for n, run in spans]
    last = runs[-1]
    return [
        (
            "n = 131072, 2 layers x 8 heads: sink, previous-token and induction",
            "finishes",
            f"{last.seconds:.0f} s, {last.memory}",
        ),
        (
            "memory added, as a power of n from 8192 up to 131072",
            "<= 1.1",
            f"{exponents[-1]:.2f} ("
            + ", ".join(f"{run.added / 2**20:.0f} MB" for run in runs)
            + ")",
        ),
    ]


def part_tl() -> list[tuple[str, str, str]]:
    runs = compare(["three", "transformer_lens"], n=8192, layers=2, repeats=2)
    ours, theirs = runs["three"], runs["transformer_lens"]
    return [
        (
            "n = 8192, 2 layers x 8 heads: the same three scores from TransformerLens' patterns",
            "",
            f"{theirs.seconds:.1f} s, {theirs.memory}",
        ),
        (
            "the same, measured here",
            ">= 25x faster, >= 30x less memory",
            f"{ours.seconds:.2f} s, {ours.memory}: {theirs.seconds / ours.seconds:.0f}x faster, "
            f"{theirs.added / ours.added:.0f}x less memory added "
            f"({theirs.peak / ours.peak:.0f}x by whole process)",
        ),
    ]


def part_blocks() -> list[tuple[str, str, str]]:
    runs = compare(["fused", "blocks", "block_entropy"], n=4096, layers=1, repeats=6)
    fused = runs["fused"].seconds
    return [
        (
            "our block loop against the fused kernel, n = 4096, 8 heads",
            "<= 3x",
            f"{runs['blocks'].seconds / fused:.2f}x",
        ),
        (
            "the block loop's entropy alone, likewise",
            "",
            f"{runs['block_entropy'].seconds / fused:.2f}x",
        ),
    ]


PARTS = {"32768": part_32768, "131072": part_131072, "tl": part_tl, "blocks": part_blocks}


# One run a process.


class Run:
    """The fastest and the leanest of several runs of one kind."""

    def __init__(self) -> None:
        self.seconds = self.peak = self.added = math.inf

    def note(self, result: dict[str, float]) -> None:
        self.seconds = min(self.seconds, result["seconds"])
        self.peak = min(self.peak, result["peak"])
        self.added = min(self.added, result["added"])

    @property
    def memory(self) -> str:
        return f"{self.peak / 2**20:.0f} MB ({self.added / 2**20:.0f} MB)"

    def against(self, other: Run) -> str:
        return f"{self.peak / other.peak:.2f}x memory ({self.added / other.added:.2f}x)"


def compare(kinds: Sequence[str], *, n: int, layers: int, repeats: int) -> dict[str, Run]:
    runs = {kind: Run() for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
            command = [sys.executable, __file__, "--run", kind, str(n), str(layers)]
            done = subprocess.run(command, env=environment, check=True, capture_output=True)
            result = json.loads(done.stdout.splitlines()[-1])
            print(f"  {kind} n={n}: {result}", file=sys.stderr, flush=True)
            runs[kind].note(result)
    return runs


def run(kind: str, n: int, layers: int) -> None:
    import torch

    torch.set_num_threads(THREADS)
    job = JOBS[kind](n, layers)
    JOBS[kind](256, 1)()  # what a first call loads is no part of the cost
    before = resident()
    seconds, began = math.inf, time.perf_counter()
    while time.perf_counter() - began < SHORT:
        start = time.perf_counter()
        job()
        seconds = min(seconds, time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "added": peak - before}))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {
        line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line
    }
    return f"{found.get('model name', 'unknown CPU')}, {os.cpu_count()} cores"


def ours(n: int, layers: int) -> tuple[Any, Any]:
    import torch

    from headstream import Decoder, DecoderConfig

    config = DecoderConfig(n_layers=layers, d_vocab=D_VOCAB, n_ctx=n, **SIZES)
    tokens = torch.randint(D_VOCAB, (1, n), generator=torch.Generator().manual_seed(0))
    return Decoder(config), tokens


def bare(n: int, layers: int) -> Callable[[], Any]:
    import torch

    model, tokens = ours(n, layers)

    def job() -> None:
        with torch.no_grad():
            model(tokens, backend="flash", stop_at_layer=layers)

    return job


def three(n: int, layers: int) -> Callable[[], Any]:
    from headstream.circuits.measuring.masses import Offset, SinkMass
    from headstream.circuits.measuring.matches import InductionMass
    from headstream.circuits.measuring.measure import measure_attention

    model, tokens = ours(n, layers)
    return lambda: measure_attention(model, tokens, [SinkMass(), Offset(1), InductionMass()])


def five(n: int, layers: int) -> Callable[[], Any]:
    from headstream.circuits.measuring.masses import Offset, SinkMass
    from headstream.circuits.measuring.matches import InductionMass
    from headstream.circuits.measuring.measure import measure_attention
    from headstream.circuits.measuring.segments import SegmentMass
    from headstream.circuits.measuring.spread import Entropy

    model, tokens = ours(n, layers)
    labels = ["instruction"] * (n // 8) + ["data"] * (n // 2) + ["answer"] * (n - n // 8 - n // 2)
    statistics = [SinkMass(), Offset(1), InductionMass(), Entropy(), SegmentMass(labels)]
    return lambda: measure_attention(model, tokens, statistics)


def transformer_lens(n: int, layers: int) -> Callable[[], Any]:
    import torch
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot

    model = boot(
        TransformerBridgeConfig(
            n_layers=layers, n_ctx=n, d_vocab=D_VOCAB, attn_only=True, seed=0, **SIZES
        )
    )
    tokens = torch.randint(D_VOCAB, (1, n), generator=torch.Generator().manual_seed(0))

    def job() -> None:
        with torch.no_grad():
            _, cache = model.run_with_cache(
                tokens,
                names_filter=lambda name: name.endswith("hook_pattern"),
                return_type=None,
            )
            after_copy = (tokens[0, :, None] == tokens[0, None].roll(1)).tril()
            after_copy[:, 0] = False
            asking = after_copy.any(-1).sum()
            for layer in range(layers):
                pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
                pattern[..., 1:, 0].mean(-1)
                pattern.diagonal(-1, -2, -1).mean(-1)
                pattern.flatten(2) @ after_copy.flatten().float() / asking

    return job


def kernel(name: str) -> Callable[[int, int], Callable[[], Any]]:
    def make(n: int, layers: int) -> Callable[[], Any]:
        import torch

        from headstream.models.attend_blocks import row_entropy
        from headstream.models.attend_flash import attend_flash

        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, n, 8, 32, generator=generator) for _ in range(3))

        def job() -> None:
            if name == "block_entropy":
                row_entropy(q, k, scale=32**-0.5)
            else:
                attend_flash(q, k, v, scale=32**-0.5, kernel=name)

        return job

    return make


JOBS = {
    "bare": bare,
    "three": three,
    "five": five,
    "transformer_lens": transformer_lens,
    **{name: kernel(name) for name in ("fused", "blocks", "block_entropy")},
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(sys.argv[1:])
