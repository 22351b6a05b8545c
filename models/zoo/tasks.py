"""Prompt pairs for the zoo's own tasks: what a model was made for, clean and corrupted.

Induction: `<bos> .. A B .. A`, the two A's at every distance that fits; the answer is B. Three ways
to corrupt it break different things:

    earlier_query   the earlier A becomes a token that occurs nowhere else: nothing matches any
                    more, so every head of the circuit matters, the previous-token head included
    answer          B becomes another token: the match stays, what is copied changes
    last            the last A becomes a token that occurs nowhere else: the query changes

The pairs of other kinds are in `gate_pairs`, `backcopy_pairs` and `recall_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest
from headstream.models.zoo.backcopy_pairs import backcopy_pairs
from headstream.models.zoo.gate_pairs import gate_pairs
from headstream.models.zoo.recall_pairs import recall_pairs
from headstream.models.zoo.sequences import single_match

Corruption = Literal["earlier_query", "answer", "last"]


def pairs_for(
    card: Mapping[str, Any],
    n: Any,
    seed: int,
    *,
    config: DecoderConfig | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`n` pairs for the task that a model's card names.

    Args:
        card: a model's card; its `task` holds the `kind` and what that kind needs.
        n: pairs.
        seed: of the draw; the global random state is not used.
        config: of the model that shall read the pairs; None checks nothing.
        options: of the kind. Every kind has `corruption`: what is replaced. None, of any option,
            is the kind's own. Induction: see `induction_pairs`; gates, backcopy and recall: see
            their files.
    Returns:
        The arguments of `Task`: `clean`, `corrupted` int64 [example, pos], `answer`, `wrong`
        [example], and `roles`, name -> position [example].
    Raises:
        TaskError: if the card names no task that is known here or one that cannot be drawn, n < 1,
            an option is not one of the kind's or does not fit, or the card asks for more than the
            model holds.
    Example:
        >>> card = {"task": {"kind": "induction", "length": 6, "n_content": 9}}
        >>> pairs = pairs_for(card, n=1, seed=0)
        >>> int((pairs["clean"] != pairs["corrupted"]).sum())
        1
    """
    task = card.get("task")
    kind = task.get("kind") if isinstance(task, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise TaskError(f"the card of {card.get('name')!r} names no known task, got {task!r}")
    draw, known = _KINDS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise TaskError(
                f"{name}={value!r} was given, and the pairs of {_IN_WORDS[kind]} have none; "
                f"they take {', '.join(known)}",
                hint=nearest(name, known),
            )
    drawn: dict[str, Any] = draw(card, n, seed, config=config, **given)
    return drawn


def induction_pairs(
    card: Mapping[str, Any],
    n: Any,
    seed: int,
    *,
    corruption: Any = None,
    distance: Any = None,
    config: DecoderConfig | None = None,
) -> dict[str, Any]:
    """`n` pairs of `<bos> .. A B .. A`; see `pairs_for`.

    Args:
        card: its task holds `length` and `n_content`, and may hold `distance` and `corruption`.
        corruption: see the top of this file; None is what the card's task names, or else
            `earlier_query`.
        distance: smallest and largest distance between the two A's; None is what the card's task
            names (decoys keep to one), or else all that fit.
    Returns:
        The arguments of `Task`; roles `earlier_query` the earlier A, `answer_source` the B after
        it, `query` the last token. `wrong` is another token of the clean prompt, drawn uniformly
        from those that are neither A, B nor BOS, so that merely preferring tokens of the context
        gains nothing; with `corruption="answer"` it is the token that replaced B.
    Raises:
        TaskError: as `pairs_for`.
    """
    length, n_content = _induction_sizes(card)
    if corruption is None:
        corruption = str(card["task"].get("corruption", "earlier_query"))
    if distance is None:
        distance = _fixed_distance(card)
    if config is not None:
        _require_fit(card, length, n_content, config)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise TaskError(f"n must be a whole number of pairs >= 1, got {n!r}")
    if corruption not in get_args(Corruption):
        raise TaskError(
            f"corruption must be one of {', '.join(get_args(Corruption))}, got {corruption!r}",
            hint=nearest(str(corruption), get_args(Corruption)),
        )
    generator = torch.Generator().manual_seed(seed)
    made = single_match(n, length, n_content, generator=generator, distance=distance)
    row = torch.arange(n)
    last = made.tokens.shape[1] - 1
    place = {
        "earlier_query": made.earlier,
        "answer": made.earlier + 1,
        "last": torch.full((n,), last),
    }[corruption]
    corrupted = made.tokens.clone()
    corrupted[row, place] = made.fresh[:, 0]
    answer = made.tokens[row, made.earlier + 1]
    wrong = _other_token(made.tokens, made.earlier, generator)
    if corruption == "answer":
        # What is copied instead is the fair alternative.
        wrong = made.fresh[:, 0]
    return {
        "clean": made.tokens,
        "corrupted": corrupted,
        "answer": answer,
        "wrong": wrong,
        "roles": {
            "earlier_query": made.earlier,
            "answer_source": made.earlier + 1,
            "query": torch.full((n,), last),
        },
    }


def _induction_sizes(card: Mapping[str, Any]) -> tuple[int, int]:
    """Length and number of content tokens of the card's task."""
    task = card["task"]
    sizes = task.get("length"), task.get("n_content")
    if not all(isinstance(size, int) for size in sizes):
        raise TaskError(
            f"the task of {card.get('name')!r} must give length and n_content as whole numbers, "
            f"got {task!r}"
        )
    if task["length"] < 5:
        raise TaskError(
            f"an induction task takes at least 5 tokens, `<bos> X A B A`, got length="
            f"{task['length']}"
        )
    return int(task["length"]), int(task["n_content"])


def _fixed_distance(card: Mapping[str, Any]) -> tuple[int, int] | None:
    """The distances that the card's task keeps to, if it does."""
    span = card["task"].get("distance")
    if span is None:
        return None
    if not isinstance(span, Sequence) or len(span) != 2 or not all(type(d) is int for d in span):
        raise TaskError(
            f"the task of {card.get('name')!r} must give distance as two whole numbers, got "
            f"{span!r}"
        )
    return int(span[0]), int(span[1])


def _require_fit(
    card: Mapping[str, Any], length: int, n_content: int, config: DecoderConfig
) -> None:
    content = config.d_vocab - (config.bos_token_id is not None)
    for name, asked, held, of in (
        ("n_content", n_content, content, f"content tokens (d_vocab={config.d_vocab})"),
        ("length", length, config.n_ctx, f"positions (n_ctx={config.n_ctx})"),
    ):
        if asked > held:
            raise TaskError(
                f"the card of {card.get('name')!r} does not fit the model: its task has "
                f"{name}={asked}, the model has {held} {of}",
                hint="correct card.json, or build a Task from your own pairs",
            )


def _other_token(tokens: Tensor, earlier: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row that is neither BOS, A nor B, drawn uniformly."""
    row = torch.arange(len(tokens))
    chance = torch.rand(tokens.shape, generator=generator)
    chance[:, 0] = -1.0
    chance[:, -1] = -1.0
    chance[row, earlier] = -1.0
    chance[row, earlier + 1] = -1.0
    return tokens[row, chance.argmax(1)]


# What draws the pairs of a kind, and the options that it takes.
_KINDS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "induction": (induction_pairs, ("corruption", "distance")),
    "gate": (gate_pairs, ("corruption",)),
    "backcopy": (backcopy_pairs, ("corruption",)),
    "recall": (recall_pairs, ("corruption", "n_pairs", "depth")),
}
_IN_WORDS = {
    "induction": "an induction task",
    "gate": "a gate",
    "backcopy": "a backcopy task",
    "recall": "a recall task",
}
