"""A process that owns its threads gives a small model one."""

from __future__ import annotations

import pytest
import torch

from headstream.models import threads
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder


@pytest.mark.parametrize(("limit", "expected"), [(10**6, 1), (10, 2)])
def test_only_a_small_model_gets_one_thread(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig(n_layers=1, n_heads=1, d_model=4, d_head=4, d_vocab=5, n_ctx=8)
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_SMALL", limit)
    try:
        torch.set_num_threads(2)
        threads.use_one_thread_if_small(Decoder(config))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
