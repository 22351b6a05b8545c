"""What a patch is measured by: one number a pair, from the logits at the answer position.

    logit_difference   logit(answer) - logit(wrong)    nats         higher is better
    log_prob           log p(answer)                   nats         higher is better
    prob               p(answer)                       probability  higher is better
    kl                 -KL(clean || run)               nats         higher is better, 0 at clean
    loss               -log p(answer)                  nats         lower is better

Logit difference is the default: probability hides components that lower the answer, and
log-probability saturates. A metric that depends on the wrong answer too can also rise when a patch
merely breaks the model towards uniform, so every sweep carries a second metric.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headstream.models.errors import TaskError, nearest

if TYPE_CHECKING:
    from headstream.analyses.patching.task import Task

Logits = Float[Tensor, "example d_vocab"]
Compute = Callable[[Tensor, Any, Tensor], Any]


@dataclass(frozen=True)
class Metric:
    """A named number per pair.

    Attributes:
        name, formula, unit: as printed.
        noun: what a patch restores or is needed for, in a sentence.
        needs_wrong: whether the task must name a wrong answer.
        compute: (logits at the answer [example, d_vocab], task, the clean run's) -> [example].
    """

    name: str
    formula: str
    unit: str
    noun: str
    needs_wrong: bool
    compute: Compute

    def as_values(self) -> dict[str, str]:
        """What a result says of it."""
        return {
            "name": self.name,
            "formula": self.formula,
            "unit": self.unit,
            "noun": self.noun,
        }


@dataclass(frozen=True)
class GivenFunction:
    """A user's `(logits, task) -> [example]` as what a `Metric` computes; pickles if that does."""

    function: Callable[[Tensor, Any], Any]

    def __call__(self, logits: Tensor, task: Any, clean: Tensor) -> Any:
        return self.function(logits, task)


def logit_difference(logits: Logits, task: Task, clean: Logits) -> Float[Tensor, " example"]:
    """logit(answer) - logit(wrong)."""
    return _at(logits, task.answer) - _at(logits, task.wrong)


def log_prob(logits: Logits, task: Task, clean: Logits) -> Float[Tensor, " example"]:
    """log p(answer), the softmax over the whole vocabulary."""
    return _at(logits.log_softmax(-1), task.answer)


def prob(logits: Logits, task: Task, clean: Logits) -> Float[Tensor, " example"]:
    """p(answer)."""
    return _at(logits.softmax(-1), task.answer)


def kl(logits: Logits, task: Task, clean: Logits) -> Float[Tensor, " example"]:
    """-KL(clean || run): 0 for the clean run itself, negative otherwise.

    The minus sign makes higher better, so that the effect of a patch is the published
    KL(clean || corrupted) - KL(clean || patched) for denoising.
    Source:
        Zhang & Nanda 2023 (arXiv 2309.16042).
    """
    reference = clean.log_softmax(-1)
    return (reference.exp() * (logits.log_softmax(-1) - reference)).sum(-1)


def loss(logits: Logits, task: Task, clean: Logits) -> Float[Tensor, " example"]:
    """-log p(answer): the cross-entropy of the answer token."""
    return -log_prob(logits, task, clean)


def _at(values: Tensor, token: Tensor | None) -> Tensor:
    assert token is not None, "Task refuses such a metric without `wrong`"
    return values.gather(1, token[:, None])[:, 0]


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "logit_difference",
            "logit(answer) - logit(wrong)",
            "nats",
            "the answer",
            True,
            logit_difference,
        ),
        Metric("log_prob", "log p(answer)", "nats", "the answer", False, log_prob),
        Metric("prob", "p(answer)", "probability", "the answer", False, prob),
        Metric("kl", "-KL(clean || run)", "nats", "the clean prediction", False, kl),
        Metric("loss", "-log p(answer)", "nats", "the answer", False, loss),
    )
}


def find_metric(metric: Any) -> Metric:
    """The metric of that name, or a callable `(logits, task) -> [example]` as a metric.

    A callable gets the logits at the answer position, float64 `[example, d_vocab]`, and the task,
    and returns one number a pair.

    Raises:
        TaskError: on an unknown name (the nearest is given) or something that is no metric.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        if metric not in METRICS:
            raise TaskError(
                f"metric must be one of {', '.join(METRICS)} or a function, got {metric!r}",
                hint=nearest(metric, METRICS),
            )
        return METRICS[metric]
    if not callable(metric):
        raise TaskError(
            f"metric must be one of {', '.join(METRICS)} or a function, "
            f"got {type(metric).__name__}",
            hint="a function takes (logits [example, d_vocab], task) and returns [example]",
        )
    name = str(getattr(metric, "__name__", type(metric).__name__))
    words = (getattr(metric, "__doc__", None) or "given as a function").strip().splitlines()[0]
    noun = f"the clean value of {name}"
    return Metric(name, words, "metric units", noun, False, GivenFunction(metric))


def second_metric(metric: Metric, task: Task) -> Metric:
    """The other metric that a sweep carries beside `metric`."""
    if metric.name == "logit_difference":
        return METRICS["log_prob"]
    if task.wrong is not None:
        return METRICS["logit_difference"]
    return METRICS["prob" if metric.name in ("log_prob", "loss") else "log_prob"]


def evaluate(
    metric: Metric, logits: Logits, task: Task, clean: Logits
) -> Float[np.ndarray, " example"]:
    """The metric of one run, per pair, float64.

    Raises:
        TaskError: if a function returned another shape or a number that is not finite.
    """
    value = metric.compute(logits, task, clean)
    n = len(logits)
    if not isinstance(value, Tensor) or value.shape != (n,):
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TaskError(
            f"metric {metric.name!r} must return one number a pair, a tensor [{n}], got {got}"
        )
    array: np.ndarray = value.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(array).all():
        pair = int(np.flatnonzero(~np.isfinite(array))[0])
        raise TaskError(f"metric {metric.name!r} is {array[pair]} in pair {pair}")
    return array
