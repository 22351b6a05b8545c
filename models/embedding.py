"""Into the residual stream and out of it: token and position embedding, unembedding."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headstream.models.config import DecoderConfig


class Embed(nn.Module):
    """`W_E` [d_vocab, d_model]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(config.d_vocab, config.d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        return self.W_E[tokens]


class PosEmbed(nn.Module):
    """`W_pos` [n_ctx, d_model], for learned and shortformer positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(config.n_ctx, config.d_model))

    def forward(self, positions: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        return self.W_pos[positions]


class Unembed(nn.Module):
    """`W_U` [d_model, d_vocab], `b_U` [d_vocab] where configured; tied models hold neither."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if not config.tied_embeddings:
            self.W_U = nn.Parameter(torch.empty(config.d_model, config.d_vocab))
        bias = nn.Parameter(torch.zeros(config.d_vocab)) if config.unembed_bias else None
        self.register_parameter("b_U", bias)
