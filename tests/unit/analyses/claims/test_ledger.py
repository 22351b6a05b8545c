"""The ledger passes on sound models of every kind, and fails on one that is broken."""

from __future__ import annotations

import pytest
import torch

from headstream.analyses.claims import ledger
from headstream.analyses.claims.ledger import Finding, audit
from headstream.analyses.evidence import Evidence
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.store import load

CONFIGS = {
    "learned-layernorm-mlp": dict(d_mlp=24, attn_bias=True, mlp_bias=True, unembed_bias=True),
    "rotary-rmsnorm-gated-grouped": dict(
        positions="rotary", norm="rmsnorm", d_mlp=24, gated_mlp=True, n_kv_heads=2
    ),
    "shortformer-attention-only": dict(positions="shortformer", bos_token_id=0),
    "sinusoidal-no-norm": dict(positions="sinusoidal", norm="none"),
    "tied-no-positions": dict(positions="none", tied_embeddings=True),
    "short": dict(n_ctx=3),
}


def toy(**options: object) -> Decoder:
    sizes = dict(n_layers=2, n_heads=4, d_model=16, d_head=8, d_vocab=20, n_ctx=16)
    model = Decoder(DecoderConfig(**(sizes | options)))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Biases and gains off their defaults: at 0 and 1 they hide half of the mistakes.
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_sound_models_pass(options: dict[str, object]) -> None:
    result = audit(toy(**options))
    assert not result.failed, [r for r in result.details["rows"] if not r["passed"]]
    ids = [row["id"] for row in result.details["rows"]]
    assert ids == ["A1", "A2", "L1", "B1", "B2", "M1", "B3", "N1", "A9", "A10"]
    for row in result.details["rows"]:
        if row["applies"]:
            assert row["largest_error"] <= row["bound"] == 1e-10
            assert row["worst"], row


def test_what_does_not_apply_says_why() -> None:
    rows = {row["id"]: row for row in audit(toy(norm="none")).details["rows"]}
    assert rows["N1"]["reason"] == "this model has no norm"
    assert not rows["N1"]["applies"]
    short = {row["id"]: row for row in audit(toy(n_ctx=3)).details["rows"]}
    assert "too short to decode in pieces" in short["A10"]["reason"]


def test_shipped_models_pass() -> None:
    assert not audit(load("constructed-induction")).failed


def failed(model: Decoder) -> set[str]:
    return {claim.id for claim in audit(model).claims if claim.evidence is Evidence.FAILED}


def test_a_flash_kernel_that_is_off_fails_L1(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstream.models import attention

    right = attention.attend_flash

    def off(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        z, lse = right(*args, **options)  # type: ignore[arg-type]
        return z * (1 + 1e-7), lse

    monkeypatch.setattr(attention, "attend_flash", off)
    assert "L1" in failed(toy())


def test_a_mask_that_leaks_fails_A9_and_A10(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstream.models import attention

    def leaky(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)

    monkeypatch.setattr(attention, "attend_flash", leaky)
    assert failed(toy()) >= {"L1", "A9", "A10", "A1"}


def test_a_write_that_is_lost_fails_B1_and_B2(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstream.models.block import Block

    right = Block.forward

    def lossy(self: Block, resid: torch.Tensor, context: object) -> torch.Tensor:
        out = right(self, resid, context)  # type: ignore[arg-type]
        return self.hook_resid_post(out + 1e-6)  # type: ignore[no-any-return]

    monkeypatch.setattr(Block, "forward", lossy)
    assert failed(toy(norm="none", positions="none")) >= {"B1", "B2"}


def test_an_output_bias_that_is_forgotten_fails_M1(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstream.models.attention import Attention

    right = Attention._project_out

    def forgetful(self: Attention, z: torch.Tensor) -> torch.Tensor:
        return right(self, z) - self.b_O

    monkeypatch.setattr(Attention, "_project_out", forgetful)
    assert "M1" in failed(toy(attn_bias=True))


def test_findings_say_where_and_how_much() -> None:
    expected = torch.zeros(2, 3)
    found = expected.clone()
    found[1, 2] = 0.5
    finding = Finding.between(found, expected, "x", "example pos")
    assert finding == Finding(0.5, "x, example 1, pos 2")
    scaled = Finding.between(found * 100, expected + 100.0, "x", "example pos")
    assert scaled.error == pytest.approx(1.0)
    nan = Finding.between(torch.tensor([float("nan"), 0.0]), torch.zeros(2), "y", "pos")
    assert Finding.worst_of([finding, nan]) is nan


def test_ids_are_unique() -> None:
    with pytest.raises(AssertionError, match="two checks of A1"):
        ledger.check("A1", "again")(lambda subject: Finding(0.0, ""))


def test_provenance_says_how_the_checks_ran() -> None:
    provenance = audit(toy()).provenance
    assert (provenance.backend, provenance.dtype) == ("naive and flash", "float64")
