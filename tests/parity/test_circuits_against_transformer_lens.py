"""Our measurements against TransformerLens' own tools, run on our decoder with the same weights.

Bound: 1e-5 in float32 at logits of order one, which is what two orders of summation differ by.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens.head_detector import detect_head
from transformer_lens.tools.analysis.direct_logit_attribution import direct_logit_attribution
from transformer_lens.tools.analysis.logit_lens import logit_lens as their_logit_lens

from headstream.circuits.folding import fold
from headstream.circuits.statistics import (
    detect_head_score,
    duplicate_token_targets,
    prefix_matching_targets,
    previous_token_targets,
    target_mass,
)
from headstream.circuits.stream.lens import logit_lens
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.hooks import capture

BOUND = 1e-5
KINDS: dict[str, dict[str, Any]] = {
    "attention only": {},
    "layernorm": {"d_mlp": 20, "attn_bias": True, "mlp_bias": True, "unembed_bias": True},
    "rmsnorm": {"d_mlp": 20, "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary"},
    "no norm": {"norm": "none", "positions": "shortformer", "n_kv_heads": 2},
    "tied": {"tied_embeddings": True, "positions": "sinusoidal"},
}


def decoder(**fields: Any) -> Decoder:
    """A float32 decoder with a vocabulary, no bias zero and no gain one."""
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 16, "d_head": 4, "d_vocab": 12, "n_ctx": 24}
    model = Decoder(DecoderConfig(**(sizes | {"bos_token_id": 0} | fields)), seed=1)
    model.vocab = ["<bos>", *"abcdefghijk"]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b" in name.removeprefix("blocks") or name.endswith(".w"):
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def prompts() -> Tensor:
    return torch.randint(1, 12, (3, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["previous_token_head", "duplicate_token_head", "induction_head"])
def test_detect_head_through_the_conversion(kind: str, name: Any) -> None:
    model = decoder(**KINDS[kind])
    prompt = "a b c d e b c a b f c c g a b h"
    with torch.no_grad():
        theirs = detect_head(model, prompt, name)
    tokens = model.to_tokens(prompt)
    real = torch.ones_like(tokens, dtype=torch.bool)
    targets = {
        "previous_token_head": previous_token_targets(real),
        "duplicate_token_head": duplicate_token_targets(tokens, real),
        "induction_head": prefix_matching_targets(tokens, real),
    }[name]
    with torch.no_grad():
        _, acts = capture(model, tokens, "blocks.*.attn.hook_pattern", backend="naive")
    ours = torch.cat([detect_head_score(pattern, targets) for pattern in acts.values()])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)
    # The conversion itself: our score times the share of rows that have a target.
    scores = torch.cat([target_mass(pattern, targets) for pattern in acts.values()])
    share = targets.any(-1).sum() / tokens.shape[1]
    torch.testing.assert_close(scores * share, theirs, rtol=0, atol=BOUND)
    assert 0.05 < share < 1


@pytest.mark.parametrize("kind", KINDS)
def test_logit_lens(kind: str) -> None:
    model = decoder(**KINDS[kind])
    theirs = their_logit_lens(model, prompts(), positions=None)
    ours = logit_lens(model, prompts())
    assert ours["layer"].values.tolist() == theirs.labels
    np.testing.assert_allclose(ours, theirs.readout.values.numpy(), rtol=0, atol=BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_direct_logit_attribution_of_heads(kind: str) -> None:
    """Their rows are the heads and one remainder; ours take the remainder apart."""
    model = fold(decoder(**KINDS[kind]), norms="final")
    answer, wrong = torch.tensor([1, 5, 7]), torch.tensor([2, 2, 3])
    with torch.no_grad():
        theirs = direct_logit_attribution(model, prompts(), answer, wrong, unit="head")
    ours = decompose_residual(model, prompts()).logit_attribution(answer, wrong)
    heads = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    assert theirs.labels[:8] == heads
    expected = theirs.attribution.numpy()
    np.testing.assert_allclose(ours.sel(component=heads), expected[:8], rtol=0, atol=BOUND)
    others = [c for c in ours["component"].values if c not in (*heads, "b_U", "ln_final.b")]
    rest = ours.sel(component=others).sum("component")
    np.testing.assert_allclose(rest, expected[8:].sum(0), rtol=0, atol=BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_direct_logit_attribution_of_components(kind: str) -> None:
    model = fold(decoder(**KINDS[kind]), norms="final")
    with torch.no_grad():
        theirs = direct_logit_attribution(model, prompts(), 4, unit="component")
    found = decompose_residual(model, prompts()).logit_attribution(4)
    names = found["component"].values.tolist()
    sums = {}
    for label in theirs.labels:
        if label in ("embed", "pos_embed"):
            parts = [label]
        else:
            layer, kind_of = label.split("_", 1)
            wanted = ("H", "bO") if kind_of == "attn_out" else ("MLP", "bout")
            parts = [c for c in names if c.startswith(tuple(f"L{layer}{w}" for w in wanted))]
        sums[label] = found.sel(component=parts).sum("component").values
    for label, values in zip(theirs.labels, theirs.attribution.numpy(), strict=True):
        np.testing.assert_allclose(sums[label], values, rtol=0, atol=BOUND)


def test_unfolded_their_attribution_leaves_the_gain_out_and_ours_does_not() -> None:
    """Why `fold` comes first in the two tests above."""
    model = decoder()
    with torch.no_grad():
        theirs = direct_logit_attribution(model, prompts(), 4, unit="component")
        logits = model(prompts())[:, -1, 4].numpy()
    ours = decompose_residual(model, prompts()).logit_attribution(4)
    np.testing.assert_allclose(ours.sum("component"), logits, rtol=0, atol=BOUND)
    assert np.abs(theirs.attribution.sum(0).numpy() - logits).max() > 0.05  # against 1e-5
