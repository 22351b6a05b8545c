"""Attention-only models made by hand, whose heads do one thing each; one-hot residual, no norm.

Parts of the stream: the token, the position, "before" (what stood before) and the output, which
the unembedding reads.
"""

from __future__ import annotations

from typing import Any

import torch

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

SHARP = 30.0


class HandMade:
    """A model of which every head is idle until it is told what to do.

    Attributes:
        model: BOS is token 0; content tokens are 1 to `n_content`.
    """

    def __init__(self, *, n_content: int = 32, n_ctx: int = 48, **fields: Any) -> None:
        vocab = n_content + 1
        self.vocab, self.n_ctx = vocab, n_ctx
        self.token = slice(0, vocab)
        self.position = slice(vocab, vocab + n_ctx)
        self.before = slice(vocab + n_ctx, 2 * vocab + n_ctx)
        self.output = slice(2 * vocab + n_ctx, 3 * vocab + n_ctx)
        given: dict[str, Any] = {"n_layers": 2, "n_heads": 4, **fields}
        config = DecoderConfig(
            d_model=self.output.stop,
            d_head=max(n_ctx, vocab) + 1,
            d_vocab=vocab,
            n_ctx=n_ctx,
            norm="none",
            attn_scale=1.0,
            bos_token_id=0,
            **given,
        )
        self.model = Decoder(config)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
            self.model.embed.W_E[:, self.token] = torch.eye(vocab)
            self.model.pos_embed.W_pos[:, self.position] = torch.eye(n_ctx)
            self.model.unembed.W_U[self.output] = torch.eye(vocab)

    @torch.no_grad()
    def look(self, layer: int, head: int, at: dict[int, int]) -> HandMade:
        """Position i attends to position at[i]; the others evenly."""
        attn = self.model.blocks[layer].attn
        wanted = torch.zeros(self.n_ctx, self.n_ctx)
        for query, key in at.items():
            wanted[query, key] = SHARP
        attn.W_Q[head, self.position, : self.n_ctx] = wanted
        attn.W_K[head, self.position, : self.n_ctx] = torch.eye(self.n_ctx)
        return self

    def look_back(self, layer: int, head: int, back: int) -> HandMade:
        """Every position attends `back` tokens back; early ones evenly."""
        return self.look(layer, head, {i: i - back for i in range(back, self.n_ctx)})

    @torch.no_grad()
    def copy(self, layer: int, head: int, *, gain: float = 10.0, to: str = "output") -> HandMade:
        """Write the token attended to, BOS apart."""
        attn = self.model.blocks[layer].attn
        content = torch.eye(self.vocab)
        if to == "output":
            content[0] = 0.0
        attn.W_V[head, self.token, : self.vocab] = content
        attn.W_O[head, : self.vocab, getattr(self, to)] = gain * torch.eye(self.vocab)
        return self

    @torch.no_grad()
    def match(self, layer: int, head: int) -> HandMade:
        """Attend to the token after an earlier copy of one's own; to BOS where there is none."""
        attn = self.model.blocks[layer].attn
        attn.W_Q[head, self.token, : self.vocab] = 2 * SHARP * torch.eye(self.vocab)
        attn.W_K[head, self.before, : self.vocab] = torch.eye(self.vocab)
        attn.W_Q[head, self.token, self.vocab] = SHARP
        attn.W_K[head, 0, self.vocab] = 1.0
        return self

    @torch.no_grad()
    def hush_bos(self, layer: int, head: int) -> HandMade:
        """The model expects BOS; wherever the head attends to content it unsays that, no more."""
        self.model.unembed.b_U[0] = 15.0
        attn = self.model.blocks[layer].attn
        attn.W_V[head, 1 : self.vocab, 0] = 1.0
        attn.W_O[head, 0, self.output.start] = -15.0
        return self


def with_previous(**fields: Any) -> HandMade:
    """L0H0 tells every position what stood before it."""
    return HandMade(**fields).look_back(0, 0, 1).copy(0, 0, gain=10.0, to="before")
