"""The gates compute what their names say, and their pairs ask for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.store import load
from headstream.models.zoo.gate_pairs import gate_pairs
from headstream.models.zoo.gates import HELD_LOGIT, constructed_and, constructed_or
from headstream.models.zoo.tasks import pairs_for

GATES = {"constructed-and": constructed_and, "constructed-or": constructed_or}
CARD = {"name": "toy", "task": {"kind": "gate", "gate": "and", "length": 9, "n_fillers": 4}}


@pytest.mark.parametrize("name", GATES)
def test_the_checkpoint_is_the_construction_bit_for_bit(name: str) -> None:
    model, shipped = GATES[name](), load(name)
    assert shipped.config == model.config
    assert shipped.vocab == model.vocab
    assert shipped.weights_sha256() == model.weights_sha256()
    assert shipped.card == {**(model.card or {}), "weights_sha256": model.weights_sha256()}


def read(model: Decoder, text: str) -> list[float]:
    """Logits of `0`, `1` and `?` after `text`, over the logit of a gate that holds."""
    logits = model(model.to_tokens(text)).detach()[0, -1]
    ids = [model.to_single_token(word) for word in "01?"]
    return [float(logits[i]) / HELD_LOGIT for i in ids]


@pytest.mark.parametrize(
    ("prompt", "both", "either"),
    [
        ("a0 w03 b0 =", [1, 0, 0.5], [1, 0, 0.5]),
        ("a0 w03 b1 =", [0, 0, 0.5], [1, 1, 0.5]),
        ("b0 w03 w01 a1 =", [0, 0, 0.5], [1, 1, 0.5]),
        ("w07 a1 b1 w02 w02 =", [0, 1, 0.5], [0, 1, 0.5]),
    ],
)
def test_the_truth_table(prompt: str, both: list[float], either: list[float]) -> None:
    # Attention is 1 up to 20 e^-30, under float32's own rounding.
    assert read(load("constructed-and"), prompt) == pytest.approx(both, abs=1e-6)
    assert read(load("constructed-or"), prompt) == pytest.approx(either, abs=1e-6)


def test_pairs_have_both_bits_right_and_then_wrong() -> None:
    pairs = gate_pairs(CARD, 40, 3)
    row, a, b = torch.arange(40), pairs["roles"]["a"], pairs["roles"]["b"]
    bit = pairs["answer"] - 6
    for name, wanted in (("clean", bit), ("corrupted", 1 - bit)):
        assert torch.equal(pairs[name][row, a], 1 + wanted)
        assert torch.equal(pairs[name][row, b], 3 + wanted)
    assert int(bit.sum()) == 20
    assert int((pairs["clean"] != pairs["corrupted"]).sum()) == 80
    assert bool((pairs["clean"][:, -1] == 5).all())
    assert not bool((a == b).any())
    assert bool((a < b).any())
    assert bool((a > b).any())


@pytest.mark.parametrize(("corruption", "role"), [("first", "a"), ("second", "b")])
def test_one_bit_alone_can_be_corrupted(corruption: str, role: str) -> None:
    pairs = gate_pairs(CARD, 12, 0, corruption=corruption)
    row, column = (pairs["clean"] != pairs["corrupted"]).nonzero(as_tuple=True)
    assert torch.equal(row, torch.arange(12))
    assert torch.equal(column, pairs["roles"][role])


def test_the_card_leads_to_the_pairs() -> None:
    made = pairs_for(CARD, 7, 1)
    assert torch.equal(made["clean"], gate_pairs(CARD, 7, 1)["clean"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "n must be a whole number of pairs >= 1, got 0"),
        ({"corruption": "frist"}, "corruption must be one of both, first, second, got 'frist'"),
        ({"corruption": "frist"}, "nearest is 'first'"),
        ({"distance": (1, 2)}, r"distance=\(1, 2\) was given, and the pairs of a gate have none"),
        ({"task": {"length": None}}, "must give length and n_fillers as whole numbers"),
        ({"task": {"length": 3}}, "takes at least 4 tokens, .* got length=3 and n_fillers=4"),
        ({"task": {"length": 99}}, "its task has length=99, the model has 24 positions"),
        ({"task": {"n_fillers": 99}}, "its task has n_fillers=99, the model has 16 fillers"),
    ],
)
def test_what_cannot_be_drawn(options: dict[str, Any], words: str) -> None:
    card = CARD | {"task": {**CARD["task"], **options.pop("task", {})}}  # type: ignore[dict-item]
    with pytest.raises(TaskError, match=words):
        pairs_for(card, options.pop("n", 4), 0, config=constructed_and().config, **options)
