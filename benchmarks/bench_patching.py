"""What a patching sweep costs beside TransformerLens' own.

    python benchmarks/bench_patching.py             everything, about fifteen minutes on two cores
    python benchmarks/bench_patching.py z resid_pre some parts: z, large, resid_pre, q, k, v, edge,
                                                    path
    THREADS=1 python ...                            two by default

One pair of prompts, that differ at every position, so that no site is left out because nothing
changes there. Ours is the whole sweep, with both unpatched runs recorded; theirs is the sweep of
`transformer_lens.patching` on TransformerLens' own natively built model of the same shape, its
clean cache given. Both measure one logit difference. They take turns, and each keeps its fastest
run, so that a busy machine disturbs both alike. Where theirs is too long, it runs every n-th site
and its time is scaled, and the table says so.

The difference is between the sweep of `transformer_lens.patching` on our Decoder and ours on the
same Decoder, in nats. Needed work is what our sweep's matrix products take, counted while it runs.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from path_recipe import HeadPath, head_paths, recipe

THREADS = int(os.environ.get("THREADS", "2"))
SMALL = {"n_layers": 4, "n_heads": 8, "d_model": 256, "d_head": 32, "d_mlp": 1024, "d_vocab": 1000}
LARGE = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_head": 64, "d_mlp": 3072}


@dataclass(frozen=True)
class Part:
    """One row of the table.

    Attributes:
        what, bar: as printed.
        shape, length: of the model and the prompts.
        site, positions: of our sweep.
        hook, setter, axes: of theirs.
        every: run every n-th of their sites and scale; 1 is all of them.
        compared: run every n-th of their sites on our Decoder, for the difference.
        repeats: turns.
    """

    what: str
    bar: str
    shape: dict[str, int]
    length: int
    site: str
    positions: Any
    hook: str
    setter: str
    axes: tuple[str, ...]
    every: int = 1
    compared: int = 1
    repeats: int = 3


HEAD = ("layer", "pos", "head")
EDGES = [(query, key) for query in range(64) for key in sorted({0, query // 2, query})]
PARTS = {
    "z": Part(
        "z by position, 4 x 8 x 64",
        ">= 40x, <= 1e-5",
        SMALL,
        64,
        "z",
        "each",
        "z",
        "layer_pos_head_vector_patch_setter",
        HEAD,
    ),
    "large": Part(
        "z by position, 12 x 12 x 32, d_model 768, d_vocab 50257",
        ">= 10x",
        LARGE | {"d_vocab": 50257},
        32,
        "z",
        "each",
        "z",
        "layer_pos_head_vector_patch_setter",
        HEAD,
        every=96,
        compared=96,
        repeats=2,
    ),
    "resid_pre": Part(
        "resid_pre by position, 4 x 64",
        ">= 5x",
        SMALL,
        64,
        "resid_pre",
        "each",
        "resid_pre",
        "layer_pos_patch_setter",
        ("layer", "pos"),
    ),
    **{
        site: Part(
            f"{site} by position, 4 x 8 x 64",
            ">= 5x",
            SMALL,
            64,
            site,
            "each",
            site,
            "layer_pos_head_vector_patch_setter",
            HEAD,
            every=8,
            compared=8,
        )
        for site in ("q", "k", "v")
    },
    "edge": Part(
        f"pattern, edge by edge: {len(EDGES)} edges of each of 4 x 8 heads",
        ">= 5x",
        SMALL,
        64,
        "pattern",
        EDGES,
        "pattern",
        "layer_head_dest_src_pos_pattern_patch_setter",
        ("layer", "head", "edge"),
        every=24,
        compared=24,
    ),
    "path": Part(
        "paths: every head to q, k and v of every later head, 4 x 8, MLPs held",
        ">= 5x",
        SMALL,
        64,
        "path",
        "all",
        "",
        "",
        ("path",),
        every=4,
        compared=4,
    ),
}


def main(names: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(THREADS)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformer-lens"))
    print(f"{cpu_name()}, {THREADS} threads, Python {platform.python_version()}, {versions}")
    print(
        "\n| sweep | bar | sites | theirs | ours | ratio | largest difference | needed work, rate |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    for name in names or PARTS:
        print(f"| {' | '.join(row(PARTS[name]))} |", flush=True)


def row(part: Part) -> list[str]:
    from torch.utils.flop_counter import FlopCounterMode

    ours, size = our_sweep(part)
    theirs, share = their_sweep(part, native(part), every=part.every)
    seconds = {"ours": math.inf, "theirs": math.inf}
    for turn in range(part.repeats + 1):
        for name, job in (("ours", ours), ("theirs", theirs)):
            if turn == 0 and name == "theirs" and part.repeats < 3:
                continue  # what a first call loads is lost in so long a run
            start = time.perf_counter()
            job()
            took = time.perf_counter() - start
            print(f"  {part.site} {name}: {took:.3f} s", file=sys.stderr, flush=True)
            if turn or part.repeats < 3:
                seconds[name] = min(seconds[name], took)
    their_seconds = seconds["theirs"] / share
    with FlopCounterMode(display=False) as counter:
        found = ours()
    work = counter.get_total_flops()
    scaled = "" if share == 1 else f" (from {share:.1%} of the sites)"
    return [
        part.what,
        part.bar,
        f"{size}",
        f"{their_seconds:.1f} s{scaled}",
        f"{seconds['ours']:.3f} s",
        f"{their_seconds / seconds['ours']:.1f}x",
        f"{difference(part, found):.1e}",
        f"{work / 1e9:.0f} GFLOP, {work / seconds['ours'] / 1e9:.0f} GFLOP/s",
    ]


def prompts(part: Part) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(part.shape["d_vocab"], (1, part.length), generator=generator)
    return clean, (clean + 1) % part.shape["d_vocab"]


def decoder(part: Part) -> Any:
    from headstream import Decoder, DecoderConfig

    config = DecoderConfig(
        **part.shape, n_ctx=part.length, attn_bias=True, mlp_bias=True, unembed_bias=True
    )
    return Decoder(config)


def native(part: Part) -> Any:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot

    config = TransformerBridgeConfig(
        **part.shape, n_ctx=part.length, act_fn="gelu", normalization_type="LN", seed=0
    )
    return boot(config).eval()


def our_sweep(part: Part) -> tuple[Callable[[], Any], int]:
    """A function that runs the sweep and returns [cell] in the grid's order, and its size."""
    if part.site == "path":
        return our_paths(part)
    import numpy as np

    from headstream.analyses.patching.engines import open_sweep
    from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
    from headstream.analyses.patching.task import Task

    model, (clean, corrupted) = decoder(part), prompts(part)
    task = Task(clean, corrupted, answer=1, wrong=2)
    plan = SweepPlan(task, part.site, positions=part.positions, second=False)
    size = plan.grid(model.config).size

    def job() -> Any:
        sweep = open_sweep(model, plan)
        found = np.full(size, np.nan)
        for block in blocks(plan, model.config, controls=False):
            found[list(block.cells)] = sweep.run(block)[0, :, 0]
        return found + sweep.base["corrupted"][0, 0]

    return job, size


