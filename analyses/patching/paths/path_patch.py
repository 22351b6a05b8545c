"""`path_patch`: what one component passes to another, and whether the answer depends on it.

1. run clean and corrupted, and measure both
2. sweep all paths: the sender's other write reaches one receiver alone, everything between is held
3. sweep them again as controls: with a run's own writes, with an unrelated pair's
4. the total effect of every sender, through everything that follows it
5. infer, label, and hand back a `PathResult`
"""

from __future__ import annotations

import warnings
from typing import Any, get_args

import numpy as np
import torch
from tqdm import tqdm

from headstream.analyses.patching import inference
from headstream.analyses.patching.conclusions import causal_cells, random_sites_95, warnings_of
from headstream.analyses.patching.engines import Engine, open_sweep
from headstream.analyses.patching.labelled import describe_gap, labelled
from headstream.analyses.patching.patch import (
    SELF_PATCH,
    Direction,
    _check_fits,
    _check_gap,
    _described,
)
from headstream.analyses.patching.paths.ends import End, ends_of
from headstream.analyses.patching.paths.plan import HookedPaths, PathPlan, Paths
from headstream.analyses.patching.paths.result import PathResult, path_claims
from headstream.analyses.patching.paths.sweep import PathSweep
from headstream.analyses.patching.places import places_of
from headstream.analyses.patching.rows import check_option, check_seed
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
from headstream.analyses.patching.task import Task, pairs_as_values
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError


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
        progress: show a bar on stderr, if that is a terminal.
        backend: of every run; None is the model's own.
    Returns:
        Effects of every path, with their inference, controls and claims. The family of the test is
        all paths together.
    Raises:
        TaskError: on an argument that does not fit; for a sender that writes after every receiver
            has read.
        TokenError, ShapeError: on tokens that do not fit the model.
        HookError: with `engine="suffix"`, if hooks or edits are on the model.
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
    check_option("direction", direction, get_args(Direction))
    check_option("engine", engine, get_args(Engine))
    inference.check_flips(n_flips)
    check_seed(seed)
    if not isinstance(freeze_mlps, bool):
        raise TaskError(f"freeze_mlps must be True or False, got {freeze_mlps!r}")
    if not isinstance(task, Task):
        raise TaskError(
            f"task must be a Task, got {type(task).__name__}",
            hint="build one with Task(clean, corrupted, answer, wrong), or Task.for_model(model)",
        )
    _check_fits(model, task)
    sending, receiving = ends_of(model.config, senders, receivers)
    named, places = places_of(task, positions)
    plan = PathPlan(
        task, sending, receiving, places, named, direction, freeze_mlps, int(seed), backend
    )
    return _path_patch(model, plan, engine, n_flips, progress)


