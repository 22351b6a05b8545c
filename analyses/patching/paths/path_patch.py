"""`path_patch`: what one component passes to another, and whether the answer depends on it.

1. run clean and corrupted, and measure both
2. sweep all paths: the sender's other write reaches one receiver alone, everything between is held
3. sweep them again as controls: with a run's own writes, with an unrelated pair's
4. the total effect of every sender, through everything that follows it
   (the work of all of them in fixed blocks, `plan`; `sweeps.sweep` has an engine run them)
5. infer and label (`findings`), and hand back a `PathResult`
"""

from __future__ import annotations

import warnings
from typing import Any, get_args

import numpy as np

from headstream.analyses.patching import inference
from headstream.analyses.patching.checks import check_gap, check_task
from headstream.analyses.patching.engines import Engine
from headstream.analyses.patching.findings import findings, moves_nothing
from headstream.analyses.patching.patch import Direction
from headstream.analyses.patching.paths.ends import ends_of
from headstream.analyses.patching.paths.plan import PathPlan
from headstream.analyses.patching.paths.result import PathResult, path_claims
from headstream.analyses.patching.places import places_of
from headstream.analyses.patching.rows import check_option, check_seed
from headstream.analyses.patching.sweeps.sweep import run_sweep
from headstream.analyses.patching.task import Task
from headstream.analyses.patching.words import all_zero
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.given_model import takes_model


@takes_model
def path_patch(
    model: Decoder,
    task: Task | Any,
    senders: Any = None,
    receivers: Any = None,
    *,
    freeze_mlps: bool = True,
    direction: str = "denoise",
    positions: Any = "all",
    engine: str = "suffix",
    seed: Any = 0,
    n_flips: int = 5000,
    executor: Any = None,
    resume: Any = None,
    progress: bool = True,
    backend: str | None = None,
) -> PathResult:
    """Patch single paths: what a sender writes in the other run reaches one receiver alone.

    Every other head stays at what it wrote in the run that is patched, and so does every other MLP
    if `freeze_mlps`; then that receiver's input is replaced, and everything after the receiver runs
    anew. To `logits` leads the sender's direct effect; the total one, through everything that
    follows, is beside it (`total`). Effects and shares are those of `patch`.

    Args:
        model: the decoder.
        task: a `Task`.
        senders: names, or several: `embed`, `L0H1` or `(0, 1)`, `L0MLP`, `heads`, `mlps`. None is
            all. A head sends what it writes, z W_O.
        receivers: `L1H2.k` (the input of one channel), `L1H2` (its three), `L1MLP`, `logits`; `q`,
            `k`, `v`, `mlps`. None is all. Keys and values that query heads share: `L1KV0.k`.
        freeze_mlps: with False MLPs between sender and receiver are recomputed, and a path leads
            through them too.
        direction: `denoise` sends clean writes into the corrupted run, `noise` the reverse; see
            `patch`.
        positions: where the sender's write is replaced: `all`, `roles`, `each`, or a list. It then
            reaches the receiver there; what the receiver does with it happens anywhere.
        engine: `suffix`, or `hooks`, the definition: two hooked forward passes a path.
        seed: in [0, 2**63), of sign flips and of which pairs are unrelated.
        n_flips: sign patterns; all of them if there are no more than this.
        executor, resume: run the sweep's blocks elsewhere, and keep them in a folder from which the
            same call goes on, as for `patch`; the numbers are the same to the bit.
        progress: show a bar on stderr, if that is a terminal.
        backend: of every run; None is the model's own.
    Returns:
        Effects of every path, with their inference, controls and claims. The family of the test is
        all paths together.
    Raises:
        TaskError: on an argument that does not fit; for a sender that writes after every receiver
            has read.
        TokenError, ShapeError: on tokens that do not fit the model.
        HookError: with `engine="suffix"`, `executor` or `resume`, if hooks or edits are on the
            model.
        SweepError: if a worker dies, the disk is full, or `resume` belongs to another sweep.
    Source:
        Wang et al. 2022 (arXiv 2211.00593), which recomputes MLPs; Goldowsky-Dill et al. 2023
        (arXiv 2304.05969). Ours freezes MLPs unless told, as edge methods do, takes each channel of
        a head as a receiver of its own, and corrects for all paths of the sweep.
    Example:
        >>> from headstream.models import load
        >>> model = load("constructed-induction")
        >>> task = Task.for_model(model, n=8)
        >>> found = path_patch(model, task, "L0H1", "L1H2", progress=False)
        >>> [round(float(share), 2) for share in found.normalized.squeeze()]
        [0.0, 1.0, 0.0]
    """
    inference.check_flips(n_flips)
    plan = planned_paths(
        model,
        task,
        senders,
        receivers,
        freeze_mlps=freeze_mlps,
        direction=direction,
        positions=positions,
        engine=engine,
        seed=seed,
        backend=backend,
    )
    return _path_patch(
        model, plan, engine, n_flips, executor=executor, resume=resume, progress=progress
    )


