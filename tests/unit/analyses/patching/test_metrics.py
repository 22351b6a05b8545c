"""Metrics by hand, on a vocabulary of three."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headstream.analyses.patching.metrics import (
    METRICS,
    evaluate,
    find_metric,
    second_metric,
)
from headstream.analyses.patching.task import Task
from headstream.models.errors import TaskError

TASK = Task([[0, 1], [0, 2]], [[1, 1], [1, 2]], answer=[0, 2], wrong=[1, 0])
# Softmax (1/2, 1/4, 1/4) and (1/6, 1/3, 1/2), up to a constant.
LOGITS = torch.tensor([[2.0, 1.0, 1.0], [1.0, 2.0, 3.0]], dtype=torch.float64).log() + 5
CLEAN = torch.tensor([[1.0, 1.0, 2.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("logit_difference", [math.log(2), math.log(3)]),
        ("log_prob", [math.log(1 / 2), math.log(1 / 2)]),
        ("prob", [1 / 2, 1 / 2]),
        ("loss", [math.log(2), math.log(2)]),
        (
            "kl",  # -sum p_clean log(p_clean / p)
            [
                -(math.log(1 / 2) / 4 + math.log(1) / 4 + math.log(2) / 2),
                -(math.log(2) + math.log(1) + math.log(2 / 3)) / 3,
            ],
        ),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    value = evaluate(METRICS[name], LOGITS, TASK, CLEAN)
    assert value.tolist() == pytest.approx(expected, abs=1e-12)  # float64 rounding


def test_kl_of_the_clean_run_with_itself_is_zero() -> None:
    assert evaluate(METRICS["kl"], CLEAN, TASK, CLEAN).tolist() == [0.0, 0.0]


def test_each_metric_says_what_it_is() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert all((metric.formula, metric.unit, metric.noun))


def test_a_function_is_a_metric() -> None:
    def margin(logits: Any, task: Task) -> Any:
        """Best logit minus the answer's."""
        return logits.max(-1).values - logits.gather(1, task.answer[:, None])[:, 0]

    metric = find_metric(margin)
    assert (metric.name, metric.formula) == ("margin", "Best logit minus the answer's.")
    assert evaluate(metric, LOGITS, TASK, CLEAN).tolist() == [0.0, 0.0]


def test_unknown_names_and_other_things_are_refused() -> None:
    with pytest.raises(TaskError, match=r"got 'logit_diff'; nearest is 'logit_difference'"):
        find_metric("logit_diff")
    with pytest.raises(TaskError, match=r"metric must be one of .* or a function, got int"):
        find_metric(3)


def test_what_a_function_returns_is_checked() -> None:
    def scalar(logits: Any, task: Any) -> Any:
        return logits.mean()

    def number(logits: Any, task: Any) -> Any:
        return 1.0

    def infinite(logits: Any, task: Any) -> Any:
        return torch.tensor([0.0, float("inf")])

    with pytest.raises(TaskError, match=r"'scalar' must return one number a pair.*\[2\], got \[\]"):
        evaluate(find_metric(scalar), LOGITS, TASK, CLEAN)
    with pytest.raises(TaskError, match="got float"):
        evaluate(find_metric(number), LOGITS, TASK, CLEAN)
    with pytest.raises(TaskError, match="metric 'infinite' is inf in pair 1"):
        evaluate(find_metric(infinite), LOGITS, TASK, CLEAN)


def test_the_second_metric_is_another_one() -> None:
    without_wrong = Task([[0, 1]], [[1, 1]], 0, metric="log_prob")
    assert second_metric(METRICS["logit_difference"], TASK).name == "log_prob"
    assert second_metric(METRICS["prob"], TASK).name == "logit_difference"
    assert second_metric(METRICS["log_prob"], without_wrong).name == "prob"
    assert second_metric(METRICS["kl"], without_wrong).name == "log_prob"
