"""The standard study behind `headstream report MODEL`: what a newcomer should see first.

Audit of the identities; for a model with a task, patching of every head in both directions, of
heads and stream by role, and direct logit attribution; then the head census, each head taken apart,
and what rests on the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tqdm import tqdm

from headstream.analyses.claims.ledger import audit
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.rows import check_seed
from headstream.analyses.patching.task import Task
from headstream.analyses.result import Result
from headstream.analyses.studies.circuits import circuits
from headstream.analyses.studies.heads import heads
from headstream.analyses.studies.sinks import sinks
from headstream.analyses.studies.writes import direct_writes
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TaskError, TokenError

_PATCHING = "patching"


def standard_study(
    model: Decoder,
    *,
    task: Task | None = None,
    n: int = 64,
    seed: int = 0,
    progress: bool = True,
    command: str | None = None,
) -> list[Result]:
    """Run the standard study on `model`.

    Args:
        task: your own pairs to patch, and an error in patching them is raised; None takes the zoo
            task that the model's card names, and a model without one gets the sections that need
            no task. What could not run then stands in the first result's `details["left_out"]`.
        n: prompt pairs, when the task is drawn here.
        seed: of everything that is drawn.
        progress: a bar on stderr.
        command: the command line that asked for it, for the report's provenance.
    Returns:
        Results in the order of the report's sections.
    """
    check_seed(seed)
    own = task is not None
    if task is None and (model.card or {}).get("task"):
        task = Task.for_model(model, n=n, seed=seed)
    steps: list[tuple[str, Callable[[], Result]]] = [("audit", lambda: audit(model, seed=seed))]
    if task is not None:
        steps += [(_PATCHING, step) for step in _patching(model, task, seed)]
        steps.append(("decomposition", lambda: direct_writes(model, task, seed=seed)))
    steps.append(("census", lambda: heads(model, seed=seed)))
    steps.append(("circuits", lambda: circuits(model, seed=seed)))
    steps.append(("sinks", lambda: sinks(model, seed=seed)))
    results: list[Result] = []
    left_out: list[str] = [] if task is not None else [_no_task(model)]
    for name, step in tqdm(steps, desc="standard study", disable=None if progress else True):
        try:
            results.append(step())
        except (ShapeError, TaskError, TokenError) as error:
            if own and name == _PATCHING:
                raise
            # A model too small for one section still gets the others, and the report says which.
            left_out.append(f"{name}: {error}")
    # Several sweeps that fail for one reason are one thing left out.
    left_out = list(dict.fromkeys(left_out))
    return [
        _finished(result, left_out if i == 0 else [], command) for i, result in enumerate(results)
    ]


def _patching(model: Decoder, task: Task, seed: int) -> Sequence[Callable[[], Result]]:
    plans: list[tuple[str, str, str]] = [("z", "all", "denoise"), ("z", "all", "noise")]
    if task.roles:
        streams = ["resid_pre", "attn_out", *(["mlp_out"] if model.config.has_mlp else [])]
        plans += [("z", "roles", "denoise"), *((site, "roles", "denoise") for site in streams)]
    return [
        partial(
            patch,
            model,
            task,
            site,
            positions=positions,
            direction=direction,
            seed=seed,
            progress=False,
        )
        for site, positions, direction in plans
    ]


def _no_task(model: Decoder) -> str:
    return (
        f"no patching was run: model {model.name!r} has no card that names a task; "
        "give pairs with --pairs FILE.jsonl"
    )


def _finished(result: Result, left_out: list[str], command: str | None) -> Result:
    """The first result carries what the whole study leaves out."""
    details = dict(result.details)
    if left_out:
        details["left_out"] = left_out
    return replace(result, details=details, provenance=replace(result.provenance, command=command))