def _path_patch(
    model: Decoder, plan: PathPlan, engine: str, n_flips: int, progress: bool
) -> PathResult:
    task, seed = plan.task, plan.seed
    count = len(plan.paths) * len(plan.places)
    with tqdm(total=2 * count, desc="patch paths", disable=None if progress else True) as bar:
        sweep: Paths
        sweep = (
            PathSweep(model, plan, bar.update) if engine == "suffix" else HookedPaths(model, plan)
        )
        clean, corrupted = sweep.base["clean"][0], sweep.base["corrupted"][0]
        rounding = 4 * torch.finfo(model.dtype).eps * float(np.abs([clean, corrupted]).max())
        _check_gap(task, clean, corrupted, rounding)
        own = sweep.run("self")[0]
        found, unrelated = sweep.run("effects"), sweep.run("unrelated")[0]
    self_patch = float(np.nanmax(np.abs(own)))
    rounding = max(rounding, self_patch)
    gap = clean - corrupted
    gap_details, refused = describe_gap(gap, task.metric.unit, seed=seed)
    coords = _coords(plan)
    shape = tuple(len(labels) for labels in coords.values())
    effects, second, unrelated = (x.reshape(*shape, -1) for x in (*found, unrelated))
    flips = inference.sign_flips(effects, n_flips=n_flips, seed=seed, floor=rounding)
    exact = engine == "hooks" and (plan.backend or model.backend) == "naive"
    details: dict[str, Any] = {
        "site": "path",
        "positions": plan.positions,
        "direction": plan.direction,
        "values": "pair",
        "engine": engine,
        "freeze_mlps": plan.freeze_mlps,
        "metric": _described(task.metric),
        "second_metric": _described(plan.metrics[1]),
        "family": int(flips.family.sum()),
        "flips": flips.flips,
        "flips_exact": flips.exact,
        "alpha": inference.ALPHA,
        "self_patch_max": self_patch,
        "self_patch_bound": 0.0 if exact else SELF_PATCH * float(np.abs(gap).mean()),
        "random_site_95": None,
        "gap": gap_details,
        "normalized_refused": refused,
        "sign_rule": "effects keep their sign; paths stand from most towards the other run to most "
        "against it",
        "prompts": pairs_as_values(task, model),
        "warnings": [],
    }
    data = labelled(
        coords,
        effects,
        second=second,
        unrelated=unrelated,
        clean=clean,
        corrupted=corrupted,
        flips=flips,
        sign=1.0 if plan.direction == "denoise" else -1.0,
        refused=refused is not None,
        seed=seed,
    )
    data["causal"] = causal_cells(data, details)
    data = data.assign_coords(channel=("receiver", [end.kind for end in plan.receivers]))
    details["random_site_95"] = random_sites_95(data)
    details["warnings"] = warnings_of(data, details)
    if not np.any(np.abs(np.nan_to_num(effects)) > rounding * bool(self_patch)):
        warnings.warn(
            "path_patch: every effect is exactly zero; nothing that the senders pass on reaches "
            "the answer",
            stacklevel=3,
        )
    total = _total(model, plan, engine)
    ends = ("sender", *tuple(coords)[2:])
    total = total.reshape(*(data.sizes[dim] for dim in ends), -1)
    low, high = inference.mean_interval(total, seed=seed)
    data["total_effects"] = ((*ends, "example"), total)
    data["total"] = (ends, inference.mean_over_prompts(total))
    data["total_low"], data["total_high"] = (ends, low), (ends, high)
    return PathResult(
        title=f"Path patching, {'denoising' if plan.direction == 'denoise' else 'noising'}",
        data=data,
        provenance=Provenance.of(model, seed=seed, backend=plan.backend),
        claims=path_claims(data, details),
        details=details,
    )


def _coords(plan: PathPlan) -> dict[str, np.ndarray]:
    coords = {
        "sender": np.array([end.label for end in plan.senders], dtype=np.str_),
        "receiver": np.array([end.label for end in plan.receivers], dtype=np.str_),
    }
    names = [place.name for place in plan.places]
    if plan.positions == "roles":
        coords["role"] = np.array(names, dtype=np.str_)
    elif plan.positions != "all":
        coords["pos"] = np.array(names, dtype=np.int64)
    return coords


def _total(model: Decoder, plan: PathPlan, engine: str) -> np.ndarray:
    """[sender, place, example]: what the sender's other write does through everything."""
    sets = {
        f"{sender.label} {place.name}": [_written(sender, place.name)]
        for sender in plan.senders
        for place in plan.places
    }
    swept = SweepPlan(
        plan.task,
        sets,
        direction=plan.direction,
        seed=plan.seed,
        backend=plan.backend,
        second=False,
    )
    opened = open_sweep(model, swept, engine)
    work = blocks(swept, model.config, controls=False)
    return np.concatenate([opened.run(block)[0] for block in work]).reshape(
        len(plan.senders), len(plan.places), -1
    )


def _written(sender: End, place: Any) -> At:
    if sender.kind == "embed":
        # Positions are the same in both runs, so the stream differs by the embedding.
        return At("resid_pre", 0, place=place)
    site = "z" if sender.kind == "head" else "mlp_out"
    return At(site, sender.layer, sender.head, place)
