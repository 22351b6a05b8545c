"""A task: clean and corrupted prompts in pairs, the answer, and the metric."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headstream.analyses.patching.metrics import Metric, find_metric
from headstream.analyses.patching.rows import (
    check_aligned,
    check_seed,
    check_token,
    columns_of,
    mask_of,
    per_pair,
    position_of,
    rows_of,
    rows_of_list,
)
from headstream.models.errors import (
    HeadstreamError,
    TaskError,
    TokenError,
    nearest,
)
from headstream.models.given_model import check_model

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

_LINE_KEYS = ("clean", "corrupted", "answer", "wrong")


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Task:
    """Pairs of prompts that differ in what the answer depends on, aligned token by token.

    Positions are row-wise real positions everywhere: 0 is the first real token of a row, whatever
    padding stands before it, and -1 its last. Left and right padding mean the same task.

    Args:
        clean, corrupted: int64 `[example, pos]` (`[pos]` is one pair), or lists of ids. Rows of a
            list may differ in length and are then padded; the two prompts of a pair may not.
        answer: the token the clean prompt should give, per pair (or one for all).
        wrong: the token it is compared with, usually the corrupted prompt's answer.
        metric: `logit_difference`, `log_prob`, `prob`, `kl`, `loss`, or a function
            `(logits at the answer [example, d_vocab], task) -> [example]`.
        attention_mask: `[example, pos]`, 1 where a token is real; it holds for both prompts.
        answer_pos: position whose next-token prediction is read, per pair (or one for all); by
            default each row's last real token.
        roles: name -> position, per pair (or one for all): `{"query": -1, "source": [3, 5]}`, so
            that effects can be given by role where the same thing stands at different positions.
    Raises:
        TaskError, ShapeError, TokenError: naming the argument, what was given and expected.
    Example:
        >>> task = Task([[0, 5, 6, 5]], [[0, 7, 6, 5]], answer=6, wrong=8)
        >>> task
        <Task: 1 pair of 4 tokens, logit_difference>
    """

    clean: Int[Tensor, "example pos"]
    corrupted: Int[Tensor, "example pos"]
    answer: Int[Tensor, " example"]
    wrong: Int[Tensor, " example"] | None
    metric: Metric
    attention_mask: Bool[Tensor, "example pos"] | None
    answer_pos: Int[Tensor, " example"]
    roles: Mapping[str, Int[Tensor, " example"]]
    columns: Int[Tensor, "example longest"]  # column of each real position; -1 past the row's end

    def __init__(
        self,
        clean: Any,
        corrupted: Any,
        answer: Any,
        wrong: Any = None,
        *,
        metric: Any = "logit_difference",
        attention_mask: Any = None,
        answer_pos: Any = None,
        roles: Any = None,
    ) -> None:
        clean_rows, clean_mask = rows_of("clean", clean)
        corrupted_rows, corrupted_mask = rows_of("corrupted", corrupted)
        check_aligned(clean_rows, corrupted_rows, clean_mask, corrupted_mask)
        mask = clean_mask
        if attention_mask is not None:
            if mask is not None:
                raise TaskError(
                    "attention_mask was given, but clean holds rows of different lengths, "
                    "which are padded here",
                    hint="give one or the other",
                )
            mask = mask_of(attention_mask, clean_rows)
        n = len(clean_rows)
        if mask is None:
            columns = torch.arange(clean_rows.shape[1]).expand(n, -1)
        else:
            columns = columns_of(mask)
        lengths = (columns >= 0).sum(1)
        set_field = object.__setattr__
        set_field(self, "clean", clean_rows)
        set_field(self, "corrupted", corrupted_rows)
        set_field(self, "attention_mask", mask)
        set_field(self, "columns", columns)
        set_field(self, "answer", per_pair("answer", answer, n))
        set_field(self, "wrong", None if wrong is None else per_pair("wrong", wrong, n))
        set_field(self, "metric", find_metric(metric))
        if roles is not None and not isinstance(roles, Mapping):
            raise TaskError(
                f"roles must map names to positions, got {type(roles).__name__}",
                hint='for example roles={"query": -1}',
            )
        last = -1 if answer_pos is None else answer_pos
        set_field(self, "answer_pos", position_of("answer_pos", last, lengths))
        set_field(
            self,
            "roles",
            {
                _role_name(name): position_of(f"roles[{name!r}]", place, lengths)
                for name, place in (roles or {}).items()
            },
        )
        self._check_answers()

    def _check_answers(self) -> None:
        for name, tokens in (("answer", self.answer), ("wrong", self.wrong)):
            if tokens is not None and bool((tokens < 0).any()):
                raise TokenError(f"{name} must hold token ids >= 0, got {int(tokens.min())}")
        if self.wrong is None:
            if self.metric.needs_wrong:
                raise TaskError(
                    f"metric {self.metric.name!r} compares answer with wrong, and wrong is None",
                    hint="give wrong, or metric='log_prob'",
                )
            return
        same = self.answer == self.wrong
        if bool(same.any()):
            pair = int(same.nonzero()[0])
            raise TaskError(
                f"answer and wrong are both token {int(self.answer[pair])} in pair {pair}; "
                "they must differ"
            )

    def __len__(self) -> int:
        return len(self.clean)

    def __repr__(self) -> str:
        low, high = int(self.lengths.min()), int(self.lengths.max())
        width = f"{high}" if low == high else f"{low} to {high}"
        pairs = "pair" if len(self) == 1 else "pairs"
        return f"<Task: {len(self)} {pairs} of {width} tokens, {self.metric.name}>"

    @property
    def lengths(self) -> Int[Tensor, " example"]:
        """Real tokens of each row."""
        return (self.columns >= 0).sum(1)

    @property
    def answer_columns(self) -> Int[Tensor, " example"]:
        """The column of `answer_pos` in the (padded) row."""
        return self.columns.gather(1, self.answer_pos[:, None])[:, 0]

    @classmethod
    def for_model(cls, model: Decoder, n: int = 64, seed: Any = 0, **options: Any) -> Task:
        """The task a zoo model was made for: `n` pairs drawn with `seed`.

        Args:
            options: passed to `zoo.tasks.pairs_for`, such as `corruption="answer"`.
        Raises:
            TaskError: if the model has no card, its card names no task, or seed is not a whole
                number in [0, 2**63).
        """
        check_model(model)
        check_seed(seed)
        if model.card is None:
            raise TaskError(
                f"model {model.name!r} has no card, so its task is not known",
                hint="for_model is for zoo models; build a Task from your own pairs",
            )
        from headstream.models.zoo.tasks import pairs_for

        pairs: dict[str, Any] = dict(pairs_for(model.card, n, seed, config=model.config, **options))
        return cls(**pairs)

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str], model: Decoder, **options: Any) -> Task:
        """Read pairs, one JSON object a line: `{"clean", "corrupted", "answer", "wrong"}`.

        Each value is a string (through `model.to_tokens`, which prepends BOS where the model has
        one) or a list of ids; `answer` and `wrong` are one token, a string or an id. `wrong` may be
        left out of all lines. Empty lines are skipped.

        Args:
            options: `metric`, ... as for `Task`.
        Raises:
            TaskError: naming the file and the line.
        """
        check_model(model)
        try:
            # Not splitlines: JSON strings may hold U+2028 and its like as they are.
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, ValueError) as error:
            raise TaskError(f"cannot read pairs from '{path}': {error}") from None
        read: dict[str, list[Any]] = {key: [] for key in _LINE_KEYS}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                pair = _read_line(line, model)
            except HeadstreamError as error:
                raise TaskError(
                    f"'{path}' line {number}: {error.message}", hint=error.hint
                ) from None
            except RecursionError:
                raise TaskError(f"'{path}' line {number}: nested too deeply") from None
            for key, value in pair.items():
                read[key].append(value)
        n = len(read["clean"])
        if not n:
            raise TaskError(f"'{path}' holds no pairs")
        if read["wrong"] and len(read["wrong"]) != n:
            raise TaskError(
                f"'{path}' gives 'wrong' in {len(read['wrong'])} of {n} lines",
                hint="give it in all, or in none",
            )
        return cls(
            read["clean"], read["corrupted"], read["answer"], read["wrong"] or None, **options
        )


def pairs_as_values(task: Task, model: Decoder) -> list[dict[str, Any]]:
    """The pairs as plain values: real tokens only, so that every position is an index into them.

    `padded` is the attention mask that they came with, or None.
    """

    def words(ids: list[int]) -> list[str]:
        return [str(i) for i in ids] if model.vocab is None else model.to_str_tokens(ids)

    rows = []
    for pair in range(len(task)):
        real = task.columns[pair][task.columns[pair] >= 0]
        clean, corrupted = task.clean[pair][real].tolist(), task.corrupted[pair][real].tolist()
        answer = int(task.answer[pair])
        wrong = None if task.wrong is None else int(task.wrong[pair])
        mask = task.attention_mask
        rows.append(
            {
                "clean": clean,
                "corrupted": corrupted,
                "clean_tokens": words(clean),
                "corrupted_tokens": words(corrupted),
                "answer": answer,
                "wrong": wrong,
                "answer_token": words([answer])[0],
                "wrong_token": None if wrong is None else words([wrong])[0],
                "answer_pos": int(task.answer_pos[pair]),
                "roles": {name: int(place[pair]) for name, place in task.roles.items()},
                "mask": None,
                "padded": None if mask is None else mask[pair].to(torch.int64).tolist(),
            }
        )
    return rows


def _role_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TaskError(f"roles must be named by non-empty strings, got {name!r}")
    return name


def _read_line(line: str, model: Decoder) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise TaskError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TaskError(f"expected an object, got {type(value).__name__}")
    for key in value:
        if key not in _LINE_KEYS:
            raise TaskError(
                f"unknown key {key!r}; expected {', '.join(_LINE_KEYS)}",
                hint=nearest(key, _LINE_KEYS),
            )
    missing = [key for key in ("clean", "corrupted", "answer") if key not in value]
    if missing:
        raise TaskError(f"lacks {', '.join(map(repr, missing))}")
    pair: dict[str, Any] = {}
    for key in ("clean", "corrupted"):
        prompt = value[key]
        pair[key] = model.to_tokens(prompt)[0].tolist() if isinstance(prompt, str) else prompt
        if not isinstance(pair[key], list):
            raise TaskError(f"{key!r} must be a string or a list of token ids, got {prompt!r}")
        rows_of_list(key, [pair[key]])
    if len(pair["clean"]) != len(pair["corrupted"]):
        raise TaskError(
            f"corrupted has {len(pair['corrupted'])} tokens, clean has {len(pair['clean'])}; "
            "they must be equally long",
            hint="replace tokens one for one, so that positions stay aligned",
        )
    for key in ("answer", "wrong"):
        if key not in value:
            continue
        token = value[key]
        if isinstance(token, list) and len(token) == 1:
            token = token[0]
        if isinstance(token, str):
            token = model.to_single_token(token)
        if isinstance(token, bool) or not isinstance(token, int):
            raise TaskError(f"{key!r} must be one token, got {value[key]!r}")
        check_token(key, token)
        pair[key] = token
    d_vocab = model.config.d_vocab
    for key, held in pair.items():
        for token in held if isinstance(held, list) else [held]:
            if token >= d_vocab:
                raise TaskError(
                    f"{key!r} holds token id {token}, and the model's ids are 0 to {d_vocab - 1}"
                )
    if pair["clean"] == pair["corrupted"]:
        raise TaskError(
            "corrupted is the clean prompt itself: nothing to patch",
            hint="change what the answer depends on, or leave the line out",
        )
    if pair.get("wrong") == pair["answer"]:
        raise TaskError(
            f"answer and wrong are both {value['answer']!r}",
            hint="wrong must be another token, to compare the answer with",
        )
    return pair
