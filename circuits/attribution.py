"""What each write to the stream adds to a logit, with the final norm's scale frozen.

    logit[o] = sum over writes of (write / scale * w) . W_U[:, o]  +  b . W_U[:, o]  +  b_U[o]

LayerNorm first takes its mean off each write. Exact, given the scale of the run (Elhage et al.
2021). `ResidualDecomposition.logit_attribution` is the way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from headstream.models.errors import ShapeError, TokenError
from headstream.models.norms import LayerNorm, NoNorm

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder

Array = npt.NDArray[np.floating]
TokenIds = int | Sequence[int] | Tensor

FROZEN = "final norm's scale held fixed at its value in the run"
NO_NORM = "no final norm"


@dataclass(frozen=True, eq=False)
class Readout:
    """How the final stream is read in one run: norm with its scale frozen, then the unembedding.

    Attributes:
        unembed: W_U [d_model, d_vocab]; bias: b_U [d_vocab], or None.
        gain, shift: of the final norm, [d_model]; None where it has none.
        scale: what the norm divided by, [example, pos]; None without a norm.
        centred: whether the norm takes the mean off first (LayerNorm).
        treatment: the same, in words.
    """

    unembed: Array
    bias: Array | None
    gain: Array | None
    shift: Array | None
    scale: Array | None
    centred: bool
    treatment: str


def readout_of(model: Decoder, scale: Tensor | None) -> Readout:
    """The readout of one run; `scale` is its `ln_final.hook_scale`, None without a norm."""
    norm = model.ln_final
    return Readout(
        unembed=plain_array(model.W_U),
        bias=plain_array(model.b_U) if model.config.unembed_bias else None,
        gain=None if isinstance(norm, NoNorm) else plain_array(norm.w),
        shift=plain_array(norm.b) if isinstance(norm, LayerNorm) else None,
        scale=None if scale is None else plain_array(scale)[..., 0],
        centred=isinstance(norm, LayerNorm),
        treatment=treatment_of(model.config),
    )


def treatment_of(config: DecoderConfig) -> str:
    """What attribution does about the final norm, in words."""
    return NO_NORM if config.norm == "none" else FROZEN


def plain_array(tensor: Tensor) -> Array:
    """A copy that shares nothing with the model; half precision widened to float32."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return np.array(tensor.detach().to("cpu", wide).numpy())


def attribute(
    readout: Readout, writes: xr.DataArray, answer: TokenIds, wrong: TokenIds | None, pos: TokenIds
) -> xr.DataArray:
    """Attribution of every write; see `ResidualDecomposition.logit_attribution`."""
    n, d_vocab = writes.sizes["example"], readout.unembed.shape[1]
    rows = np.arange(n)
    right = _row_ids("answer", answer, n, d_vocab)
    place = _row_positions(pos, n, writes.sizes["pos"])
    direction = readout.unembed[:, right].T.astype(np.float64)
    constant = None if readout.bias is None else readout.bias[right].astype(np.float64)
    if wrong is not None:
        other = _row_ids("wrong", wrong, n, d_vocab)
        direction = direction - readout.unembed[:, other].T
        if constant is not None and readout.bias is not None:
            constant = constant - readout.bias[other]
    reader = direction if readout.gain is None else direction * readout.gain
    if readout.scale is not None:
        reader = reader / readout.scale[rows, place, None]
    written = writes.values[:, rows, place].astype(np.float64)
    if readout.centred:
        written = written - written.mean(-1, keepdims=True)
    parts = [np.einsum("ced,ed->ce", written, reader)]
    labels = writes["component"].values.tolist()
    if readout.shift is not None:
        parts.append((direction @ readout.shift.astype(np.float64))[None])
        labels.append("ln_final.b")
    if constant is not None:
        parts.append(constant[None])
        labels.append("b_U")
    return xr.DataArray(
        np.concatenate(parts),
        dims=("component", "example"),
        coords={"component": labels, "example": rows, "pos": ("example", place)},
        name="attribution",
        attrs={
            "unit": "nats",
            "of": "logit" if wrong is None else "logit difference",
            "norm": readout.treatment,
        },
    )


def _row_ids(name: str, given: TokenIds, n: int, d_vocab: int) -> npt.NDArray[np.int64]:
    ids = _rows(name, given, n, TokenError)
    if (ids < 0).any() or (ids >= d_vocab).any():
        raise TokenError(f"{name} must lie in [0, {d_vocab}), got {ids.tolist()}")
    return ids


def _row_positions(given: TokenIds, n: int, size: int) -> npt.NDArray[np.int64]:
    place = _rows("pos", given, n, ShapeError)
    if (place < -size).any() or (place >= size).any():
        raise ShapeError(f"pos must lie in [{-size}, {size}), got {place.tolist()}")
    return place % size


def _rows(
    name: str,
    given: TokenIds,
    n: int,
    error: type[ShapeError] | type[TokenError],
) -> npt.NDArray[np.int64]:
    """`given` as one whole number a row."""
    array = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
    if array.dtype.kind not in "iu" or array.shape not in ((), (n,)):
        raise error(
            f"{name} must be one whole number, or one for each of {n} examples, got "
            f"{array.dtype} of shape {list(array.shape)}"
        )
    return np.broadcast_to(array.astype(np.int64), (n,))
