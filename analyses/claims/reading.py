"""What attention and MLP read from the stream, the norm's gain and shift applied a second time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.norms import LayerNorm, NoNorm, RMSNorm

Reader = Literal["attn", "mlp"]
Norm = LayerNorm | RMSNorm | NoNorm
_NORM = {"attn": "ln1", "mlp": "ln2"}
_STREAM = {"attn": "hook_resid_pre", "mlp": "hook_resid_mid"}


def read_hook(config: DecoderConfig, layer: int | str, reader: Reader) -> str:
    """The last hook before `reader` reads; `layer` may be "*"."""
    name = _STREAM[reader] if config.norm == "none" else f"{_NORM[reader]}.hook_normalized"
    return f"blocks.{layer}.{name}"


def read_input(model: Decoder, run: Mapping[str, Tensor], layer: int, reader: Reader) -> Tensor:
    """[example, pos, d_model]: what `reader` was given in a run that holds its `read_hook`."""
    norm = getattr(model.blocks[layer], _NORM[reader])
    return gained(norm, run[read_hook(model.config, layer, reader)])


def gained(norm: Norm, normalized: Tensor, *, shift: bool = True) -> Tensor:
    """The norm's gain and shift on what `hook_normalized` shows."""
    if isinstance(norm, LayerNorm):
        return normalized * norm.w + (norm.b if shift else 0.0)
    return normalized * norm.w if isinstance(norm, RMSNorm) else normalized
