"""Two gates of two heads, by hand: what denoising and noising can and cannot see.

`constructed-and` and `constructed-or` differ in four weights of an MLP. The stream has five parts:

    token    one-hot of the token            written by W_E
    a, b     the first and the second bit    written by L0H0 and L0H2
    zeros    how far the gate holds of 0     written by the MLP, read by the logit of `0`
    ones     how far it holds of 1           written by the MLP, read by the logit of `1`

L0H0 rests on BOS until a token `a0` or `a1` has come, and from there on attends to it: scores 60
and 30 against 0, so that attention is 1 up to 20 e^-30. It writes 1 for `a1`. L0H2 does the same
with `b0` and `b1`. The other two heads have zero weights. With bits in {0, 1} the MLP computes

              ones                                zeros, the same of 1 - a and 1 - b
    and       relu(a + b - 1)                     relu(1 - a - b)
    or        relu(a + b) - relu(a + b - 1)       relu(2 - a - b) - relu(1 - a - b)

The logit of `?` is half of that of a gate that holds. Which bit is asked for changes from pair to
pair, so values of an unrelated prompt are right in half of the pairs and wrong in the others.

Source:
    Heimersheim & Nanda 2024 (arXiv 2404.15255), the AND and OR circuits. Theirs are drawn, these
    run.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

BOS, A0, A1, B0, B1, QUERY, ZERO, ONE, MIXED = range(9)
N_FILLERS = 16
N_CTX = 24
SHARPNESS = 30.0
HELD_LOGIT = 10.0
HEADS = {"a": (0, 0), "b": (0, 2)}

# Neurons relu(sign * (a + b) + bias), and what each writes to (zeros, ones).
_NEURONS = {
    "and": (
        (1.0, -1.0, (0.0, 1.0)),
        (-1.0, 1.0, (1.0, 0.0)),
    ),
    "or": (
        (1.0, 0.0, (0.0, 1.0)),
        (1.0, -1.0, (0.0, -1.0)),
        (-1.0, 2.0, (1.0, 0.0)),
        (-1.0, 1.0, (-1.0, 0.0)),
    ),
}


def constructed_and() -> Decoder:
    """The gate that holds if both heads bring the bit: 1 layer, 4 heads, no norm, float32."""
    return _gate("and", "a gate of two heads that both must open: denoising one restores nothing")


def constructed_or() -> Decoder:
    """The gate that holds if either head brings the bit: 1 layer, 4 heads, no norm, float32."""
    return _gate("or", "a gate of two heads that each can open: noising one breaks nothing")


def _gate(kind: str, purpose: str) -> Decoder:
    d_vocab = MIXED + 1 + N_FILLERS
    a, b, zeros, ones = range(d_vocab, d_vocab + 4)
    model = Decoder(
        DecoderConfig(
            n_layers=1,
            n_heads=4,
            d_model=d_vocab + 4,
            d_head=4,
            d_mlp=4,
            d_vocab=d_vocab,
            n_ctx=N_CTX,
            positions="none",
            norm="none",
            activation="relu",
            mlp_bias=True,
            unembed_bias=True,
            attn_scale=1.0,
            bos_token_id=BOS,
        )
    )
    block = model.blocks[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[:, :d_vocab] = torch.eye(d_vocab)
        for name, bits, part in (("a", (A0, A1), a), ("b", (B0, B1), b)):
            _, head = HEADS[name]
            block.attn.W_Q[head, :d_vocab, 0] = SHARPNESS
            block.attn.W_K[head, list(bits), 0] = 2.0
            block.attn.W_K[head, BOS, 0] = 1.0
            block.attn.W_V[head, bits[1], 0] = 1.0
            block.attn.W_O[head, 0, part] = 1.0
        assert block.mlp.b_in is not None
        for neuron, (sign, bias, writes) in enumerate(_NEURONS[kind]):
            block.mlp.W_in[[a, b], neuron] = sign
            block.mlp.b_in[neuron] = bias
            block.mlp.W_out[neuron, [zeros, ones]] = torch.tensor(writes)
        model.unembed.W_U[zeros, ZERO] = HELD_LOGIT
        model.unembed.W_U[ones, ONE] = HELD_LOGIT
        assert model.unembed.b_U is not None
        model.unembed.b_U[MIXED] = HELD_LOGIT / 2
    model.name = f"constructed-{kind}"
    fillers = [f"w{index:02}" for index in range(N_FILLERS)]
    model.vocab = ["<bos>", "a0", "a1", "b0", "b1", "=", "0", "1", "?", *fillers]
    model.card = _card(model.name, kind, purpose)
    return model


def _card(name: str, kind: str, purpose: str) -> dict[str, Any]:
    holds = "both bits are" if kind == "and" else "either bit is"
    # Beside the bit that holds: `?` at half its logit, all others at 0.
    others = math.exp(-HELD_LOGIT / 2) + (MIXED - 1 + N_FILLERS) * math.exp(-HELD_LOGIT)
    return {
        "name": name,
        "purpose": purpose,
        "task": {"kind": "gate", "gate": kind, "length": 12, "n_fillers": N_FILLERS},
        "loss": {
            "on_answers": round(math.log1p(others), 5),
            "best_possible_on_answers": 0.0,
            "what": "answers of the task's prompts, over the whole vocabulary",
            "unit": "nats",
        },
        "circuit": {
            "first bit": ["L0H0"],
            "second bit": ["L0H2"],
            "gate": ["L0MLP"],
            "idle": ["L0H1", "L0H3"],
            "through": f"the MLP raises `0` where {holds} 0, and `1` where {holds} 1",
        },
        "vocabulary": (
            f"<bos>, the bits a0 a1 b0 b1, the question =, the answers 0 1 ?, and {N_FILLERS} "
            "fillers w.. without meaning"
        ),
        "recipe": f"weights by hand: headstream.models.zoo.gates.constructed_{kind}",
        "norm": "none",
        "positions": "none",
    }
