"""What a sweep asks of its task before anything is run: that it fits the model and has a gap."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.vocabulary import check_tokens


def check_task(model: Decoder, task: Task | Any) -> Task:
    """The task, if its tokens are the model's and every pair has something to patch.

    Raises:
        TaskError: if it is none, or holds a pair whose prompts are the same.
        TokenError: on tokens that the model does not have.
    """
    if not isinstance(task, Task):
        raise TaskError(
            f"task must be a Task, got {type(task).__name__}",
            hint="build one with Task(clean, corrupted, answer, wrong), or Task.for_model(model)",
        )
    check_vocabulary(model, task)
    same = (task.clean == task.corrupted) | (
        torch.zeros_like(task.clean, dtype=torch.bool)
        if task.attention_mask is None
        else ~task.attention_mask
    )
    identical = same.all(1)
    if bool(identical.any()):
        pair = int(identical.nonzero()[0])
        raise TaskError(
            f"corrupted is the clean prompt itself in pair {pair}: nothing to patch",
            hint="change what the answer depends on, or leave the pair out",
        )
    return task


def check_vocabulary(model: Decoder, task: Task) -> None:
    """Raise TokenError where prompts or answers hold a token that the model does not have."""
    for name in ("clean", "corrupted", "answer", "wrong"):
        tokens = getattr(task, name)
        if tokens is not None:
            check_tokens(tokens, model.config.d_vocab, argument=name)


def rounding_of(base: dict[str, np.ndarray], dtype: torch.dtype) -> float:
    """What a difference of the two unpatched runs' first metrics is uncertain by.

    Args:
        base: by run (`clean`, `corrupted`), its metrics [metric, example].
    """
    return 4 * torch.finfo(dtype).eps * float(np.abs([run[0] for run in base.values()]).max())


def check_gap(task: Task, base: dict[str, np.ndarray], dtype: torch.dtype) -> None:
    """Raise TaskError if no pair's runs differ by more than rounding.

    Args:
        base: as for `rounding_of`.
    """
    clean, corrupted = base["clean"][0], base["corrupted"][0]
    if float(np.abs(clean - corrupted).max()) <= rounding_of(base, dtype):
        raise TaskError(
            f"clean and corrupted give the same {task.metric.name} in every pair "
            f"(mean {clean.mean():.4g}): there is no gap to patch",
            hint="corrupt what the answer depends on, or read another answer_pos",
        )
