"""The residual stream as a sum of writes, and what each write adds to a logit.

    stream = embed (+ pos_embed) + sum over layers of
             (sum over heads of z_h W_O_h) + b_O + (post W_out) + b_out

This is exact: `decompose_residual` returns writes that sum to the stream, or raises. Reading the
stream is linear but for the final norm's scale. With that scale frozen at its value in the run, a
logit is a sum too:

    logit[o] = sum over writes of (write / scale * w) . W_U[:, o]  +  b . W_U[:, o]  +  b_U[o]

(LayerNorm first centres each write.) Elhage et al. 2021. These are direct effects on the logit:
a write that acts through a later head counts as that head's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.attribution import (
    Readout,
    TokenIds,
    attribute,
    plain_array,
    readout_of,
    treatment_of,
)
from headstream.circuits.writes import Writes, collect_writes, has_visible_key
from headstream.models.errors import ExactnessError, HookError, ShapeError, nearest
from headstream.models.hooks import capture
from headstream.models.names import hook_table

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder

# Refuse to build more than this many bytes of writes.
_LIMIT = 8 * 2**30


@dataclass(frozen=True, eq=False, repr=False)
class ResidualDecomposition:
    """Writes that sum to the residual stream.

    Attributes:
        writes: [component, example, pos, d_model]. Components in the order of the sum: `embed`,
            `pos_embed` (learned or sinusoidal positions), and for each layer its heads `L0H0` ..,
            `L0bO`, `L0MLP` (or its neurons `L0N0` ..), `L0bout`. A head's write carries its share
            of b_V, or `L0bV` does (`value_bias`).
        stream: [example, pos, d_model] at `at`, as the model computed it.
        remainder: `stream` minus the sum of the writes: rounding, and nothing else.
        at: hook name of the stream.
        largest_error, bound: largest |remainder|, and what it was held to.
        value_bias: "inside" the heads, "separate", or "none" in this model.
        norm: what `logit_attribution` does about the final norm.
    """

    writes: xr.DataArray
    stream: xr.DataArray
    remainder: xr.DataArray
    at: str
    largest_error: float
    bound: float
    value_bias: str
    norm: str
    readout: Readout | None

    def __repr__(self) -> str:
        size = self.writes.sizes
        return (
            f"<{size['component']} writes to '{self.at}', {size['example']} examples x "
            f"{size['pos']} positions; largest error {self.largest_error:.1e}, "
            f"bound {self.bound:.1e}>"
        )

    def logit_attribution(
        self,
        answer: TokenIds,
        wrong: TokenIds | None = None,
        pos: TokenIds = -1,
    ) -> xr.DataArray:
        """What each write adds to a logit, or to a logit difference, in nats.

        The final norm's scale stays frozen at its value in the run, so the rows sum to the logit
        (difference) that the model computed. Two rows follow the components where the model has
        them: `ln_final.b`, the norm's shift, and `b_U`.

        Args:
            answer: the token, or one for each example.
            wrong: token to subtract, or one for each example; None for the logit itself.
            pos: position that predicts, or one for each example; negative counts from the end.
        Returns:
            [component, example] float64, with attributes `unit` and `norm`.
        Raises:
            ExactnessError: if the writes are not those of the whole stream.
            TokenError, ShapeError: for a token or a position that does not exist.
        Source:
            Elhage et al. 2021. TransformerLens' `direct_logit_attribution` agrees where the final
            norm is folded (`fold`); where it is not, that one leaves the gain out.
        """
        if self.readout is None:
            raise ExactnessError(
                f"logit attribution needs all writes to the stream, these end at '{self.at}'",
                hint="decompose with at='final'",
            )
        return attribute(self.readout, self.writes, answer, wrong, pos)


def decompose_residual(
    model: Decoder,
    tokens: Tensor,
    *,
    at: str = "final",
    per_neuron: bool = False,
    split_value_bias: bool = False,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> ResidualDecomposition:
    """Run the model and take the stream at `at` apart into the writes that made it.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        at: "final", or the hook name of a stream: "blocks.1.hook_resid_pre", `_mid`, `_post`.
        per_neuron: one write a neuron instead of one an MLP.
        split_value_bias: give b_V's share its own row `L0bV`, summed over the heads. The pattern
            of a query sums to 1, so the share is the constant b_V W_O; for a query that may read
            no key (left padding) it is 0.
        attention_mask: [example, pos], 1 on real tokens.
        backend: as for the model; the writes are the same on every backend.
    Raises:
        ExactnessError: if the writes do not sum to the stream within the bound, with the largest
            error and where it is. An active hook that edits `attn_out` or `mlp_out` does that.
        HookError: if `at` names no stream of this model.
        ShapeError: if the writes would take more than 8 GiB.
    Note:
        The bound is what rounding can do: errors have either sign, so those of m additions and
        of an inner product of n terms add up to about sqrt(m) and sqrt(n) times the dtype's
        epsilon times the largest sum of |writes|; twice that is allowed.
        Shortformer vectors go into q and k and are no write.
    """
    target = _stream_name(model.config, at)
    names = ["hook_embed", "blocks.*.attn.hook_z", target]
    if model.config.positions in ("learned", "sinusoidal"):
        names.append("hook_pos_embed")
    if model.config.has_mlp:
        names.append("blocks.*.mlp.hook_post" if per_neuron else "blocks.*.hook_mlp_out")
    complete = target == _stream_name(model.config, "final")
    if complete and model.config.norm != "none":
        names.append("ln_final.hook_scale")
    with torch.no_grad():
        _, acts = capture(model, tokens, names, attention_mask=attention_mask, backend=backend)
        stream = acts[target]
        _require_room(model.config, stream, per_neuron)
        seen = has_visible_key(stream, attention_mask) if split_value_bias else None
        writes = collect_writes(model, acts, target, per_neuron=per_neuron, visible=seen)
        remainder, bound = _compare(model.config, writes, stream, target)
        biased = model.config.attn_bias
        return ResidualDecomposition(
            writes=_labelled(writes.values, writes.labels),
            stream=_labelled(stream),
            remainder=_labelled(remainder),
            at=target,
            largest_error=float(remainder.abs().max()),
            bound=bound,
            value_bias=("separate" if split_value_bias else "inside") if biased else "none",
            norm=treatment_of(model.config),
            readout=readout_of(model, acts.get("ln_final.hook_scale")) if complete else None,
        )


def _compare(
    config: DecoderConfig, writes: Writes, stream: Tensor, target: str
) -> tuple[Tensor, float]:
    """Stream minus the sum of the writes, and its bound; raises where the sum does not hold."""
    total = writes.values.sum(0, dtype=torch.float64)
    size = float(torch.linalg.vector_norm(writes.values, ord=1, dim=0).max())
    additions = 2 * config.n_layers + 8
    longest = max(config.n_heads * config.d_head, config.d_mlp or 0)
    wide = torch.promote_types(stream.dtype, torch.float32)
    narrow, exact = torch.finfo(stream.dtype).eps, torch.finfo(wide).eps
    bound = 2 * size * (math.sqrt(additions) * narrow + math.sqrt(longest) * exact)
    remainder = stream.double() - total
    largest = float(remainder.abs().max())
    if not largest <= bound:
        wrong = remainder.abs().nan_to_num(nan=torch.inf).flatten().argmax()
        example, pos, channel = (int(i) for i in torch.unravel_index(wrong, remainder.shape))
        raise ExactnessError(
            f"the writes do not sum to '{target}': largest error {largest:.1e} at example "
            f"{example}, pos {pos}, channel {channel}; the bound is {bound:.1e}",
            hint="an active hook that edits attn_out or mlp_out breaks the sum: detach it",
        )
    return remainder, bound


def _labelled(values: Tensor, labels: Sequence[str] | None = None) -> xr.DataArray:
    dims = ("example", "pos", "d_model")
    examples, positions = values.shape[-3], values.shape[-2]
    coords: dict[str, object] = {"example": np.arange(examples), "pos": np.arange(positions)}
    if labels is None:
        return xr.DataArray(plain_array(values), dims=dims, coords=coords)
    coords["component"] = list(labels)
    return xr.DataArray(plain_array(values), dims=("component", *dims), coords=coords)


def _stream_name(config: DecoderConfig, at: str) -> str:
    if at == "final":
        return f"blocks.{config.n_layers - 1}.hook_resid_post"
    streams = [n for n in hook_table(config) if re.fullmatch(r"blocks\.\d+\.hook_resid_\w+", n)]
    if at not in streams:
        raise HookError(
            f"at={at!r} names no residual stream of this model",
            hint=nearest(at, streams) or f"give 'final' or a name like '{streams[0]}'",
        )
    return at


def _require_room(config: DecoderConfig, stream: Tensor, per_neuron: bool) -> None:
    layer = config.n_heads + 3 + ((config.d_mlp or 0) if per_neuron else 1)
    count = config.n_layers * layer + 2
    needed = count * stream.numel() * max(stream.element_size(), 4)
    if needed > _LIMIT:
        raise ShapeError(
            f"up to {count} writes for {list(stream.shape[:2])} positions of width "
            f"{config.d_model} take {needed:,} bytes, over the limit of {_LIMIT:,}",
            hint="decompose fewer examples at a time, or leave per_neuron off",
        )
