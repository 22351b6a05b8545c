"""A small decoder with everything that hides faults, and tasks on it with a real gap."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import pytest
import torch

from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

N_TOKENS = 20


def _randomised(config: DecoderConfig, seed: int = 0) -> Decoder:
    """Weights large enough that heads matter, norm gains and biases that are not the identity."""
    model = Decoder(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.rsplit(".", 1)[-1].startswith("W_"):
                parameter.mul_(2.0)
            elif name.endswith(".w"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)
    model.backend = "naive"
    return model


@pytest.fixture(scope="session")
def model() -> Decoder:
    """Fixture A of the field cases: learned positions, LayerNorm, biases, an MLP; naive."""
    return _randomised(
        DecoderConfig(
            n_layers=2,
            n_heads=4,
            d_model=16,
            d_head=4,
            d_mlp=32,
            d_vocab=N_TOKENS,
            n_ctx=16,
            attn_bias=True,
            mlp_bias=True,
            unembed_bias=True,
        )
    )


@pytest.fixture(scope="session")
def grouped() -> Decoder:
    """Fixture R: rotary, RMSNorm, two query heads a key/value head, free d_head; naive."""
    return _randomised(
        DecoderConfig(
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            d_model=16,
            d_head=8,
            d_mlp=32,
            d_vocab=N_TOKENS,
            n_ctx=16,
            positions="rotary",
            norm="rmsnorm",
        )
    )


@pytest.fixture(scope="session")
def attention_only() -> Decoder:
    return _randomised(
        DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=N_TOKENS, n_ctx=8)
    )


def make_prompts(n: int, length: int, changed: int, seed: int = 0) -> tuple[Any, Any]:
    """Random prompts, and the same with another token at `changed`."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(0, N_TOKENS, (n, length), generator=generator)
    shift = torch.randint(1, N_TOKENS, (n,), generator=generator)
    corrupted = clean.clone()
    corrupted[:, changed] = (clean[:, changed] + shift) % N_TOKENS
    return clean, corrupted


@pytest.fixture(scope="session")
def make_task() -> Callable[..., Task]:
    """Pairs whose answer is what the change raises most, so that every pair has a gap."""

    def make(
        model: Decoder,
        n: int = 16,
        *,
        length: int = 7,
        changed: int = 2,
        seed: int = 0,
        **options: Any,
    ) -> Task:
        clean, corrupted = make_prompts(n, length, changed, seed)
        at = torch.as_tensor(options.get("answer_pos", -1)).expand(n)
        with torch.no_grad():
            rows = torch.arange(n)
            moved = model(clean)[rows, at] - model(corrupted)[rows, at]
        return Task(clean, corrupted, moved.argmax(1), moved.argmin(1), **options)

    return make


class Now(Executor):
    """Runs what it is given at once; after `lasts` tasks its workers are dead."""

    def __init__(self, lasts: float = np.inf) -> None:
        self.lasts = lasts

    def submit(self, call: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.lasts <= 0:
            future.set_exception(BrokenProcessPool("a process ended abruptly"))
            return future
        self.lasts -= 1
        try:
            future.set_result(call(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture(scope="session")
def now() -> Callable[..., Executor]:
    """Makes executors that run what they are given at once, as long as they last."""
    return Now
