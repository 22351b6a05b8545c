"""Keys and values of an MLP: columns and rows of its weights, with the norm before it inside."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headstream.circuits.folding import fold
from headstream.circuits.memory.keys_values import mlp_memory
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError

KINDS: dict[str, dict[str, Any]] = {
    "layernorm": {"d_mlp": 10, "mlp_bias": True},
    "no bias": {"d_mlp": 10},
    "rmsnorm gated": {"d_mlp": 10, "norm": "rmsnorm", "gated_mlp": True},
    "no norm gated": {"d_mlp": 10, "norm": "none", "gated_mlp": True, "mlp_bias": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_the_folded_columns_and_values_the_rows(
    build: Callable[..., Decoder], kind: str
) -> None:
    model = build(KINDS[kind])
    folded = fold(model)
    memory = mlp_memory(model, 1)
    branches = ["gate", "in"] if "gated" in kind else ["in"]
    assert memory.keys["branch"].values.tolist() == branches
    assert memory.keys.dims == ("branch", "neuron", "d_model")
    assert memory.keys.shape == (len(branches), 10, 16)
    for branch in branches:
        columns = folded.blocks[1].mlp.get_parameter(f"W_{branch}").detach().numpy()
        np.testing.assert_allclose(memory.keys.sel(branch=branch), columns.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        memory.offsets.sel(branch="in"), folded.b_in[1].detach(), rtol=0, atol=1e-12
    )
    np.testing.assert_array_equal(memory.values, model.W_out[1].detach())
    np.testing.assert_array_equal(memory.bias, model.b_out[1].detach())
    assert repr(memory).startswith("<MLP of layer 1 as a memory: 10 ")
    assert ("gated" in repr(memory)) == ("gated" in kind)


def test_the_gate_takes_its_share_of_the_shift(build: Callable[..., Decoder]) -> None:
    """`fold` cannot put it anywhere, since the gate has no bias; an offset can hold it."""
    model = build({"d_mlp": 10, "gated_mlp": True})
    block = model.blocks[0]
    memory = mlp_memory(model, 0)
    expected = (block.ln2.b @ block.mlp.W_gate).detach()
    np.testing.assert_allclose(memory.offsets.sel(branch="gate"), expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.1


def test_what_it_holds_is_its_own(build: Callable[..., Decoder]) -> None:
    model = build({"d_mlp": 10, "norm": "none"})
    before = mlp_memory(model, 0)
    kept = before.values.values.copy(), before.keys.values.copy()
    with torch.no_grad():
        model.blocks[0].mlp.W_out.zero_()
        model.blocks[0].mlp.W_in.zero_()
    np.testing.assert_array_equal(before.values, kept[0])
    np.testing.assert_array_equal(before.keys, kept[1])
    assert np.abs(kept[1]).max() > 0.1


def test_refusals(build: Callable[..., Decoder]) -> None:
    with pytest.raises(
        ConfigError, match=r"attention-only model has no MLP .*d_mlp is None.*; ov_circuit"
    ):
        mlp_memory(build({}), 0)
    model = build({"d_mlp": 10})
    for layer in (2, -1, True):
        with pytest.raises(ShapeError, match=r"there is no layer .*: the model has 2, 0 to 1"):
            mlp_memory(model, layer)
    with torch.no_grad():
        model.blocks[1].mlp.W_out[3, 4] = float("nan")
    with pytest.raises(ShapeError, match=r"finite, but blocks\.1\.mlp\.W_out holds NaN"):
        mlp_memory(model, 0)
