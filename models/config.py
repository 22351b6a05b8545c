"""What a decoder is: one frozen, validated value, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headstream.models.errors import ConfigError, nearest

Positions = Literal["learned", "shortformer", "sinusoidal", "rotary", "none"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Activation = Literal["gelu", "gelu_new", "relu", "silu"]

# What real models have and this decoder does not yet: asking for it is refused by name.
_NOT_YET = {
    "qk_norm": "normalised queries and keys",
    "attn_softcap": "attention logit soft-capping",
    "output_softcap": "output logit soft-capping",
    "rotary_dim": "partial rotary positions",
    "rotary_interleaved": "interleaved rotary pairs",
    "rotary_scaling": "rotary scaling for long contexts",
    "parallel_blocks": "parallel attention and MLP",
    "sliding_window": "sliding-window attention",
    "sink_logit": "a learned sink logit",
    "alibi": "linear position biases",
    "n_experts": "mixtures of experts",
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and kind of a decoder.

    Attributes:
        n_layers, n_heads, d_model, d_head, d_vocab, n_ctx: sizes. `d_head` is free of
            `d_model / n_heads`; `n_ctx` is the longest sequence in tokens.
        n_kv_heads: key/value heads, a divisor of `n_heads` (None: as many). Query head h reads
            key/value head `h // (n_heads // n_kv_heads)`.
        d_mlp: neurons a layer; None is an attention-only model.
        positions: `learned` and `sinusoidal` are added to the stream; `shortformer` is learned
            and added to the normalised inputs of q and k only; `rotary` turns q and k; `none`.
        rotary_base: base of the rotary frequencies.
        norm, eps: normalisation before each reader of the stream, eps inside the square root.
        activation, gated_mlp: of the MLP; gated: `act(x W_gate) * (x W_in)`.
        attn_bias, mlp_bias, unembed_bias: whether those biases exist.
        tied_embeddings: W_U is W_E transposed (and is not stored).
        attn_scale: factor on q . k; None is 1/sqrt(d_head), 1.0 the unscaled experiment.
        bos_token_id, pad_token_id: may be None, and then nothing is prepended or padded.
        n_train: the longest length the weights were trained on, if known.
    Raises:
        ConfigError: naming the field, what was given and what was expected.
    Example:
        >>> config = DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=5, n_ctx=9)
        >>> DecoderConfig.from_json(config.to_json()) == config
        True
    """

    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    n_ctx: int
    n_kv_heads: int | None = None
    d_mlp: int | None = None
    positions: Positions = "learned"
    rotary_base: float = 10000.0
    norm: Norm = "layernorm"
    eps: float = 1e-5
    activation: Activation = "gelu"
    gated_mlp: bool = False
    attn_bias: bool = False
    mlp_bias: bool = False
    unembed_bias: bool = False
    tied_embeddings: bool = False
    attn_scale: float | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    n_train: int | None = None

    def __new__(cls, **fields: Any) -> DecoderConfig:
        _refuse_unknown(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "d_model", "d_head", "d_vocab", "n_ctx"):
            _require_count(name, getattr(self, name))
        for name in ("n_kv_heads", "d_mlp", "n_train"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        for name, options in (
            ("positions", get_args(Positions)),
            ("norm", get_args(Norm)),
            ("activation", get_args(Activation)),
        ):
            _require_option(name, getattr(self, name), options)
        for name in ("gated_mlp", "attn_bias", "mlp_bias", "unembed_bias", "tied_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("eps", "rotary_base", "attn_scale"):
            if getattr(self, name) is not None or name != "attn_scale":
                _require_positive(name, getattr(self, name))
        if self.n_heads % self.kv_heads:
            raise ConfigError(
                f"n_kv_heads must divide n_heads, got n_kv_heads={self.n_kv_heads} "
                f"and n_heads={self.n_heads}"
            )
        if self.positions == "rotary" and self.d_head % 2:
            raise ConfigError(
                f"rotary positions turn pairs and need an even d_head, got d_head={self.d_head}"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ConfigError(
                f"sinusoidal positions come in pairs and need an even d_model, "
                f"got d_model={self.d_model}"
            )
        if self.d_mlp is None and (self.gated_mlp or self.mlp_bias):
            raise ConfigError(
                f"gated_mlp={self.gated_mlp} and mlp_bias={self.mlp_bias} need an MLP, "
                "but d_mlp is None (attention only)",
                hint="set d_mlp, or leave both False",
            )
        for name in ("bos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ConfigError(f"{name} must be a whole number or None, got {value!r}")
                if not 0 <= value < self.d_vocab:
                    raise ConfigError(
                        f"{name} must lie in [0, {self.d_vocab}) = [0, d_vocab), got {value}"
                    )

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads: `n_kv_heads`, or `n_heads` where that is None."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.kv_heads

    @property
    def scale(self) -> float:
        """The factor on q . k that the scores carry."""
        return 1.0 / math.sqrt(self.d_head) if self.attn_scale is None else self.attn_scale

    @property
    def has_mlp(self) -> bool:
        return self.d_mlp is not None

    def to_json(self) -> str:
        """The configuration as JSON text, every field written out, keys in field order."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> DecoderConfig:
        """Read back what `to_json` wrote.

        Raises:
            ConfigError: if the text is not a JSON object, a field is unknown (the nearest is
                named), missing, or invalid.
        """
        try:
            fields: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"configuration is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"configuration must be a JSON object, got {type(fields).__name__}")
        _refuse_unknown(fields)
        required = [
            field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING
        ]
        missing = [name for name in required if name not in fields]
        if missing:
            raise ConfigError(f"configuration lacks {', '.join(missing)}")
        return cls(**fields)


def _refuse_unknown(fields: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(DecoderConfig)]
    for name in fields:
        if name in _NOT_YET:
            raise ConfigError(f"{name}: {_NOT_YET[name]} is not supported yet")
        if name not in known:
            raise ConfigError(f"unknown configuration field {name!r}", hint=nearest(name, known))


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")


def _require_option(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ConfigError(
            f"{name} must be one of {', '.join(options)}, got {value!r}",
            hint=nearest(str(value), options),
        )


def _require_positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise ConfigError(f"{name} must be a finite number > 0, got {value!r}")
