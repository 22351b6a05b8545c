"""The residual stream as a sum of writes, and what each write adds to a logit.

    stream = embed (+ pos_embed) + sum over layers of
             (sum over heads of z_h W_O_h) + b_O + (post W_out) + b_out

This is exact: `decompose_residual` returns writes that sum to the stream, or raises. Reading the
stream is linear but for the final norm's scale. With that scale frozen at its value in the run, a
logit is a sum too:

    logit[o] = sum over writes of (write / scale * w) . W_U[:, o]  +  b . W_U[:, o]  +  b_U[o]

(LayerNorm first centres each write.) Elhage et al. 2021. These are direct effects on the logit:
a write that acts through a later head counts as that head's.

What is kept of a run is each head's z and each MLP's output, not [pos, head, d_model] for every
layer: writes are formed layer by layer to be checked, and again only when they are asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.attribution import (
    Readout,
    TokenIds,
    accumulate,
    attribute,
    plain_array,
    readout_of,
    treatment_of,
)
from headstream.circuits.undisturbed import undisturbed
from headstream.circuits.writes import (
    WriteGroup,
    activations_of,
    has_visible_key,
    stream_place,
    write_groups,
)
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

    It holds the run's activations and refers to the model's output weights: to use it after they
    were changed in place is an error. What was formed before stays valid.

    Attributes:
        groups: the writes, unformed: a layer's heads together.
        stream: [example, pos, d_model] at `at`, as the model computed it.
        remainder: `stream` minus the sum of the writes: rounding, and nothing else.
        at: hook name of the stream.
        largest_error, bound: largest |remainder|, and what it was held to.
        value_bias: "inside" the heads, "separate", or "none" in this model.
        norm: what `logit_attribution` does about the final norm.
    """

    groups: tuple[WriteGroup, ...]
    stream: xr.DataArray
    remainder: xr.DataArray
    at: str
    largest_error: float
    bound: float
    value_bias: str
    norm: str
    readout: Readout | None

    def __repr__(self) -> str:
        size = self.stream.sizes
        return (
            f"<{len(self.components)} writes to '{self.at}', {size['example']} examples x "
            f"{size['pos']} positions; largest error {self.largest_error:.1e}, "
            f"bound {self.bound:.1e}>"
        )

    @property
    def components(self) -> list[str]:
        """Labels in the order of the sum: `embed`, `pos_embed` (learned or sinusoidal positions),
        and for each layer its heads `L0H0` .., `L0bO`, `L0MLP` (or its neurons `L0N0` ..),
        `L0bout`. A head's write carries its share of b_V, or `L0bV` does (`value_bias`)."""
        return [label for group in self.groups for label in group.labels]

    @cached_property
    def writes(self) -> xr.DataArray:
        """All writes, [component, example, pos, d_model]: formed on first use, then kept.

        Raises:
            ShapeError: if they take more than 8 GiB; `layer_writes` forms a layer's.
        """
        return self._formed(self.groups)

    def layer_writes(self, layer: int | None) -> xr.DataArray:
        """The writes of one layer, or with None those before the first; formed anew, not kept.

        Raises:
            ShapeError: for a layer that does not write to this stream, or over 8 GiB.
        """
        found = tuple(group for group in self.groups if group.layer == layer)
        if not found:
            raise ShapeError(
                f"no writes of layer {layer!r} to '{self.at}': it has those of layers 0 to "
                f"{stream_place(self.at)[0]}",
                hint="None gives the embeddings",
            )
        return self._formed(found)

    def write_norms(self) -> xr.DataArray:
        """Euclidean norm of every write, [component, example, pos]."""
        norms = [
            torch.linalg.vector_norm(group.form(slice(start, start + 64)), dim=-1)
            for group in self.groups
            for start in range(0, len(group.labels), 64)
        ]
        return _labelled(torch.cat(norms), ("component", "example", "pos"), self.components)

    def logit_attribution(
        self,
        answer: TokenIds,
        wrong: TokenIds | None = None,
        pos: TokenIds | None = -1,
        *,
        by: str = "component",
    ) -> xr.DataArray:
        """What each write adds to a logit, or to a logit difference, in nats.

        The final norm's scale stays frozen at its value in the run, so the rows sum to the logit
        (difference) that the model computed. Two rows follow the components where the model has
        them: `ln_final.b`, the norm's shift, and `b_U`. No write is formed for it.

        Args:
            answer: the token, or one for each example.
            wrong: token to subtract, or one for each example; None for the logit itself.
            pos: position that predicts, or one for each example; negative counts from the end.
                None takes every position.
            by: "component"; "sublayer" sums each layer's heads and b_O to `L0attn_out`, its
                MLP to `L0mlp_out`; "layer" sums all a layer writes to `L0`.
        Returns:
            [component, example] float64 (with `pos=None` [component, example, pos]), with
            attributes `unit` and `norm`.
        Raises:
            ExactnessError: if the writes are not those of the whole stream, or the weights were
                changed since.
            TokenError, ShapeError: for a token or a position that does not exist.
            ConfigError: for another `by`.
        Source:
            Elhage et al. 2021. TransformerLens' `direct_logit_attribution` agrees where the final
            norm is folded (`fold`); where it is not, that one leaves the gain out.
        """
        return attribute(self._readout(), self.groups, answer, wrong, pos, by)

    def accumulated_logits(
        self,
        answer: TokenIds,
        wrong: TokenIds | None = None,
        pos: TokenIds | None = -1,
        *,
        scale: str = "frozen",
    ) -> xr.DataArray:
        """The logit (difference) read off the stream after each write, in the order of the sum.

        The norm's shift and b_U count from the start; the last entry is what the model computed.

        Args:
            answer, wrong, pos: as in `logit_attribution`.
            scale: "frozen" divides by the run's final scale, so steps are the attributions; "own"
                lets each partial stream be normalised by itself, as if the model stopped there.
        Returns:
            [component, example] float64 (with `pos=None` [component, example, pos]).
        Raises:
            ExactnessError, TokenError, ShapeError: as `logit_attribution`.
            ConfigError: if `scale` is neither.
        """
        return accumulate(self._readout(), self.groups, answer, wrong, pos, scale)

    def _readout(self) -> Readout:
        if self.readout is None:
            raise ExactnessError(
                f"logit attribution needs all writes to the stream, these end at '{self.at}'",
                hint="decompose with at='final'",
            )
        return self.readout

    def _formed(self, groups: Sequence[WriteGroup]) -> xr.DataArray:
        labels = [label for group in groups for label in group.labels]
        size = self.stream.sizes
        require_room(
            len(labels) * self.stream.nbytes,
            f"{len(labels)} writes for {[size['example'], size['pos']]} positions of width "
            f"{size['d_model']}",
            hint="take layer_writes(layer), or fewer examples at a time",
        )
        values = np.empty((len(labels), *self.stream.shape), self.stream.dtype)
        start = 0
        for group in groups:
            end = start + len(group.labels)
            values[start:end] = plain_array(group.form())
            start = end
        coords = dict(self.stream.coords) | {"component": labels}
        return xr.DataArray(values, dims=("component", *self.stream.dims), coords=coords)


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

    Head by source token is `source_writes`.

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
            error and where it is.
        HookError: if `at` names no stream of this model; or if the run is edited, by a hook that
            changes an activation, by edges cut or by a pattern frozen. The writes of an edited run
            may well sum, and would be told as the model's own.
    Note:
        The bound is what rounding can do: errors have either sign, so those of m additions and
        of an inner product of n terms add up to about sqrt(m) and sqrt(n) times the dtype's
        epsilon times the largest sum of |writes|; twice that is allowed.
        Shortformer vectors go into q and k and are no write.
    """
    config = model.config
    target = _stream_name(config, at)
    complete = target == _stream_name(config, "final")
    names = activations_of(
        target, positions=config.positions, has_mlp=config.has_mlp, per_neuron=per_neuron
    )
    names.append(target)
    # The logits are not needed, and the last layer's stream not before it.
    forward: dict[str, object] = {"stop_at_layer": stream_place(target)[0] + 1}
    if complete:
        forward = {"return_type": None}
        if config.norm != "none":
            names.append("ln_final.hook_scale")
    with torch.no_grad():
        with undisturbed(model, "decompose the stream"):
            _, acts = capture(
                model, tokens, names, attention_mask=attention_mask, backend=backend, **forward
            )
        stream = acts[target]
        seen = has_visible_key(stream, attention_mask) if split_value_bias else None
        groups = tuple(write_groups(model, acts, target, per_neuron=per_neuron, visible=seen))
        remainder, bound = _compare(config, groups, stream, target)
        biased = config.attn_bias
        dims = ("example", "pos", "d_model")
        return ResidualDecomposition(
            groups=groups,
            stream=_labelled(stream, dims),
            remainder=_labelled(remainder, dims),
            at=target,
            largest_error=float(remainder.abs().max()),
            bound=bound,
            value_bias=("separate" if split_value_bias else "inside") if biased else "none",
            norm=treatment_of(config),
            readout=readout_of(model, acts.get("ln_final.hook_scale")) if complete else None,
        )


def require_room(needed: int, what: str, hint: str = "take fewer examples at a time") -> None:
    """Raise ShapeError if `what` takes more than 8 GiB."""
    if needed > _LIMIT:
        raise ShapeError(f"{what} take {needed:,} bytes, over the limit of {_LIMIT:,}", hint=hint)


def rounding(config: DecoderConfig, dtype: torch.dtype, longest: int) -> float:
    """What rounding may do to a sum of writes, relative to the sum of their absolute values.

    Args:
        longest: terms of the longest inner product on the way, taken in float32 at least.
    """
    wide = torch.promote_types(dtype, torch.float32)
    additions = 2 * config.n_layers + 8
    narrow, exact = torch.finfo(dtype).eps, torch.finfo(wide).eps
    return 2 * (math.sqrt(additions) * narrow + math.sqrt(longest) * exact)


def _compare(
    config: DecoderConfig, groups: Sequence[WriteGroup], stream: Tensor, target: str
) -> tuple[Tensor, float]:
    """The remainder and its bound; raises if it is larger. One layer's writes at a time."""
    remainder = stream.double()
    size = torch.zeros_like(remainder)
    for group in groups:
        total, absolute = group.sums()
        remainder = remainder - total
        size += absolute
    longest = max(config.n_heads * config.d_head, config.d_mlp or 0)
    bound = float(size.max()) * rounding(config, stream.dtype, longest)
    largest = float(remainder.abs().max())
    if not largest <= bound:
        wrong = remainder.abs().nan_to_num(nan=torch.inf).flatten().argmax()
        example, pos, channel = (int(i) for i in torch.unravel_index(wrong, remainder.shape))
        raise ExactnessError(
            f"the writes do not sum to '{target}': largest error {largest:.1e} at example "
            f"{example}, pos {pos}, channel {channel}; the bound is {bound:.1e}"
        )
    return remainder, bound


def _labelled(
    values: Tensor, dims: Sequence[str], components: Sequence[str] | None = None
) -> xr.DataArray:
    array = plain_array(values)
    sizes = dict(zip(dims, array.shape, strict=True))
    coords: dict[str, object] = {name: np.arange(sizes[name]) for name in ("example", "pos")}
    if components is not None:
        coords["component"] = list(components)
    return xr.DataArray(array, dims=tuple(dims), coords=coords)


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
