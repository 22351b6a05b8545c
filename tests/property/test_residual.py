"""What must hold of writes, reads and sources of every decoder, over drawn ones."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from headstream.circuits.stream.reads import residual_reads
from headstream.circuits.stream.residual import decompose_residual
from headstream.circuits.stream.sources import source_attribution, source_reads, source_writes
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.hooks import capture

quick = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
seeds = st.integers(0, 2**16)
# Float64 sums of a few dozen terms; a norm's scale near sqrt(eps) magnifies them.
BOUND = 1e-9


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    """Fields of a small decoder of any kind; it is built in the test (see test_circuits)."""
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    mlp = draw(st.sampled_from([None, 5]))
    return {
        "n_layers": 2,
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
        "attn_scale": draw(st.sampled_from([None, 1.0])),
    }


def decoder(fields: dict[str, Any], seed: int) -> Decoder:
    """In float64, biases and gains as random as the rest."""
    model = Decoder(DecoderConfig(**fields), seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b" in name.removeprefix("blocks") or name.endswith(".w"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask with padding on the left, on the right, or none."""
    tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(seed))
    start = seed % 3
    mask = torch.zeros(2, 5, dtype=torch.long)
    mask[0, start:] = 1
    mask[1, : 5 - start] = 1
    return tokens, mask


@quick
@given(configs(), seeds)
def test_reads_sum_to_q_k_and_v_and_their_pairs_to_every_score(
    fields: dict[str, Any], seed: int
) -> None:
    model = decoder(fields, seed)
    tokens, mask = drawn(seed)
    head = seed % model.config.n_heads
    found = residual_reads(
        model, tokens, 1, head, attention_mask=mask, split_value_bias=seed % 2 == 0
    )
    assert found.largest_error <= found.bound
    names = ["blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_[qkv]"]
    _, acts = capture(model, tokens, names, attention_mask=mask, backend="naive")
    for letter in "qkv":
        real = acts[f"blocks.1.attn.hook_{letter}"]
        own = head if letter == "q" else found.kv_head
        total = getattr(found, letter).sum("write")
        np.testing.assert_allclose(total, real[:, :, own], rtol=0, atol=BOUND)
    scores = acts["blocks.1.attn.hook_attn_scores"][:, head].numpy()
    for query, key in np.argwhere(np.isfinite(scores).all(0)):
        total = found.score_terms(int(query), int(key)).sum(("query_write", "key_write"))
        np.testing.assert_allclose(total, scores[:, query, key], rtol=1e-10, atol=BOUND)


@quick
@given(configs(), seeds)
def test_sources_sum_to_writes_attributions_and_reads(fields: dict[str, Any], seed: int) -> None:
    model = decoder(fields, seed)
    tokens, mask = drawn(seed)
    head = seed % model.config.n_heads
    groups = None if seed % 3 else torch.tensor([[0, 1, 1, 0, 2], [2, 2, 2, 0, 1]])
    options: dict[str, Any] = {"attention_mask": mask, "split_value_bias": seed % 2 == 0}
    run = decompose_residual(model, tokens, **options)
    writes = source_writes(model, tokens, 1, head, groups=groups, **options).sum("source")
    expected = run.writes.sel(component=f"L1H{head}")
    np.testing.assert_allclose(writes, expected, rtol=0, atol=BOUND)
    pos = None if seed % 5 else [1, 4]
    added = source_attribution(model, tokens, 3, [1, 2], pos=pos, groups=groups, **options)
    labels = [f"L{layer}H{h}" for layer in range(2) for h in range(model.config.n_heads)]
    whole = run.logit_attribution(3, [1, 2], pos=pos).sel(component=labels)
    total = added.sum("source").values.reshape(whole.shape)
    np.testing.assert_allclose(total, whole, rtol=0, atol=BOUND)
    reads = residual_reads(model, tokens, 1, head, **options)
    through = source_reads(model, tokens, 1, head, through=(0, head), groups=groups, **options)
    for letter in "qkv":
        share = getattr(reads, letter).sel(write=f"L0H{head}")
        np.testing.assert_allclose(through[letter].sum("source"), share, rtol=0, atol=BOUND)


@quick
@given(configs(), seeds)
def test_a_head_reads_nothing_later_and_writes_are_invariant_to_its_basis(
    fields: dict[str, Any], seed: int
) -> None:
    """W_V G and G^-1 W_O compute the same: every write, source and attribution stays."""
    model = decoder(fields, seed)
    tokens, _ = drawn(seed)
    before = decompose_residual(model, tokens)
    sources = source_writes(model, tokens, 1, 0)
    attribution, writes = before.logit_attribution(1, 2), before.writes
    for source in range(1, 5):
        assert float(abs(sources[source, :, :source]).max()) == 0  # queries before it
    generator = torch.Generator().manual_seed(seed)
    width = model.config.d_head
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator).double()).Q
    turn = turn * (0.5 + 1.5 * torch.rand(width, generator=generator).double())
    with torch.no_grad():
        for block in model.blocks:
            attn = block.attn
            attn.W_V.copy_(attn.W_V @ turn)
            attn.W_O.copy_(torch.linalg.inv(turn) @ attn.W_O)
            if attn.b_V is not None:
                attn.b_V.copy_(attn.b_V @ turn)
    after = decompose_residual(model, tokens)
    np.testing.assert_allclose(after.writes, writes, rtol=0, atol=BOUND)
    np.testing.assert_allclose(after.logit_attribution(1, 2), attribution, rtol=0, atol=BOUND)
    np.testing.assert_allclose(source_writes(model, tokens, 1, 0), sources, rtol=0, atol=BOUND)


@quick
@given(configs(), seeds)
def test_forms_of_the_attribution_agree(fields: dict[str, Any], seed: int) -> None:
    model = decoder(fields, seed)
    tokens, mask = drawn(seed)
    found = decompose_residual(model, tokens, attention_mask=mask, per_neuron=seed % 2 == 0)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).numpy()
    difference = logits[..., 1] - logits[..., 2]
    for by in ("component", "sublayer", "layer"):
        total = found.logit_attribution(1, 2, pos=None, by=by).sum("component")
        np.testing.assert_allclose(total, difference, rtol=0, atol=BOUND)
    for scale in ("own", "frozen"):
        after = found.accumulated_logits(1, 2, pos=None, scale=scale)
        np.testing.assert_allclose(after[-1], difference, rtol=0, atol=BOUND)
