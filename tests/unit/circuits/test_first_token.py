"""The first token: its norms beside the others', and which edges are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstream.circuits.first_token import cut_another, cut_first, first_token_norms, losses
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

CONFIG = DecoderConfig(
    n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, d_head=4, d_vocab=11, n_ctx=24
)
MODEL = Decoder(CONFIG, seed=2, dtype=torch.float64)
TOKENS = torch.randint(11, (3, 20), generator=torch.Generator().manual_seed(0))
REAL = torch.ones_like(TOKENS, dtype=torch.bool)


def test_norms_are_those_of_v_and_of_what_it_writes() -> None:
    found = first_token_norms(MODEL, TOKENS, REAL)
    _, cache = MODEL.run_with_cache(TOKENS)
    for layer in range(2):
        v = cache[f"blocks.{layer}.attn.hook_v"]
        for head in range(4):
            own = v[:, :, head // 2]
            for got, vectors in (
                (found.value, own),
                (found.written, own @ MODEL.W_O[layer, head]),
            ):
                norm = vectors.norm(dim=-1).detach()
                expected = norm[:, 0] / norm[:, 1:].mean(1)
                np.testing.assert_allclose(got[layer, head], expected, rtol=1e-12)
        norm = cache[f"blocks.{layer}.hook_resid_post"].norm(dim=-1).detach()
        expected = norm[:, 0] / norm[:, 1:].mean(1)
        np.testing.assert_allclose(found.stream[layer], expected, rtol=1e-12)


def test_padding_before_the_first_token_changes_nothing() -> None:
    pads = torch.zeros(3, 4, dtype=torch.int64)
    padded = torch.cat([pads, TOKENS], 1)
    real = torch.cat([pads.bool(), REAL], 1)
    for got, expected in zip(
        first_token_norms(MODEL, padded, real), first_token_norms(MODEL, TOKENS, REAL), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-10)
    got = losses(MODEL, padded, real, cut_first(real), layer=1, head=2)
    expected = losses(MODEL, TOKENS, REAL, cut_first(REAL), layer=1, head=2)
    np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_every_later_query_loses_one_edge_and_the_control_another_one() -> None:
    def edges(cuts) -> torch.Tensor:
        table = torch.zeros(3, 20, 20, dtype=torch.int64)
        for cut in cuts:
            table += (cut.queries[:, :, None] & cut.keys[:, None, :]).long()
        return table

    sink = edges(cut_first(REAL))
    assert (sink.sum(-1) == torch.tensor([0] + [1] * 19)).all()
    assert (sink[:, 1:, 0] == 1).all()
    control = edges(cut_another(REAL, torch.Generator().manual_seed(1)))
    assert (control.sum(-1) == torch.tensor([0, 0] + [1] * 18)).all()
    assert (control[:, :, 0] == 0).all()
    assert (control.triu() == 0).all(), "the key stands before the query"


@pytest.mark.parametrize("renormalise", [True, False])
def test_losses_under_a_cut_are_those_of_the_edited_pattern(renormalise: bool) -> None:
    def edit(pattern: torch.Tensor, hook: object) -> torch.Tensor:
        new = pattern.clone()
        new[:, 1, 1:, 0] = 0
        if renormalise:
            new[:, 1] = new[:, 1] / new[:, 1].sum(-1, keepdim=True)
        return new

    with MODEL.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", edit)]):
        expected = MODEL(TOKENS, return_type="loss_per_token").mean(1).detach()
    cut = cut_first(REAL)
    got = losses(MODEL, TOKENS, REAL, cut, layer=0, head=1, renormalise=renormalise)
    np.testing.assert_allclose(got, expected, rtol=1e-11)
    plain = losses(MODEL, TOKENS, REAL)
    np.testing.assert_allclose(plain, MODEL(TOKENS, return_type="loss_per_token").mean(1).detach())
    assert (np.abs(got - plain) > 1e-6).all()
