"""What an induction study writes down: its arrays, its joint cut, and what a reader must know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from headstream.analyses.studies.repeat_cuts import RepeatCuts
from headstream.circuits.fixed_distance import FixedDistances
from headstream.circuits.induction_scores import InductionScores
from headstream.circuits.labels import percentile_interval
from headstream.circuits.repeats import RepeatPlan
from headstream.models.decoder import Decoder
from headstream.models.names import head_name


def arrays_of(
    plan: RepeatPlan,
    scores: InductionScores,
    copying: np.ndarray,
    cuts: RepeatCuts | None,
    seed: int,
) -> xr.Dataset:
    """Scores and cuts over (layer, head), NaN for heads that were not cut."""
    site, by_distance = ("layer", "head"), ("distance", "layer", "head")
    gapped_low, gapped_high = percentile_interval(scores.gapped, seed=seed)
    fixed_low, fixed_high = percentile_interval(scores.fixed.mass, seed=seed)
    shape = scores.fixed.distance.shape
    arrays: dict[str, Any] = {
        "induction": (by_distance, scores.induction.mean(1)),
        "position_control": (by_distance, scores.position_control.mean(1)),
        "content_control": (by_distance, scores.content_control.mean(1)),
        "chance": (("distance",), scores.chance),
        "gapped": (site, scores.gapped.mean(0)),
        "gapped_low": (site, gapped_low),
        "gapped_high": (site, gapped_high),
        "gapped_control": (site, scores.gapped_control.mean(0)),
        "fixed": (site, scores.fixed.mass.mean(0)),
        "fixed_low": (site, fixed_low),
        "fixed_high": (site, fixed_high),
        "fixed_late": (site, scores.fixed.late.mean(0)),
        "fixed_distance": (site, scores.fixed.distance),
        "copying": (site, copying),
    }
    for name in ("alone", "restored"):
        for end in ("", "_low", "_high", *(("_p", "_control") if name == "alone" else ())):
            values = np.full(shape, np.nan)
            if cuts is not None:
                values[tuple(np.transpose(cuts.heads))] = getattr(cuts, name + end)
            arrays[name + end] = (site, values)
    if cuts is not None:
        arrays["joint"] = (("example",), cuts.joint)
    layers, heads = shape
    coords = {
        "distance": list(plan.distances),
        "layer": np.arange(layers),
        "head": np.arange(heads),
        "example": np.arange(scores.gapped.shape[0]),
    }
    return xr.Dataset(arrays, coords)


def joint_of(cuts: RepeatCuts | None, labels: np.ndarray) -> dict[str, Any] | None:
    """The joint cut as plain values.

    Args:
        labels: [layer, head], to say of the other heads what they are.
    """
    if cuts is None:
        return None
    largest = int(cuts.random.argmax()) if len(cuts.random) else None
    others = () if largest is None else cuts.random_sets[largest]
    return {
        "heads": [head_name(*head) for head in cuts.heads],
        "mean": float(cuts.joint.mean()),
        "low": cuts.joint_low,
        "high": cuts.joint_high,
        "p": cuts.joint_p,
        "control": cuts.joint_control,
        "failed": list(cuts.joint_failed),
        "random": {
            "sets": len(cuts.random),
            "size": len(others),
            "mean": None if largest is None else float(cuts.random.mean()),
            "largest": None if largest is None else float(cuts.random[largest]),
            # Of the set that costs most: each head, and its label where it has one.
            "heads": {head_name(*head): str(labels[head]) for head in others},
        },
        "self_cut_max": cuts.self_cut,
        "self_cut_bound": cuts.self_bound,
    }


def notes_of(model: Decoder, plan: RepeatPlan, fixed: FixedDistances, length: int) -> list[str]:
    """What a reader must know of this run."""
    config = model.config
    notes = [*plan.notes]
    if plan.bos is None:
        notes.append("the model has no BOS, and is measured without one")
    beyond = [distance for distance in plan.distances if distance > fixed.farthest]
    takes = min(config.n_train or config.n_ctx, config.n_ctx)
    if beyond:
        notes.append(
            f"fixed distances were looked for up to {fixed.farthest} tokens: too few queries of "
            f"{fixed.length} tokens reach {', '.join(map(str, beyond))}"
        )
    elif fixed.length < takes:
        notes.append(
            f"fixed distances were looked for up to {fixed.farthest} tokens, in sequences of "
            f"{fixed.length}; the model takes {takes}"
        )
    if config.n_train is not None and length > config.n_train:
        notes.append(f"the model was trained on {config.n_train} positions, fewer than these")
    task = (model.card or {}).get("task")
    kind = task.get("kind") if isinstance(task, Mapping) else None
    if kind is not None and kind != "induction":
        notes.append(
            f"the sequences are random orders of all tokens; this model was trained on {kind} "
            "prompts, which are not like that, and may attend otherwise there"
        )
    return notes
