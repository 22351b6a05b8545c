"""From a finished sweep, over sites or over paths, to its labelled arrays and its details."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from headstream.analyses.patching import inference
from headstream.analyses.patching.checks import rounding_of
from headstream.analyses.patching.conclusions import causal_cells, random_sites_95, warnings_of
from headstream.analyses.patching.labelled import describe_gap, labelled
from headstream.analyses.patching.sweeps.plans import Plan
from headstream.analyses.patching.sweeps.sweep import Swept
from headstream.analyses.patching.task import pairs_as_values
from headstream.models.decoder import Decoder

# Batched products round differently; the bound on the self-patch where it need not be bitwise.
SELF_PATCH = 1e-4


def findings(
    model: Decoder,
    plan: Plan,
    engine: str,
    swept: Swept,
    coords: Mapping[str, np.ndarray],
    *,
    n_flips: int,
    about: Mapping[str, Any],
) -> tuple[xr.Dataset, dict[str, Any]]:
    """Inference, labels and controls.

    Args:
        swept: passes `effects`, `self` and, unless effects are that control, `unrelated`.
        coords: names and labels of the cell axes, in order.
        about: what the plan's own kind says in `details`: `site` at least, and `noun`, which is no
            detail: what the cells are called.
    Returns:
        The data of a `PatchingResult`, and its details.
    """
    task, seed, direction = plan.task, plan.seed, plan.direction
    shape = tuple(len(labels) for labels in coords.values())
    found = swept.passes["effects"].reshape(-1, *shape, len(task))
    own = swept.passes["self"][0]
    # Resampled values are the unrelated pair's.
    unrelated = swept.passes.get("unrelated", found)[0].reshape(*shape, len(task))
    clean, corrupted = swept.base["clean"][0], swept.base["corrupted"][0]
    self_patch = float(np.nanmax(np.abs(own)))
    # No effect is smaller than what the engine's own rounding makes of no change.
    floor = max(rounding_of(swept.base, model.dtype), self_patch)
    gap = clean - corrupted
    gap_details, refused = describe_gap(gap, task.metric.unit, seed=seed)
    exact = engine == "hooks" and (plan.backend or model.backend) == "naive"
    flips = inference.sign_flips(found[0], n_flips=n_flips, seed=seed, floor=floor)
    details: dict[str, Any] = {
        **{key: value for key, value in about.items() if key != "noun"},
        "direction": direction,
        "engine": engine,
        "metric": task.metric.as_values(),
        "second_metric": plan.metrics[1].as_values(),
        "family": int(flips.family.sum()),
        "flips": flips.flips,
        "flips_exact": flips.exact,
        "alpha": inference.ALPHA,
        "self_patch_max": self_patch,
        "self_patch_bound": 0.0 if exact else SELF_PATCH * float(np.abs(gap).mean()),
        "random_site_95": None,
        "gap": gap_details,
        "normalized_refused": refused,
        "sign_rule": f"effects keep their sign; {about['noun']} stand from most towards the other "
        "run to most against it",
        "prompts": pairs_as_values(task, model),
        "warnings": [],
    }
    data = labelled(
        coords,
        found[0],
        second=found[1],
        unrelated=unrelated,
        clean=clean,
        corrupted=corrupted,
        flips=flips,
        sign=1.0 if direction == "denoise" else -1.0,
        refused=refused is not None,
        seed=seed,
    )
    data["causal"] = causal_cells(data, details)
    details["random_site_95"] = random_sites_95(data)
    details["warnings"] = warnings_of(data, details)
    return data, details


def moves_nothing(swept: Swept, model: Decoder) -> bool:
    """Whether no effect is more than the engine's own rounding makes of no change."""
    own = float(np.nanmax(np.abs(swept.passes["self"][0])))
    least = max(rounding_of(swept.base, model.dtype), own) * bool(own)
    return not np.any(np.abs(np.nan_to_num(swept.passes["effects"][0])) > least)
