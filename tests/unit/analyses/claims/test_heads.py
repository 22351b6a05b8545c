"""M2, M3 and M4: broken circuits and costs fail; overlap and composition by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstream.analyses.claims.ledger import audit
from headstream.analyses.evidence import Claim
from headstream.circuits.qk_ov import weights
from headstream.circuits.qk_ov.weights import ov_circuit
from headstream.models.attention import Attention
from headstream.models.decoder import Decoder

Make = Callable[..., Decoder]
Failed = Callable[..., set[str]]
Measured = Callable[..., list[Claim]]


def test_a_circuit_turned_the_wrong_way_fails_M2_alone(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = weights.turn_rows
    monkeypatch.setattr(weights, "turn_rows", lambda rows, by, base: right(rows, -by, base))
    assert failed(toy(positions="rotary")) == {"M2"}


def test_a_scale_that_the_circuits_do_not_know_fails_M2(toy: Make, failed: Failed) -> None:
    model = toy()
    assert failed(model, "M2") == set()
    for block in model.blocks:
        block.attn.scale *= 1 + 1e-7
    assert failed(model, "M2") == {"M2"}


def test_an_output_map_of_the_wrong_head_fails_M2(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstream.analyses.claims import heads

    def next_head(model: Decoder, layer: int, head: int, **options: Any) -> Any:
        return ov_circuit(model, layer, (head + 1) % model.config.n_heads, **options)

    monkeypatch.setattr(heads, "ov_circuit", next_head)
    assert failed(toy(norm="none"), "M1", "M2", "M3") == {"M2"}


def test_an_attention_that_multiplies_twice_fails_M3(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Attention._project_out

    def twice(self: Attention, z: torch.Tensor) -> torch.Tensor:
        return (right(self, z) + right(self, z)) / 2

    monkeypatch.setattr(Attention, "_project_out", twice)
    assert failed(toy(), "M1", "M2", "M3", "B1") == {"M3"}


def test_cost_is_the_closed_form(toy: Make) -> None:
    (row,) = (row for row in audit(toy()).details["rows"] if row["id"] == "M3")
    # Four 16 x 32 matrices; 24 tokens: 2 * 24 * 4 * 16 * 32 + 2 * 24^2 * 2 * 32.
    assert row["worst"].startswith("layer 0: 2,048 parameters, 172,032 operations at 24 tokens")


def plain(toy: Make, **options: object) -> Decoder:
    """Two layers of two heads of width 2 in a stream of 8, no norm."""
    return toy(n_heads=2, d_head=2, d_model=8, norm="none", positions="none", **options)


def test_heads_that_write_to_the_same_directions_overlap_by_one(
    toy: Make, measured: Measured
) -> None:
    model = plain(toy)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O.zero_()
            block.attn.W_O[0, 0, 0] = block.attn.W_O[0, 1, 1] = 1.0
            block.attn.W_O[1, 0, 1] = block.attn.W_O[1, 1, 0] = -3.0
    overlap, _ = measured(model, "M4")
    # The same two axes of eight, in another order, sign and size: 1, less the chance of 2/8.
    assert overlap.value == pytest.approx(0.75)
    assert overlap.n == 2
    assert "chance 0.25" in overlap.reason
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O[1].zero_()
            block.attn.W_O[1, 0, 2] = block.attn.W_O[1, 1, 0] = 1.0
    overlap, _ = measured(model, "M4")
    # One axis of two is shared.
    assert overlap.value == pytest.approx(0.5 - 0.25)


def test_the_head_that_is_read_composes_most(toy: Make, measured: Measured) -> None:
    model = plain(toy)
    with torch.no_grad():
        early, late = model.blocks[0].attn, model.blocks[1].attn
        early.W_O[0].zero_()
        early.W_O[0, 0, 5] = 1.0
        # L1H1 reads in its keys that axis and no other.
        late.W_K[1].zero_()
        late.W_K[1, 5, 0] = 1.0
    _, composition = measured(model, "M4")
    assert "most: K of L0H0 to L1H1 +0.65" in composition.reason, "1 less the chance 1/sqrt(8)"
    assert composition.n == 12
    assert composition.interval[0] <= composition.value <= composition.interval[1]


def test_random_heads_compose_by_chance(toy: Make, measured: Measured) -> None:
    model = toy(d_model=64, d_head=16, norm="rmsnorm", positions="none")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            draws = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=draws))
        for block in model.blocks:
            block.ln1.w.fill_(1.0)
    overlap, composition = measured(model, "M4")
    # science.md: 0.1247 for a stream of 64 against 1/8; over 48 pairs the mean wanders by 0.002.
    assert abs(composition.value) < 0.005
    assert "composition score less 0.125" in composition.reason
    assert "which 0 pass" in composition.reason
    assert abs(overlap.value) < 0.02


def test_rotary_composition_says_at_which_distance(toy: Make, measured: Measured) -> None:
    _, composition = measured(toy(positions="rotary"), "M4")
    assert composition.n == 48
    assert "Q and K at distance 1" in composition.reason


def test_an_interval_over_many_pairs_needs_no_bootstrap(
    toy: Make, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstream.analyses.claims import interplay

    model = toy(positions="none")
    _, bootstrapped = measured(model, "M4")
    monkeypatch.setattr(interplay, "_MANY", 10)
    _, normal = measured(model, "M4")
    assert normal.value == bootstrapped.value
    # 48 pairs, skewed: the two agree to a tenth of the interval's width.
    width = bootstrapped.interval[1] - bootstrapped.interval[0]
    assert normal.interval == pytest.approx(bootstrapped.interval, abs=width / 10)
