"""Positions that turn q and k: relative, norm-preserving, and nowhere else (P3 to P6)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstream.analyses.claims.complex_form import as_complex, frequencies, score_terms, turn
from headstream.analyses.claims.ledger import (
    Finding,
    NotApplicable,
    Observation,
    Subject,
    check,
    measurement,
)
from headstream.analyses.claims.variation import observed, shares_of_variation
from headstream.circuits.attention_run import record_attention
from headstream.circuits.interventions import freeze_attention
from headstream.models.hooks import capture, edited


@check(
    "P3", "rotary scores depend on the distance alone, so a shift of all positions moves nothing"
)
def _relative(subject: Subject) -> Finding:
    _require_rotary(subject)
    model, tokens = subject.model, subject.tokens
    config = model.config
    names = ["*.hook_q", "*.hook_k", "*.hook_attn_scores"]
    _, run = capture(model, tokens, names)
    findings = []
    for layer in range(config.n_layers):
        attn = f"blocks.{layer}.attn.hook_"
        keys = run[attn + "k"].repeat_interleave(config.group_size, 2)
        scores = score_terms(run[attn + "q"], keys, config.rotary_base).sum(0) * config.scale
        name = attn + "attn_scores"
        findings.append(
            Finding.between(run[name].tril(), scores.tril(), name, "example head pos key")
        )
    place = torch.arange(tokens.shape[1], device=model.device).expand_as(tokens)
    for by in (1, 1000):
        findings += _moved(subject, place, place + by, f"shifted by {by}")
    return Finding.worst_of(findings)


@check("P4", "rotary positions leave the length of every query and key as it was")
def _lengths_kept(subject: Subject) -> Finding:
    _require_rotary(subject)
    names = ["*.hook_q", "*.hook_k", "*.hook_rot_q", "*.hook_rot_k"]
    _, run = capture(subject.model, subject.tokens, names)
    return Finding.worst_of(
        [
            Finding.between(
                torch.linalg.vector_norm(turned, dim=-1),
                torch.linalg.vector_norm(run[name.replace("rot_", "")], dim=-1),
                name,
                "example pos head",
            )
            for name, turned in run.items()
            if "rot_" in name
        ]
    )


@check("P5", "rotary acts through q . k alone: with the pattern held, position ids change nothing")
def _only_through_scores(subject: Subject) -> Finding:
    _require_rotary(subject)
    model, tokens = subject.model, subject.tokens
    place = torch.arange(tokens.shape[1], device=model.device).expand_as(tokens)
    draws = torch.Generator().manual_seed(subject.seed)
    anywhere = torch.randint(1000, tokens.shape, generator=draws).to(model.device)
    held = record_attention(model, tokens)
    with freeze_attention(model, held):
        findings = _moved(subject, place, anywhere, "pattern held")
    findings += _moved(subject, place, place + 7, "pattern free, a common shift")
    worst = Finding.worst_of(findings)
    free = Finding.worst_of(_moved(subject, place, anywhere, ""))
    return Finding(worst.error, f"{worst.worst} (with the pattern free: {free.error:.1e})")


@check(
    "P6", "pair i turns by base^(-2i/d_head) a token: fast pairs part neighbours, slow ones range"
)
def _frequencies(subject: Subject) -> Finding:
    _require_rotary(subject)
    model = subject.model
    config = model.config
    half = config.d_head // 2

    def unit(vectors: Tensor) -> Tensor:
        """The number 1 in every pair, whose turned form is e^{i p w}."""
        return torch.cat(
            (torch.ones_like(vectors[..., :half]), torch.zeros_like(vectors[..., :half])), -1
        )

    place = torch.arange(subject.tokens.shape[1], dtype=torch.float64, device=model.device)
    speed = frequencies(config.d_head, config.rotary_base).to(model.device)
    expected = turn(place[:, None] * speed)[None, :, None]
    names = ["*.hook_rot_q", "*.hook_rot_k"]
    with edited(model, {"*.hook_q": unit, "*.hook_k": unit}):
        _, run = capture(model, subject.tokens[:1], names)
    worst = Finding.worst_of(
        [
            Finding.between(
                as_complex(turned),
                expected.expand_as(as_complex(turned)),
                name,
                "example pos head pair",
            )
            for name, turned in run.items()
        ]
    )
    whole = 2 * math.pi / speed
    turns = f"one turn in {float(whole[0]):.1f} to {float(whole[-1]):,.1f} tokens"
    return Finding(worst.error, f"{worst.worst} ({turns})")


@measurement("P6", "the share of a score's variation over keys in pairs that turn within the text")
def _share_of_fast_pairs(subject: Subject) -> Observation:
    _require_rotary(subject)
    model, config = subject.model, subject.model.config
    _, run = capture(model, subject.sample, ["*.hook_q", "*.hook_k"])
    every = []
    for layer in range(config.n_layers):
        attn = f"blocks.{layer}.attn.hook_"
        keys = run[attn + "k"].repeat_interleave(config.group_size, 2)
        every.append(shares_of_variation(score_terms(run[attn + "q"], keys, config.rotary_base)))
    shares = torch.cat(every, 2)
    length = subject.sample.shape[1]
    fast = 2 * math.pi / frequencies(config.d_head, config.rotary_base) <= length
    each = ", ".join(f"{share:.2f}" for share in shares.nanmean((1, 2)).tolist()[:16])
    words = (
        f"{int(fast.sum())} of {len(fast)} pairs turn once in {length} tokens; mean over all "
        f"heads, by pair from the fastest: {each}"
    )
    return observed(subject, shares[fast].sum(0), "of the variation", words)


def _require_rotary(subject: Subject) -> None:
    positions = subject.model.config.positions
    if positions == "none":
        raise NotApplicable("this model has no positions")
    if positions != "rotary":
        raise NotApplicable(f"positions are {positions}, not rotary")


def _moved(subject: Subject, before: Tensor, after: Tensor, what: str) -> list[Finding]:
    """Values, streams and logits at one set of position ids against another."""
    model = subject.model
    names = ["*.hook_v", "*.hook_resid_post"]
    names += ["*.hook_resid_mid"] if model.config.has_mlp else []
    runs = [
        capture(model, subject.tokens, names, position_ids=places) for places in (before, after)
    ]
    (logits, run), (other_logits, other) = runs
    findings = [
        Finding.between(
            other[name],
            value,
            f"{name}, {what}",
            "example pos head channel" if name.endswith("v") else "example pos channel",
        )
        for name, value in run.items()
    ]
    findings.append(Finding.between(other_logits, logits, f"logits, {what}", "example pos token"))
    return findings
