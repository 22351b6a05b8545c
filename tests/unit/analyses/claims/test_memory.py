"""F1 and F2: a layer that mixes positions, or neurons that are not what they are said to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headstream.analyses.claims.memory import _ACTIVATIONS
from headstream.models import mlp
from headstream.models.decoder import Decoder
from headstream.models.mlp import ACTIVATIONS, MLP

Make = Callable[..., Decoder]
Failed = Callable[..., set[str]]


def patched(monkeypatch: pytest.MonkeyPatch, off: Callable[[Tensor], Tensor]) -> None:
    right: Any = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x: right(self, x) + off(x))


def test_a_layer_that_mixes_positions_fails_F1(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mean over positions is the same for permuted ones: one at a time shows it.
    patched(monkeypatch, lambda x: 1e-7 * x.mean(1, keepdim=True))
    assert failed(toy(d_mlp=24), "F1", "F2", "B1") == {"F1", "F2"}


def test_a_layer_that_knows_its_position_fails_F1(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, lambda x: 1e-7 * torch.arange(x.shape[1])[:, None].to(x))
    assert failed(toy(d_mlp=24, norm="none"), "F1") == {"F1"}


def test_another_activation_fails_F2_alone(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mlp.ACTIVATIONS, "gelu", lambda x: functional.gelu(x, approximate="tanh"))
    assert failed(toy(d_mlp=24)) == {"F2"}


def test_a_gate_on_the_wrong_branch_fails_F2(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(self: MLP, x: Tensor) -> Tensor:
        return self.act(x @ self.W_in) * (x @ self.W_gate) @ self.W_out

    model = toy(d_mlp=24, gated_mlp=True)
    assert failed(model, "F2") == set()
    right = MLP.forward

    def forward(self: MLP, x: Tensor) -> Tensor:
        right(self, x)  # so that the hooks fire
        return swapped(self, x)

    monkeypatch.setattr(MLP, "forward", forward)
    assert failed(model, "F1", "F2") == {"F2"}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_written_out_right(name: str) -> None:
    x = torch.linspace(-9, 9, 101, dtype=torch.float64)
    torch.testing.assert_close(_ACTIVATIONS[name](x), ACTIVATIONS[name](x), rtol=1e-13, atol=1e-15)
