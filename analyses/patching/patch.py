"""`patch`: what happens to the answer when one activation takes its value from another run.

1. run clean and corrupted, and measure both
2. sweep the grid: the site's values from the pair (or zero, mean, resampled) into the other run
3. sweep it twice more as controls: with a run's own values, with an unrelated pair's
   (the work of all three in fixed blocks, `sweep_plan`; `sweep` has an engine run them)
4. infer and label (`findings`), and hand back a `PatchingResult`
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

from headstream.analyses.patching import inference
from headstream.analyses.patching.checks import check_gap, check_task
from headstream.analyses.patching.conclusions import claims_of
from headstream.analyses.patching.engines import Engine
from headstream.analyses.patching.findings import findings, moves_nothing
from headstream.analyses.patching.result import PatchingResult
from headstream.analyses.patching.rows import check_option, check_seed
from headstream.analyses.patching.sweep_plan import SweepPlan
from headstream.analyses.patching.sweeps.sweep import run_sweep
from headstream.analyses.patching.task import Task
from headstream.analyses.patching.words import all_zero
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.given_model import takes_model

Direction = Literal["denoise", "noise"]
Values = Literal["pair", "zero", "mean", "resample"]


@takes_model
def patch(
    model: Decoder,
    task: Task | Any,
    site: str | Any,
    *,
    direction: str = "denoise",
    values: str = "pair",
    engine: str = "suffix",
    layers: Any = None,
    heads: Any = None,
    positions: Any = None,
    seed: Any = 0,
    n_flips: int = 5000,
    executor: Any = None,
    resume: Any = None,
    progress: bool = True,
    backend: str | None = None,
) -> PatchingResult:
    """Patch one kind of site, cell by cell, and say what that does to the answer.

    `effects` is metric(patched) - metric(the run patched into), per pair, in the metric's units,
    for both directions. `normalized` is the share of the clean-corrupted gap that was moved, as a
    ratio of means: (patched - corrupted) / gap for denoise, (clean - patched) / gap for noise.

    Args:
        model: the decoder.
        task: a `Task`: pairs of prompts, answers and metric.
        site: `resid_pre resid_mid resid_post attn_out mlp_out z q k v pattern mlp_post`, or named
            sets of sites, each patched together: `{"pair": [At("z", 0, 1), At("z", 1, 3)]}`.
            The pattern keeps the values that it meets and is not renormalised.
        direction: `denoise` puts clean values into the corrupted run and shows what suffices to
            restore the answer; `noise` puts corrupted values into the clean run and shows what is
            needed. Neither mirrors the other: denoising misses the members of an AND, noising
            those of an OR. Where any wrong value breaks the answer, an unrelated prompt's may do so
            as much. Such a site gets no label, however large its effect (what breaks is not
            specific to the corruption), and the summary names it apart.
        values: `pair` takes them from the pair's other run; `mean` from the mean of that run over
            all pairs, position by position; `resample` from that run of another pair; `zero`.
            `resample` is the unrelated-prompt control itself, so it can carry no CAUSAL label.
        engine: `suffix` recomputes only what a patch changes; `hooks` is the definition, one hooked
            forward pass a cell, and the one for a model that carries hooks or edits. Their numbers
            agree to rounding.
        layers, heads: restrict the grid. For k and v, `heads` are key/value heads, for mlp_post
            neurons.
        positions: `each` real position of a row counted from its first real token, `all` positions
            of a row at once, `roles` of the task, or a list of positions (negative ones count from
            each row's end). By default `each` for sites on the stream, `all` for heads. Positions
            that a row lacks are NaN for its pair, and every mean is over the pairs that have them.
            For the pattern a position is the query's (a row of it), and there are also `edges` (all
            of them) or a list of edges `(query, key)`, each end a position or a role.
        seed: in [0, 2**63), of sign flips, resamples and of which pairs are unrelated.
        n_flips: sign patterns; all of them if there are no more than this.
        executor: a `concurrent.futures.Executor` that runs the sweep's blocks: a pool of spawned
            processes, Dask's `Client.get_executor()`, any other. Workers compute with one thread
            each and read model and prompts from a folder: `resume`, which must then lie on a disk
            that all of them see, or a temporary one of this machine. Any executor, split or order
            gives the same numbers to the bit, on one kind of machine.
        resume: a folder that keeps every finished block. After a kill, a crash or a full disk the
            same call goes on from there, with nothing lost or repeated; a folder of another model,
            task or version is refused. It keeps the number of threads it was begun with.
        progress: show a bar on stderr, if that is a terminal.
        backend: of every run; None is the model's own.
    Returns:
        Effects with their inference, controls and claims.
    Raises:
        TaskError: on an argument that does not fit, or if clean and corrupted give the same metric.
        TokenError, ShapeError: on tokens that do not fit the model.
        HookError: with `engine="suffix"`, `executor` or `resume`, if hooks or edits are on the
            model.
        SweepError: if a worker dies, the disk is full, or `resume` belongs to another sweep.
    Source:
        Heimersheim & Nanda 2024 (arXiv 2404.15255); Zhang & Nanda 2023 (arXiv 2309.16042). We
        correct for the whole grid and average before dividing.
    """
    inference.check_flips(n_flips)
    plan = planned(
        model,
        task,
        site,
        direction=direction,
        values=values,
        engine=engine,
        layers=layers,
        heads=heads,
        positions=positions,
        seed=seed,
        backend=backend,
    )
    return _patch(model, plan, engine, n_flips, executor=executor, resume=resume, progress=progress)


def planned(
    model: Decoder,
    task: Task | Any,
    site: str | Any,
    *,
    direction: str = "denoise",
    values: str = "pair",
    engine: str = "suffix",
    layers: Any = None,
    heads: Any = None,
    positions: Any = None,
    seed: Any = 0,
    backend: str | None = None,
) -> SweepPlan:
    """The sweep that a call of `patch` with these arguments runs.

    Raises:
        TaskError, TokenError: on an argument that does not fit.
    """
    check_option("direction", direction, get_args(Direction))
    check_option("values", values, get_args(Values))
    check_option("engine", engine, get_args(Engine))
    check_seed(seed)
    return SweepPlan(
        check_task(model, task),
        site,
        direction=direction,
        values=values,
        layers=layers,
        heads=heads,
        positions=positions,
        seed=seed,
        backend=backend,
    )


def _patch(
    model: Decoder,
    plan: SweepPlan,
    engine: str,
    n_flips: int,
    *,
    executor: Any,
    resume: Any,
    progress: bool,
) -> PatchingResult:
    grid = plan.grid(model.config)
    swept = run_sweep(
        model,
        plan,
        engine,
        executor=executor,
        resume=resume,
        progress=progress,
        check=lambda base: check_gap(plan.task, base, model.dtype),
    )
    data, details = findings(
        model,
        plan,
        engine,
        swept,
        grid.coords,
        n_flips=n_flips,
        about={
            "site": grid.name,
            "positions": grid.positions,
            "values": plan.values,
            "noun": "sites",
        },
    )
    if moves_nothing(swept, model):
        warnings.warn(
            f"patch of {grid.name}, {plan.direction}: "
            + all_zero(details, data, "no one of these values moves the metric"),
            stacklevel=4,
        )
    how = "denoising" if plan.direction == "denoise" else "noising"
    return PatchingResult(
        title=f"Causal patching of {grid.name}, {how}",
        data=data,
        provenance=Provenance.of(model, seed=plan.seed, backend=plan.backend),
        claims=claims_of(data, details),
        details=details,
    )
