"""Our configuration as TransformerLens' tools expect to find it.

Their tools read a `TransformerLensConfig` from `model.cfg`. This is one, filled from a
`DecoderConfig`; every name of ours that it does not have (`positions`, `n_kv_heads`,
`bos_token_id`, `to_json`, ...) is answered by the `DecoderConfig` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens.config import TransformerLensConfig

from headstream.models.config import DecoderConfig
from headstream.models.errors import ConfigError

_POSITIONS = {
    "learned": "standard",
    "sinusoidal": "standard",
    "shortformer": "shortformer",
    "rotary": "rotary",
    "none": "none",
}
_NORMS = {"layernorm": "LN", "rmsnorm": "RMS", "none": None}


class LensConfig(TransformerLensConfig):
    """A TransformerLensConfig that falls back on the `DecoderConfig` it was made from.

    It is a view: setting a field would change nothing about the model, and raises.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(
            d_model=config.d_model,
            d_head=config.d_head,
            n_layers=config.n_layers,
            n_ctx=config.n_ctx,
            n_heads=config.n_heads,
            d_mlp=config.d_mlp,
            d_vocab=config.d_vocab,
            device=str(device),
            default_prepend_bos=config.bos_token_id is not None,
            positional_embedding_type=_POSITIONS[config.positions],
            n_key_value_heads=config.n_kv_heads,
            attn_only=not config.has_mlp,
            gated_mlp=config.gated_mlp,
            uses_rms_norm=config.norm == "rmsnorm",
            eps=config.eps,
            act_fn=config.activation,
            normalization_type=_NORMS[config.norm],
            final_rms=config.norm == "rmsnorm",
            dtype=dtype,
        )
        # Its __post_init__ invents 4 * d_model for a model without an MLP.
        self.d_mlp = config.d_mlp
        self.decoder = config
        self.settled = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "settled" in self.__dict__:
            raise ConfigError(
                f"model.cfg follows from model.config and cannot be changed: {name} = {value!r}",
                hint="build a Decoder with another DecoderConfig",
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that TransformerLensConfig lacks.
        if name.startswith("__") or name == "decoder":
            raise AttributeError(name)
        return getattr(self.decoder, name)