def planned_paths(
    model: Decoder,
    task: Task | Any,
    senders: Any = None,
    receivers: Any = None,
    *,
    freeze_mlps: bool = True,
    direction: str = "denoise",
    positions: Any = "all",
    engine: str = "suffix",
    seed: Any = 0,
    backend: str | None = None,
) -> PathPlan:
    """The sweep that a call of `path_patch` with these arguments runs.

    Raises:
        TaskError, TokenError: on an argument that does not fit.
    """
    check_option("direction", direction, get_args(Direction))
    check_option("engine", engine, get_args(Engine))
    check_seed(seed)
    if not isinstance(freeze_mlps, bool):
        raise TaskError(f"freeze_mlps must be True or False, got {freeze_mlps!r}")
    checked = check_task(model, task)
    sending, receiving = ends_of(model.config, senders, receivers)
    places_of(checked, positions)
    return PathPlan(
        checked,
        sending,
        receiving,
        positions=positions,
        direction=direction,
        freeze_mlps=freeze_mlps,
        seed=int(seed),
        backend=backend,
    )


def _path_patch(
    model: Decoder,
    plan: PathPlan,
    engine: str,
    n_flips: int,
    *,
    executor: Any,
    resume: Any,
    progress: bool,
) -> PathResult:
    swept = run_sweep(
        model,
        plan,
        engine,
        executor=executor,
        resume=resume,
        progress=progress,
        check=lambda base: check_gap(plan.task, base, model.dtype),
    )
    coords = _coords(plan)
    data, details = findings(
        model,
        plan,
        engine,
        swept,
        coords,
        n_flips=n_flips,
        about={
            "site": "path",
            "positions": plan.kind_of_places,
            "values": "pair",
            "freeze_mlps": plan.freeze_mlps,
            "noun": "paths",
        },
    )
    if moves_nothing(swept, model):
        warnings.warn(
            "path_patch: " + all_zero(details, data, "no one of these writes moves the metric"),
            stacklevel=4,
        )
    ends = ("sender", *tuple(coords)[2:])
    total = swept.passes["total"][0].reshape(*(data.sizes[dim] for dim in ends), -1)
    low, high = inference.mean_interval(total, seed=plan.seed)
    data = data.assign_coords(channel=("receiver", [end.kind for end in plan.receivers]))
    data["total_effects"] = ((*ends, "example"), total)
    data["total"] = (ends, inference.mean_over_prompts(total))
    data["total_low"], data["total_high"] = (ends, low), (ends, high)
    return PathResult(
        title=f"Path patching, {'denoising' if plan.direction == 'denoise' else 'noising'}",
        data=data,
        provenance=Provenance.of(model, seed=plan.seed, backend=plan.backend),
        claims=path_claims(data, details),
        details=details,
    )


def _coords(plan: PathPlan) -> dict[str, np.ndarray]:
    coords = {
        "sender": np.array([end.label for end in plan.senders], dtype=np.str_),
        "receiver": np.array([end.label for end in plan.receivers], dtype=np.str_),
    }
    names = [place.name for place in plan.places]
    if plan.kind_of_places == "roles":
        coords["role"] = np.array(names, dtype=np.str_)
    elif plan.kind_of_places != "all":
        coords["pos"] = np.array(names, dtype=np.int64)
    return coords
