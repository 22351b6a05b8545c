"""Sinks: known by hand on the constructed circuit, honest about what was not found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstream.analyses.evidence import Evidence
from headstream.analyses.kinds import SinksResult
from headstream.analyses.stored import load_result
from headstream.analyses.studies.sinks import sinks
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TokenError
from headstream.models.store import load
from headstream.models.zoo.constructed import constructed_induction

LENGTH = 16
CONFIG = DecoderConfig(
    n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=30, n_ctx=32, bos_token_id=0
)


def without_repeats(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(32, generator=generator)[: LENGTH - 1] + 1 for _ in range(n)]
    return torch.cat([torch.zeros(n, 1, dtype=torch.int64), torch.stack(rows)], 1)


@pytest.fixture(scope="module")
def constructed() -> SinksResult:
    return sinks(constructed_induction(), tokens=without_repeats(8))


def labels(result: SinksResult) -> dict[str, Evidence]:
    return {claim.id: claim.evidence for claim in result.claims}


def test_the_induction_head_rests_on_bos_which_has_no_value(constructed: SinksResult) -> None:
    data = constructed.data
    head = data.sel(layer=1, head=2)
    assert float(head["sink_mass"]) == pytest.approx(1, abs=1e-6)
    assert float(head["sink_rate"]) == 1
    assert float(head["value_drain"]) == float(head["written_drain"]) == 0
    np.testing.assert_allclose(head["mass_by_position"][1:], 1, atol=1e-6)
    # The previous-token head reads it from the second token only; its value is like the others'.
    before = data.sel(layer=0, head=1)
    assert float(before["sink_mass"]) == pytest.approx(1 / (LENGTH - 1), abs=1e-6)
    assert float(before["value_drain"]) == pytest.approx(1)
    np.testing.assert_allclose(before["mass_by_position"][2:], 0, atol=1e-6)
    # Heads without weights attend evenly, and a ratio of nothing to nothing is no number.
    idle = data.sel(layer=0, head=0)
    np.testing.assert_allclose(idle["sink_mass"], constructed.details["chance"], rtol=1e-6)
    np.testing.assert_allclose(idle["mass_by_position"], data["chance_by_position"], rtol=1e-6)
    assert np.isnan(idle["value_drain"])
    # Streams are sums of one-hot vectors of equal number: no peak before the second layer.
    assert float(data["peak"][0]) == pytest.approx(1, abs=1e-6)


def test_its_weight_can_be_dropped_but_must_not_go_elsewhere(constructed: SinksResult) -> None:
    effect = constructed.data["effect"]
    assert abs(float(effect.sel(cut="dropped", layer=1, head=2))) < constructed.details["floor"]
    assert float(effect.sel(cut="redistributed", layer=1, head=2)) > 0.3
    found = labels(constructed)
    assert found["sinks.L1H2"] == Evidence.MEASURED
    assert found["sinks.L1H2.dropped"] == Evidence.UNKNOWN
    assert found["sinks.L1H2.redistributed"] == Evidence.CAUSAL
    assert found["sinks.all_heads.redistributed"] == Evidence.CAUSAL
    (claim,) = [c for c in constructed.claims if c.id == "sinks.L1H2.dropped"]
    assert claim.reason == "its effects are zero to rounding"
    assert "L0H0" not in "".join(found)


def test_the_summary_and_the_file(constructed: SinksResult, tmp_path: Path) -> None:
    words = constructed.summary()
    assert words.startswith(
        "1 of 8 heads rests on the first token (share of its attention, chance 0.16): L1H2 1.00"
    )
    assert "sink rate 12.5% at eps = 0.3, T = 16" in words
    cost = float(constructed.data["effect"].sel(cut="redistributed", layer=1, head=2))
    assert f"cutting it raises the loss: L1H2 {cost:+.2f} nats (n = 8)" in words
    (claim,) = [c for c in constructed.claims if c.id == "sinks.L1H2.redistributed"]
    assert claim.statement.endswith("its weight redistributed, raises the loss")
    path = constructed.save(tmp_path / "sinks.json")
    again = load_result(path)
    assert isinstance(again, SinksResult)
    assert again.summary() == words
    assert again.claims[0].statement == constructed.claims[0].statement


def test_many_heads_are_counted_after_the_first_few(constructed: SinksResult) -> None:
    data = constructed.data.copy(deep=True)
    for name in ("sink_mass", "sink_mass_low"):
        data[name][:] = 0.9
    words = replace(constructed, data=data).summary()
    assert words.startswith(
        "8 of 8 heads rest on the first token (share of their attention, chance"
    )
    assert "): L0H0 0.90, L0H1 0.90, L0H2 0.90, L0H3 0.90 and 4 more; sink rate" in words


def test_a_claim_names_its_tokens_and_a_single_head_is_told_once() -> None:
    """The census says it of random tokens: two claims of one head must differ in words."""
    found = sinks(load("backcopy-1l"), n=8)
    statements = {claim.id: claim.statement for claim in found.claims}
    assert statements["sinks.L0H0"] == "L0H0 rests on the first token of the task's prompts"
    assert list(statements) == ["sinks.L0H0", "sinks.L0H0.dropped", "sinks.L0H0.redistributed"]
    drawn = sinks(load("backcopy-1l"), n=2, length=8)
    assert drawn.claims[0].statement == "L0H0 rests on the first token of random tokens"


def test_a_model_without_a_sink_says_so() -> None:
    model = Decoder(CONFIG)
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    result = sinks(model, n=6, length=20)
    assert result.summary().startswith("no head of 2 rests on the first token: the largest mass")
    assert result.resting == []
    np.testing.assert_allclose(result.data["sink_mass"], result.details["chance"], rtol=1e-5)
    assert all(claim.evidence != Evidence.MEASURED for claim in result.claims)
    assert "the first token is BOS" in result.details["notes"]


def test_without_bos_the_first_token_is_measured_and_it_is_said() -> None:
    result = sinks(Decoder(replace(CONFIG, bos_token_id=None)), n=6, length=10)
    assert any("no BOS stands first" in note for note in result.details["notes"])
    assert any("T = 10 tokens, not the usual 64" in note for note in result.details["notes"])


def test_five_sequences_are_too_few_for_a_cause() -> None:
    result = sinks(constructed_induction(), tokens=without_repeats(5))
    assert Evidence.CAUSAL not in labels(result).values()
    reasons = [c.reason for c in result.claims if c.id == "sinks.L1H2.redistributed"]
    assert reasons == ["n = 5, and at least 6 sequences are needed; more would settle it"]


def test_padding_changes_nothing() -> None:
    model, tokens = Decoder(CONFIG, dtype=torch.float64), without_repeats(3)[:, :9] % 30
    pads = torch.zeros(3, 2, dtype=torch.int64)
    mask = torch.cat([pads, torch.ones_like(tokens)], 1)
    plain = sinks(model, tokens=tokens)
    padded = sinks(model, tokens=torch.cat([pads, tokens], 1), attention_mask=mask)
    for name in ("sink_mass", "sink_rate", "value_drain", "peak", "together"):
        np.testing.assert_allclose(padded.data[name], plain.data[name], atol=1e-10)
    positions = padded.data["mass_by_position"]
    np.testing.assert_allclose(positions[..., :9], plain.data["mass_by_position"], atol=1e-10)


def test_zoo_prompts_are_the_default_and_seeds_repeat() -> None:
    model = constructed_induction()
    one, other = sinks(model, n=6), sinks(model, n=6)
    assert one.details["inputs"] == "clean prompts of the model's task, each followed by its answer"
    assert one.data.identical(other.data)


def test_bad_input() -> None:
    model = Decoder(CONFIG)
    with pytest.raises(ShapeError, match="length=33 is out of range"):
        sinks(model, length=33)
    with pytest.raises(ShapeError, match="2 real tokens, and a sink and its control take at least"):
        sinks(model, tokens=torch.tensor([[0, 1]]))
    with pytest.raises(ShapeError, match="n must be at least 1 sequences, got 0"):
        sinks(model, n=0)
    with pytest.raises(ShapeError, match="attention_mask belongs to tokens"):
        sinks(model, attention_mask=torch.ones(1, 4))
    with pytest.raises(TokenError):
        sinks(model, tokens=torch.tensor([[0, 1, 99]]))


def test_over_few_tokens_there_is_no_sink_rate() -> None:
    # Uniform attention has importance H_4 / 4 = 0.52 on the first of four tokens.
    result = sinks(Decoder(CONFIG), n=6, length=4)
    assert result.details["rate"] is None
    assert np.isnan(result.data["sink_rate"]).all()
    assert "no sink rate at eps = 0.3, T = 4" in result.summary()
    assert any(
        "over 4 tokens uniform attention itself is above eps = 0.3" in note
        for note in result.details["notes"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": True}, "n must be a whole number"),
        ({"length": True}, "length must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
        (
            {"tokens": torch.zeros(2, 4, dtype=torch.int64), "length": 4},
            "length=4 belongs to drawn sequences",
        ),
    ],
)
def test_numbers_are_checked_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        sinks(Decoder(CONFIG), **options)


def test_a_weight_that_is_no_number_is_named() -> None:
    model = Decoder(CONFIG)
    with torch.no_grad():
        model.blocks[0].attn.W_V[0, 0, 0] = torch.nan
    with pytest.raises(ShapeError, match="W_V"):
        sinks(model, n=6, length=8)


def test_a_cut_that_helps_is_told_as_such() -> None:
    """What the head writes after reading BOS lowers the right logit: without it the loss falls."""
    tokens = without_repeats(8)
    model = constructed_induction()
    with torch.no_grad():
        attn = model.blocks[1].attn
        # The induction head gives BOS itself a value: it is announced as the next token.
        attn.W_V[2, 0, 0] = 1.0
    result = sinks(model, tokens=tokens)
    cost = float(result.data["effect"].sel(cut="dropped", layer=1, head=2))
    assert cost < -0.5
    assert f"cutting it lowers the loss: L1H2 {cost:+.2f} nats" in result.summary()
    (claim,) = [c for c in result.claims if c.id == "sinks.L1H2.dropped"]
    assert claim.evidence is Evidence.CAUSAL
    assert claim.statement.endswith("its weight dropped, lowers the loss")


def test_without_a_sink_the_summary_does_not_speak_of_one() -> None:
    words = sinks(load("decoy-2l"), n=8).summary()
    assert words.startswith("no head of 4 rests on the first token")
    assert "cutting the little that is there raises the loss: L1H0 +0." in words
    assert "cutting it" not in words


def test_logits_that_overflow_are_refused() -> None:
    model = Decoder(CONFIG)
    with torch.no_grad():
        model.unembed.W_U.mul_(1e38)
    with pytest.raises(ShapeError, match=r"not finite: its logits overflow torch\.float32"):
        sinks(model, n=4, length=10)
