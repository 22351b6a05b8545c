"""Attention: convex combinations, two circuits, and two backends with one truth (A1, A2, L1)."""

from __future__ import annotations

import torch

from headstream.analyses.claims.ledger import Finding, Subject, check
from headstream.models.hooks import capture


@check("A1", "a head's output is softmax(scale q.k + mask) v, recomputed from what it read")
def _head_recomputed(subject: Subject) -> Finding:
    model = subject.model
    config = model.config
    names = ["*.hook_z", "*.hook_v", "*.hook_rot_q", "*.hook_rot_k"]
    if config.positions != "rotary":
        names = ["*.hook_z", "*.hook_v", "*.hook_q", "*.hook_k"]
    _, run = capture(model, subject.tokens, names, attention_mask=subject.mask)
    q_name, k_name = ("rot_q", "rot_k") if config.positions == "rotary" else ("q", "k")
    length = subject.tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=model.device).tril()
    allowed = (causal & subject.mask[:, None, :])[:, None]
    findings = []
    for layer in range(config.n_layers):
        attn = f"blocks.{layer}.attn.hook_"
        keys, values = (
            run[attn + name].repeat_interleave(config.group_size, 2) for name in (k_name, "v")
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", run[attn + q_name], keys) * config.scale
        # Masked before the maximum is taken: one over later keys would swallow a row of low scores.
        scores = torch.where(allowed, scores, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - torch.where(highest.isfinite(), highest, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        # A row that may read nothing writes nothing.
        weights = torch.where(total > 0, weights / total, 0.0)
        z = torch.einsum("bhqk,bkhd->bqhd", weights, values)
        findings.append(Finding.between(run[attn + "z"], z, attn + "z", "example pos head channel"))
    return Finding.worst_of(findings)


@check("A2", "attention weights are >= 0, sum to 1, and z stays within the range of the values")
def _convex(subject: Subject) -> Finding:
    model = subject.model
    _, run = capture(model, subject.tokens, ["*.hook_pattern", "*.hook_z", "*.hook_v"])
    findings = []
    for layer in range(model.config.n_layers):
        attn = f"blocks.{layer}.attn.hook_"
        pattern, z = run[attn + "pattern"], run[attn + "z"]
        ones = torch.ones_like(pattern[..., 0])
        findings.append(
            Finding.between(pattern.sum(-1), ones, attn + "pattern", "example head pos")
        )
        below = pattern.clamp(max=0)
        findings.append(
            Finding.between(
                below, torch.zeros_like(below), attn + "pattern", "example head pos key"
            )
        )
        values = run[attn + "v"].repeat_interleave(model.config.group_size, 2)
        lowest, highest = values.cummin(1).values, values.cummax(1).values
        outside = (lowest - z).clamp(min=0) + (z - highest).clamp(min=0)
        findings.append(
            Finding.between(
                outside, torch.zeros_like(outside), attn + "z", "example pos head channel"
            )
        )
    return Finding.worst_of(findings)


@check("L1", "flash attention (online softmax) is exact: it equals the naive definition")
def _flash_is_exact(subject: Subject) -> Finding:
    model = subject.model
    findings = []
    for mask, words in ((None, "no padding"), (subject.mask, "left padding")):
        both = [
            capture(
                model,
                subject.tokens,
                ["*.hook_z", "*.hook_lse"],
                attention_mask=mask,
                backend=backend,
            )
            for backend in ("flash", "naive")
        ]
        (flash_logits, flash), (naive_logits, naive) = both
        for name in flash:
            # Rows that may read nothing have lse -inf on both: equal, and their difference NaN.
            same = flash[name] == naive[name]
            found = torch.where(same, 0.0, flash[name] - naive[name])
            axes = "example pos head channel" if name.endswith("z") else "example head pos"
            findings.append(
                Finding.between(found, torch.zeros_like(found), f"{name}, {words}", axes)
            )
        findings.append(
            Finding.between(flash_logits, naive_logits, f"logits, {words}", "example pos token")
        )
    return Finding.worst_of(findings)
