"""Positions that are added: what a sinusoid is, and what addition does to a score (P1, P2)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstream.analyses.claims.ledger import (
    Finding,
    NotApplicable,
    Observation,
    Subject,
    check,
    measurement,
)
from headstream.analyses.claims.reading import gained
from headstream.analyses.claims.variation import observed, shares_of_variation
from headstream.models.hooks import capture

# Every shift of this many positions is checked against every other, which is quadratic.
_LONGEST = 512


@check("P1", "sinusoidal: the code of p + k is the code of p, turned by an angle k alone decides")
def _shift_is_a_rotation(subject: Subject) -> Finding:
    config = subject.model.config
    if config.positions != "sinusoidal":
        raise NotApplicable(f"positions are {config.positions}, not sinusoidal")
    length = min(config.n_ctx, _LONGEST)
    zeros = torch.zeros(1, length, dtype=torch.int64, device=subject.model.device)
    _, run = capture(subject.model, zeros, "hook_pos_embed", stop_at_layer=0)
    # sin and cos of one angle stand side by side; a shift by k multiplies by [[c, -s], [s, c]].
    sin, cos = run["hook_pos_embed"][0].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.arange(config.d_model // 2, dtype=torch.float64, device=sin.device)
    speed = torch.exp(-math.log(10000.0) * 2 * pairs / config.d_model)
    findings = []
    for k in range(1, length):
        s, c = torch.sin(k * speed), torch.cos(k * speed)
        turned = torch.stack((sin[:-k] * c + cos[:-k] * s, cos[:-k] * c - sin[:-k] * s), -1)
        table = torch.stack((sin[k:], cos[k:]), -1)
        findings.append(Finding.between(table, turned, f"k = {k}", "p pair side"))
    if not findings:
        raise NotApplicable("n_ctx is 1: there is no shift")
    return Finding.worst_of(findings)


@check("P2", "added positions make q . k four terms of content and position, which sum to it")
def _four_terms(subject: Subject) -> Finding:
    model = subject.model
    layers = _layers(subject)
    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in layers]
    _, run = capture(model, subject.tokens, names)
    findings = []
    for name, terms in zip(names, _terms(subject, subject.tokens), strict=True):
        total, scores = terms.sum(0).tril(), run[name].tril()
        findings.append(Finding.between(total, scores, name, "example head pos key"))
    return Finding.worst_of(findings)


@measurement("P2", "the share of a score's variation over keys in the terms that hold a position")
def _share_of_position(subject: Subject) -> Observation:
    shares = [shares_of_variation(terms) for terms in _terms(subject, subject.sample)]
    every = torch.cat(shares, 2)
    mean = every.nanmean((1, 2)).tolist()
    names = ("content-content", "content-position", "position-content", "position-position")
    words = ", ".join(f"{name} {share:.2f}" for name, share in zip(names, mean, strict=True))
    where = "heads of layer 0" if len(shares) == 1 else "all heads"
    return observed(
        subject, 1 - every[0], "of the variation", f"mean over {where}; query-key: {words}"
    )


def _layers(subject: Subject) -> range:
    """Layers whose input still tells content from position: after the first they have mixed."""
    config = subject.model.config
    if config.positions == "rotary":
        raise NotApplicable("rotary positions turn q and k: nothing is added")
    if config.positions == "none":
        raise NotApplicable("this model has no positions")
    return range(config.n_layers if config.positions == "shortformer" else 1)


def _terms(
    subject: Subject, tokens: Int[Tensor, "batch pos"]
) -> list[Float[Tensor, "term batch head query_pos key_pos"]]:
    """Content-content, content-position, position-content and position-position, by layer.

    Biases stand with the content. In the stream, the norm's scale is held at its value in the run.
    """
    model = subject.model
    config = model.config
    layers = _layers(subject)
    names = ["hook_embed", *(f"blocks.{layer}.hook_resid_pre" for layer in layers)]
    if config.norm != "none":
        names += [f"blocks.{layer}.ln1.hook_scale" for layer in layers]
    _, run = capture(model, tokens, names)
    vectors = _vectors(subject, tokens.shape[1])
    found = []
    for layer in layers:
        scale = run.get(f"blocks.{layer}.ln1.hook_scale")
        if config.positions == "shortformer":
            # Added after the norm, gain and shift.
            content = _normalised(subject, layer, run[f"blocks.{layer}.hook_resid_pre"], scale)
            position = vectors.expand_as(content)
        else:
            content = _normalised(subject, layer, run["hook_embed"], scale)
            position = _normalised(
                subject, layer, vectors.expand_as(content), scale, with_shift=False
            )
        found.append(_score_terms(subject, layer, content, position))
    return found


def _vectors(subject: Subject, length: int) -> Float[Tensor, "pos d_model"]:
    model = subject.model
    config = model.config
    if config.positions != "sinusoidal":
        return model.W_pos[:length]
    place = torch.arange(length, dtype=torch.float64, device=model.device)[:, None]
    pairs = torch.arange(config.d_model // 2, dtype=torch.float64, device=model.device)
    angle = place * torch.exp(-math.log(10000.0) * 2 * pairs / config.d_model)
    return torch.stack((torch.sin(angle), torch.cos(angle)), -1).flatten(1)


def _normalised(
    subject: Subject, layer: int, part: Tensor, scale: Tensor | None, *, with_shift: bool = True
) -> Tensor:
    """What the norm makes of one part of its input; the shift belongs to one part alone."""
    if scale is None:
        return part
    if subject.model.config.norm == "layernorm":
        part = part - part.mean(-1, keepdim=True)
    return gained(subject.model.blocks[layer].ln1, part / scale, shift=with_shift)


def _score_terms(subject: Subject, layer: int, content: Tensor, position: Tensor) -> Tensor:
    attn = subject.model.blocks[layer].attn
    config = subject.model.config
    queries = [torch.einsum("bpd,hdk->bphk", part, attn.W_Q) for part in (content, position)]
    keys = [torch.einsum("bpd,hdk->bphk", part, attn.W_K) for part in (content, position)]
    if attn.b_Q is not None and attn.b_K is not None:
        queries[0], keys[0] = queries[0] + attn.b_Q, keys[0] + attn.b_K
    keys = [key.repeat_interleave(config.group_size, 2) for key in keys]
    return torch.stack(
        [
            torch.einsum("bihk,bjhk->bhij", query, key) * config.scale
            for query in queries
            for key in keys
        ]
    )
