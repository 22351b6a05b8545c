"""An MLP of one run, neuron by neuron: an exact sum, or an error.

    out = sum_i a_i value_i + b_out              a_i rebuilt from the keys (`keys_values`)

With the final norm's scale frozen, neuron i adds a_i value_i . W_U[:, o] / scale to logit o. That
is its direct effect: what later layers make of it counts as theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.memory.keys_values import fire, keys_of, labelled, require_mlp
from headstream.circuits.stream.attribution import Readout, TokenIds, readout_of, row_positions
from headstream.circuits.undisturbed import undisturbed
from headstream.models.errors import ExactnessError, ShapeError
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.mlp import ACTIVATIONS

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Activations = Float[Tensor, "example pos neuron"]
Stream = Float[Tensor, "example pos d_model"]

# Refuse to hold more than this many bytes of activations.
_LIMIT = 8 * 2**30
# No activation here is steeper: the steepest is GELU, near x = 1.4.
_SLOPE = 1.13


@dataclass(frozen=True, eq=False, repr=False)
class NeuronRun:
    """What the neurons of one layer did in a run, rebuilt from their keys.

    Attributes:
        layer: which.
        activations: [example, pos, neuron] float64: what each value was multiplied by.
        output: [example, pos, d_model], the MLP's output as the model computed it.
        remainder: `output` minus sum of activation x value, minus b_out: rounding only.
        largest_error, bound: largest |remainder|, and the largest that rounding may be.
        norm: what `logit_attribution` does about the final norm.
    """

    layer: int
    activations: xr.DataArray
    output: xr.DataArray
    remainder: xr.DataArray
    largest_error: float
    bound: float
    norm: str
    values: xr.DataArray
    bias: xr.DataArray | None
    readout: Readout

    def __repr__(self) -> str:
        size = self.activations.sizes
        return (
            f"<{size['neuron']} neurons of layer {self.layer}, {size['example']} examples x "
            f"{size['pos']} positions; largest error {self.largest_error:.1e}, "
            f"bound {self.bound:.1e}>"
        )

    def logit_attribution(
        self, answer: TokenIds, wrong: TokenIds | None = None, pos: TokenIds = -1
    ) -> xr.DataArray:
        """What each neuron adds to a logit, or to a logit difference, in nats.

        activation x value . (gain x W_U[:, answer] - ...) / scale, with the final norm's scale
        frozen at its value in the run. The rows sum to what the MLP adds, as
        `ResidualDecomposition.logit_attribution` has it; labels are those it has per neuron.

        Args:
            answer: the token, or one for each example.
            wrong: token to subtract, or one for each example; None for the logit itself.
            pos: position that predicts, or one for each example; negative counts from the end.
        Returns:
            [component, example] float64: `L0N0` .., then `L0bout` where there is a bias.
        Raises:
            TokenError, ShapeError: for a token or a position that does not exist.
            ExactnessError: if the unembedding was changed since the run.
        """
        n, size = self.activations.sizes["example"], self.activations.sizes["pos"]
        reader = self.readout.reader(answer, wrong, n)
        rows, place = np.arange(n), row_positions(pos, n, size)
        direction = reader.direction.cpu().numpy()
        if self.readout.scale is not None:
            direction = direction / self.readout.scale.cpu().numpy()[rows, place, None]
        fired = self.activations.values[rows, place]
        parts = [(fired * (direction @ self.values.values.T)).T]
        labels = [f"L{self.layer}N{neuron}" for neuron in range(fired.shape[1])]
        if self.bias is not None:
            parts.append((direction @ self.bias.values)[None])
            labels.append(f"L{self.layer}bout")
        return xr.DataArray(
            np.concatenate(parts),
            dims=("component", "example"),
            coords={"component": labels, "example": rows, "pos": ("example", place)},
            name="attribution",
            attrs={"unit": "nats", "of": reader.of, "norm": self.norm},
        )


@takes_model
def neuron_activations(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> NeuronRun:
    """Run the model and rebuild a layer's MLP from its keys and values, neuron by neuron.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        layer: which MLP.
        attention_mask: [example, pos], 1 on real tokens.
        backend: as for the model.
    Raises:
        ExactnessError: if activation x value, summed, is not the MLP's output within the bound.
        HookError: if a hook or an intervention edits the run.
        ConfigError: if the model has no MLP.
        ShapeError: for a layer that does not exist, weights that are not finite, or activations
            of more than 8 GiB.
    Note:
        The bound follows rounding through the layer: an inner product of n terms is off by about
        sqrt(n) epsilons of the sum of |terms| (twice that is allowed), an activation by that times
        its steepest slope, and errors of different neurons add up as a random walk does.
    """
    require_mlp(model, layer)
    config = model.config
    block = f"blocks.{layer}."
    read_from = "hook_resid_mid" if config.norm == "none" else "ln2.hook_normalized"
    names = [block + read_from, block + "hook_mlp_out"]
    if config.norm != "none":
        names.append("ln_final.hook_scale")
    with torch.no_grad():
        with undisturbed(model, "rebuild an MLP"):
            _, acts = capture(model, tokens, names, attention_mask=attention_mask, backend=backend)
        output = acts[block + "hook_mlp_out"]
        _require_room(output, config.d_mlp or 0)
        fired, allowed = _rebuild(model, layer, acts[block + read_from])
        mlp = model.blocks[layer].mlp
        total = fired @ mlp.W_out.double()
        if mlp.b_out is not None:
            total = total + mlp.b_out.double()
        remainder = output.double() - total
        _require_exact(remainder, allowed, layer)
        readout = readout_of(model, acts.get("ln_final.hook_scale"))
        return NeuronRun(
            layer=layer,
            activations=labelled(fired, "example pos neuron"),
            output=labelled(output, "example pos d_model"),
            remainder=labelled(remainder, "example pos d_model"),
            largest_error=float(remainder.abs().max()),
            bound=float(allowed.max()),
            norm=readout.treatment,
            values=labelled(mlp.W_out, "neuron d_model"),
            bias=None if mlp.b_out is None else labelled(mlp.b_out, "d_model"),
            readout=readout,
        )


def _rebuild(model: Decoder, layer: int, x: Stream) -> tuple[Activations, Stream]:
    """Activations from the normalised stream, and how far rounding may move the output."""
    config, mlp = model.config, model.blocks[layer].mlp
    read, x = keys_of(model, layer), x.double()
    narrow = torch.finfo(model.dtype).eps
    exact = torch.finfo(torch.promote_types(model.dtype, torch.float32)).eps
    pairs = list(zip(read.keys, read.offsets, read.sizes, strict=True))
    matches = torch.stack([x @ key.T + offset for key, offset, _ in pairs])
    terms = torch.stack([x.abs() @ key.abs().T + size for key, _, size in pairs])
    # The root of the sum of squared terms: each was rounded on its own, once by gain and shift.
    spread = torch.stack([(x.square() @ key.square().T + size**2).sqrt() for key, _, size in pairs])
    off = 2 * (math.sqrt(config.d_model) * exact * terms + narrow * (2 * spread + matches.abs()))
    fired = fire(matches, config.activation)
    first = _SLOPE * off[0] + 4 * exact * matches[0].abs()
    if mlp.gated:
        act = ACTIVATIONS[config.activation](matches[0])
        first = first * (matches[1].abs() + off[1]) + act.abs() * (
            off[1] + narrow * matches[1].abs()
        )
    first = first + narrow * fired.abs()
    rows = mlp.W_out.double()
    size, total = fired.abs() @ rows.abs(), (fired @ rows).abs()
    if mlp.b_out is not None:
        bias = mlp.b_out.double().abs()
        size, total = size + bias, total + bias
    summing = 2 * (math.sqrt(config.d_mlp or 1) * exact * size + 2 * narrow * total)
    return fired, (first.square() @ rows.square()).sqrt() + summing


def _require_exact(remainder: Stream, allowed: Stream, layer: int) -> None:
    excess = remainder.abs() - allowed
    if bool((excess <= 0).all()):
        return
    worst = excess.nan_to_num(nan=torch.inf).flatten().argmax()
    example, pos, channel = (int(i) for i in torch.unravel_index(worst, remainder.shape))
    raise ExactnessError(
        f"the neurons of layer {layer} do not sum to its MLP's output: off by "
        f"{float(remainder[example, pos, channel]):.1e} at example {example}, pos {pos}, channel "
        f"{channel}; the bound is {float(allowed[example, pos, channel]):.1e}"
    )


def _require_room(output: Stream, d_mlp: int) -> None:
    examples, positions = output.shape[:2]
    needed = 8 * examples * positions * d_mlp
    if needed > _LIMIT:
        raise ShapeError(
            f"activations of {d_mlp} neurons at {examples} x {positions} positions take {needed:,} "
            f"bytes, over the limit of {_LIMIT:,}",
            hint="rebuild fewer examples at a time",
        )
