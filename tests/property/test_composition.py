"""No score of composition depends on the basis inside a head, over drawn decoders."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from headstream.circuits.composing.composition import composition_scores
from headstream.circuits.composing.path_expansion import expand_paths
from headstream.circuits.composing.prefix_trace import prefix_matching_trace
from headstream.circuits.composing.subspaces import principal_cosines, subspace_overlap
from headstream.circuits.composing.term_importance import importance_by_order
from headstream.circuits.composing.virtual_heads import virtual_head
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

quick = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
seeds = st.integers(0, 2**16)
# Factors of condition 4 at most, float64.
EXACT = 1e-10


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    """Fields of a small attention-only decoder of any kind.

    The decoder is built in the test: the type checker draws from `random` when it looks into a
    list, and hypothesis objects to that inside a strategy.
    """
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    return {
        "n_layers": draw(st.integers(2, 3)),
        "n_heads": heads,
        "n_kv_heads": heads // group,
        "d_model": draw(st.sampled_from([4, 6])),
        "d_head": draw(st.sampled_from([2, 4])),
        "d_vocab": 7,
        "n_ctx": 6,
        "positions": draw(
            st.sampled_from(["learned", "shortformer", "sinusoidal", "rotary", "none"])
        ),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm", "none"])),
        "attn_bias": draw(st.booleans()),
        "unembed_bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
    }


def decoder(fields: dict[str, Any], seed: int) -> Decoder:
    """In float64, biases and gains as random as the rest."""
    model = Decoder(DecoderConfig(**fields), seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b" in name.removeprefix("blocks") or name.endswith(".w"):
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def prompts(seed: int) -> Tensor:
    return torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(seed))


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


def change_basis(model: Decoder, seed: int) -> None:
    """k -> k G, q -> q G^-T, v -> v G, W_O -> G^-1 W_O: weights and biases, head by head."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    make = rotary_gauge if config.positions == "rotary" else gauge
    turn = make(config.kv_heads, config.d_head, generator)
    moved = gauge(config.kv_heads, config.d_head, generator)
    back = torch.linalg.inv(turn).repeat_interleave(config.group_size, 0).mT
    undone = torch.linalg.inv(moved).repeat_interleave(config.group_size, 0)
    with torch.no_grad():
        for block in model.blocks:
            attn = block.attn
            before = attn.W_O.clone()
            attn.W_O.copy_(undone @ attn.W_O)
            assert (attn.W_O - before).abs().max() > 1e-3
            for letter, basis in (("Q", back), ("K", turn), ("V", moved)):
                weight = getattr(attn, f"W_{letter}")
                weight.copy_(weight @ basis)
                if config.attn_bias:
                    bias = getattr(attn, f"b_{letter}")
                    bias.copy_(torch.einsum("hk,hkj->hj", bias, basis))


def every_score(model: Decoder, seed: int) -> dict[str, np.ndarray]:
    distance = seed % 4 if model.config.positions == "rotary" else None
    tokens, last = prompts(seed), model.config.n_heads - 1
    found: dict[str, np.ndarray] = {}
    for norms in ("folded", "ignored"):
        scores = composition_scores(model, distance=distance, norms=norms, n_random=2)
        found[f"composition {norms}"] = scores["score"].values
        found[f"overlap {norms}"] = subspace_overlap(model, norms=norms)["overlap"].values
        cosines = principal_cosines(model, (0, last), (1, 0), norms=norms)
        found[f"cosines {norms}"] = cosines.values
        trace = prefix_matching_trace(model, tokens, distance=distance, norms=norms)
        found[f"trace {norms}"] = trace["trace"].values
    virtual = virtual_head(model, tokens, [(0, last), (1, 0)])
    found["virtual pattern"] = virtual.weights.numpy()
    found["virtual circuit"] = virtual.ov.AB.numpy()
    paths = expand_paths(model, tokens, 1, 2)
    found["paths"], found["constants"] = paths["contribution"].values, paths["constant"].values
    found["orders"] = importance_by_order(model, tokens)["loss"].values
    return found


@quick
@given(configs(), seeds)
def test_no_score_depends_on_the_basis_of_a_head(fields: dict[str, Any], seed: int) -> None:
    """Beside it: cosines and scores lie in [0, 1], and the paths sum to the logits."""
    model = decoder(fields, seed)
    before = every_score(model, seed)
    with torch.no_grad():
        logits = model(prompts(seed))[:, -1].numpy()
    change_basis(model, seed)
    for name, values in every_score(model, seed).items():
        np.testing.assert_allclose(values, before[name], rtol=1e-10, atol=EXACT, err_msg=name)
        if name.startswith(("composition", "overlap", "cosines")):
            known = values[np.isfinite(values)]
            assert len(known), name
            assert ((known >= 0) & (known <= 1 + 1e-12)).all(), name
    sums = before["paths"].sum(0) + before["constants"].sum(0)
    # Terms grow with gains and 1/scale, up to a few hundred nats.
    np.testing.assert_allclose(sums, logits[:, 1] - logits[:, 2], rtol=0, atol=1e-9)
