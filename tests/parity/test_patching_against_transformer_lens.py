"""Our sweeps against `transformer_lens.patching` on our Decoder with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens import patching

from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

N_TOKENS = 20
SHAPE = {"n_layers": 2, "n_heads": 4, "d_model": 16, "d_vocab": N_TOKENS, "n_ctx": 16}
MODELS = {
    "learned": DecoderConfig(**SHAPE, d_head=4, d_mlp=32, attn_bias=True, mlp_bias=True),
    "attention_only": DecoderConfig(**SHAPE, d_head=4, positions="shortformer"),
    "grouped_rotary": DecoderConfig(
        **SHAPE, d_head=8, n_kv_heads=2, d_mlp=32, positions="rotary", norm="rmsnorm"
    ),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Decoder:
    return Decoder(MODELS[request.param], seed=1)


@pytest.fixture(scope="module")
def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, N_TOKENS, (6, 3), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 1) % N_TOKENS
    return Task(clean, corrupted, clean[:, 1], corrupted[:, 1])


def theirs(model: Decoder, task: Task, sweep: str) -> np.ndarray:
    """Mean logit difference of the patched corrupted run, as their sweep returns it."""

    def metric(logits: Tensor) -> Tensor:
        assert task.wrong is not None
        rows = torch.arange(len(task))
        last = logits[:, -1]
        return (last[rows, task.answer] - last[rows, task.wrong]).mean()

    with torch.no_grad():
        _, cache = model.run_with_cache(task.clean)
        found: Tensor = getattr(patching, sweep)(model, task.corrupted, cache, metric)
    return found.numpy()


@pytest.mark.parametrize(
    ("site", "positions", "sweep"),
    [
        ("z", "each", "get_act_patch_attn_head_out_by_pos"),
        ("z", "all", "get_act_patch_attn_head_out_all_pos"),
        ("q", "all", "get_act_patch_attn_head_q_all_pos"),
        ("resid_pre", "each", "get_act_patch_resid_pre"),
        ("attn_out", "each", "get_act_patch_attn_out"),
    ],
)
def test_sweeps_agree(model: Decoder, task: Task, site: str, positions: str, sweep: str) -> None:
    ours = patch(model, task, site, positions=positions, n_flips=1)
    patched = ours.mean + ours.corrupted.mean()
    if site == "z" and positions == "each":
        patched = patched.transpose("layer", "pos", "head")
    # float32 at unit scale; the bar of the design.
    np.testing.assert_allclose(patched, theirs(model, task, sweep), atol=1e-5, rtol=0)


def test_mlp_sweep_agrees_where_there_is_one(task: Task) -> None:
    model = Decoder(MODELS["learned"], seed=1)
    ours = patch(model, task, "mlp_out", n_flips=1)
    patched = ours.mean + ours.corrupted.mean()
    expected = theirs(model, task, "get_act_patch_mlp_out")
    np.testing.assert_allclose(patched, expected, atol=1e-5, rtol=0)


def test_values_agree_on_key_value_heads(task: Task) -> None:
    """Their grid counts key/value heads where ours does."""
    model = Decoder(MODELS["learned"], seed=1)
    for site in ("k", "v"):
        ours = patch(model, task, site, n_flips=1)
        expected = theirs(model, task, f"get_act_patch_attn_head_{site}_all_pos")
        np.testing.assert_allclose(ours.mean + ours.corrupted.mean(), expected, atol=1e-5, rtol=0)
