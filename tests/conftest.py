"""Shared fixtures: small decoders with nothing left at its default.

Identity norms and zero biases hide half of the faults that users of such tools met, so every
parameter here is random. A: learned positions, LayerNorm, biases everywhere. R: rotary, RMSNorm,
grouped heads, n_heads * d_head != d_model, no biases. L1: one layer of attention, no norm.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import settings

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

torch.set_num_threads(1)
settings.register_profile("headstream", deadline=None, derandomize=True, database=None)
settings.load_profile("headstream")

SIZES: dict[str, Any] = {
    "n_layers": 2,
    "n_heads": 4,
    "d_model": 16,
    "d_head": 4,
    "d_vocab": 20,
    "n_ctx": 16,
}
A = SIZES | {"d_mlp": 32, "attn_bias": True, "mlp_bias": True, "unembed_bias": True}
R = SIZES | {"d_mlp": 32, "d_head": 8, "n_kv_heads": 2, "positions": "rotary", "norm": "rmsnorm"}
L1 = SIZES | {"n_layers": 1, "norm": "none"}


def random_decoder(
    fields: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Decoder:
    """A decoder with weights of standard deviation 0.3, gains about 1, biases N(0, 1)."""
    model = Decoder(DecoderConfig(**fields), dtype=dtype)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
            kind = name.rsplit(".", 1)[-1]
            if kind == "w":
                drawn = 1 + 0.5 * drawn
            elif kind.startswith("W_"):
                drawn = 0.3 * drawn
            parameter.copy_(drawn)
    return model


@pytest.fixture(scope="session")
def build() -> Callable[..., Decoder]:
    """`build({field: value}, seed=0, dtype=torch.float64)`: random, SIZES where nothing is said."""

    def make(fields: dict[str, Any], **options: Any) -> Decoder:
        return random_decoder(SIZES | fields, **options)

    return make


@pytest.fixture
def model_a() -> Decoder:
    return random_decoder(A)


@pytest.fixture
def model_r() -> Decoder:
    return random_decoder(R)


@pytest.fixture
def model_l1() -> Decoder:
    return random_decoder(L1)


@pytest.fixture(params=[A, R], ids=["A", "R"])
def model(request: pytest.FixtureRequest) -> Decoder:
    """Fixtures A and R in turn, float64."""
    return random_decoder(request.param)


@pytest.fixture(params=[A, R], ids=["A", "R"])
def model32(request: pytest.FixtureRequest) -> Decoder:
    """Fixtures A and R in turn, float32."""
    return random_decoder(request.param, dtype=torch.float32)


@pytest.fixture(params=["naive", "flash"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def tokens() -> torch.Tensor:
    """[0 1 2 3 1 2] and two other rows: a batch of three, so that a squeezed batch axis shows."""
    return torch.tensor([[0, 1, 2, 3, 1, 2], [0, 7, 4, 4, 19, 3], [5, 18, 2, 0, 9, 11]])


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations are not enforced, as for a user: what a wrong type meets is our own error."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def hand() -> ModuleType:
    """tests/hand_made.py: models made by hand, head by head."""
    spec = importlib.util.spec_from_file_location(
        "hand_made", Path(__file__).with_name("hand_made.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
