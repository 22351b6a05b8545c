"""An MLP as a key-value memory: what each neuron looks for, and what it writes when it finds it.

    plain   a_i = act(x . key_i + c_i)                        out = sum_i a_i value_i + b_out
    gated   a_i = act(x . gate_i + c'_i) (x . key_i + c_i)    x the normalised stream

Keys are columns of W_in (gated: of W_gate too) with the norm's gain folded in, values rows of
W_out. Geva et al. 2021, "Transformer Feed-Forward Layers Are Key-Value Memories" (arXiv
2012.14913); the gated form, Shazeer 2020, has two keys a neuron.

`neuron_run` rebuilds a run from them, `tokens` reads them in the vocabulary and `contexts` by the
text that fires them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.qk_ov.copying import require_finite
from headstream.circuits.selection import indices
from headstream.models.errors import ConfigError
from headstream.models.given_model import takes_model
from headstream.models.mlp import ACTIVATIONS
from headstream.models.norms import LayerNorm, NoNorm

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


class Keys(NamedTuple):
    """What the neurons of one layer read, as tensors; see `MLPMemory`. float64.

    `sizes` bounds what goes into an offset, for rounding: the sum of |terms|.
    """

    keys: Float[Tensor, "branch neuron d_model"]
    offsets: Float[Tensor, "branch neuron"]
    sizes: Float[Tensor, "branch neuron"]


@dataclass(frozen=True, eq=False, repr=False)
class MLPMemory:
    """One layer's MLP, neuron by neuron.

    Attributes:
        layer: which.
        activation: name of the non-linearity; a gated MLP applies it to branch "gate".
        keys: [branch, neuron, d_model], branches "in", or "gate" and "in". Columns of W_in and
            W_gate times the gain of ln2, so that they are read along the normalised stream as
            `ln2.hook_normalized` shows it; float64, dimensionless.
        offsets: [branch, neuron]: b_in plus what the shift of ln2 adds.
        values: [neuron, d_model], rows of W_out, in units of the stream.
        bias: [d_model], b_out; zeros where there is none.
    """

    layer: int
    activation: str
    keys: xr.DataArray
    offsets: xr.DataArray
    values: xr.DataArray
    bias: xr.DataArray

    def __repr__(self) -> str:
        kind = "gated " if self.keys.sizes["branch"] == 2 else ""
        return (
            f"<MLP of layer {self.layer} as a memory: {self.values.sizes['neuron']} {kind}neurons, "
            f"{self.activation}>"
        )


@takes_model
def mlp_memory(model: Decoder, layer: int) -> MLPMemory:
    """The MLP of a layer as keys and values.

    Args:
        model: the decoder.
        layer: which.
    Returns:
        Copies, in float64, with the gain and shift of ln2 folded into keys and offsets.
    Raises:
        ConfigError: if the model has no MLP.
        ShapeError: for a layer that does not exist, or weights that are NaN or infinite.
    Source:
        Geva et al. 2021, who read keys and values in models that normalise after the MLP; here
        the norm stands before it, and its gain belongs to the key.
    Example:
        >>> from headstream.models import Decoder, DecoderConfig
        >>> sizes = dict(n_layers=1, n_heads=1, d_model=4, d_head=4, d_vocab=3, n_ctx=5)
        >>> mlp_memory(Decoder(DecoderConfig(**sizes, d_mlp=6, activation="relu")), 0)
        <MLP of layer 0 as a memory: 6 neurons, relu>
    """
    require_mlp(model, layer)
    read = keys_of(model, layer)
    mlp = model.blocks[layer].mlp
    bias = mlp.W_out.new_zeros(mlp.W_out.shape[1]) if mlp.b_out is None else mlp.b_out
    branches = {"branch": ["gate", "in"] if mlp.gated else ["in"]}
    return MLPMemory(
        layer=layer,
        activation=model.config.activation,
        keys=labelled(read.keys, "branch neuron d_model", branches),
        offsets=labelled(read.offsets, "branch neuron", branches),
        values=labelled(mlp.W_out, "neuron d_model"),
        bias=labelled(bias, "d_model"),
    )


def require_mlp(model: Decoder, layer: int) -> None:
    """Raise unless this layer has an MLP with finite weights.

    Raises:
        ConfigError: if the model is attention-only.
        ShapeError: for a layer that does not exist, or weights that are NaN or infinite.
    """
    if not model.config.has_mlp:
        raise ConfigError(
            "an attention-only model has no MLP to take as a memory (d_mlp is None)",
            hint="ov_circuit says what its heads move",
        )
    indices([layer], "layer", model.config.n_layers)
    require_finite(model)


def keys_of(model: Decoder, layer: int) -> Keys:
    """Keys and offsets of every neuron, the norm's gain and shift folded in."""
    block = model.blocks[layer]
    mlp, norm = block.mlp, block.ln2
    into = mlp.W_in.detach().double()
    columns = torch.stack([mlp.W_gate.detach().double(), into]) if mlp.gated else into[None]
    offsets = columns.new_zeros(columns.shape[0], columns.shape[2])
    if mlp.b_in is not None:
        offsets[-1] = mlp.b_in.detach().double()
    sizes = offsets.abs()
    if isinstance(norm, LayerNorm):
        shift = norm.b.detach().double()
        offsets, sizes = offsets + shift @ columns, sizes + shift.abs() @ columns.abs()
    if not isinstance(norm, NoNorm):
        columns = norm.w.detach().double()[:, None] * columns
    return Keys(columns.mT.contiguous(), offsets, sizes)


def fire(
    matches: Float[Tensor, "branch *rows neuron"], activation: str
) -> Float[Tensor, "*rows neuron"]:
    """Activations from what each key matches: act(in), or act(gate) * in."""
    act = ACTIVATIONS[activation]
    return act(matches[0]) * matches[1] if matches.shape[0] == 2 else act(matches[0])


def labelled(values: Tensor, dims: str, coords: dict[str, list[str]] | None = None) -> xr.DataArray:
    """float64 with named axes, numbered where nothing else is said; `d_model` is not."""
    array = np.array(values.detach().double().cpu().numpy())
    axes = dims.split()
    numbered = {
        axis: np.arange(size)
        for axis, size in zip(axes, array.shape, strict=True)
        if axis != "d_model"
    }
    return xr.DataArray(array, dims=axes, coords=numbered | (coords or {}))
