"""Multi-head causal attention with a choice of backend.

    q, k, v = x W_Q + b_Q, x W_K + b_K, x W_V + b_V          per head; rotary turns q and k
    scores  = scale * q . k, -inf where masked                naive only
    lse     = logsumexp(scores) over the keys                 every backend
    pattern = exp(scores - lse)                               naive only
    z       = pattern v
    out     = sum over heads of z_h W_O_h, + b_O

Query head h reads key/value head h // group_size. `naive` is the definition and keeps every hook
live; `flash` computes z and lse without forming the n x n matrix; `auto` is flash, except on a
layer where somebody listens to scores or pattern. Sources: Vaswani et al. 2017; grouped heads,
Ainslie et al. 2023; the log-sum-exp as a by-product, Dao et al. 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headstream.models.attend_edited import EditedAttention
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import masked_scores, pattern_of, row_lse, weigh
from headstream.models.config import DecoderConfig
from headstream.models.edits import EdgeCut, FrozenPattern
from headstream.models.errors import BackendError
from headstream.models.hook_point import HookPoint
from headstream.models.kv_cache import KVCache
from headstream.models.positions import RotaryTables, rotate

Backend = Literal["naive", "flash", "auto"]


@dataclass(frozen=True)
class PassContext:
    """What all layers of one forward pass share.

    Attributes:
        backend: as asked for; `auto` is decided layer by layer.
        key_mask: keys that may be read, over cached and new tokens; None if all may.
        rotary: cos and sin for the new tokens, or None.
        shortformer: vectors added to the normalised inputs of q and k, or None.
        kv_cache: earlier keys and values, or None.
        naive_limit: bytes of scores and pattern a layer above which `auto` refuses to turn naive.
    """

    backend: Backend
    key_mask: Bool[Tensor, "batch key_pos"] | None
    rotary: RotaryTables | None
    shortformer: Float[Tensor, "batch pos d_model"] | None
    kv_cache: KVCache | None
    naive_limit: int


class Attention(nn.Module):
    """One layer's heads. Weights: `W_Q` [head, d_model, d_head], `W_K W_V` [kv_head, d_model,
    d_head], `W_O` [head, d_head, d_model], `b_Q b_K b_V` [head, d_head], `b_O` [d_model].

    Attributes:
        edits: edges cut and patterns held, on every backend; empty unless
            `headstream.circuits.interventions` put them there.
    """

    b_Q: nn.Parameter | None
    b_K: nn.Parameter | None
    b_V: nn.Parameter | None
    b_O: nn.Parameter | None

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.scale = config.scale
        self.edits: list[EdgeCut | FrozenPattern] = []
        heads, kv_heads = config.n_heads, config.kv_heads
        d_model, d_head = config.d_model, config.d_head
        self.W_Q = nn.Parameter(torch.empty(heads, d_model, d_head))
        self.W_K = nn.Parameter(torch.empty(kv_heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(kv_heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(heads, d_head, d_model))
        for name, shape in (
            ("b_Q", (heads, d_head)),
            ("b_K", (kv_heads, d_head)),
            ("b_V", (kv_heads, d_head)),
            ("b_O", (d_model,)),
        ):
            bias = nn.Parameter(torch.zeros(shape)) if config.attn_bias else None
            self.register_parameter(name, bias)
        self.hook_q = HookPoint()
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        if config.positions == "rotary":
            self.hook_rot_q = HookPoint()
            self.hook_rot_k = HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_lse = HookPoint()
        self.hook_pattern = HookPoint()
        self.hook_z = HookPoint()
        self.hook_result = HookPoint()

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], context: PassContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """Attend from the normalised stream `x`."""
        addressed = x if context.shortformer is None else x + context.shortformer
        q = self.hook_q(_project(addressed, self.W_Q, self.b_Q))
        k = self.hook_k(_project(addressed, self.W_K, self.b_K))
        v = self.hook_v(_project(x, self.W_V, self.b_V))
        if context.rotary is not None:
            q = self.hook_rot_q(rotate(q, context.rotary))
            k = self.hook_rot_k(rotate(k, context.rotary))
        if context.kv_cache is not None:
            k, v = context.kv_cache.stage(self.layer, k, v)
        z = self._attend(q, k, v, context)
        z = self.hook_z(z)
        return self._project_out(z)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: PassContext) -> Tensor:
        edited = self._edited(q, k, context) if self.edits else None
        if self._runs_naive(q, k, context):
            if edited is None:
                scores = masked_scores(q, k, scale=self.scale, key_mask=context.key_mask)
            else:
                scores = edited.scores()
            scores = self.hook_attn_scores(scores)
            lse = self.hook_lse(row_lse(scores))
            pattern = pattern_of(scores, lse)
            if edited is not None:
                pattern = edited.zero(pattern)
            return weigh(self.hook_pattern(pattern), v)
        # The fused kernel's log-sum-exp carries no gradient; who listens may want one.
        need_lse_grad = torch.is_grad_enabled() and self.hook_lse.wanted
        if edited is None:
            z, lse = attend_flash(
                q,
                k,
                v,
                scale=self.scale,
                key_mask=context.key_mask,
                need_lse_grad=need_lse_grad,
            )
        else:
            z, lse = edited.flash(v, need_lse_grad=need_lse_grad)
        self.hook_lse(lse)
        return z

    def _edited(self, q: Tensor, k: Tensor, context: PassContext) -> EditedAttention:
        return EditedAttention(
            self.edits,
            q,
            k,
            scale=self.scale,
            key_mask=context.key_mask,
            cached=context.kv_cache is not None,
        )

    def _runs_naive(self, q: Tensor, k: Tensor, context: PassContext) -> bool:
        square = (self.hook_attn_scores, self.hook_pattern)
        if context.backend == "naive":
            return True
        if context.backend == "flash":
            for point in square:
                if point.wanted_by_name:
                    raise BackendError(
                        f"'{point.name}' never fires: backend 'flash' does not form the n x n "
                        "matrix",
                        hint="use backend='naive', or 'auto', which turns this layer naive",
                    )
            return False
        if not any(point.wanted for point in square):
            return False
        batch, n_queries, heads, _ = q.shape
        width = torch.promote_types(q.dtype, torch.float32).itemsize
        needed = 2 * batch * heads * n_queries * k.shape[1] * width
        if needed > context.naive_limit:
            raise BackendError(
                f"a hook on the scores or pattern of layer {self.layer} needs {needed:,} bytes "
                f"for scores and pattern, over the limit of {context.naive_limit:,}",
                hint="hook fewer rows, or raise model.naive_limit",
            )
        return True

    def _project_out(self, z: Tensor) -> Tensor:
        if self.hook_result.wanted:
            result = self.hook_result(torch.einsum("bphk,hkd->bphd", z, self.W_O))
            out: Tensor = result.sum(2)
        else:
            out = z.flatten(2) @ self.W_O.flatten(0, 1)
        return out if self.b_O is None else out + self.b_O


def _project(
    x: Float[Tensor, "batch pos d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"] | None,
) -> Float[Tensor, "batch pos head d_head"]:
    heads, d_model, d_head = weight.shape
    out = (x @ weight.transpose(0, 1).reshape(d_model, heads * d_head)).unflatten(
        -1, (heads, d_head)
    )
    return out if bias is None else out + bias
