"""QK, OV and what is measured on them: exact on every decoder, and the same in every head basis."""

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstream.circuits.qk_ov.behavioural_copying import behavioural_copying_score
from headstream.circuits.qk_ov.content_position import score_terms
from headstream.circuits.qk_ov.copying import copying_score
from headstream.circuits.qk_ov.left_out import ov_bias, qk_bias
from headstream.circuits.qk_ov.rotary_profile import distance_profile, score_frequencies
from headstream.circuits.qk_ov.top_entries import top_pairs, top_per_row
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder, build
from headstream.models.hooks import capture

quick = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
seeds = st.integers(0, 2**16)
# Sums of a few dozen float64 products of order 10.
EXACT = 1e-10
LENGTH = 6


@st.composite
def configs(draw: Any, **fixed: Any) -> dict[str, Any]:
    """Fields of a small decoder of any kind; it is built in the test."""
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (2, 2)]))
    mlp = draw(st.sampled_from([None, 5]))
    kinds = ["learned", "shortformer", "sinusoidal", "rotary", "none"]
    fields: dict[str, Any] = {
        "n_layers": 2,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_model": draw(st.sampled_from([4, 6])),
        "d_head": draw(st.sampled_from([2, 4])),
        "d_vocab": 7,
        "n_ctx": 8,
        "d_mlp": mlp,
        "positions": draw(st.sampled_from(kinds)),
        "rotary_base": draw(st.sampled_from([10.0, 10000.0])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm", "none"])),
        "attn_bias": draw(st.booleans()),
        "attn_scale": draw(st.sampled_from([None, 1.0])),
        "tied_embeddings": draw(st.booleans()),
        "bos_token_id": draw(st.sampled_from([None, 0])),
    }
    return fields | fixed


def decoder(fields: dict[str, Any], seed: int) -> Decoder:
    """In float64, biases and gains as random as the rest."""
    model = Decoder(DecoderConfig(**fields), seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b" in name.removeprefix("blocks") or name.endswith(".w"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def prompts(seed: int) -> Tensor:
    return torch.randint(0, 7, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def masks(seed: int) -> Tensor:
    """Padding on the left of one row, a hole in the other, or nothing."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, : seed % 3] = 0
    mask[1, seed % 4] = int(seed % 5 > 0)
    return mask


def sites(model: Decoder) -> list[tuple[int, int]]:
    return [(la, h) for la in range(model.config.n_layers) for h in range(model.config.n_heads)]


@quick
@given(configs(positions="rotary"), seeds)
def test_qk_at_a_distance_reproduces_real_scores(fields: dict[str, Any], seed: int) -> None:
    """D-1: s[i, i - d] of every layer, head, distance and i; only d = 0 without the distance."""
    model, tokens = decoder(fields, seed), prompts(seed)
    names = [f"blocks.{la}.{hook}" for la in range(2) for hook in ("hook_resid_pre",)]
    names += [f"blocks.{la}.attn.hook_attn_scores" for la in range(2)]
    with torch.no_grad():
        _, acts = capture(model, tokens, names, backend="naive")
        read = [model.blocks[la].ln1(acts[names[la]]) for la in range(2)]
    missed = []
    for layer, head in sites(model):
        x, scores = read[layer], acts[names[2 + layer]][:, head]
        for distance in range(LENGTH):
            real = scores.diagonal(-distance, 1, 2)
            for used in {distance, 0}:
                circuit = qk_circuit(model, layer, head, distance=used, space="residual").AB
                bias = qk_bias(model, layer, head, distance=used, space="residual")
                sides = [torch.tensor(bias[side].values) for side in ("query_side", "key_side")]
                rebuilt = x @ circuit @ x.mT + (x @ sides[0])[..., None] + (x @ sides[1])[:, None]
                found = model.config.scale * (rebuilt + bias["constant"].item())
                error = (found.diagonal(-distance, 1, 2) - real).abs().max().item()
                if used == distance:
                    assert error < EXACT
                else:
                    missed.append(error)
    assert max(missed) > 1e-2


def test_the_position_free_product_misses_by_order_one(model_r: Decoder, tokens: Tensor) -> None:
    """Unit-scale inputs and weights: off the diagonal it is no score at all."""
    names = ["blocks.0.hook_resid_pre", "blocks.0.attn.hook_attn_scores"]
    with torch.no_grad():
        _, acts = capture(model_r, tokens, names, backend="naive")
        x = model_r.blocks[0].ln1(acts[names[0]])
    for head in range(4):
        circuit = qk_circuit(model_r, 0, head, distance=0, space="residual").AB
        free = model_r.config.scale * x @ circuit @ x.mT
        miss = (free - acts[names[1]][:, head]).abs()
        assert miss.diagonal(0, 1, 2).max() < EXACT
        for distance in range(1, LENGTH):
            assert miss.diagonal(-distance, 1, 2).max() > 0.3
        assert miss[miss.isfinite()].max() > 1


@quick
@given(configs(), seeds)
def test_splits_sum_to_real_scores(fields: dict[str, Any], seed: int) -> None:
    """Every kind of position, norm, bias and grouping, under padding and holes."""
    model, tokens, mask = decoder(fields, seed), prompts(seed), masks(seed)
    for layer, head in sites(model):
        splits = [score_terms(model, tokens, layer, head, attention_mask=mask)]
        if model.config.positions == "rotary":
            splits.append(score_frequencies(model, tokens, layer, head, attention_mask=mask))
        hook = f"blocks.{layer}.attn.hook_attn_scores"
        _, acts = capture(model, tokens, hook, attention_mask=mask, backend="naive")
        real = acts[hook][:, head].numpy()
        for split in splits:
            total = split.terms.sum(split.term_dims, skipna=False).fillna(-np.inf)
            np.testing.assert_allclose(total, real, rtol=0, atol=EXACT)


@quick
@given(configs(), seeds)
def test_small_eigenvalues_and_singular_values_are_those_of_the_product(
    fields: dict[str, Any], seed: int
) -> None:
    """FR-50: no more than d_head of them, and they rebuild the product."""
    model = decoder(fields, seed)
    distance = 3 if model.config.positions == "rotary" else None
    for layer, head in sites(model):
        for space in ("vocab", "residual"):
            qk = qk_circuit(model, layer, head, distance=distance, space=space)
            for circuit in (qk, ov_circuit(model, layer, head, space=space)):
                small, dense = circuit.eigenvalues, torch.linalg.eigvals(circuit.AB)
                assert small.shape == (model.config.d_head,)
                # Sums of powers, since the order of eigenvalues means nothing.
                for power in (1, 2):
                    error = ((small**power).sum() - (dense**power).sum()).abs()
                    assert error < EXACT * (1 + (dense.abs() ** power).sum())
                left, values, right = circuit.svd()
                assert len(values) <= model.config.d_head
                rebuilt = left * values @ right.mT
                torch.testing.assert_close(rebuilt, circuit.AB, rtol=0, atol=EXACT)


def gauge(n: int, size: int, generator: torch.Generator) -> Tensor:
    """Invertible and well conditioned: a rotation times gains between 1/2 and 2."""
    turn = torch.linalg.qr(torch.randn(n, size, size, generator=generator).double()).Q
    return turn * (0.5 + 1.5 * torch.rand(n, 1, size, generator=generator).double())


def rotary_gauge(n: int, size: int, generator: torch.Generator) -> Tensor:
    """What commutes with every rotation: one complex number a pair (i, i + size/2)."""
    length = 0.5 + torch.rand(n, size // 2, generator=generator).double()
    angle = 6.28 * torch.rand(n, size // 2, generator=generator).double()
    cos, sin = torch.diag_embed(length * angle.cos()), torch.diag_embed(length * angle.sin())
    return torch.cat([torch.cat([cos, sin], -1), torch.cat([-sin, cos], -1)], -2)


def in_another_basis(model: Decoder, seed: int) -> Decoder:
    """A second model: (Q, K) -> (Q G^-T, K G) and (V, O) -> (V H, H^-1 O), biases with them."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in range(config.n_layers):
        stem = f"blocks.{layer}.attn."
        shape = (config.kv_heads, config.d_head, generator)
        turn = rotary_gauge(*shape) if config.positions == "rotary" else gauge(*shape)
        for letter, partner, basis in (("K", "Q", turn), ("V", "O", gauge(*shape))):
            inverse = torch.linalg.inv(basis).repeat_interleave(config.group_size, 0)
            weights[f"{stem}W_{letter}"] @= basis
            if partner == "Q":
                weights[f"{stem}W_Q"] @= inverse.mT
            else:
                weights[f"{stem}W_O"] = inverse @ weights[f"{stem}W_O"]
            if config.attn_bias:
                weights[f"{stem}b_{letter}"] = torch.einsum(
                    "hk,hkj->hj", weights[f"{stem}b_{letter}"], basis
                )
                if partner == "Q":
                    weights[f"{stem}b_Q"] = torch.einsum(
                        "hk,hjk->hj", weights[f"{stem}b_Q"], inverse
                    )
    return build(config, weights)


def everything(model: Decoder, seed: int) -> dict[str, Any]:
    """Every number that is said about the heads of a model."""
    rotary, config = model.config.positions == "rotary", model.config
    lag: dict[str, Any] = {"distance": seed % LENGTH} if rotary else {}
    found: dict[str, Any] = {}
    # One head a layer; of grouped heads one that is not its group's first.
    for layer, head in ((0, config.n_heads - 1), (1, config.n_heads // 2)):
        at = f"L{layer}H{head} "
        options: list[dict[str, Any]] = [{}, {"space": "residual"}]
        options += [{"embedding": "effective"}] if layer and config.has_mlp else []
        for option in options:
            qk = qk_circuit(model, layer, head, **lag, **option)
            ov = ov_circuit(model, layer, head, **option)
            bias = qk_bias(model, layer, head, **lag, **option)
            for name, circuit in (("qk", qk), ("ov", ov)):
                here = f"{at}{name} {option} "
                found[here] = circuit.AB
                found[here + "singular values"] = circuit.S
                found[here + "norm"] = circuit.norm()
                for by in ("largest", "magnitude"):
                    found[here + by] = abs(top_pairs(circuit, 5, by=by)["value"])
                found[here + "rows"] = top_per_row(circuit, 2)["value"]
            found |= {f"{at}{option} {key}": bias[key] for key in bias}
        found[at + "b_V"] = ov_bias(model, layer, head)
        split = score_terms(model, prompts(seed), layer, head)
        found[at + "terms"], found[at + "shares"] = split.terms, split.shares()
        if rotary:
            split = score_frequencies(model, prompts(seed), layer, head)
            found[at + "pairs"], found[at + "pair shares"] = split.terms, split.shares()
            found[at + "profile"] = distance_profile(model, layer, head, query=1, key=2)["share"]
    for kind in ("plain", "effective") if config.has_mlp else ("plain",):
        score = copying_score(model, n_random=2, embedding=kind)
        found[f"copying {kind}"], found[f"top {kind}"] = score["score"], score["top"]
    behaviour = behavioural_copying_score(model, n=2)
    return found | {key: behaviour[key] for key in ("value", "chance")}


@settings(quick, max_examples=15)
@given(configs(), seeds)
def test_nothing_said_about_a_head_depends_on_its_basis(fields: dict[str, Any], seed: int) -> None:
    model = decoder(fields, seed)
    other = in_another_basis(model, seed)
    changed = [
        n for n, w in model.state_dict().items() if not torch.equal(w, other.state_dict()[n])
    ]
    n_changed = 7 if model.config.attn_bias else 4
    assert len(changed) == n_changed * model.config.n_layers
    with torch.no_grad():
        logits = model(prompts(seed)), other(prompts(seed))
    torch.testing.assert_close(*logits, rtol=0, atol=EXACT)
    before, after = everything(model, seed), everything(other, seed)
    assert before.keys() == after.keys()
    for name in before:
        old, new = np.asarray(before[name]), np.asarray(after[name])
        np.testing.assert_allclose(new, old, rtol=0, atol=EXACT, err_msg=name)
