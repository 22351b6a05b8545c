"""A decoder's weights under TransformerLens' names and shapes, stacked over layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.models.config import DecoderConfig
from headstream.models.positions import sinusoidal_vectors

if TYPE_CHECKING:
    from headstream.models.block import Block


class WeightViews:
    """Weights by name. A bias that does not exist is zeros; a matrix that does not is refused."""

    config: DecoderConfig
    # An nn.ModuleList; typed by what it holds.
    blocks: Sequence[Block]
    embed: Any
    pos_embed: Any
    unembed: Any

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights."""
        return self.embed.W_E.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.W_E.device

    def __getattr__(self, name: str) -> Any:
        # nn.Module turns the AttributeError of a property into one of its own, which says less.
        config = self.__dict__.get("config")
        if config is not None:
            if name == "W_pos":
                raise AttributeError(f"this model with {config.positions} positions has no W_pos")
            if name in ("W_in", "W_out", "W_gate", "b_in", "b_out"):
                kind = (
                    "a model without a gated MLP" if config.has_mlp else "an attention-only model"
                )
                raise AttributeError(f"{kind} has no {name}")
        return super().__getattr__(name)  # type: ignore[misc]

    def _stack(self, part: str, name: str) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    def _stack_bias(self, part: str, name: str, *shape: int) -> Tensor:
        values = [getattr(getattr(block, part), name) for block in self.blocks]
        if values[0] is None:
            return torch.zeros(len(values), *shape, dtype=self.dtype, device=self.device)
        return torch.stack(values)

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """Position vectors: learned, shortformer or sinusoidal. Other models have none."""
        if self.config.positions == "sinusoidal":
            index = torch.arange(self.config.n_ctx, device=self.device)
            return sinusoidal_vectors(index, self.config.d_model, self.dtype)
        return self.pos_embed.W_pos

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self.embed.W_E.T if self.config.tied_embeddings else self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        if self.unembed.b_U is None:
            return torch.zeros(self.config.d_vocab, dtype=self.dtype, device=self.device)
        return self.unembed.b_U

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        return self._stack("attn", "W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        return self._stack("attn", "W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return self._stack("attn", "W_O")

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        return self._stack_bias("attn", "b_Q", self.config.n_heads, self.config.d_head)

    @property
    def b_K(self) -> Float[Tensor, "layer kv_head d_head"]:
        return self._stack_bias("attn", "b_K", self.config.kv_heads, self.config.d_head)

    @property
    def b_V(self) -> Float[Tensor, "layer kv_head d_head"]:
        return self._stack_bias("attn", "b_V", self.config.kv_heads, self.config.d_head)

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        return self._stack_bias("attn", "b_O", self.config.d_model)

    def _mlp(self, name: str) -> Tensor:
        if name.startswith("b_"):
            width = self.config.d_mlp if name == "b_in" else self.config.d_model
            return self._stack_bias("mlp", name, cast(int, width))
        return self._stack("mlp", name)

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        return self._mlp("W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"]:
        return self._mlp("W_gate")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        return self._mlp("W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        return self._mlp("b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        return self._mlp("b_out")

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum of the output biases of the layers before `layer`, as TransformerLens' cache asks."""
        total = torch.zeros(self.config.d_model, dtype=self.dtype, device=self.device)
        for index, block in enumerate(self.blocks[: layer + 1 if mlp_input else layer]):
            if block.attn.b_O is not None:
                total = total + block.attn.b_O
            whole = include_mlp_biases and block.has_mlp and not (mlp_input and index == layer)
            if whole and block.mlp.b_out is not None:
                total = total + block.mlp.b_out
        return total
