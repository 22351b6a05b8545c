"""The census without patterns: its sequences, its agreement with the definition, its refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstream.circuits import long_census as module
from headstream.circuits.heads import SCORES
from headstream.circuits.long_census import BlockCopies, draw_long, plan_long, score_long_heads
from headstream.circuits.measuring.measure import measure_attention
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TokenError
from headstream.models.zoo.constructed import constructed_induction

CONFIG = DecoderConfig(
    n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, d_head=4, d_vocab=20, n_ctx=80, bos_token_id=0
)


def test_the_constructed_circuit_is_found_whole_and_alone() -> None:
    census = score_long_heads(constructed_induction(), length=33, n=8)
    assert census.found("induction pattern") == ["L1H2"]
    assert census.found("previous-token") == ["L0H1"]
    assert (census.data["label"] == "none").sum() == 6
    value = census.data["value"].sel(layer=1, head=2)
    # No token of the control recurs, so the head rests on BOS; in the block it finds its copy.
    assert float(value.sel(score="sink")) == pytest.approx(1, abs=1e-6)
    assert float(value.sel(score="induction")) == pytest.approx(1, abs=1e-6)
    assert float(value.sel(score="induction_control")) == pytest.approx(0, abs=1e-6)


def test_it_is_found_beyond_the_vocabulary_too() -> None:
    census = score_long_heads(constructed_induction(), length=48, n=8)
    assert census.found("induction pattern") == ["L1H2"]
    assert any("47 tokens are drawn from 32" in note for note in census.notes)


@pytest.mark.parametrize("length", [5, 17, 70])
def test_equal_to_the_materialised_definition(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PRODUCTS", 64)
    model = Decoder(replace(CONFIG, positions="rotary"), seed=1, dtype=torch.float64)
    flash = score_long_heads(model, length=length, n=3).data
    naive = score_long_heads(model, length=length, n=3, backend="naive").data
    for name in ("value", "control_by_distance", "duplicate_control_by_distance"):
        np.testing.assert_allclose(flash[name], naive[name], atol=1e-12)
    np.testing.assert_array_equal(flash["chance"], naive["chance"])
    assert flash["score"].values.tolist() == list(SCORES)


def test_chance_is_what_uniform_attention_scores() -> None:
    model = Decoder(CONFIG, dtype=torch.float64)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.zero_()
    data = score_long_heads(model, length=30, n=3).data
    scores = [score for score in SCORES if score != "copying"]
    for head in range(CONFIG.n_heads):
        got = data["value"].sel(layer=1, head=head, score=scores)
        np.testing.assert_allclose(got, data["chance"].sel(score=scores), atol=1e-12)


def test_block_copies_by_hand() -> None:
    # Positions 0 a 1 b 2 c 3 a 4 b: a's copy is at 0 and b's at 1; after them stand b and c.
    text = torch.tensor([[5, 6, 7, 5, 6]])
    model = Decoder(replace(CONFIG, n_layers=1), dtype=torch.float64)
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    given = [BlockCopies(text, 2, True, name="after"), BlockCopies(text, 2, False, name="copy")]
    data = measure_attention(model, text, given)
    mean = (1 / 4 + 1 / 5) / 2
    for name in ("after", "copy"):
        np.testing.assert_allclose(data[name], mean)
        assert data[f"chance_{name}"].item() == pytest.approx(mean)
        assert data[f"queries_{name}"].item() == 2


def test_a_pair_differs_in_its_last_block_only() -> None:
    model = Decoder(CONFIG)
    plan = plan_long(model, 16)
    assert (plan.block, plan.distances) == (5, (5, 7, 8, 10))
    control = draw_long(plan, 6, torch.Generator().manual_seed(0))
    assert control.shape == (6, 16)
    assert (control[:, 0] == 0).all()
    assert all(len(set(row)) == 16 for row in control.tolist()), "no token occurs twice"
    for distance in plan.distances:
        text = module.repeat_block(control, plan.block, distance)
        assert torch.equal(text[:, :-5], control[:, :-5])
        assert torch.equal(text[:, -5:], text[:, 11 - distance : 16 - distance])


def test_same_seed_same_census() -> None:
    before = torch.random.get_rng_state()
    model = Decoder(CONFIG)
    one, other = (score_long_heads(model, length=40, n=4, seed=3).data for _ in range(2))
    assert one.identical(other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_bad_input() -> None:
    model = Decoder(CONFIG)
    with pytest.raises(ShapeError, match=r"length=81 is more than the n_ctx=80.*ask for 5 to 80"):
        score_long_heads(model, length=81)
    with pytest.raises(ShapeError, match="length=4 is too short for a repeat: the smallest takes"):
        score_long_heads(model, length=4)
    with pytest.raises(ShapeError, match="n must be at least 2 sequences, got 1"):
        score_long_heads(model, length=9, n=1)
    with pytest.raises(TokenError, match="2 content tokens are too few"):
        score_long_heads(Decoder(replace(CONFIG, d_vocab=3)), length=9)
    with pytest.raises(ShapeError, match="n_ctx=3 is too short for a repeat: the smallest takes 5"):
        score_long_heads(Decoder(replace(CONFIG, n_ctx=3)), length=9)
    with pytest.raises(ShapeError, match="seed must be a whole number"):
        score_long_heads(model, length=9, seed=-1)


@pytest.mark.usefixtures("unchecked")
def test_numbers_that_are_not_whole() -> None:
    model = Decoder(CONFIG)
    with pytest.raises(ShapeError, match=r"n must be a whole number of sequences, got 2\.5"):
        score_long_heads(model, length=9, n=2.5)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"length=9\.5 is too short"):
        score_long_heads(model, length=9.5)  # type: ignore[arg-type]
