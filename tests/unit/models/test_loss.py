"""The loss by hand: real targets, predicted from the real token before them."""

import math

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError
from headstream.models.loss import next_token_loss

# Two tokens; logits [0, x] give the second token probability 1 / (1 + exp(-x)).
LOGITS = torch.tensor([[[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]]], dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 0, 1]])


def surprise(x: float, token: int) -> float:
    return math.log(1 + math.exp(-x)) + (0 if token else x)


def test_without_a_mask() -> None:
    expected = [surprise(1, 1), surprise(2, 0), surprise(3, 1)]
    per_token = next_token_loss(LOGITS, TOKENS, None, per_token=True)
    assert per_token[0].tolist() == pytest.approx(expected, abs=1e-12)
    mean = next_token_loss(LOGITS, TOKENS, None, per_token=False)
    assert float(mean) == pytest.approx(sum(expected) / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 0], [surprise(1, 1), surprise(2, 0), math.nan]),
        ([0, 1, 1, 1], [math.nan, surprise(2, 0), surprise(3, 1)]),
        # The token after the hole is predicted from the one before it.
        ([1, 0, 1, 1], [math.nan, surprise(1, 0), surprise(3, 1)]),
        ([1, 0, 0, 1], [math.nan, math.nan, surprise(1, 1)]),
    ],
)
def test_masked_tokens_are_neither_target_nor_source(
    mask: list[int], expected: list[float]
) -> None:
    allowed = torch.tensor([mask]).bool()
    per_token = next_token_loss(LOGITS, TOKENS, allowed, per_token=True)
    assert per_token[0].tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)
    real = [value for value in expected if not math.isnan(value)]
    mean = next_token_loss(LOGITS, TOKENS, allowed, per_token=False)
    assert float(mean) == pytest.approx(sum(real) / len(real), abs=1e-12)


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [0, 0, 1, 0]])
def test_no_target(mask: list[int]) -> None:
    words = "the loss has no target: no real token follows another real token"
    for per_token in (True, False):
        with pytest.raises(ShapeError, match=words):
            next_token_loss(LOGITS, TOKENS, torch.tensor([mask]).bool(), per_token=per_token)
    with pytest.raises(ShapeError, match=words):
        next_token_loss(LOGITS[:, :1], TOKENS[:, :1], None, per_token=False)


def test_return_types_agree(model: Decoder, tokens: Tensor, backend: str) -> None:
    logits = model(tokens, backend=backend)
    loss = model(tokens, backend=backend, return_type="loss")
    per_token = model(tokens, backend=backend, return_type="loss_per_token")
    log_probs = logits.log_softmax(-1)
    expected = -log_probs[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    assert (per_token - expected).abs().max() < 1e-12
    assert abs(loss - expected.mean()) < 1e-12
    assert model(tokens, backend=backend, return_type=None) is None


def test_half_precision_logits_are_widened_first() -> None:
    half = LOGITS.bfloat16()
    loss = next_token_loss(half, TOKENS, None, per_token=False)
    assert loss.dtype == torch.float32
    assert abs(loss - next_token_loss(half.double(), TOKENS, None, per_token=False)) < 1e-6
