"""What heads are cut on: a task's pairs, or rows of tokens; and the control beside it.

    task      effect on the clean prompts' metric; control: the same cut on the corrupted prompts,
              where the answer is not to be found
    tokens    effect on the mean next-token loss; control: the same cut on the same tokens in random
              order (the first one stays)

What a cut does there too is no sign that the heads are needed for the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from headstream.analyses.patching import inference
from headstream.analyses.patching.checks import check_vocabulary
from headstream.analyses.patching.cuts.runs import (
    AnswerScore,
    CutRuns,
    CutValues,
    How,
    LossScore,
    Prompts,
)
from headstream.analyses.patching.metrics import METRICS, Metric
from headstream.analyses.patching.rows import check_option, check_seed, columns_of, mask_of, rows_of
from headstream.analyses.patching.suffix.state import compact
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TaskError
from headstream.models.vocabulary import check_tokens

# Chunks that start elsewhere round differently; the bound on a cut with a head's own values, as a
# part of the uncut score.
SELF_CUT = 1e-4

_VALUES = {
    "zero": "zero",
    "mean": "the mean over the uncut prompts, position by position",
    "resample": "those of another uncut prompt of equal length",
    "pair": "those of the pair's corrupted run",
}


@dataclass(frozen=True)
class Opened:
    """Both runs, ready to cut.

    Attributes:
        values, how: as asked for.
        runs, control: on what is asked about, and where a cut should not matter.
        metric: what is read, and `noun` what a head is needed for.
        examples: what one row is called.
        control_words: why a control that does as much excludes.
        gap: clean - corrupted score of each pair; None for tokens.
    """

    values: str
    how: str
    runs: CutRuns
    control: CutRuns
    metric: Metric
    noun: str
    examples: str
    control_words: str
    gap: np.ndarray | None

    @property
    def worse(self) -> int:
        """The sign of an effect that does harm."""
        return 1 if self.metric.name == "loss" else -1

    @property
    def values_in_words(self) -> str:
        return _VALUES[self.values]


def open_cuts(
    model: Decoder,
    task_or_tokens: Any,
    *,
    values: Any,
    how: Any = "full",
    seed: Any = 0,
    n_flips: Any = 5000,
    attention_mask: Any = None,
    from_pos: Any = None,
    backend: str | None = None,
    pair: bool = False,
) -> Opened:
    """Check the arguments that all questions share, and run what is cut, uncut.

    Args:
        n_flips: only checked.
        pair: whether `values="pair"` is allowed.
    Raises:
        TaskError, TokenError, ShapeError: naming the argument that does not fit.
    """
    inference.check_flips(n_flips)
    allowed = (*get_args(CutValues), *(("pair",) if pair else ()))
    check_option("values", values, allowed)
    check_option("how", how, get_args(How))
    check_seed(seed)
    options: dict[str, Any] = {
        "values": values,
        "how": how,
        "seed": int(seed),
        "backend": backend,
    }
    if isinstance(task_or_tokens, Task):
        if attention_mask is not None or from_pos is not None:
            raise TaskError(
                "attention_mask and from_pos belong to tokens, and a Task was given",
                hint="a Task has its own mask and answer_pos",
            )
        return _of_task(model, task_or_tokens, options)
    if values == "pair":
        raise TaskError(
            "values='pair' takes them from the corrupted run, and tokens have none",
            hint="give a Task",
        )
    return _of_tokens(model, task_or_tokens, attention_mask, from_pos, options)


def _of_task(model: Decoder, task: Task, options: dict[str, Any]) -> Opened:
    check_vocabulary(model, task)
    score = AnswerScore(task, task.metric)
    clean, corrupted = (
        Prompts(compact(task, tokens), task.lengths) for tokens in (task.clean, task.corrupted)
    )
    own = {**options, "values": "zero"} if options["values"] == "pair" else options
    # The clean run first: some metrics compare with it.
    if options["values"] == "pair":
        CutRuns(model, clean, score, **own)
        control = CutRuns(model, corrupted, score, **own)
        runs = CutRuns(model, clean, score, **options, other=control.z)
    else:
        runs = CutRuns(model, clean, score, **options)
        control = CutRuns(model, corrupted, score, **options)
    return Opened(
        options["values"],
        options["how"],
        runs,
        control,
        task.metric,
        task.metric.noun,
        "pairs",
        "the same cut does as much to the corrupted prompts",
        runs.base - control.base,
    )


def _of_tokens(
    model: Decoder, tokens: Any, attention_mask: Any, from_pos: Any, options: dict[str, Any]
) -> Opened:
    if isinstance(tokens, str):
        tokens = model.to_tokens(tokens)
    rows, mask = rows_of("tokens", tokens)
    check_tokens(rows, model.config.d_vocab)
    if attention_mask is not None:
        if mask is not None:
            raise TaskError(
                "attention_mask was given, but tokens are rows of different lengths, which are "
                "padded here",
                hint="give one or the other",
            )
        mask = mask_of(attention_mask, rows)
    columns = (
        torch.arange(rows.shape[1]).expand(len(rows), -1) if mask is None else columns_of(mask)
    )
    lengths = (columns >= 0).sum(1)
    prompts = Prompts(rows.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0), lengths)
    first = 1 if from_pos is None else from_pos
    if isinstance(first, bool) or not isinstance(first, int) or first < 1:
        raise ShapeError(f"from_pos must be a whole number >= 1, got {from_pos!r}")
    if int(lengths.min()) <= first:
        row = int(lengths.argmin())
        raise ShapeError(
            f"row {row} has {int(lengths[row])} real tokens, and no target at or after position "
            f"{first}"
        )
    shuffled = _shuffled(prompts, options["seed"])
    runs, control = (
        CutRuns(model, given, LossScore(given, first), **options) for given in (prompts, shuffled)
    )
    return Opened(
        options["values"],
        options["how"],
        runs,
        control,
        METRICS["loss"],
        "the next token",
        "sequences",
        "the same cut does as much to the same tokens in random order",
        None,
    )


def _shuffled(prompts: Prompts, seed: int) -> Prompts:
    """The same tokens in random order, the first one apart."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(prompts.rows.shape, generator=generator)
    at = torch.arange(prompts.rows.shape[1])
    chance[:, 0] = -1.0
    chance = torch.where(at < prompts.lengths[:, None], chance, 2.0 + at)
    return Prompts(prompts.rows.gather(1, chance.argsort(1)), prompts.lengths)
