"""A plan as JSON and back is the same plan: the same cells, the same blocks, the same numbers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.analyses.patching.metrics import find_metric
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
from headstream.analyses.patching.sweeps.plan_values import (
    code_sha256,
    function_of,
    own_metric,
    plan_from_values,
    plan_to_values,
)
from headstream.analyses.patching.sweeps.sweep import run_sweep
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder

SETS = {
    "b": [At("z", 0, 1, place=-1), At("k", 1, 0, place="source")],
    "a": [At("pattern", 1, 2, place=(3, "source")), At("resid_mid", 0)],
}
PLANS: list[dict[str, Any]] = [
    {"site": "z", "layers": range(1, 2), "heads": (0, 3), "positions": [0, -2]},
    {"site": "pattern", "positions": [(3, 1), ("last", "source")], "direction": "noise"},
    {"site": "resid_pre", "positions": "roles", "values": "resample", "seed": 5},
    {"site": SETS, "second": False, "values": "mean"},
]


def padded(n: int = 3) -> Task:
    """Rows of 4 to 6 tokens, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, 20, (n, 6), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 3] = (clean[:, 3] + 5) % 20
    mask = torch.arange(6) >= torch.tensor([[0], [1], [2]])
    return Task(
        clean,
        corrupted,
        1,
        [2, 3, 2],
        attention_mask=mask,
        roles={"source": 1, "last": [-1, -1, -2]},
    )


@pytest.mark.parametrize("fields", PLANS, ids=["z", "edges", "roles", "sets"])
def test_there_and_back(model: Decoder, fields: dict[str, Any]) -> None:
    plan = SweepPlan(padded(), **fields)
    values = json.loads(json.dumps(plan_to_values(plan)))
    again = plan_from_values(values)
    assert plan_to_values(again) == values
    assert blocks(again, model.config) == blocks(plan, model.config)
    for name, labels in plan.grid(model.config).coords.items():
        assert np.array_equal(again.grid(model.config).coords[name], labels)
    one, other = (run_sweep(model, p, progress=False) for p in (plan, again))
    for kind, found in one.passes.items():
        assert np.array_equal(found, other.passes[kind], equal_nan=True)
    assert np.isfinite(one.passes["effects"]).any()


def test_a_metric_of_ones_own_travels_beside_the_values() -> None:
    def first(logits: Tensor, task: Any) -> Tensor:
        return logits[:, 0]

    task = Task([[1, 2, 3]], [[1, 4, 3]], 5, metric=first)
    plan = SweepPlan(task, "z")
    values = plan_to_values(plan)
    assert values["task"]["metric"]["name"] == "first"
    assert values["task"]["metric"]["function"].endswith("<locals>.first")
    assert not own_metric(task.metric)
    assert function_of(task.metric) is first
    assert plan_from_values(values, task.metric).task.metric is task.metric


def _maker(source: str) -> Callable[..., Any]:
    space: dict[str, Any] = {}
    exec(source, space)
    made: Callable[..., Any] = space["f"]
    return made


def test_code_is_told_apart_by_what_it_does() -> None:
    one = "def f(logits, task):\n    return logits[:, 1]\n"
    assert code_sha256(_maker(one)) == code_sha256(_maker("\n\n" + one)), "wherever it stands"
    for other in (
        "def f(logits, task):\n    return logits[:, 2]\n",
        "def f(logits, task):\n    return -logits[:, 1]\n",
        "def f(logits, task):\n    return logits[:, 1].exp()\n",
    ):
        assert code_sha256(_maker(one)) != code_sha256(_maker(other))
    inner = "def f(logits, task):\n    return (lambda x: x[:, {}])(logits)\n"
    assert code_sha256(_maker(inner.format(1))) != code_sha256(_maker(inner.format(2)))


def test_code_that_does_not_say_it_all() -> None:
    hidden = 3
    for function in (
        lambda logits, task: logits[:, hidden],
        lambda logits, task, k=3: logits[:, k],
        functools.partial(lambda logits, task, k: logits[:, k], k=3),
        _maker("def f(logits, task, *, k=3):\n    return logits[:, k]\n"),
    ):
        assert code_sha256(function) is None


def test_our_own_metrics_go_by_name() -> None:
    assert own_metric(find_metric("kl"))
    plan = SweepPlan(Task([[1, 2]], [[1, 4]], 5, metric="kl"), "z")
    assert plan_to_values(plan)["task"]["metric"] == {"name": "kl"}
    assert plan_from_values(plan_to_values(plan)).task.metric is find_metric("kl")
