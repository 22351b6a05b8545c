"""The feed-forward layer: a key-value memory over neurons, plain or gated.

    plain   out = act(x W_in + b_in) W_out + b_out
    gated   out = (act(x W_gate) * (x W_in + b_in)) W_out + b_out

`hook_pre` is what the activation sees, `hook_post` what W_out sees; the gated form has
`hook_pre_linear`, the branch without activation. Names follow TransformerLens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from headstream.models.config import DecoderConfig
from headstream.models.hook_point import HookPoint

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class MLP(nn.Module):
    """`W_in`, `W_gate` [d_model, d_mlp], `W_out` [d_mlp, d_model]; biases where configured."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.d_mlp is not None
        self.act = ACTIVATIONS[config.activation]
        self.gated = config.gated_mlp
        self.W_in = nn.Parameter(torch.empty(config.d_model, config.d_mlp))
        self.W_out = nn.Parameter(torch.empty(config.d_mlp, config.d_model))
        if config.gated_mlp:
            self.W_gate = nn.Parameter(torch.empty(config.d_model, config.d_mlp))
        if config.mlp_bias:
            self.b_in = nn.Parameter(torch.zeros(config.d_mlp))
            self.b_out = nn.Parameter(torch.zeros(config.d_model))
        else:
            self.register_parameter("b_in", None)
            self.register_parameter("b_out", None)
        self.hook_pre = HookPoint()
        if config.gated_mlp:
            self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        linear = x @ self.W_in
        if self.b_in is not None:
            linear = linear + self.b_in
        if self.gated:
            pre = self.hook_pre(x @ self.W_gate)
            post: Tensor = self.hook_post(self.act(pre) * self.hook_pre_linear(linear))
        else:
            post = self.hook_post(self.act(self.hook_pre(linear)))
        out = post @ self.W_out
        return out if self.b_out is None else out + self.b_out
