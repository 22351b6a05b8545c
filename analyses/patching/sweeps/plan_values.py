"""A plan as plain JSON values, and back: what a resume folder states and a worker reads.

Values that two calls share decide the same numbers. A metric that is a function is described by its
name and its code; the function itself must be handed over beside the values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import CodeType
from typing import Any

import torch

from headstream.analyses.patching.metrics import METRICS, GivenFunction, Metric
from headstream.analyses.patching.paths.ends import End
from headstream.analyses.patching.paths.plan import PathPlan
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.sweep_plan import SweepPlan
from headstream.analyses.patching.sweeps.plans import Plan
from headstream.analyses.patching.task import Task

# What both kinds of plan have, by the name of the field.
_SHARED = ("direction", "seed", "backend")
_OF_SITES = ("values", "second")
_GRID = ("layers", "heads", "positions")


def plan_to_values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON can hold it; `plan_from_values` reads it back."""
    shared = {name: getattr(plan, name) for name in _SHARED}
    if isinstance(plan, PathPlan):
        return {
            "swept": "paths",
            "task": _task_to_values(plan.task),
            "senders": [asdict(end) for end in plan.senders],
            "receivers": [asdict(end) for end in plan.receivers],
            "positions": _listed(plan.positions),
            "freeze_mlps": plan.freeze_mlps,
            **shared,
        }
    return {
        "swept": "sites",
        "task": _task_to_values(plan.task),
        "site": plan.site if isinstance(plan.site, str) else _sets_to_values(plan.site),
        **{name: _listed(getattr(plan, name)) for name in _GRID},
        **{name: getattr(plan, name) for name in _OF_SITES},
        **shared,
    }


def plan_from_values(values: Mapping[str, Any], metric: Metric | None = None) -> Plan:
    """The plan that `plan_to_values` wrote.

    Args:
        metric: the task's, where it is none of our own.
    """
    task = _task_from_values(values["task"], metric)
    shared = {name: values[name] for name in _SHARED}
    if values["swept"] == "paths":
        return PathPlan(
            task,
            tuple(End(**end) for end in values["senders"]),
            tuple(End(**end) for end in values["receivers"]),
            positions=values["positions"],
            freeze_mlps=values["freeze_mlps"],
            **shared,
        )
    site = values["site"]
    return SweepPlan(
        task,
        site if isinstance(site, str) else _sets_from_values(site),
        **{name: values[name] for name in (*_GRID, *_OF_SITES)},
        **shared,
    )


def _task_to_values(task: Task) -> dict[str, Any]:
    mask = task.attention_mask
    return {
        "clean": task.clean.tolist(),
        "corrupted": task.corrupted.tolist(),
        "attention_mask": None if mask is None else mask.to(torch.int64).tolist(),
        "answer": task.answer.tolist(),
        "wrong": None if task.wrong is None else task.wrong.tolist(),
        "answer_pos": task.answer_pos.tolist(),
        "roles": {name: place.tolist() for name, place in task.roles.items()},
        "metric": _metric_to_values(task.metric),
    }


def _task_from_values(task: Mapping[str, Any], metric: Metric | None) -> Task:
    mask = task["attention_mask"]
    return Task(
        torch.tensor(task["clean"]),
        torch.tensor(task["corrupted"]),
        task["answer"],
        task["wrong"],
        metric=metric or METRICS[task["metric"]["name"]],
        attention_mask=None if mask is None else torch.tensor(mask),
        answer_pos=task["answer_pos"],
        roles=task["roles"],
    )


def own_metric(metric: Metric) -> bool:
    """Whether a metric is one of ours, which a name says in full."""
    return METRICS.get(metric.name) is metric


def function_of(metric: Metric) -> Any:
    """The function that a metric which is none of ours computes by."""
    compute = metric.compute
    return compute.function if isinstance(compute, GivenFunction) else compute


def code_sha256(function: Any) -> str | None:
    """A hash of what a function does, or None where its code alone does not say it.

    Closed-over values, defaults and objects may change between two runs, unseen.
    """
    code = getattr(function, "__code__", None)
    bare = not (getattr(function, "__closure__", None) or getattr(function, "__defaults__", None))
    if not isinstance(code, CodeType) or not bare or getattr(function, "__kwdefaults__", None):
        return None
    digest = hashlib.sha256()
    for part in _code_parts(code):
        digest.update(part)
    return digest.hexdigest()


def _code_parts(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            yield repr(constant).encode()


def _metric_to_values(metric: Metric) -> dict[str, Any]:
    if own_metric(metric):
        return {"name": metric.name}
    function = function_of(metric)
    return {
        "name": metric.name,
        "function": f"{getattr(function, '__module__', '')}."
        f"{getattr(function, '__qualname__', type(function).__qualname__)}",
        "code_sha256": code_sha256(function),
    }


def _sets_to_values(sets: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [name, [asdict(at) | {"place": _listed(at.place)} for at in members]]
        for name, members in sets.items()
    ]


def _sets_from_values(sets: Sequence[Any]) -> dict[str, list[At]]:
    return {name: [At(**at) for at in members] for name, members in sets}


def _listed(value: Any) -> Any:
    """Tuples and ranges as lists, at every depth."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_listed(item) for item in value]
    return value
