"""Heads as circuits: two low-rank products, their cost, and their subspaces (M2 to M4)."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headstream.analyses.claims.complex_form import as_complex, as_real, frequencies, turn
from headstream.analyses.claims.ledger import Finding, NotApplicable, Subject, check
from headstream.analyses.claims.reading import read_hook, read_input
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.attention import Attention, PassContext
from headstream.models.hooks import capture


@check("M2", "a head is a QK and an OV product of rank <= d_head: its scores and output from them")
def _two_circuits(subject: Subject) -> Finding:
    model, config = subject.model, subject.model.config
    names = [read_hook(config, "*", "attn"), "*.hook_attn_scores", "*.hook_result"]
    _, run = capture(model, subject.tokens, names)
    findings = []
    for layer in range(config.n_layers):
        x = read_input(model, run, layer, "attn")
        attn = f"blocks.{layer}.attn.hook_"
        for head in range(config.n_heads):
            scores = _scores(subject, layer, head, x)
            there = run[attn + "attn_scores"][:, head].tril()
            where = f"{attn}attn_scores, head {head}"
            findings.append(Finding.between(there, scores, where, "example pos key"))
            result = _result(subject, layer, head, x, scores)
            where = f"{attn}result, head {head}"
            there = run[attn + "result"][:, :, head]
            findings.append(Finding.between(there, result, where, "example pos channel"))
    return Finding.worst_of(findings)


@check(
    "M3",
    "h heads of width d/h cost what one of width d costs, in parameters and multiplications",
    reason="whole numbers: equal or not",
)
def _same_cost(subject: Subject) -> Finding:
    model, config = subject.model, subject.model.config
    if config.kv_heads != config.n_heads:
        raise NotApplicable("heads share keys and values here, and cost less than one wide head")
    if config.d_head == 1:
        raise NotApplicable("heads of one number: torch multiplies them uncounted")
    wide = config.n_heads * config.d_head
    one = dataclasses.replace(
        config, n_heads=1, n_kv_heads=None, d_head=wide, positions="none", attn_scale=1.0
    )
    single = Attention(one, 0).to(device=model.device, dtype=torch.float64)
    for parameter in single.parameters():
        parameter.zero_()
    # However long the model's own text may be: at one token torch multiplies without a product.
    n = 24
    x = torch.zeros(1, n, config.d_model, dtype=torch.float64, device=model.device)
    # Four projections, then q . k and pattern times v over all n^2 edges, as the naive path does.
    formula = 2 * n * (4 * config.d_model * wide) + 2 * n * n * (2 * wide)
    findings = []
    for layer in range(config.n_layers):
        attn = model.blocks[layer].attn
        found = [_parameters(attn), _flops(attn, x), _flops(single, x)]
        expected = [_parameters(single), formula, formula]
        findings.append(
            Finding.between(
                torch.tensor(found).double(),
                torch.tensor(expected).double(),
                f"layer {layer}: {found[0]:,} parameters, {found[1]:,} operations at {n} tokens",
                "count",
            )
        )
    return Finding.worst_of(findings)


def _scores(
    subject: Subject, layer: int, head: int, x: Float[Tensor, "example pos d_model"]
) -> Float[Tensor, "example pos pos"]:
    """Scaled scores from the QK product, 0 above the diagonal; rotary ones distance by distance."""
    model, config = subject.model, subject.model.config
    attn = model.blocks[layer].attn
    if config.positions == "shortformer":
        x = x + model.pos_embed.W_pos[: x.shape[1]]
    b_Q = None if attn.b_Q is None else attn.b_Q[head]
    b_K = None if attn.b_K is None else attn.b_K[head // config.group_size]
    if config.positions != "rotary":
        circuit = qk_circuit(model, layer, head, space="residual")
        query, key = x @ circuit.A, x @ circuit.B.mT
        if b_Q is not None and b_K is not None:
            query, key = query + b_Q, key + b_K
        full: Tensor = query @ key.mT * config.scale
        return full.tril()
    scores = x.new_zeros(x.shape[0], x.shape[1], x.shape[1])
    speed = frequencies(config.d_head, config.rotary_base).to(x.device)
    for distance in range(x.shape[1]):
        circuit = qk_circuit(model, layer, head, distance=distance, space="residual")
        query, key = x[:, distance:] @ circuit.A, x[:, : x.shape[1] - distance] @ circuit.B.mT
        if b_Q is not None and b_K is not None:
            query = query + as_real(as_complex(b_Q) * turn(distance * speed))
            key = key + b_K
        scores.diagonal(-distance, 1, 2).copy_((query * key).sum(-1) * config.scale)
    return scores


def _result(
    subject: Subject, layer: int, head: int, x: Tensor, scores: Tensor
) -> Float[Tensor, "example pos d_model"]:
    """What the head writes: the weights of `scores` over what the OV product moves."""
    attn = subject.model.blocks[layer].attn
    circuit = ov_circuit(subject.model, layer, head, space="residual")
    # Masked before the maximum is taken: one over later keys would swallow a row of low scores.
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    moved = x @ circuit.A @ circuit.B
    if attn.b_V is not None:
        moved = moved + attn.b_V[head // subject.model.config.group_size] @ attn.W_O[head]
    result: Tensor = weights @ moved / weights.sum(-1, keepdim=True)
    return result


def _parameters(attn: Attention) -> int:
    return sum(parameter.numel() for parameter in attn.parameters())


def _flops(attn: Attention, x: Tensor) -> int:
    """Multiplications and additions in matrix products on the naive path, as torch counts them."""
    context = PassContext(
        backend="naive", key_mask=None, rotary=None, shortformer=None, kv_cache=None, naive_limit=0
    )
    with FlopCounterMode(display=False) as counter:
        attn(x, context)
    return int(counter.get_total_flops())
