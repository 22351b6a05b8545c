"""Folding over drawn decoders of every kind: the same log-probabilities, or a refusal."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

from headstream.circuits.centring import PARTS, centre_readers, centre_writers
from headstream.circuits.folding import fold
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder, build
from headstream.models.errors import ExactnessError
from headstream.models.hooks import capture

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
seeds = st.integers(0, 2**16)
parts = st.sets(st.sampled_from(PARTS))


@st.composite
def configs(draw: Any, **fixed: Any) -> dict[str, Any]:
    """Fields of a small decoder of any kind."""
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]))
    mlp = fixed.get("d_mlp", draw(st.sampled_from([None, 5])))
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
        "activation": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        "attn_bias": draw(st.booleans()),
        "mlp_bias": mlp is not None and draw(st.booleans()),
        "gated_mlp": mlp is not None and draw(st.booleans()),
        "unembed_bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
    }
    return fields | fixed


def decoder(fields: dict[str, Any], seed: int, *, shifts: bool = True) -> Decoder:
    """In float64, biases and gains as random as the rest; without `shifts` the norms have none."""
    model = Decoder(DecoderConfig(**fields), seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b" in name.removeprefix("blocks") or name.endswith(".w"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
            if not shifts and name.endswith((".ln1.b", ".ln2.b", "final.b")):
                parameter.zero_()
    return model


def log_probabilities(model: Decoder, seed: int, mask: Tensor | None = None) -> Tensor:
    tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        out: Tensor = model(tokens, attention_mask=mask).log_softmax(-1)
    return out


def refusal(model: Decoder, norms: str, centre: set[str]) -> str:
    """What `fold` must say of this model; "" where folding is exact."""
    config = model.config
    if config.norm != "layernorm" and centre & {"readers", "writers"}:
        return f"cannot be centred with norm='{config.norm}'"
    if norms == "final" or config.norm == "none":
        return ""
    if config.positions == "shortformer":
        return "shortformer positions"
    if not config.gated_mlp or config.norm != "layernorm":
        return ""
    shifted = any(bool(block.ln2.b.any()) for block in model.blocks)
    return "cannot be folded into a gated MLP" if shifted else ""


@quick
@given(configs(), seeds, st.sampled_from(["all", "final"]), st.booleans(), parts)
def test_the_same_log_probabilities_or_a_refusal(
    fields: dict[str, Any], seed: int, norms: str, value_bias: bool, centre: set[str]
) -> None:
    model = decoder(fields, seed, shifts=not fields["gated_mlp"] or seed % 2 == 0)
    options: dict[str, Any] = {"norms": norms, "value_bias": value_bias, "centre": sorted(centre)}
    said = refusal(model, norms, centre)
    if said:
        with pytest.raises(ExactnessError, match=said):
            fold(model, **options)
        return
    folded = fold(model, **options)
    before, after = log_probabilities(model, seed), log_probabilities(folded, seed)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10)
    if "writers" in centre and fields["positions"] != "sinusoidal":
        streams = capture(folded, torch.tensor([[0, 1, 2]]), "blocks.*.hook_resid_post")[1]
        assert all(stream.mean(-1).abs().max() < 1e-12 for stream in streams.values())


@quick
@given(configs(attn_bias=True), seeds, st.integers(0, 4), st.integers(0, 4))
def test_the_value_bias_is_exact_where_the_mask_lets_every_query_read(
    fields: dict[str, Any], seed: int, first: int, second: int
) -> None:
    """Real positions always agree; the mask is refused exactly if a query is left without a key."""
    model = decoder(fields, seed)
    norms = "final" if fields["norm"] != "none" else "all"
    folded = fold(model, norms=norms, value_bias=True)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :first], mask[1, 5 - second :] = 0, 0
    before = log_probabilities(model, seed, mask)
    after = log_probabilities(folded, seed, mask)
    seen = mask.cumsum(-1) > 0
    torch.testing.assert_close(after[seen], before[seen], rtol=0, atol=1e-10)
    if first:
        assert (after[~seen] - before[~seen]).abs().max() > 1e-6
        with pytest.raises(ExactnessError, match=f"row 0 the first {first} queries"):
            fold(model, norms=norms, value_bias=True, attention_mask=mask)
    else:
        fold(model, norms=norms, value_bias=True, attention_mask=mask)


@quick
@given(configs(norm="rmsnorm"), seeds, st.booleans())
def test_the_wrong_recipe_fails_the_same_test(
    fields: dict[str, Any], seed: int, writers: bool
) -> None:
    """Centring under RMSNorm, which `fold` refuses, is off by far more than 1e-10."""
    assume(fields["positions"] != "shortformer")
    folded = fold(decoder(fields, seed))
    weights = dict(folded.state_dict())
    if writers:
        centre_writers(weights, folded.config)
    else:
        centre_readers(weights, folded.config, blocks=True)
    wrong = build(folded.config, weights)
    change = log_probabilities(wrong, seed) - log_probabilities(folded, seed)
    assert change.abs().max() > 1e-4
