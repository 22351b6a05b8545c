"""How much the loss owes to paths of each order: none, one head, two heads in a row, ..

    order 0   heads write nothing; what each would have written is saved
    order n   heads write what was saved at order n - 1; what each would write now is saved

with every pattern held as in the run, so that the order-n logits hold the paths through up to n
heads (`path_expansion`). The fall of the loss from one order to the next is what the paths of that
order are worth, given the lower ones. Source: Elhage et al. 2021, term importance analysis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.circuits.composing.frozen_run import (
    NOT_IN_IT,
    FrozenRun,
    checked_rows,
    freeze_run,
    require_attention_only,
)
from headstream.circuits.labels import percentile_interval
from headstream.circuits.qk_ov.head_factors import ReadingNorm, layer_norm, reading_norm
from headstream.models.arguments import check_mask, check_seed
from headstream.models.errors import ConfigError, ShapeError, nearest
from headstream.models.given_model import takes_model
from headstream.models.loss import next_token_loss

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Scale = Literal["frozen", "own"]
Array = npt.NDArray[np.floating]

_BYTES = 2**28  # of patterns, or of logits, held at once


@takes_model
def importance_by_order(
    model: Decoder,
    tokens: Any,
    *,
    scale: str = "frozen",
    targets: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seed: int = 0,
) -> xr.Dataset:
    """The loss with paths of up to n heads, for n = 0, 1, .., n_layers, in nats.

    Args:
        model: an attention-only decoder.
        tokens: as for the model.
        scale: of the norms. "frozen": as in the run, so that logits are exactly the paths of that
            order. "own": each stream is normalised by itself, as the model would.
        targets: bool [batch, pos], the tokens whose prediction counts, such as those that a repeat
            determines; None counts all. The first token is never predicted.
        attention_mask: as for the model.
        seed: of the intervals.
    Returns:
        Dataset with `loss` (order, example), the mean next-token loss of a sequence;
        `marginal` (order, example), what the paths of that order take off the loss (the loss one
        order below minus this one; for order 0, against the uniform guess log(d_vocab)): positive
        helps; `mean` (order) of it, with the 95% bootstrap interval over examples `low` to `high`
        (NaN for one example); `model_loss` (example), which the last order equals to rounding.
    Raises:
        ExactnessError: if the model has an MLP.
        ConfigError: if `scale` is neither.
        HookError: if something edits the run.
        ShapeError: for tokens without a target, or `targets` of another shape or dtype; and as
            `freeze_run`.
    Source:
        Elhage et al. 2021; the uniform guess as the reference of order 0 is theirs. Output biases
        and the norm's shift belong to what reads them; they are in all orders.
    """
    require_attention_only(model, "weigh the orders of paths")
    check_seed(seed)
    if scale not in get_args(Scale):
        raise ConfigError(
            f"scale must be 'frozen' or 'own', got {scale!r}",
            hint=nearest(str(scale), get_args(Scale)),
        )
    config = model.config
    rows = checked_rows(model, tokens)
    batch, length = rows.shape
    mask = check_mask(attention_mask, batch, length, model.device)
    counted = _checked_targets(targets, rows)
    squares = 8 * config.n_layers * config.n_heads * length**2
    step = max(1, _BYTES // max(squares, 8 * length * config.d_vocab))
    by_order, own = [], []
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        run = freeze_run(
            model,
            rows[some],
            "weigh the orders of paths",
            attention_mask=None if mask is None else mask[some],
        )
        assert run.logits is not None
        own.append(_loss(run.logits.double(), run, counted[some]))
        by_order.append(_losses(model, run, counted[some], frozen=scale == "frozen"))
    loss = np.concatenate(by_order, axis=1)
    before = np.concatenate([np.full_like(loss[:1], math.log(config.d_vocab)), loss[:-1]])
    marginal = before - loss
    there = marginal[:, ~np.isnan(marginal).any(0)]
    if not there.size:
        raise ShapeError("the loss has no target: none of `targets` follows another real token")
    low, high = (np.full(len(loss), np.nan) for _ in range(2))
    if there.shape[1] > 1:
        low, high = percentile_interval(there.T, seed=seed)
    return xr.Dataset(
        {
            "loss": (("order", "example"), loss),
            "marginal": (("order", "example"), marginal),
            "mean": (("order",), there.mean(1)),
            "low": (("order",), low),
            "high": (("order",), high),
            "model_loss": (("example",), np.concatenate(own)),
        },
        coords={"order": np.arange(config.n_layers + 1), "example": np.arange(len(rows))},
        attrs={
            "unit": "nats",
            "scale": "none" if config.norm == "none" else scale,
            "note": NOT_IN_IT,
        },
    )


def _checked_targets(targets: Tensor | None, rows: Tensor) -> Bool[Tensor, "batch pos"]:
    if targets is None:
        return torch.ones_like(rows, dtype=torch.bool)
    if not isinstance(targets, Tensor):
        raise ShapeError(
            f"targets must be a bool tensor [batch, pos] = {list(rows.shape)}, got "
            f"{type(targets).__name__}",
            hint="use torch.tensor(targets)",
        )
    given = targets[None] if targets.ndim == 1 else targets
    if given.shape != rows.shape or given.dtype != torch.bool:
        raise ShapeError(
            f"targets must be bool [batch, pos] = {list(rows.shape)}, got "
            f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"
        )
    return given.to(rows.device)


def _losses(
    model: Decoder, run: FrozenRun, counted: Tensor, *, frozen: bool
) -> Float[Array, "order example"]:
    """Loss of every order: what heads write in one order is what they would have in the last."""
    n_layers = model.config.n_layers
    saved: list[Tensor | None] = [None] * n_layers
    found = []
    for _ in range(n_layers + 1):
        stream = run.streams[0].double()
        fresh: list[Tensor | None] = []
        for layer in range(n_layers):
            fresh.append(_written(model, run, layer, stream, frozen))
            written = saved[layer]
            if written is not None:
                stream = stream + written
            bias = model.blocks[layer].attn.b_O
            if bias is not None:
                stream = stream + bias.detach().double()
        saved = fresh
        norm = reading_norm(model, model.ln_final)
        given = None if run.final_scale is None else run.final_scale[..., 0].double()
        normalised = _normalise(model, norm, stream, given if frozen else None)
        logits = normalised @ model.W_U.detach().double() + model.b_U.detach().double()
        found.append(_loss(logits, run, counted))
    return np.stack(found)


def _written(
    model: Decoder, run: FrozenRun, layer: int, stream: Tensor, frozen: bool
) -> Float[Tensor, "batch pos d_model"]:
    """What the heads of a layer would write, attending as in the run."""
    attn, group = model.blocks[layer].attn, model.config.group_size
    norm = layer_norm(model, layer)
    x = _normalise(model, norm, stream, run.scales[layer] if frozen else None)
    value = torch.einsum("bpd,hdk->bphk", x, attn.W_V.detach().double())
    if attn.b_V is not None:
        value = value + attn.b_V.detach().double()
    value = value.repeat_interleave(group, 2)
    z = torch.einsum("bhqk,bkhd->bqhd", run.patterns[layer].double(), value)
    return torch.einsum("bphk,hkd->bpd", z, attn.W_O.detach().double())


def _normalise(
    model: Decoder,
    norm: ReadingNorm,
    stream: Float[Tensor, "batch pos d_model"],
    scale: Float[Tensor, "batch pos"] | None,
) -> Float[Tensor, "batch pos d_model"]:
    """A norm with the scale of the run, or (None) the stream's own."""
    if model.config.norm == "none":
        return stream
    centred = stream - stream.mean(-1, keepdim=True) if norm.centred else stream
    if scale is None:
        scale = (centred.square().mean(-1) + model.config.eps).sqrt()
    return centred / scale[..., None] * norm.gain + norm.shift


def _loss(
    logits: Float[Tensor, "batch pos d_vocab"], run: FrozenRun, counted: Bool[Tensor, "batch pos"]
) -> Float[Array, " batch"]:
    """Mean over the counted targets of each example; NaN where it has none."""
    each = next_token_loss(logits, run.tokens, run.mask, per_token=True)
    each = each.masked_fill(~counted[:, 1:], torch.nan)
    return np.asarray(each.nanmean(1).cpu().numpy())