def our_paths(part: Part) -> tuple[Callable[[], Any], int]:
    """The same over paths, in the order of `path_recipe.head_paths`."""
    import numpy as np

    from headstream.analyses.patching.paths.ends import ends_of
    from headstream.analyses.patching.paths.engines import open_paths
    from headstream.analyses.patching.paths.plan import PathPlan, path_blocks
    from headstream.analyses.patching.task import Task

    model, (clean, corrupted) = decoder(part), prompts(part)
    task = Task(clean, corrupted, answer=1, wrong=2)
    paths = every_path(part)
    ends = ends_of(
        model.config,
        list(dict.fromkeys(f"L{la}H{h}" for (la, h), _ in paths)),
        list(dict.fromkeys(f"L{la}H{h}.{what}" for _, (la, h, what) in paths)),
    )
    plan = PathPlan(task, *ends, positions=part.positions)
    senders, receivers = ([end.label for end in each] for each in ends)
    order = [
        (senders.index(f"L{la}H{h}"), receivers.index(f"L{to}H{g}.{what}"), 0)
        for (la, h), (to, g, what) in paths
    ]
    index = np.ravel_multi_index(np.array(order).T, plan.shape)
    work = [block for block in path_blocks(plan, model.config) if block.kind == "effects"]

    def job() -> Any:
        sweep = open_paths(model, plan)
        found = np.full(int(np.prod(plan.shape)), np.nan)
        for block in work:
            found[list(block.cells)] = sweep.run(block)[0, :, 0]
        return found[index] + sweep.base["corrupted"][0, 0]

    return job, len(paths)


def every_path(part: Part) -> list[HeadPath]:
    return head_paths(part.shape["n_layers"], part.shape["n_heads"])


def their_sweep(part: Part, model: Any, *, every: int) -> tuple[Callable[[], Any], float]:
    """The same of TransformerLens, on every n-th site, and the share of sites that it runs."""
    import pandas as pd
    import torch
    from transformer_lens import patching

    clean, corrupted = prompts(part)
    if part.site == "path":
        paths = every_path(part)
        some = paths[:: every if every == 1 else every + 1]
        return recipe(model, clean, corrupted, some, metric), len(some) / len(paths)
    index = sites(part)
    chosen = index[:: every if every == 1 else every + 1]  # + 1: not always the same head
    columns = ["layer", "head", "dest_pos", "src_pos"] if part.site == "pattern" else part.axes
    frame = pd.DataFrame(chosen, columns=list(columns))
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)

    def job() -> Any:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            return patching.generic_activation_patch(
                model,
                corrupted,
                cache,
                metric,
                getattr(patching, part.setter),
                part.hook,
                index_df=frame,
            )

    return job, len(chosen) / len(index)


def metric(logits: Any) -> Any:
    return logits[0, -1, 1] - logits[0, -1, 2]


def sites(part: Part) -> list[tuple[int, ...]]:
    """Their indices of every site, in the order of our grid."""
    layers, heads, length = part.shape["n_layers"], part.shape["n_heads"], part.length
    if part.site == "pattern":
        return [(la, h, q, k) for la in range(layers) for h in range(heads) for q, k in EDGES]
    if "head" not in part.axes:
        return [(la, p) for la in range(layers) for p in range(length)]
    return [(la, p, h) for la in range(layers) for h in range(heads) for p in range(length)]


def difference(part: Part, found: Any) -> float:
    """The largest difference of the metric at the sites that they run on our Decoder."""
    import numpy as np

    job, _ = their_sweep(part, decoder(part), every=part.compared)
    ours = found[:: part.compared if part.compared == 1 else part.compared + 1]
    return float(np.abs(ours - job().numpy()).max())


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {
        line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line
    }
    return f"{found.get('model name', 'unknown CPU')}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main(sys.argv[1:])
