"""The ledger passes on sound models of every kind, and fails on one that is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headstream.analyses.claims import ledger
from headstream.analyses.claims.ledger import Finding, audit
from headstream.models.decoder import Decoder
from headstream.models.errors import HeadstreamError, ShapeError
from headstream.models.store import load

Make = Callable[..., Decoder]
Failed = Callable[..., set[str]]

CONFIGS = {
    "learned-layernorm-mlp": dict(d_mlp=24, attn_bias=True, mlp_bias=True, unembed_bias=True),
    "rotary-rmsnorm-gated-grouped": dict(
        positions="rotary", norm="rmsnorm", d_mlp=24, gated_mlp=True, n_kv_heads=2
    ),
    "rotary-biased-unscaled": dict(
        positions="rotary", attn_bias=True, attn_scale=0.1, d_mlp=70, activation="silu"
    ),
    "sinusoidal-grouped-biased": dict(
        positions="sinusoidal", n_kv_heads=2, attn_bias=True, d_mlp=8, activation="gelu_new"
    ),
    "one-head-one-layer": dict(n_layers=1, n_heads=1, d_head=16, d_mlp=8, activation="relu"),
    "shortformer-attention-only": dict(positions="shortformer", bos_token_id=0),
    "sinusoidal-no-norm": dict(positions="sinusoidal", norm="none"),
    "tied-no-positions": dict(positions="none", tied_embeddings=True),
    "short": dict(n_ctx=3),
    "one-number-a-head": dict(d_head=1, n_heads=2, d_model=4),
    "one-token": dict(n_ctx=1, positions="rotary"),
    "one-token-sinusoidal": dict(n_ctx=1, positions="sinusoidal"),
}
PROVEN = [
    "A1",
    "A2",
    "A9",
    "A10",
    "M1",
    "M2",
    "M3",
    "B1",
    "B2",
    "B3",
    "N1",
    "N2",
    "F1",
    "F2",
    "P1",
    "P2",
    "P3",
    "P4",
    "P5",
    "P6",
    "L1",
]
MEASURED = ["M4", "B3", "B4", "P2", "P6"]


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_sound_models_pass(toy: Make, options: dict[str, object]) -> None:
    result = audit(toy(**options))
    assert not result.failed, [r for r in result.details["rows"] if not r["passed"]]
    rows = result.details["rows"]
    ids = list(dict.fromkeys(row["id"] for row in rows if row["id"] != "M4"))
    assert ids == PROVEN, "the ledger's own order, every check once"
    for row in rows:
        if row["applies"]:
            assert row["largest_error"] <= row["bound"] == 1e-10
            assert row["worst"], row
        else:
            assert row["reason"], row
    seen = {row["id"] for row in rows if not row["applies"]}
    for claim in result.measured:
        assert claim.where == "audit"
        assert claim.reason
        assert claim.n is not None
        seen.add(claim.id)
        # One pair or one sequence has no interval.
        if claim.n > 1:
            assert claim.interval is not None
            assert claim.value is not None
            assert claim.interval[0] <= claim.value <= claim.interval[1]
    assert seen >= set(MEASURED), "every measurement is made, or says why not"


def test_what_does_not_apply_says_why(toy: Make) -> None:
    def reasons(**options: object) -> dict[str, str]:
        rows = audit(toy(**options)).details["rows"]
        return {row["id"]: row["reason"] for row in rows if not row["applies"]}

    bare = reasons(norm="none", positions="none", n_kv_heads=2)
    assert bare["N1"] == bare["N2"] == "this model has no norm"
    assert bare["B3"] == "this model has no norm: nothing is left over"
    assert bare["F1"] == bare["F2"] == "no MLP in this model"
    assert bare["P2"] == bare["P3"] == "this model has no positions"
    assert "share keys and values" in bare["M3"]
    learned = reasons()
    assert learned["P1"] == "positions are learned, not sinusoidal"
    assert learned["P3"] == learned["P6"] == "positions are learned, not rotary"
    short = reasons(positions="rotary", n_ctx=3)
    assert short["P2"] == "rotary positions turn q and k: nothing is added"
    assert "too short to decode in pieces" in short["A10"]
    one = audit(toy(n_ctx=1, positions="sinusoidal", n_layers=1, n_heads=1)).details["rows"]
    single = {row["id"]: row["reason"] for row in one if not row["applies"]}
    assert single["P1"] == "n_ctx is 1: there is no shift"
    assert single["P2"] == "no head's scores vary over the keys"
    assert [row["reason"] for row in one if row["id"] == "M4"] == [
        "one head a layer: no two share a layer",
        "one layer: no head comes after another",
    ]


def test_one_row_where_check_and_measurement_do_not_apply_alike(toy: Make) -> None:
    rows = audit(toy()).details["rows"]
    assert [row["id"] for row in rows].count("P6") == 1


def test_what_is_measured_on_tokens_of_your_own_says_so(toy: Make) -> None:
    result = audit(toy(), torch.arange(18).reshape(3, 6))
    (share,) = (claim for claim in result.measured if claim.id == "B4")
    assert share.n == 3
    assert "the 3 rows of tokens given" in share.reason


def test_shipped_models_pass() -> None:
    assert not audit(load("constructed-induction")).failed


def test_a_flash_kernel_that_is_off_fails_L1(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstream.models import attention

    right = attention.attend_flash

    def off(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        z, lse = right(*args, **options)  # type: ignore[arg-type]
        return z * (1 + 1e-7), lse

    monkeypatch.setattr(attention, "attend_flash", off)
    assert failed(toy(), "L1") == {"L1"}


def test_a_mask_that_leaks_fails_A9_and_A10(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstream.models import attention

    def leaky(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)

    monkeypatch.setattr(attention, "attend_flash", leaky)
    assert failed(toy(), "A1", "A9", "A10", "L1") == {"A1", "A9", "A10", "L1"}


def test_a_write_that_is_lost_fails_B1_and_B2(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstream.models.block import Block

    right = Block.forward

    def lossy(self: Block, resid: torch.Tensor, context: object) -> torch.Tensor:
        out = right(self, resid, context)  # type: ignore[arg-type]
        return self.hook_resid_post(out + 1e-6)  # type: ignore[no-any-return]

    monkeypatch.setattr(Block, "forward", lossy)
    assert failed(toy(norm="none", positions="none")) >= {"B1", "B2"}


def test_an_output_bias_that_is_forgotten_fails_M1(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstream.models.attention import Attention

    right = Attention._project_out

    def forgetful(self: Attention, z: torch.Tensor) -> torch.Tensor:
        return right(self, z) - self.b_O

    monkeypatch.setattr(Attention, "_project_out", forgetful)
    assert failed(toy(attn_bias=True), "M1") == {"M1"}


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


def test_provenance_says_how_the_checks_ran(toy: Make) -> None:
    provenance = audit(toy()).provenance
    assert (provenance.backend, provenance.dtype) == ("naive and flash", "float64")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_far_from_zero_are_scores_all_the_same(
    toy: Make, failed: Failed, sign: float
) -> None:
    """The checks' own softmax holds where exp(score) under- or overflows, and a later key's score
    is of no account."""
    model = toy(attn_bias=True)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.b_Q.fill_(40.0 * sign)
            block.attn.b_K.fill_(40.0)
    assert failed(model, "A1", "M2") == set()
    with torch.no_grad():
        # Each position's key outdoes those before it by a thousand.
        model = toy(norm="none", n_layers=1)
        model.pos_embed.W_pos[:] = 1000.0 * sign * torch.arange(16.0)[:, None]
        model.blocks[0].attn.W_Q.abs_()
        model.blocks[0].attn.W_K.abs_()
    assert failed(model, "A1", "M2") == set()


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_audited(toy: Make) -> None:
    model = toy()
    assert not audit(model, torch.tensor([1, 2, 3])).failed
    for tokens, words in (
        ("a b", r"tokens must be an int64 tensor \[batch, pos\], got str"),
        (torch.zeros(0, 3, dtype=torch.long), "not empty"),
        (torch.zeros(1, 17, dtype=torch.long), "tokens are 17 long, over n_ctx = 16"),
        (torch.tensor([[20]]), "is 20, outside the vocabulary"),
    ):
        with pytest.raises(HeadstreamError, match=words):
            audit(model, tokens)
    with pytest.raises(ShapeError, match="seed must be a whole number"):
        audit(model, seed=1.5)
