"""Models whose weights are written by hand: the ground truth for every detector.

`constructed-induction` is the induction circuit with nothing else in it. Its stream has four parts
that no two components share:

    token    one-hot of the token                    written by W_E
    place    one-hot of the position                 written by W_pos
    before   one-hot of the previous token           written by L0H1
    next     the token to predict                    written by L1H2, read by W_U

L0H1, the previous-token head: queries and keys read `place`, the query shifted by one, so that
position i attends to i - 1; it copies `token` into `before`. L1H2, the induction head: the query
is `token`, the key is `before`; where they are equal the score is 60. A key on BOS scores 30, so
that a query without a match rests there, and BOS has no value: nothing is written. L1H2 copies
`token` into `next`. All other heads have zero weights: they attend uniformly and write nothing.

The target's score lies 30 above the rest, so its attention is 1 up to 64 e^-30, under 1e-11.
"""

from __future__ import annotations

import math

import torch

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.zoo.sequences import BOS

N_CONTENT = 32
N_CTX = 48
# Nats between what a head looks for and everything else, and the logit of a copied token.
SHARPNESS = 30.0
COPIED_LOGIT = 10.0
PREVIOUS_TOKEN_HEAD = (0, 1)
INDUCTION_HEAD = (1, 2)


def constructed_induction() -> Decoder:
    """The model described above: 2 layers, 4 heads, no norm, learned positions, float32."""
    d_vocab = N_CONTENT + 1
    token = slice(0, d_vocab)
    place = slice(d_vocab, d_vocab + N_CTX)
    before = slice(place.stop, place.stop + d_vocab)
    following = slice(before.stop, before.stop + d_vocab)
    model = Decoder(
        DecoderConfig(
            n_layers=2,
            n_heads=4,
            d_model=following.stop,
            d_head=N_CTX,
            d_vocab=d_vocab,
            n_ctx=N_CTX,
            positions="learned",
            norm="none",
            attn_scale=1.0,
            bos_token_id=BOS,
        )
    )
    one_hot = torch.eye(d_vocab)
    no_bos = one_hot.clone()
    no_bos[BOS] = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[:, token] = one_hot
        model.pos_embed.W_pos[:, place] = torch.eye(N_CTX)

        layer, head = PREVIOUS_TOKEN_HEAD
        attn = model.blocks[layer].attn
        # Row i of the query weights asks for place i - 1; place 0 asks for nothing and gets itself.
        attn.W_Q[head, place] = SHARPNESS * torch.eye(N_CTX).roll(-1, 1).tril()
        attn.W_K[head, place] = torch.eye(N_CTX)
        attn.W_V[head, token, :d_vocab] = one_hot
        attn.W_O[head, :d_vocab, before] = one_hot

        layer, head = INDUCTION_HEAD
        attn = model.blocks[layer].attn
        attn.W_Q[head, token, :d_vocab] = 2 * SHARPNESS * one_hot
        attn.W_K[head, before, :d_vocab] = one_hot
        # Every token's query has SHARPNESS on one more channel, which only BOS's key answers.
        attn.W_Q[head, token, d_vocab] = SHARPNESS
        attn.W_K[head, BOS, d_vocab] = 1.0
        attn.W_V[head, token, :d_vocab] = no_bos
        attn.W_O[head, :d_vocab, following] = COPIED_LOGIT * one_hot
        model.unembed.W_U[following] = one_hot
    model.name = "constructed-induction"
    model.vocab = ["<bos>", *(f"t{index:02}" for index in range(1, d_vocab))]
    model.card = {
        "name": model.name,
        "purpose": "ground truth: an induction circuit written by hand, idle heads beside it",
        "task": {"kind": "induction", "length": 32, "n_content": N_CONTENT},
        "loss": {
            # One logit stands above all others, which are equal.
            "on_answers": round(math.log1p((d_vocab - 1) * math.exp(-COPIED_LOGIT)), 5),
            "best_possible_on_answers": 0.0,
            "what": "answers of the task's prompts, over the whole vocabulary",
            "unit": "nats",
        },
        "circuit": {
            "previous-token": ["L0H1"],
            "induction": ["L1H2"],
            "idle": ["L0H0", "L0H2", "L0H3", "L1H0", "L1H1", "L1H3"],
            "through": "L1H2 reads what L0H1 writes through its keys, and nothing else",
        },
        "vocabulary": f"<bos> and {N_CONTENT} tokens without meaning",
        "recipe": "weights by hand: headstream.models.zoo.constructed.constructed_induction",
        "norm": "none",
        "positions": "learned, one-hot",
    }
    return model
