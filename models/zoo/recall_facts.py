"""What a card says of a model trained on recall: by depth, by number of pairs, head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from headstream.models.decoder import Decoder
from headstream.models.hooks import capture, edited
from headstream.models.names import head_name
from headstream.models.zoo.facts import NAMED_FROM
from headstream.models.zoo.recall_sequences import (
    N_KEYS,
    N_VALUES,
    Questions,
    prompt_length,
    questions,
)

_ASKED = 512
_CIRCUIT_ON = 128
_NUMBERS = (2, 4, 8, 12, 16, 21, 22, 24, 28, 32, 40, 50, 62)
_DEPTHS = 5

Span = tuple[int, int]
Heads = list[tuple[int, int]]


def recall_facts(model: Decoder, pairs: Span, task_pairs: int, seed: int) -> dict[str, Any]:
    """`task`, `loss`, `circuit`, `measured` and `vocabulary` of the card."""
    config = model.config
    trained = config.n_train or config.n_ctx
    by_number: dict[str, dict[str, float]] = {"within_training": {}, "past_training": {}}
    accuracy: dict[str, dict[str, float]] = {"within_training": {}, "past_training": {}}
    for number in _NUMBERS:
        if prompt_length(number) > config.n_ctx:
            continue
        # The answer takes one token more than the prompt.
        part = "within_training" if prompt_length(number) < trained else "past_training"
        made = questions(_ASKED, number, generator=Generator().manual_seed(seed))
        lost, right = ask(model, made)
        by_number[part][str(number)] = round(lost, 4)
        accuracy[part][str(number)] = round(right, 4)
    depths = {
        number: by_depth(model, number, seed) for number in (pairs[1], (config.n_ctx - 4) // 2)
    }
    circuit, measured = _circuit(model, task_pairs, seed)
    return {
        "task": {"kind": "recall", "pairs": task_pairs},
        "loss": {
            "on_answers": max(by_number["within_training"].values()),
            "what": "answers at the worst number of pairs within the training length",
            "best_possible_on_answers": 0.0,
            "unit": "nats",
            "questions": _ASKED,
            "by_number_of_pairs": by_number,
            **{f"by_depth_of_{number}_pairs": lost for number, (lost, _) in depths.items()},
        },
        "accuracy": {
            "on_answers": min(accuracy["within_training"].values()),
            "by_number_of_pairs": accuracy,
            **{f"by_depth_of_{number}_pairs": right for number, (_, right) in depths.items()},
        },
        "circuit": circuit,
        "measured": measured,
        "vocabulary": (
            f"<bos>, <data>, <inst>, {N_KEYS} keys k.. and {N_VALUES} values v.. without meaning"
        ),
    }


def ask(model: Decoder, made: Questions) -> tuple[float, float]:
    """Mean loss in nats on the answers, and the share that the largest logit gets right."""
    with torch.no_grad():
        logits = model(made.tokens)[:, -1]
    lost = torch.nn.functional.cross_entropy(logits, made.answer)
    return float(lost), float((logits.argmax(-1) == made.answer).float().mean())


def by_depth(model: Decoder, n_pairs: int, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Loss and accuracy with the needle in each fifth of the pairs, `first-last` pair."""
    lost, right = {}, {}
    for fifth in range(_DEPTHS):
        low, high = n_pairs * fifth // _DEPTHS, n_pairs * (fifth + 1) // _DEPTHS - 1
        made = questions(
            _ASKED // 2, n_pairs, generator=Generator().manual_seed(seed), depth=(low, high)
        )
        found = ask(model, made)
        lost[f"{low}-{high}"], right[f"{low}-{high}"] = (round(value, 4) for value in found)
    return lost, right


def _circuit(
    model: Decoder, n_pairs: int, seed: int
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Heads that look from a value to its key, and from the question to the needle's value."""
    config = model.config
    made = questions(_CIRCUIT_ON, n_pairs, generator=Generator().manual_seed(seed))
    heads = [(at, head) for at in range(config.n_layers) for head in range(config.n_heads)]
    names = [f"blocks.{at}.attn.hook_pattern" for at in range(config.n_layers)]
    with torch.no_grad():
        _, acts = capture(model, made.tokens, names)
    value_at = torch.arange(3, 2 * n_pairs + 2, 2)
    row, needle = torch.arange(_CIRCUIT_ON), 2 * made.depth + 3
    to_key, to_needle = {}, {}
    for at, head in heads:
        pattern = acts[names[at]][:, head]
        to_key[at, head] = float(pattern[:, value_at, value_at - 1].mean())
        to_needle[at, head] = float(pattern[row, -1, needle].mean())
    kinds: dict[str, Heads] = {
        # No previous-token head: on other tokens than values it looks elsewhere.
        "value-to-key": [h for h in heads if to_key[h] > NAMED_FROM],
        "retrieval": [h for h in heads if to_needle[h] > NAMED_FROM],
    }
    named = {head for members in kinds.values() for head in members}
    kinds["other"] = [head for head in heads if head not in named]
    kinds = {kind: members for kind, members in kinds.items() if members}
    without = {head_name(*head): _loss_without(model, made, [head]) for head in heads} | {
        f"all {kind}": _loss_without(model, made, members) for kind, members in kinds.items()
    }
    return (
        {kind: [head_name(*head) for head in members] for kind, members in kinds.items()},
        {
            "questions": _CIRCUIT_ON,
            "pairs": n_pairs,
            "attention_from_values_to_their_keys": _named(to_key),
            "attention_from_the_question_to_the_needles_value": _named(to_needle),
            "loss_without": without,
        },
    )


def _loss_without(model: Decoder, made: Questions, heads: Heads) -> float:
    def silence(layer: int) -> Any:
        chosen = [head for at, head in heads if at == layer]
        return lambda z: z.index_fill(2, torch.tensor(chosen), 0.0)

    edits = {f"blocks.{at}.attn.hook_z": silence(at) for at in {at for at, _ in heads}}
    with edited(model, edits):
        return round(ask(model, made)[0], 4)


def _named(scores: dict[tuple[int, int], float]) -> dict[str, float]:
    return {head_name(*head): round(score, 3) for head, score in scores.items()}
