"""Toys of every kind for the ledger, and what fails on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headstream.analyses.claims import ledger
from headstream.analyses.claims.ledger import audit
from headstream.analyses.evidence import Claim, Evidence
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Every check is in the ledger, as after any audit."""
    ledger.register_all()


@pytest.fixture(scope="session")
def toy() -> Callable[..., Decoder]:
    """`toy(field=value, ...)`: two layers of four heads with nothing left at its default."""

    def make(**options: object) -> Decoder:
        sizes = dict(n_layers=2, n_heads=4, d_model=16, d_head=8, d_vocab=20, n_ctx=16)
        model = Decoder(DecoderConfig(**(sizes | options)))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            # Biases and gains off their defaults: at 0 and 1 they hide half of the mistakes.
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        return model

    return make


@pytest.fixture(scope="session")
def failed() -> Callable[..., set[str]]:
    """`failed(model)`: ids of the checks that it fails; `failed(model, "M2", ...)`: of these."""

    def run(model: Decoder, *ids: str) -> set[str]:
        if not ids:
            claims = list(audit(model).claims)
        else:
            subject = ledger._subject(model, None, 0)
            found = (ledger._run(ledger.LEDGER[id], subject)[0] for id in ids)
            claims = [claim for claim in found if claim is not None]
        return {claim.id for claim in claims if claim.evidence is Evidence.FAILED}

    return run


@pytest.fixture(scope="session")
def measured() -> Callable[..., list[Claim]]:
    """`measured(model, "M4")`: what is measured on a model under that id."""

    def run(model: Decoder, id: str, tokens: torch.Tensor | None = None) -> list[Claim]:
        subject = ledger._subject(model, tokens, 0)
        found = (ledger._observe(m, subject)[0] for m in ledger.MEASUREMENTS if m.id == id)
        return [claim for claim in found if claim is not None]

    return run
