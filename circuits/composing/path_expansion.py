"""The logits of an attention-only model as a sum over paths through its heads.

Patterns and the norms' scales held as they were in a run, every map is linear:

    x_{l+1} = x_l + b_O + sum over heads of A^h (x_l / scale * gain + shift) W_V^h W_O^h + ..

Multiplied out, a logit is a sum over paths: none of the heads, one of them, one in each of two
layers, ..: (1 + H)^L paths from the embedding to the logit, beside what biases and shifts add on
their way. A path through heads h1, h2, .. is A^{h2} A^{h1} (x) OV_1 OV_2 .., a pattern and a
matrix, and so is read from the end: a row of pattern products, and a direction of the stream that
starts as W_U's column and goes back through W_O and W_V. No [d_vocab] output is formed.

Source: Elhage et al. 2021. How much a path contributes is exact for this run's patterns; Q- and
K-composition change patterns, and are not in this sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.composing.frozen_run import (
    NOT_IN_IT,
    FrozenRun,
    freeze_run,
    require_attention_only,
)
from headstream.circuits.composing.path_list import Heads, allowed_order, list_paths
from headstream.circuits.qk_ov.head_factors import ReadingNorm, layer_norm
from headstream.circuits.stream.attribution import Readout, TokenIds, readout_of, row_positions
from headstream.models.errors import ExactnessError
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

_BYTES = 2**28  # of path states held at once


@takes_model
def expand_paths(
    model: Decoder,
    tokens: Any,
    answer: TokenIds,
    wrong: TokenIds | None = None,
    *,
    pos: TokenIds = -1,
    max_order: int | None = None,
    limit: int = 4096,
    attention_mask: Tensor | None = None,
) -> xr.Dataset:
    """What every path through the heads adds to a logit, or to a logit difference, in nats.

    Args:
        model: an attention-only decoder.
        tokens: as for the model.
        answer: the token, or one for each example.
        wrong: token to subtract, or one for each example; None for the logit itself.
        pos: position that predicts, or one for each example; negative counts from the end.
        max_order: most heads on a path; None takes all paths. What longer ones add is then the
            `remainder`.
        limit: most paths that are counted out.
        attention_mask: as for the model.
    Returns:
        Dataset with `contribution` (path, example): "direct" is the embedding (and position
        vectors) read by the unembedding, "L0H1" goes through that head, "L0H1 -> L1H2" through
        both; coordinate `order` (path) counts heads, so `contribution.groupby("order").sum()` are
        the terms by order. `constant` (source, example): what `L0bO`, `L0bV`, `L0ln1.b` (the
        norm's shift) add, each through all heads after it that the order allows, and `ln_final.b`
        and `b_U`. `total` (example): what the model computed; `remainder`: total minus all of
        these.
    Raises:
        ExactnessError: if the model has an MLP, or all paths are there and do not sum to the
            logit within the bound (what rounding of the model's dtype can do).
        ShapeError: if there are more paths than `limit`, with the number; for a `max_order` not in
            [0, n_layers]; for a position that does not exist; and as `freeze_run`.
        TokenError: for a token that does not exist.
        HookError: if something edits the run.
    Example:
        >>> from headstream.models import load
        >>> model = load("constructed-induction")
        >>> found = expand_paths(model, torch.tensor([0, 5, 6, 7, 8, 5, 6]), answer=7, wrong=5)
        >>> found["contribution"].groupby("order").sum().sel(example=0).values.round(4).tolist()
        [0.0, 10.0, 0.0]
    """
    require_attention_only(model, "expand the paths")
    config = model.config
    order = allowed_order(config, max_order, limit)
    run = freeze_run(model, tokens, "expand paths", attention_mask=attention_mask)
    n, size = run.tokens.shape
    readout = readout_of(model, run.final_scale)
    reader = readout.reader(answer, wrong, n)
    place = torch.as_tensor(row_positions(pos, n, size), device=model.device)
    rows = torch.arange(n, device=model.device)
    start = torch.zeros(n, size, dtype=torch.float64, device=model.device)
    start[rows, place] = 1.0
    if run.final_scale is not None:
        start = start / run.final_scale[..., 0].double()
    layers = [_layer(model, layer) for layer in range(config.n_layers)]
    paths = list_paths(config, order)
    step = max(1, _BYTES // (8 * len(paths) * (size + config.d_model)))
    parts = [
        _expand(layers, run, start, reader.direction, order, slice(first, first + step))
        for first in range(0, n, step)
    ]
    found = {heads: torch.cat([part.paths[heads] for part in parts]) for heads in paths}
    constants = {
        source: torch.cat([part.constants[source] for part in parts])
        for source in parts[0].constants
    } | reader.constants
    total = _measured(run, answer, wrong, place)
    contribution = torch.stack(list(found.values()))
    constant = torch.stack([*constants.values()]) if constants else contribution.new_zeros(0, n)
    remainder = total - contribution.sum(0) - constant.sum(0)
    if order == config.n_layers:
        rounded = torch.cat([part.size for part in parts])
        rounded = rounded + _read_size(readout, run, answer, wrong, place)
        _require_sum(model, remainder, rounded, size)
    labels = [" -> ".join(head_name(*pair) for pair in heads) or "direct" for heads in paths]
    return xr.Dataset(
        {
            "contribution": (("path", "example"), contribution.cpu().numpy()),
            "constant": (("source", "example"), constant.cpu().numpy()),
            "total": (("example",), total.cpu().numpy()),
            "remainder": (("example",), remainder.cpu().numpy()),
        },
        coords={
            "path": labels,
            "order": ("path", [len(heads) for heads in paths]),
            "source": list(constants),
            "example": np.arange(n),
            "pos": ("example", place.cpu().numpy()),
        },
        attrs={
            "unit": "nats",
            "of": reader.of,
            "norm": f"every {config.norm}'s scale held fixed at its value in the run"
            if config.norm != "none"
            else "no norm",
            "paths": len(paths),
            "of_paths": (1 + config.n_heads) ** config.n_layers,
            "note": NOT_IN_IT,
        },
    )


@dataclass(frozen=True, eq=False)
class _Layer:
    """Float64 weights of a layer, over query heads; biases that do not exist are None."""

    norm: ReadingNorm
    value: Float[Tensor, "head d_model d_head"]
    reading: Float[Tensor, "head d_model d_head"]
    out: Float[Tensor, "head d_head d_model"]
    value_bias: Float[Tensor, "head d_head"] | None
    out_bias: Float[Tensor, " d_model"] | None


@dataclass(frozen=True, eq=False)
class _Expansion:
    """By path and by constant, [example]; `size` bounds what rounding before the readout is
    relative to."""

    paths: dict[Heads, Float[Tensor, " example"]]
    constants: dict[str, Float[Tensor, " example"]]
    size: Float[Tensor, " example"]


def _layer(model: Decoder, layer: int) -> _Layer:
    attn, group = model.blocks[layer].attn, model.config.group_size
    norm = layer_norm(model, layer)
    value = attn.W_V.detach().double().repeat_interleave(group, 0)
    b_V, b_O = attn.b_V, attn.b_O
    return _Layer(
        norm=norm,
        value=value,
        reading=norm.fold(value),
        out=attn.W_O.detach().double(),
        value_bias=None if b_V is None else b_V.detach().double().repeat_interleave(group, 0),
        out_bias=None if b_O is None else b_O.detach().double(),
    )


def _expand(
    layers: list[_Layer],
    run: FrozenRun,
    start: Float[Tensor, "example pos"],
    direction: Float[Tensor, "example d_model"],
    order: int,
    some: slice,
) -> _Expansion:
    """All paths of some examples, from the last layer back to the first.

    A path so far is a functional of the stream x before a layer, sum_t weights[t] x_t . direction:
    one row of weights and one direction an example.
    """
    heads: list[Heads] = [()]
    weights, directions = start[some][None], direction[some][None]
    constants: dict[str, Tensor] = {}
    bound = _size(weights, run.streams[-1][some], directions)
    for number in reversed(range(len(layers))):
        layer = layers[number]
        if layer.out_bias is not None:
            reading = directions @ layer.out_bias
            constants[f"L{number}bO"] = (weights.sum(-1) * reading).sum(0)
        going = [index for index, path in enumerate(heads) if len(path) < order]
        pattern = run.patterns[number][some].double()
        # What is asked of z and of v: through W_O, and through the pattern.
        asked = torch.einsum("hkd,ped->phek", layer.out, directions[going])
        through = torch.einsum("pet,ehts->phes", weights[going], pattern)
        values = _value_size(layer, run.streams[number][some], run.scales[number][some])
        passed = torch.einsum("hkd,ped->phek", layer.out.abs(), directions[going].abs())
        bound = bound + torch.einsum("phes,eshk,phek->e", through, values, passed)
        mass = through.sum(-1)
        if layer.value_bias is not None:
            reading = torch.einsum("phek,hk->phe", asked, layer.value_bias)
            constants[f"L{number}bV"] = (mass * reading).sum((0, 1))
        if layer.norm.centred:
            shift = torch.einsum("d,hdk->hk", layer.norm.shift, layer.value)
            reading = torch.einsum("phek,hk->phe", asked, shift)
            constants[f"L{number}ln1.b"] = (mass * reading).sum((0, 1))
        heads += [((number, h), *heads[index]) for index in going for h in range(len(layer.out))]
        back = torch.einsum("phek,hdk->phed", asked, layer.reading)
        weights = torch.cat([weights, (through / run.scales[number][some]).flatten(0, 1)])
        directions = torch.cat([directions, back.flatten(0, 1)])
        bound = bound + _size(weights, run.streams[number][some], directions)
    read = torch.einsum("pet,etd->ped", weights, run.streams[0][some].double())
    values = (read * directions).sum(-1)

    found = dict(zip(heads, values, strict=True))
    return _Expansion(found, dict(reversed(constants.items())), bound)


def _value_size(
    layer: _Layer, stream: Float[Tensor, "example pos d_model"], scale: Float[Tensor, "example pos"]
) -> Float[Tensor, "example pos head d_head"]:
    """The moduli of all products that a value is made of, summed.

    They may cancel in it, and then its rounding is larger than its size tells: biases and shifts
    against each other, or the parts of a head in an ill-conditioned basis.
    """
    x = stream.double().abs()
    if layer.norm.centred:
        x = x + x.mean(-1, keepdim=True)
    read = x / scale[..., None] * layer.norm.gain.abs() + layer.norm.shift.abs()
    size = torch.einsum("esd,hdk->eshk", read, layer.value.abs())
    return size if layer.value_bias is None else size + layer.value_bias.abs()


def _size(weights: Tensor, stream: Tensor, directions: Tensor) -> Float[Tensor, " example"]:
    """Sum over paths of |weights| |x| |direction|: what rounding errors are relative to."""
    reach = torch.einsum("pet,et->pe", weights.abs(), stream.double().norm(dim=-1))
    return (reach * directions.norm(dim=-1)).sum(0)


def _read_size(
    readout: Readout, run: FrozenRun, answer: TokenIds, wrong: TokenIds | None, place: Tensor
) -> Float[Tensor, " example"]:
    """The moduli of all products that the logits are made of, summed: of either logit, since the
    difference of two large ones is no better known than they are."""
    rows = torch.arange(len(place), device=place.device)
    x = run.streams[-1][rows, place].double().abs()
    if readout.centred:
        x = x + x.mean(-1, keepdim=True)
    if run.final_scale is not None:
        x = x / run.final_scale[rows, place].double()
    if readout.gain is not None:
        x = x * readout.gain.abs()
    if readout.shift is not None:
        x = x + readout.shift.abs()
    size = torch.zeros(len(rows), dtype=torch.float64, device=place.device)
    for ids in (answer,) if wrong is None else (answer, wrong):
        chosen = torch.as_tensor(ids, device=place.device).expand(len(rows))
        size = size + (x * readout.unembed.value[:, chosen].T.double().abs()).sum(-1)
        if readout.bias is not None:
            size = size + readout.bias.value[chosen].double().abs()
    return size


def _measured(
    run: FrozenRun, answer: TokenIds, wrong: TokenIds | None, place: Tensor
) -> Float[Tensor, " example"]:
    """The logit (difference) that the model computed, from its logits."""
    assert run.logits is not None
    rows = torch.arange(len(place), device=place.device)
    logits = run.logits[rows, place].double()
    total = logits[rows, torch.as_tensor(answer, device=place.device).expand(len(rows))]
    if wrong is not None:
        other = torch.as_tensor(wrong, device=place.device).expand(len(rows))
        total = total - logits[rows, other]
    return total


def _require_sum(
    model: Decoder, remainder: Tensor, size: Float[Tensor, " example"], length: int
) -> None:
    """Raise ExactnessError where the remainder is more than rounding of either sign."""
    terms = model.config.d_model + length + 2 * model.config.n_layers
    bound = 2 * torch.finfo(model.dtype).eps * math.sqrt(terms) * size
    # Infinite weights make the bound infinite, and everything is under it.
    wrong = ~(bound.isfinite() & (remainder.abs() <= bound))
    if bool(wrong.any()):
        worst = int((remainder.abs() / bound).nan_to_num(nan=torch.inf).argmax())
        raise ExactnessError(
            f"the paths do not sum to the logit: they miss it by {float(remainder[worst]):.1e} in "
            f"example {worst}; the bound is {float(bound[worst]):.1e}",
            hint="something changes the run that is no hook: load the model again",
        )
