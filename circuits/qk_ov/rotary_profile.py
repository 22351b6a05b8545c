"""A rotary head's score against distance, and the share of each rotary pair in it.

Channels (i, i + d_head/2) of a query or key are a pair, a complex number a_i, that turns by
w_i = rotary_base^(-2i/d_head) radians a token. With u and v the query and key before turning and d
the distance,

    s = scale * sum over pairs of Re( u_i conj(v_i) e^{j d w_i} )

so every pair adds a cosine of the distance with its own amplitude and phase: the fast pairs (small
i) tell near positions apart, the slow ones code distance (Su et al. 2021). The split over pairs is
the same in every basis of the head that leaves the model unchanged, since those turn and stretch
each pair by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.qk_ov.score_split import ScoreSplit, checked_split, run_scores
from headstream.circuits.qk_ov.token_vectors import normalised_tokens
from headstream.circuits.qk_ov.weights import FARTHEST, check_head
from headstream.circuits.selection import whole
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.given_model import takes_model
from headstream.models.positions import rotary_tables
from headstream.models.vocabulary import check_tokens

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder

# Refuse to build more than this many bytes of shares.
_LIMIT = 2**31


@takes_model
def score_frequencies(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    head: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> ScoreSplit:
    """Run the model and split a head's scores over its rotary pairs.

    Args:
        model: a decoder with rotary positions.
        tokens: int64 [example, pos], or [pos] as one row.
        layer, head: which query head.
        attention_mask, position_ids: as for the model.
    Returns:
        Terms over `pair`, fastest first, biases inside; the coordinate `frequency` of `terms` is
        in radians a token.
    Raises:
        ConfigError: without rotary positions.
        ShapeError: if layer or head is out of range, or the terms would take more than 8 GiB.
        HookError, ExactnessError: as `score_terms`.
    """
    config = model.config
    layer, head = check_head(config, layer, head)
    _require_rotary(config, "score_terms splits its scores by content and position")
    names = [f"blocks.{layer}.attn.hook_rot_{what}" for what in "qk"]
    acts, score = run_scores(
        model,
        tokens,
        layer,
        head,
        names,
        n_terms=config.d_head // 2,
        attention_mask=attention_mask,
        position_ids=position_ids,
    )
    query = _pairs(acts[names[0]][:, :, head].double())
    key = _pairs(acts[names[1]][:, :, head // config.group_size].double())
    terms = config.scale * torch.einsum("bitp,bjtp->pbij", query, key)
    size = float(config.scale * (query.abs().flatten(2) @ key.abs().flatten(2).mT).max())
    pairs = {"pair": range(config.d_head // 2)}
    found = checked_split(
        model,
        layer,
        head,
        terms,
        score,
        size=size,
        labels=pairs,
        attention_mask=attention_mask,
    )
    frequency = ("pair", _frequencies(config).numpy())
    return dataclasses.replace(found, terms=found.terms.assign_coords(frequency=frequency))


@takes_model
def distance_profile(
    model: Decoder,
    layer: int,
    head: int,
    *,
    query: int | Tensor,
    key: int | Tensor,
    distances: Iterable[int] | None = None,
) -> xr.Dataset:
    """The score of given queries for given keys at every distance, biases and scale in it.

    Args:
        model: a decoder with rotary positions.
        layer, head: which query head.
        query, key: token ids (a whole number, or int64 [n]), or normalised inputs (floating
            [d_model] or [n, d_model]), which are read as they are. A token stands for its
            embedding through the layer's norm: exactly what a head of layer 0 reads; in a later
            layer, what it would read if nothing had been written to the stream.
        distances: query position minus key position, in tokens; None is 0 to n_ctx - 1. Negative
            distances are keys that a causal mask hides.
    Returns:
        `score` (query, key, distance) and `share` (pair, query, key, distance), which sums to it
        over pairs; float64, in float64 arithmetic whatever the model's dtype. Coordinates:
        `distance`, `frequency` (pair) in radians a token, and the token ids on `query` and `key`
        where tokens were given.
    Raises:
        ConfigError: without rotary positions: the score of two inputs has no distance in it.
        ShapeError, TokenError: for a layer, head, token or input that does not exist or does not
            fit, distances that are no whole numbers, or shares over 2 GiB.
    Source:
        Su et al. 2021; with tokens of layer 0 it is the score s[i, i - d] of any sequence that has
        the key's token d before the query's.
    """
    config = model.config
    layer, head = check_head(config, layer, head)
    _require_rotary(config, "leave the distance out: qk_circuit gives the one score")
    lags = _distances(distances, config.n_ctx)
    queries, query_ids = _read(model, layer, query, "query")
    keys, key_ids = _read(model, layer, key, "key")
    needed = 8 * len(queries) * len(keys) * len(lags) * (config.d_head // 2)
    if needed > _LIMIT:
        raise ShapeError(
            f"{len(queries)} queries x {len(keys)} keys x {len(lags)} distances take {needed:,} "
            f"bytes, over the limit of {_LIMIT:,}",
            hint="give fewer at a time",
        )
    attn, kv_head = model.blocks[layer].attn, head // config.group_size
    u = _project(queries, attn.W_Q[head], attn.b_Q, head)
    v = _project(keys, attn.W_K[kv_head], attn.b_K, kv_head)
    place = torch.tensor(lags, device=u.device)[None]
    cos, sin = rotary_tables(place, config.d_head, config.rotary_base, torch.float64)
    (u1, u2), (v1, v2) = _pairs(u).unbind(-2), _pairs(v).unbind(-2)
    # Turning the query by +d against an unturned key.
    even = torch.einsum("qp,kp->pqk", u1, v1) + torch.einsum("qp,kp->pqk", u2, v2)
    odd = torch.einsum("qp,kp->pqk", u1, v2) - torch.einsum("qp,kp->pqk", u2, v1)
    turn = cos[0, :, 0].T[:, None, None], sin[0, :, 0].T[:, None, None]
    share = config.scale * (even[..., None] * turn[0] + odd[..., None] * turn[1])
    return xr.Dataset(
        {
            "score": (("query", "key", "distance"), share.sum(0).cpu().numpy()),
            "share": (("pair", "query", "key", "distance"), share.cpu().numpy()),
        },
        coords={
            "query": query_ids,
            "key": key_ids,
            "distance": lags,
            "pair": range(config.d_head // 2),
            "frequency": ("pair", _frequencies(config).numpy()),
        },
        attrs={"layer": layer, "head": head, "unit": "score"},
    )


def _pairs(channels: Tensor) -> Tensor:
    """[..., d_head] as [..., 2, pair]: half-split, channel i with i + d_head/2."""
    return channels.unflatten(-1, (2, -1))


def _frequencies(config: DecoderConfig) -> Tensor:
    channels = torch.arange(0, config.d_head, 2, dtype=torch.float64)
    return config.rotary_base ** (-channels / config.d_head)


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None, index: int) -> Tensor:
    out = inputs @ weight.detach().double()
    return out if bias is None else out + bias[index].detach().double()


def _read(
    model: Decoder, layer: int, given: object, name: str
) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Normalised inputs [n, d_model] in float64, and what to call them: token ids or places."""
    d_model = model.config.d_model
    if not isinstance(given, Tensor) and (token := whole(given)) is not None:
        given = torch.tensor([token])
    if not isinstance(given, Tensor):
        raise ShapeError(
            f"{name} must be a token, an int64 tensor of tokens or a floating tensor "
            f"[n, {d_model}], got {type(given).__name__}"
        )
    if given.is_floating_point():
        rows = given if given.ndim != 1 else given[None]
        if rows.ndim != 2 or rows.shape[1] != d_model or len(rows) == 0:
            raise ShapeError(
                f"{name} must be normalised inputs [n, d_model] = [n, {d_model}], got "
                f"{list(given.shape)}"
            )
        if not bool(torch.isfinite(rows).all()):
            raise ShapeError(f"{name} must be finite, but holds NaN or infinity")
        return rows.detach().to(model.device).double(), np.arange(len(rows))
    if given.ndim == 0:
        given = given[None]
    if given.ndim != 1:
        raise ShapeError(f"{name} must be tokens [n], got {list(given.shape)}")
    ids = check_tokens(given, model.config.d_vocab, argument=name)[0]
    vectors = model.W_E.detach()[ids.to(model.device)]
    return normalised_tokens(model, layer, vectors), ids.cpu().numpy()


def _distances(given: Any, n_ctx: int) -> list[int]:
    if given is None:
        return list(range(n_ctx))
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ShapeError(f"distances must be a list of whole numbers of tokens, got {given!r}")
    lags = []
    for lag in given:
        tokens = whole(lag)
        if tokens is None or abs(tokens) > FARTHEST:
            raise ShapeError(
                f"distances must be whole numbers of tokens in [-2**31, 2**31], got {lag!r}"
            )
        lags.append(tokens)
    if not lags or len(set(lags)) < len(lags):
        raise ShapeError(f"distances must be distinct and at least one, got {lags}")
    return lags


def _require_rotary(config: DecoderConfig, hint: str) -> None:
    if config.positions != "rotary":
        raise ConfigError(
            f"this model has positions='{config.positions}': no rotary pairs, and no score that "
            "depends on distance alone",
            hint=hint,
        )
