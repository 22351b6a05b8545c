"""The standard study behind `headstream report MODEL`: what a newcomer should see first.

Audit of the identities; for a model with a task, patching of every head in both directions, of
heads and stream by role, and direct logit attribution; then the head census.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tqdm import tqdm

from headstream.analyses.claims.ledger import audit
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.task import Task
from headstream.analyses.result import Result
from headstream.analyses.studies.heads import heads
from headstream.analyses.studies.writes import direct_writes
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TaskError


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
        task: pairs to patch; None takes the zoo task that the model's card names, and a model
            without one gets the sections that need no task.
        n: prompt pairs, when the task is drawn here.
        seed: of everything that is drawn.
        progress: a bar on stderr.
        command: the command line that asked for it, for the report's provenance.
    Returns:
        Results in the order of the report's sections.
    """
    if task is None and (model.card or {}).get("task"):
        task = Task.for_model(model, n=n, seed=seed)
    steps: list[Callable[[], Result]] = [lambda: audit(model, seed=seed)]
    if task is not None:
        steps += _patching(model, task, seed)
        steps.append(lambda: direct_writes(model, task, seed=seed))
    steps.append(lambda: heads(model, seed=seed))
    results: list[Result] = []
    skipped: list[str] = [] if task is not None else [_no_task(model)]
    for step in tqdm(steps, desc="standard study", disable=None if progress else True):
        try:
            results.append(step())
        except (ShapeError, TaskError) as error:
            # A model too small for one section still gets the others, and the report says which.
            skipped.append(str(error))
    return [
        _finished(result, skipped if i == 0 else [], command) for i, result in enumerate(results)
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


def _finished(result: Result, skipped: list[str], command: str | None) -> Result:
    details = dict(result.details)
    if skipped:
        details["warnings"] = [*details.get("warnings", []), *skipped]
    return replace(result, details=details, provenance=replace(result.provenance, command=command))
