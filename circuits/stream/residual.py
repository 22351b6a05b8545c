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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstream.circuits.stream.attribution import readout_of, treatment_of
from headstream.circuits.stream.decomposition import ResidualDecomposition, labelled
from headstream.circuits.stream.writes import (
    WriteGroup,
    activations_of,
    has_visible_key,
    stream_place,
    write_groups,
)
from headstream.circuits.undisturbed import undisturbed
from headstream.models.errors import ExactnessError, HookError, nearest
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.names import hook_table

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder


@takes_model
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
    forward: dict[str, Any] = {"stop_at_layer": stream_place(target)[0] + 1}
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
            stream=labelled(stream, dims),
            remainder=labelled(remainder, dims),
            at=target,
            largest_error=float(remainder.abs().max()),
            bound=bound,
            value_bias=("separate" if split_value_bias else "inside") if biased else "none",
            norm=treatment_of(config),
            readout=readout_of(model, acts.get("ln_final.hook_scale")) if complete else None,
        )


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
    # Infinite weights make the bound infinite, and everything is under it.
    if not (math.isfinite(bound) and largest <= bound):
        wrong = remainder.abs().nan_to_num(nan=torch.inf).flatten().argmax()
        example, pos, channel = (int(i) for i in torch.unravel_index(wrong, remainder.shape))
        raise ExactnessError(
            f"the writes do not sum to '{target}': largest error {largest:.1e} at example "
            f"{example}, pos {pos}, channel {channel}; the bound is {bound:.1e}"
        )
    return remainder, bound


def _stream_name(config: DecoderConfig, at: str) -> str:
    if at == "final":
        return f"blocks.{config.n_layers - 1}.hook_resid_post"
    streams = [n for n in hook_table(config) if re.fullmatch(r"blocks\.\d+\.hook_resid_\w+", n)]
    if at not in streams:
        raise HookError(
            f"at={at!r} names no residual stream of this model",
            hint=nearest(str(at), streams) or f"give 'final' or a name like '{streams[0]}'",
        )
    return at
