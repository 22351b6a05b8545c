"""Our decoder against transformers' GPT-2 and Llama with the same weights, built in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder

ROWS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5], [8, 9]]
# GPT-2 in float64 differs by the order of sums. Llama's rotary tables stay float32 in a float64
# model, which costs about 1e-7 an angle, and its RMSNorm computes in float32.
BOUNDS = {"gpt2": 1e-10, "llama": 1e-5}
# Their loss is taken in float32, whatever the model: 6e-8 of a number of order 1.
LOSS_BOUND = {"gpt2": 5e-7, "llama": 1e-5}


def batch(side: str) -> tuple[Tensor, Tensor]:
    """ROWS padded to 7 with token 10, and the mask."""
    tokens, mask = [], []
    for row in ROWS:
        pad, ones, zeros = [10] * (7 - len(row)), [1] * len(row), [0] * (7 - len(row))
        tokens.append(pad + row if side == "left" else row + pad)
        mask.append(zeros + ones if side == "left" else ones + zeros)
    return torch.tensor(tokens), torch.tensor(mask)


def test_logits(pair: tuple[Any, Decoder, str], backend: str) -> None:
    theirs, ours, name = pair
    tokens = torch.tensor([ROWS[0], ROWS[0][::-1]])
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (ours(tokens, backend=backend) - expected).abs().max()
    assert expected.abs().max() > 1
    assert difference < BOUNDS[name]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(pair: tuple[Any, Decoder, str], backend: str, side: str) -> None:
    theirs, ours, name = pair
    tokens, mask = batch(side)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = theirs(tokens, attention_mask=mask, position_ids=positions).logits
        logits = ours(tokens, attention_mask=mask, backend=backend)
    assert (logits - expected)[mask.bool()].abs().max() < BOUNDS[name]


def test_loss(pair: tuple[Any, Decoder, str], backend: str) -> None:
    theirs, ours, name = pair
    tokens, mask = batch("right")
    with torch.no_grad():
        expected = theirs(
            tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)
        ).loss
        loss = ours(tokens, attention_mask=mask, backend=backend, return_type="loss")
    assert abs(loss - expected) < LOSS_BOUND[name]


def test_gradients(pair: tuple[Any, Decoder, str], backend: str) -> None:
    """Of the loss with respect to the embedding, which every path reaches."""
    theirs, ours, name = pair
    tokens = torch.tensor([ROWS[0]])
    embedding = theirs.get_input_embeddings().weight
    (expected,) = torch.autograd.grad(theirs(tokens, labels=tokens).loss, embedding)
    (grad,) = torch.autograd.grad(ours(tokens, backend=backend, return_type="loss"), ours.embed.W_E)
    assert expected.abs().max() > 0.01
    assert (grad - expected).abs().max() < LOSS_BOUND[name]


def test_greedy_continuation(pair: tuple[Any, Decoder, str]) -> None:
    theirs, ours, _ = pair
    tokens = torch.tensor([ROWS[0]])
    greedy = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=10,
    )
    assert torch.equal(ours.generate(tokens, 5), greedy)
