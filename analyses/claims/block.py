"""Block and residual stream: what is added to what (B1 to B3, M1, N1)."""

from __future__ import annotations

import torch

from headstream.analyses.claims.ledger import Finding, NotApplicable, Subject, check
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.hooks import capture

_STREAM = "example pos channel"


@check("B1", "each block adds attention, then the MLP, to the stream it read")
def _block_adds(subject: Subject) -> Finding:
    model = subject.model
    _, run = capture(
        model, subject.tokens, ["*.hook_resid_*", "*.hook_attn_out", *_mlp_out(subject)]
    )
    findings = []
    for layer in range(model.config.n_layers):
        name = f"blocks.{layer}.hook_"
        total = run[name + "resid_pre"] + run[name + "attn_out"]
        if model.config.has_mlp:
            total = total + run[name + "mlp_out"]
        findings.append(
            Finding.between(total, run[name + "resid_post"], name + "resid_post", _STREAM)
        )
    return Finding.worst_of(findings)


@check("B2", "the final stream is the embedding plus every attention and MLP write")
def _writes_sum(subject: Subject) -> Finding:
    model = subject.model
    added = ["hook_embed", "*.hook_attn_out", *_mlp_out(subject)]
    if "hook_pos_embed" in model.hook_dict:
        added.append("hook_pos_embed")
    _, run = capture(model, subject.tokens, added)
    last = f"blocks.{model.config.n_layers - 1}.hook_resid_post"
    _, end = capture(model, subject.tokens, last)
    return Finding.between(torch.stack(list(run.values())).sum(0), end[last], last, _STREAM)


@check("M1", "concatenate-then-project equals a sum over heads plus the output bias")
def _heads_sum(subject: Subject) -> Finding:
    model = subject.model
    _, run = capture(model, subject.tokens, ["*.hook_z", "*.hook_attn_out"])
    findings = []
    for layer in range(model.config.n_layers):
        attn = model.blocks[layer].attn
        z = run[f"blocks.{layer}.attn.hook_z"]
        heads = [z[:, :, head] @ attn.W_O[head] for head in range(model.config.n_heads)]
        total = torch.stack(heads).sum(0) + model.b_O[layer]
        name = f"blocks.{layer}.hook_attn_out"
        findings.append(Finding.between(total, run[name], name, _STREAM))
    return Finding.worst_of(findings)


@check(
    "B3", "with the final norm's scale held fixed, the writes' logit attributions sum to the logit"
)
def _attribution_sums(subject: Subject) -> Finding:
    model, tokens = subject.model, subject.tokens
    answers = tokens.roll(1, 0)[:, -1]
    logits = model(tokens)[torch.arange(len(tokens)), -1, answers]
    parts = decompose_residual(model, tokens).logit_attribution(answers)
    total = torch.as_tensor(parts.sum("component").values, dtype=logits.dtype)
    return Finding.between(total, logits.cpu(), "last position", "example")


@check("N1", "each norm's output has mean square 1, and LayerNorm's has mean 0, up to eps")
def _norm_output(subject: Subject) -> Finding:
    model = subject.model
    if model.config.norm == "none":
        raise NotApplicable("this model has no norm")
    _, run = capture(model, subject.tokens, ["*.hook_normalized", "*.hook_scale"])
    findings = []
    for name, normalized in run.items():
        if not name.endswith("hook_normalized"):
            continue
        scale = run[name.replace("hook_normalized", "hook_scale")]
        # eps sits inside the root: the mean square is 1 - eps / scale^2, exactly.
        expected = 1 - model.config.eps / scale.square().squeeze(-1)
        findings.append(
            Finding.between(normalized.square().mean(-1), expected, name, "example pos")
        )
        if model.config.norm == "layernorm":
            mean = normalized.mean(-1)
            findings.append(Finding.between(mean, torch.zeros_like(mean), name, "example pos"))
    return Finding.worst_of(findings)


def _mlp_out(subject: Subject) -> list[str]:
    return ["*.hook_mlp_out"] if subject.model.config.has_mlp else []
