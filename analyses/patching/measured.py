"""Metrics of many patched runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headstream.analyses.patching.metrics import METRICS, Metric, evaluate

if TYPE_CHECKING:
    from headstream.analyses.patching.task import Task

# Cells are measured this many logits at a time: 32 MB in float64.
_ENTRIES = 2**22


class _Answers(NamedTuple):
    """What our own metrics ask of a task, for the pairs of several cells in a row."""

    answer: Tensor
    wrong: Tensor | None


def measure(
    metrics: Sequence[Metric],
    logits: Float[Tensor, "cell example d_vocab"],
    task: Task,
    clean: Float[Tensor, "example d_vocab"],
) -> Float[np.ndarray, "metric cell example"]:
    """Every metric of every cell, from the logits at the answer position.

    A function of the user's sees one cell at a time, with the whole task, as `find_metric` says.

    Raises:
        TaskError: as `evaluate`.
    """
    cells, n, d_vocab = logits.shape
    out = np.empty((len(metrics), cells, n))
    step = max(1, _ENTRIES // (n * d_vocab))
    for start in range(0, cells, step):
        part = logits[start : start + step].to("cpu", torch.float64)
        for metric, found in zip(metrics, out):
            found[start : start + step] = _of_cells(metric, part, task, clean)
    return out


def _of_cells(
    metric: Metric,
    logits: Float[Tensor, "cell example d_vocab"],
    task: Task,
    clean: Float[Tensor, "example d_vocab"],
) -> Float[np.ndarray, "cell example"]:
    if METRICS.get(metric.name) is metric:
        times = len(logits)
        answers = _Answers(
            task.answer.repeat(times), None if task.wrong is None else task.wrong.repeat(times)
        )
        reference = clean.expand(times, -1, -1).flatten(0, 1)
        value: np.ndarray = (
            metric.compute(logits.flatten(0, 1), answers, reference).detach().numpy()
        )
        if np.isfinite(value).all():
            return value.reshape(logits.shape[:2])
    # One by one: a function of the user's, or a number that is none, for the error to name.
    return np.stack([evaluate(metric, cell, task, clean) for cell in logits])
