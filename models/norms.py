"""LayerNorm, RMSNorm and no norm, with the two hook points a reader of the stream needs.

All three first divide by a scale and then apply what was learned:

    scale      = sqrt(mean(c^2) + eps)      c = x - mean(x) for LayerNorm, c = x for RMSNorm
    normalized = c / scale                  what `hook_normalized` sees: before gain and bias
    output     = normalized * w + b         (RMSNorm has no b)

Statistics are taken in float32 at least, so that half precision does not decide them.
Sources: Ba et al. 2016 (LayerNorm), Zhang and Sennrich 2019 (RMSNorm). TransformerLens' LayerNorm
hooks the value after gain and bias and its RMSNorm the one before; here both are before.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headstream.models.config import DecoderConfig
from headstream.models.hook_point import HookPoint


class LayerNorm(nn.Module):
    """Centre, divide by the standard deviation, scale by `w`, shift by `b`."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(torch.ones(d_model))
        self.b = nn.Parameter(torch.zeros(d_model))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        wide = _at_least_float32(x)
        centred = wide - wide.mean(-1, keepdim=True)
        scale = self.hook_scale((centred.square().mean(-1, keepdim=True) + self.eps).sqrt())
        normalized: Tensor = self.hook_normalized((centred / scale).to(x.dtype))
        return normalized * self.w + self.b


class RMSNorm(nn.Module):
    """Divide by the root of the mean square and scale by `w`; nothing is centred."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(torch.ones(d_model))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        wide = _at_least_float32(x)
        scale = self.hook_scale((wide.square().mean(-1, keepdim=True) + self.eps).sqrt())
        normalized: Tensor = self.hook_normalized((wide / scale).to(x.dtype))
        return normalized * self.w


class NoNorm(nn.Module):
    """The identity, for models whose readers see the stream as it is. It has no hook points."""

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return x


def make_norm(config: DecoderConfig) -> LayerNorm | RMSNorm | NoNorm:
    """The norm module that the configuration asks for."""
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.eps)
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.eps)
    return NoNorm()


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
