"""What must hold of every decoder and every pattern, over drawn ones."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from headstream.circuits.folding import fold
from headstream.circuits.qk_ov.copying import copying_score
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.circuits.statistics import (
    chance_level,
    current_token_targets,
    duplicate_token_targets,
    prefix_matching_targets,
    previous_token_targets,
    sink_targets,
    target_mass,
)
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
seeds = st.integers(0, 2**16)


@st.composite
def configs(draw: Any, **fixed: Any) -> dict[str, Any]:
    """Fields of a small decoder of any kind.

    The decoder is built in the test: the type checker draws from `random` when it looks into a
    list, and hypothesis objects to that inside a strategy.
    """
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]))
    mlp = draw(st.sampled_from([None, 5]))
    fields: dict[str, Any] = {
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": heads,
        "n_kv_heads": heads // group,
        "d_model": draw(st.sampled_from([4, 6])),
        "d_head": draw(st.sampled_from([2, 4])),
        "d_vocab": 7,
        "n_ctx": 6,
        "d_mlp": mlp,
        "positions": draw(
            st.sampled_from(["learned", "shortformer", "sinusoidal", "rotary", "none"])
        ),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm", "none"])),
        "attn_bias": draw(st.booleans()),
        "mlp_bias": mlp is not None and draw(st.booleans()),
        "gated_mlp": mlp is not None and draw(st.booleans()),
        "unembed_bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
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


def prompts(seed: int, rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(0, 7, (rows, length), generator=torch.Generator().manual_seed(seed))


def masks(seed: int) -> Tensor:
    """Padding on the left, on the right, or none; a real token stays."""
    start = seed % 3
    mask = torch.zeros(2, 5, dtype=torch.long)
    mask[0, start:] = 1
    mask[1, : 5 - start] = 1
    return mask


@quick
@given(configs(), seeds)
def test_writes_sum_to_the_stream_and_attributions_to_the_logits(
    fields: dict[str, Any], seed: int
) -> None:
    model = decoder(fields, seed)
    tokens, mask = prompts(seed), masks(seed)
    found = decompose_residual(
        model, tokens, attention_mask=mask, split_value_bias=seed % 2 == 0, per_neuron=seed % 5 == 0
    )
    assert found.largest_error <= found.bound <= 1e-10
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).numpy()
    for pos in range(5):
        sums = found.logit_attribution([1, 2], [3, 4], pos=pos).sum("component")
        expected = [logits[0, pos, 1] - logits[0, pos, 3], logits[1, pos, 2] - logits[1, pos, 4]]
        # Float64 sums of a few dozen terms; a scale near sqrt(eps) magnifies them.
        np.testing.assert_allclose(sums, expected, rtol=0, atol=1e-9)


@quick
@given(configs(), seeds)
def test_folding_changes_no_log_probability(fields: dict[str, Any], seed: int) -> None:
    model = decoder(fields, seed)
    config = model.config
    gate_shift = config.gated_mlp and config.norm == "layernorm"
    everything = config.positions != "shortformer" and not gate_shift
    folded = fold(
        model, norms="all" if everything or config.norm == "none" else "final", value_bias=True
    )
    with torch.no_grad():
        before = model(prompts(seed)).log_softmax(-1)
        after = folded(prompts(seed)).log_softmax(-1)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


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


@quick
@given(configs(norm="none", attn_bias=False), seeds)
def test_circuits_and_their_scores_do_not_depend_on_the_basis_of_a_head(
    fields: dict[str, Any], seed: int
) -> None:
    """(W_Q, W_K) -> (W_Q G, W_K G^-T) and (W_V, W_O) -> (W_V G, G^-1 W_O) change nothing."""
    model = decoder(fields, seed)
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    rotary = config.positions == "rotary"
    sites = [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]
    distance = seed % 5 if rotary else None

    def circuits() -> list[Tensor]:
        qk = [qk_circuit(model, *site, distance=distance).AB for site in sites]
        return qk + [ov_circuit(model, *site).AB for site in sites]

    before, score = circuits(), copying_score(model, n_random=2)
    with torch.no_grad():
        for block in model.blocks:
            attn = block.attn
            make = rotary_gauge if rotary else gauge
            for name, other, basis in (
                ("W_K", "W_Q", make(config.kv_heads, config.d_head, generator)),
                ("W_V", "W_O", gauge(config.kv_heads, config.d_head, generator)),
            ):
                spread = torch.linalg.inv(basis).repeat_interleave(config.group_size, 0)
                getattr(attn, name).copy_(getattr(attn, name) @ basis)
                partner = getattr(attn, other)
                changed = partner @ spread.mT if other == "W_Q" else spread @ partner
                assert (changed - partner).abs().max() > 1e-3
                partner.copy_(changed)
    for new, old in zip(circuits(), before, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-10)
    after = copying_score(model, n_random=2)
    np.testing.assert_allclose(after["score"], score["score"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(after["top"], score["top"], rtol=0, atol=1e-10)


def target_sets(tokens: Tensor, real: Tensor) -> list[Tensor]:
    return [
        previous_token_targets(real),
        current_token_targets(real),
        duplicate_token_targets(tokens, real),
        prefix_matching_targets(tokens, real),
        sink_targets(real, first=1),
        sink_targets(real, first=2),
    ]


def patterns(real: Tensor, heads: int, seed: int) -> Tensor:
    """Random causal attention over real keys; a row without one is zero."""
    generator = torch.Generator().manual_seed(seed)
    n = real.shape[1]
    weight = torch.rand(len(real), heads, n, n, generator=generator).double() ** 4
    weight = (weight * real[:, None, None]).tril()
    return (weight / weight.sum(-1, keepdim=True)).nan_to_num()


@quick
@given(seeds, st.integers(2, 8))
def test_scores_lie_in_the_unit_interval_and_uniform_attention_is_at_chance(
    seed: int, length: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (3, length), generator=generator)
    real = torch.rand(3, length, generator=generator) < 0.8
    pattern = patterns(real, 2, seed)
    flat = real[:, None, None].expand(3, 1, length, length).double().tril()
    flat = (flat / flat.sum(-1, keepdim=True)).nan_to_num()
    for targets in target_sets(tokens, real):
        assert not bool((targets & ~real[:, None, :]).any())
        assert not bool((targets & ~real[:, :, None]).any())
        assert not bool(targets.triu(1).any())
        scores = target_mass(pattern, targets)
        known = scores[~scores.isnan()]
        assert bool(((known >= 0) & (known <= 1 + 1e-12)).all())
        assert bool((scores.isnan().all(1) == ~targets.any((1, 2))).all())
        torch.testing.assert_close(
            target_mass(flat, targets)[:, 0],
            chance_level(targets, real),
            rtol=0,
            atol=1e-12,
            equal_nan=True,
        )


@quick
@given(seeds, st.integers(0, 3), st.integers(0, 3))
def test_padding_and_the_order_of_examples_change_no_score(
    seed: int, left: int, right: int
) -> None:
    tokens = torch.randint(0, 3, (3, 6), generator=torch.Generator().manual_seed(seed))
    real = torch.ones_like(tokens, dtype=torch.bool)
    pattern = patterns(real, 2, seed)
    pad = torch.nn.functional.pad
    wide_tokens = pad(tokens, (left, right), value=1)
    wide_real = pad(real, (left, right), value=False)
    wide_pattern = pad(pattern, (left, right, left, right))
    order = torch.tensor([2, 0, 1])
    for plain, wide in zip(
        target_sets(tokens, real), target_sets(wide_tokens, wide_real), strict=True
    ):
        expected = target_mass(pattern, plain)
        padded = target_mass(wide_pattern, wide)
        torch.testing.assert_close(padded, expected, rtol=0, atol=1e-12, equal_nan=True)
        chance, wide_chance = chance_level(plain, real), chance_level(wide, wide_real)
        torch.testing.assert_close(wide_chance, chance, rtol=0, atol=1e-12, equal_nan=True)
        shuffled = target_mass(pattern[order], plain[order])
        torch.testing.assert_close(shuffled, expected[order], rtol=0, atol=1e-12, equal_nan=True)
