"""One Pre-LN block: two readers of the stream, each adding what it writes.

    resid_mid  = resid_pre + attention(ln1(resid_pre))
    resid_post = resid_mid + mlp(ln2(resid_mid))

Attention-only blocks stop after the first line, and have no `hook_resid_mid`, `ln2` or `mlp`.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from headstream.models.attention import Attention, PassContext
from headstream.models.config import DecoderConfig
from headstream.models.hook_point import HookPoint
from headstream.models.mlp import MLP
from headstream.models.norms import make_norm


class Block(nn.Module):
    """Attention, then (unless attention-only) the MLP; both read through a norm."""

    # TransformerLens' lens tools ask: hook_resid_post is the one stream that is unembedded.
    hook_out_is_single_residual_stream = True

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.has_mlp = config.has_mlp
        self.hook_resid_pre = HookPoint()
        self.ln1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.hook_attn_out = HookPoint()
        if config.has_mlp:
            self.hook_resid_mid = HookPoint()
            self.ln2 = make_norm(config)
            self.mlp = MLP(config)
            self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: PassContext
    ) -> Float[Tensor, "batch pos d_model"]:
        resid = self.hook_resid_pre(resid)
        resid = resid + self.hook_attn_out(self.attn(self.ln1(resid), context))
        if self.has_mlp:
            resid = self.hook_resid_mid(resid)
            resid = resid + self.hook_mlp_out(self.mlp(self.ln2(resid)))
        out: Tensor = self.hook_resid_post(resid)
        return out
