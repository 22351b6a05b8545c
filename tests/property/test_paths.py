"""The fast sweep over paths gives the definition's numbers, whatever the model and the prompts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headstream.analyses.patching.paths.ends import ends_of
from headstream.analyses.patching.paths.engines import open_paths
from headstream.analyses.patching.paths.plan import PathPlan, path_blocks
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

N_TOKENS = 11


@st.composite
def fields_of_models(draw: st.DrawFn) -> dict[str, Any]:
    mlp = draw(st.booleans())
    fields: dict[str, Any] = {
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": 2,
        "n_kv_heads": draw(st.sampled_from([1, 2])),
        "positions": draw(st.sampled_from(["learned", "rotary", "shortformer", "none"])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm", "none"])),
        "attn_bias": draw(st.booleans()),
        "unembed_bias": draw(st.booleans()),
    }
    if mlp:
        fields |= {"d_mlp": 8, "mlp_bias": draw(st.booleans()), "gated_mlp": draw(st.booleans())}
    return fields


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    n, length = draw(st.integers(2, 3)), draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    clean = torch.randint(0, N_TOKENS, (n, length), generator=generator)
    mask = torch.rand(n, length, generator=generator) < draw(st.sampled_from([0.7, 1.0]))
    mask[:, 0] = True
    corrupted = clean.clone()
    corrupted[:, : length - 1] = (clean[:, : length - 1] + 1) % N_TOKENS
    return Task(
        clean, corrupted, 1, 2, attention_mask=mask, roles={"first": 0, "last": -1}, answer_pos=-1
    )


# No shrinking: it takes minutes, and examples are small as they are.
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    fields=fields_of_models(),
    backend=st.sampled_from(["naive", "flash"]),
    task=tasks(),
    freeze=st.booleans(),
    positions=st.sampled_from(["all", "roles"]),
    direction=st.sampled_from(["denoise", "noise"]),
    pick=st.randoms(use_true_random=False),
)
@pytest.mark.parametrize("kind", ["effects", "unrelated", "self", "total"])
def test_fast_equals_hooked(
    kind: Any,
    fields: dict[str, Any],
    backend: str,
    task: Task,
    freeze: bool,
    positions: str,
    direction: str,
    pick: random.Random,
) -> None:
    config = DecoderConfig(d_model=8, d_head=4, d_vocab=N_TOKENS, n_ctx=8, **fields)
    model = Decoder(config, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    every = ends_of(model.config, None, None)
    # Some of both ends: the definition takes two hooked passes a path.
    senders, receivers = (
        tuple(end for i, end in enumerate(ends) if i in keep or i == always)
        for ends, keep, always in (
            (every[0], pick.sample(range(12), 4), 0),
            (every[1], pick.sample(range(20), 6), len(every[1]) - 1),
        )
    )
    plan = PathPlan(
        task, senders, receivers, positions, direction, freeze_mlps=freeze, backend=backend
    )
    fast, slow = open_paths(model, plan, "suffix"), open_paths(model, plan, "hooks")
    for block in path_blocks(plan, config):
        if block.kind == kind:
            # float64; the sum of the stream rounds otherwise than the passes it stands for.
            np.testing.assert_allclose(fast.run(block), slow.run(block), atol=1e-10)
    for run in ("clean", "corrupted"):
        np.testing.assert_allclose(fast.base[run], slow.base[run], atol=1e-10)
