"""The feed-forward layer: one position at a time, and a memory of keys and values (F1, F2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headstream.analyses.claims.ledger import Finding, NotApplicable, Subject, check
from headstream.analyses.claims.reading import read_hook, read_input
from headstream.models.hooks import capture

_STREAM = "example pos channel"
# Neurons that are rebuilt at once: memory, not meaning.
_AT_ONCE = 64


@check("F1", "the feed-forward layer acts on each position alone")
def _one_position(subject: Subject) -> Finding:
    inputs, outputs = _read_and_written(subject)
    length = subject.tokens.shape[1]
    draws = torch.Generator().manual_seed(subject.seed)
    order = torch.randperm(length, generator=draws).to(subject.model.device)
    findings = []
    for layer, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        mlp = subject.model.blocks[layer].mlp
        name = f"blocks.{layer}.mlp"
        permuted = mlp(x[:, order])
        findings.append(Finding.between(permuted, out[:, order], f"{name}, permuted", _STREAM))
        alone = torch.cat([mlp(x[:, i : i + 1]) for i in range(length)], 1)
        findings.append(Finding.between(alone, out, f"{name}, alone", _STREAM))
    return Finding.worst_of(findings)


@check("F2", "the feed-forward layer sums its neurons: activation of key . x, times value")
def _keys_and_values(subject: Subject) -> Finding:
    inputs, outputs = _read_and_written(subject)
    config = subject.model.config
    act = _ACTIVATIONS[config.activation]
    findings = []
    for layer, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        mlp = subject.model.blocks[layer].mlp
        # One by one is slow: one sequence is enough for every neuron.
        x, out = x[:1], out[:1]
        total = torch.zeros_like(out) if mlp.b_out is None else mlp.b_out.expand_as(out).clone()
        for start in range(0, mlp.W_in.shape[1], _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            found = (x[..., None, :] * mlp.W_in[:, some].T).sum(-1)
            if mlp.b_in is not None:
                found = found + mlp.b_in[some]
            if config.gated_mlp:
                found = act((x[..., None, :] * mlp.W_gate[:, some].T).sum(-1)) * found
            else:
                found = act(found)
            total = total + (found[..., None] * mlp.W_out[some]).sum(-2)
        findings.append(Finding.between(out, total, f"blocks.{layer}.hook_mlp_out", _STREAM))
    return Finding.worst_of(findings)


def _read_and_written(subject: Subject) -> tuple[list[Tensor], list[Tensor]]:
    """What each feed-forward layer read and wrote in the run, by layer."""
    model = subject.model
    if not model.config.has_mlp:
        raise NotApplicable("no MLP in this model")
    names = [read_hook(model.config, "*", "mlp"), "*.hook_mlp_out"]
    _, run = capture(model, subject.tokens, names)
    layers = range(model.config.n_layers)
    inputs = [read_input(model, run, layer, "mlp") for layer in layers]
    return inputs, [run[f"blocks.{layer}.hook_mlp_out"] for layer in layers]


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _gelu_new(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


# Written out here: a check that called the model's own would pass whatever they are.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_new,
    "relu": _relu,
    "silu": _silu,
}
