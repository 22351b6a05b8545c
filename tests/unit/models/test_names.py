"""The hook table says what fires, in which order, with which axes, for every configuration."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.names import HookSpec, axis_size, head_name, hook_table

POSITIONS = ("learned", "shortformer", "sinusoidal", "rotary", "none")
NORMS = ("layernorm", "rmsnorm", "none")
MLPS: tuple[dict[str, Any], ...] = ({}, {"d_mlp": 12}, {"d_mlp": 12, "gated_mlp": True})
BATCH, LENGTH = 3, 5


def fired(model: Decoder, backend: str) -> list[tuple[str, tuple[int, ...]]]:
    """Every hook that fires in one pass, in order, with the shape it saw."""
    seen = []
    for point in model.hook_dict.values():
        point.add_hook(
            lambda tensor, hook: seen.append((hook.name, tuple(tensor.shape))), by_name=False
        )
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    model(tokens, backend=backend)
    model.reset_hooks()
    return seen


@pytest.mark.parametrize(("positions", "norm"), list(itertools.product(POSITIONS, NORMS)))
def test_table_equals_what_fires(build: Callable[..., Decoder], positions: str, norm: str) -> None:
    for mlp in MLPS:
        model = build({"positions": positions, "norm": norm, "n_kv_heads": 2, "d_head": 6} | mlp)
        table = hook_table(model.config)
        sizes = {"batch": BATCH, "pos": LENGTH, "query_pos": LENGTH, "key_pos": LENGTH}
        expected = [
            (
                name,
                tuple(sizes.get(axis) or axis_size(model.config, axis) for axis in spec.axes),
            )
            for name, spec in table.items()
        ]
        assert fired(model, "naive") == expected
        # Flash skips the n x n matrix and nothing else; auto is naive where somebody listens.
        formed = [pair for pair in expected if not table[pair[0]].naive_only]
        assert fired(model, "flash") == formed
        assert fired(model, "auto") == expected
        assert list(model.hook_dict) == list(table)
        assert all(model.hook_dict[name].spec == spec for name, spec in table.items())


def test_table_of_a_small_model_by_hand() -> None:
    config = DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=5, n_ctx=9)
    assert list(hook_table(config)) == [
        "hook_embed",
        "hook_pos_embed",
        "blocks.0.hook_resid_pre",
        "blocks.0.ln1.hook_scale",
        "blocks.0.ln1.hook_normalized",
        "blocks.0.attn.hook_q",
        "blocks.0.attn.hook_k",
        "blocks.0.attn.hook_v",
        "blocks.0.attn.hook_attn_scores",
        "blocks.0.attn.hook_lse",
        "blocks.0.attn.hook_pattern",
        "blocks.0.attn.hook_z",
        "blocks.0.attn.hook_result",
        "blocks.0.hook_attn_out",
        "blocks.0.hook_resid_post",
        "ln_final.hook_scale",
        "ln_final.hook_normalized",
    ]
    table = hook_table(config)
    assert [name for name, spec in table.items() if not spec.writable] == ["blocks.0.attn.hook_lse"]
    assert [name for name, spec in table.items() if spec.on_request] == [
        "blocks.0.attn.hook_result"
    ]


def test_axes_of_a_spec() -> None:
    square = HookSpec(("batch", "head", "query_pos", "key_pos"))
    assert (square.pos_axis, square.head_axis) == (2, 1)
    assert (HookSpec(("batch", "pos", "kv_head", "d_head")).head_axis) == 2
    assert (HookSpec(("batch", "pos", "d_model")).head_axis) is None
    assert head_name(1, 4) == "L1H4"
