"""The factors of QK and OV as a head really meets the stream: norm gain folded, mean taken off.

    q = norm(x) W_Q,   norm(x) = (x - mean(x)) / scale * gain + shift

so what reads x is P diag(gain) W_Q, with P = I - 1 1^T / d_model under LayerNorm and P = I
elsewhere; the same for W_K and W_V. What is written is z W_O, and where every reader is a
LayerNorm its mean is not read by anyone: W_O P. The scale is a number for each position and stays
out, and so does the shift, which is a constant.

Factors are float64 and stacked over query heads; grouped heads and rotary distances are those of
`weights.qk_circuit` and `weights.ov_circuit`, which this module calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.errors import ConfigError, nearest
from headstream.models.norms import LayerNorm, NoNorm, RMSNorm

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

NormTreatment = Literal["folded", "ignored"]

Reader = Float[Tensor, "head d_model d_head"]
Writer = Float[Tensor, "head d_head d_model"]

# What centring leaves of a matrix that was constant along the stream, relative to that matrix.
_ROUNDING = 2.0**-48


class ReadingNorm(NamedTuple):
    """What is linear about a norm.

    Attributes:
        gain, shift: [d_model] float64; ones and zeros where the norm has none.
        centred: whether the mean is taken off first (LayerNorm).
    """

    gain: Float[Tensor, " d_model"]
    shift: Float[Tensor, " d_model"]
    centred: bool

    def fold(self, weight: Float[Tensor, "*heads d_model width"]) -> Tensor:
        """P diag(gain) W: the matrix that reads the stream itself, up to the scale."""
        folded = self.gain[:, None] * weight
        return centre(folded, -2) if self.centred else folded


def reading_norm(model: Decoder, norm: LayerNorm | RMSNorm | NoNorm) -> ReadingNorm:
    """Gain, shift and centring of one of the model's norms."""
    if isinstance(norm, NoNorm):
        ones = torch.ones(model.config.d_model, dtype=torch.float64, device=model.device)
        return ReadingNorm(ones, torch.zeros_like(ones), False)
    gain = norm.w.detach().double()
    if isinstance(norm, LayerNorm):
        return ReadingNorm(gain, norm.b.detach().double(), True)
    return ReadingNorm(gain, torch.zeros_like(gain), False)


def layer_norm(model: Decoder, layer: int) -> ReadingNorm:
    """What is linear about the norm before the heads of a layer."""
    return reading_norm(model, model.blocks[layer].ln1)


def qk_factors(
    model: Decoder, layer: int, *, distance: int | None, norms: str
) -> tuple[Reader, Reader]:
    """Query and key matrices of a layer: `query[h] @ key[h].T` is QK(distance) on the stream."""
    heads = range(model.config.n_heads)
    circuits = [qk_circuit(model, layer, h, distance=distance, space="residual") for h in heads]
    query = torch.stack([circuit.A.double() for circuit in circuits])
    key = torch.stack([circuit.B.mT.double() for circuit in circuits])
    if norms == "ignored":
        return query, key
    norm = layer_norm(model, layer)
    return norm.fold(query), norm.fold(key)


def ov_factors(model: Decoder, layer: int, *, norms: str) -> tuple[Reader, Writer]:
    """Value and output matrices of a layer: `value[h] @ out[h]` is OV on the stream."""
    heads = range(model.config.n_heads)
    circuits = [ov_circuit(model, layer, head, space="residual") for head in heads]
    value = torch.stack([circuit.A.double() for circuit in circuits])
    out = torch.stack([circuit.B.double() for circuit in circuits])
    if norms == "ignored":
        return value, out
    norm = layer_norm(model, layer)
    return norm.fold(value), centre(out, -1) if norm.centred else out


def stream_dims(model: Decoder, norms: str) -> int:
    """Dimensions of the stream that are read: one less than d_model where the mean is taken off."""
    return model.config.d_model - (norms == "folded" and model.config.norm == "layernorm")


def check_norms(norms: str) -> None:
    """Raise ConfigError unless `norms` is "folded" or "ignored"."""
    if norms not in get_args(NormTreatment):
        raise ConfigError(
            f"norms must be 'folded' or 'ignored', got {norms!r}",
            hint=nearest(str(norms), get_args(NormTreatment)),
        )


def treatment(model: Decoder, norms: str) -> str:
    """What is done about the norms, in words."""
    if model.config.norm == "none":
        return "no norm in this model"
    if norms == "ignored":
        return "norms left out: weights as they are"
    centred = ", mean taken off readers and writes" if model.config.norm == "layernorm" else ""
    return f"norm gains folded into readers{centred}; the norm's scale left out"


def centre(weight: Float[Tensor, "*heads rows columns"], axis: int) -> Tensor:
    """`weight` minus its mean along an axis; exactly 0 where nothing but rounding is left."""
    centred = weight - weight.mean(axis, keepdim=True)
    left = centred.abs().amax((-2, -1), keepdim=True)
    before = weight.abs().amax((-2, -1), keepdim=True)
    return torch.where(left > _ROUNDING * before, centred, torch.zeros_like(centred))
