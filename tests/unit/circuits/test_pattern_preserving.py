"""Ablation with patterns held: against forced patterns, and what it shows of a known circuit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.circuits.pattern_preserving import pattern_preserving_ablation
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.hooks import capture, edited
from headstream.models.store import load

# Float64 sums in another order; two orders above what is found.
EXACT = 1e-10


def test_ablating_with_the_pattern_held_spares_what_acts_through_keys() -> None:
    """The previous-token head of induction-2l serves the keys of later heads and nothing else.

    Full ablation takes the loss on repeats above 3 nats; with patterns held it stays near the base.
    """
    model = load("induction-2l")
    draws = torch.Generator().manual_seed(0)
    block = torch.stack([torch.randperm(48, generator=draws)[:24] + 1 for _ in range(32)])
    tokens = torch.cat((torch.zeros(32, 1, dtype=torch.int64), block, block), 1)

    def loss() -> float:
        with torch.no_grad():
            return float(model(tokens, return_type="loss_per_token")[:, 25:].mean())

    def without_head_0(z: Tensor) -> Tensor:
        return torch.cat((torch.zeros_like(z[:, :, :1]), z[:, :, 1:]), 2)

    base = loss()
    with edited(model, {"blocks.0.attn.hook_z": without_head_0}):
        full = loss()
    with pattern_preserving_ablation(model, tokens, [(0, 0)]):
        preserving = loss()
    with pattern_preserving_ablation(model, tokens, [(0, 0)], values="mean"):
        of_mean = loss()
    with pattern_preserving_ablation(model, tokens, [(1, head) for head in range(4)]):
        heads_that_copy = loss()
    assert base < 0.02
    assert full > 3
    assert preserving < 0.02
    assert of_mean < 0.02
    assert full > 100 * preserving
    # The control: heads that act through values are not spared.
    assert heads_that_copy > 3


@pytest.mark.parametrize("values", ["zero", "mean"])
@pytest.mark.parametrize("backend", ["naive", "flash"])
def test_it_is_forced_patterns_and_an_edit_of_z(
    model: Decoder, tokens: Tensor, values: str, backend: str
) -> None:
    mask = torch.ones(3, 6, dtype=torch.int64)
    mask[2, :3] = 0
    patterns = ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    point = "blocks.0.attn.hook_z"
    _, clean = capture(model, tokens, [*patterns, point], attention_mask=mask, backend="naive")
    mean = clean[point][mask.bool()].mean(0)

    def ablate(z: Tensor) -> Tensor:
        ablated = z.clone()
        for head in (1, 2):
            ablated[:, :, head] = 0 if values == "zero" else mean[head]
        return ablated

    forced: dict[str, Any] = {name: lambda _, name=name: clean[name] for name in patterns}
    with edited(model, forced | {point: ablate}):
        expected = model(tokens, attention_mask=mask, backend="naive")
    heads = [(0, 2), (0, 1)]
    with pattern_preserving_ablation(model, tokens, heads, values=values, attention_mask=mask):
        got = model(tokens, attention_mask=mask, backend=backend)
    assert (got - expected).abs().max() < EXACT


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"heads": []}, ShapeError, r"no heads were given; give pairs such as \[\(0, 3\)\]"),
        ({"heads": [3]}, ShapeError, r"a head is a pair \(layer, head\), got 3"),
        ({"heads": [(0, 4)]}, ShapeError, "there is no head 4"),
        ({"heads": [(2, 0)]}, ShapeError, "there is no layer 2"),
        ({"heads": [(None, 0)]}, ShapeError, "there is no layer None"),
        ({"values": "men"}, ConfigError, "values must be 'zero' or 'mean', got 'men'; nearest is"),
    ],
)
def test_ablations_that_are_none(
    model_a: Decoder, tokens: Tensor, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with (
        pytest.raises(error, match=words),
        pattern_preserving_ablation(model_a, tokens, **({"heads": [(0, 0)]} | given)),
    ):
        pass
