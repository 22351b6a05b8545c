"""What the standard study does when a section cannot be run."""

from __future__ import annotations

import pytest
import torch

from headstream.analyses.patching.task import Task
from headstream.analyses.standard import standard_study
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError, TokenError
from headstream.reports.closing import limits
from headstream.reports.study import Study


def toy(card: dict[str, object] | None = None) -> Decoder:
    sizes = dict(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=20, n_ctx=16)
    model = Decoder(DecoderConfig(**sizes))  # type: ignore[arg-type]
    model.card = card
    return model


def pairs(identical: int | None = None, last: int = 6) -> Task:
    clean = torch.randint(1, 5, (8, 5), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, 1] = last
    if identical is not None:
        corrupted[identical] = clean[identical]
    return Task(clean, corrupted, answer=7, wrong=8)


def test_an_error_in_the_users_own_pairs_is_raised() -> None:
    words = "corrupted is the clean prompt itself in pair 3: nothing to patch"
    with pytest.raises(TaskError, match=words):
        standard_study(toy(), task=pairs(identical=3), progress=False)
    with pytest.raises(TokenError, match="corrupted"):
        standard_study(toy(), task=pairs(last=20), progress=False)


def test_what_the_models_own_task_cannot_do_is_left_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Task, "for_model", lambda model, n, seed: pairs(last=20))
    results = standard_study(toy({"task": "induction"}), n=8, progress=False)
    assert [result.kind for result in results] == [
        "audit",
        "decomposition",
        "heads",
        "circuits",
        "sinks",
    ]
    first, *others = results
    patching = [why for why in first.details["left_out"] if why.startswith("patching: ")]
    assert len(patching) == 1, "two sweeps, one reason"
    assert not any(result.details.get("left_out") for result in others)
    bullets = limits(Study.of("toy", results), []).blocks[0].items
    said = [text for lead, text in bullets if lead == "Left out."]
    assert len(said) == len(first.details["left_out"])
    assert sum("atching: " in text for text in said) == 1
    assert not any("audit" in text for lead, text in bullets if text.startswith("Said of"))


def test_a_seed_that_is_none() -> None:
    with pytest.raises(TaskError, match="seed must be a whole number"):
        standard_study(toy(), seed=-1, progress=False)
