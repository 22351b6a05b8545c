"""P1 to P6: a code, a sum or a rotation that is off fails; shares by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.analyses.claims.complex_form import (
    as_complex,
    as_real,
    frequencies,
    score_terms,
    turn,
)
from headstream.analyses.claims.ledger import audit
from headstream.analyses.claims.variation import shares_of_variation
from headstream.analyses.evidence import Claim
from headstream.models import attention, decoder
from headstream.models.attention import Attention, PassContext
from headstream.models.decoder import Decoder
from headstream.models.embedding import PosEmbed

Make = Callable[..., Decoder]
Failed = Callable[..., set[str]]
Measured = Callable[..., list[Claim]]


def test_the_complex_form_by_hand() -> None:
    assert frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert as_complex(x).tolist() == [1 + 3j, 2 + 4j]
    assert as_real(as_complex(x)).equal(x)
    # A quarter turn takes the first of a pair to the second.
    quarter = turn(torch.tensor([math.pi / 2, 0.0], dtype=torch.float64))
    assert as_real(as_complex(x) * quarter).tolist() == pytest.approx([-3.0, 2.0, 1.0, 4.0])
    q = torch.zeros(1, 2, 1, 2, dtype=torch.float64)
    q[..., 0] = 1.0
    # One pair, one radian a token: (1, 0) against itself one token back is cos 1.
    terms = score_terms(q, q, 10000.0)
    assert terms.flatten().tolist() == pytest.approx([1.0, math.cos(1), math.cos(1), 1.0])


def test_a_code_that_is_not_a_rotation_fails_P1(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decoder.sinusoidal_vectors

    def off(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
        return right(positions, d_model, dtype) * (1 + 1e-7 * positions[..., None] ** 2)

    monkeypatch.setattr(decoder, "sinusoidal_vectors", off)
    assert failed(toy(positions="sinusoidal"), "P1", "P2") == {"P1", "P2"}


@pytest.mark.parametrize("positions", ["learned", "shortformer"])
def test_a_position_vector_that_is_off_fails_P2(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    right = PosEmbed.forward
    monkeypatch.setattr(PosEmbed, "forward", lambda self, ids: right(self, ids) * (1 + 1e-6))
    assert failed(toy(positions=positions), "P2") == {"P2"}


def patched_rotation(monkeypatch: pytest.MonkeyPatch, off: Callable[..., Tensor]) -> None:
    right = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, tables: off(right, x, tables))


def test_the_other_layout_fails_P3_and_keeps_lengths(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interleaved(right: Callable[..., Tensor], x: Tensor, tables: Any) -> Tensor:
        paired = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        first, second = right(paired, tables).chunk(2, -1)
        return torch.stack((first, second), -1).flatten(-2)

    patched_rotation(monkeypatch, interleaved)
    assert failed(toy(positions="rotary"), "P3", "P4", "P5") == {"P3"}


def test_a_rotation_that_grows_fails_P3_and_P4(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(right: Callable[..., Tensor], x: Tensor, tables: Any) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None]
        return right(x, tables) * (1 + 1e-7 * place)

    patched_rotation(monkeypatch, growing)
    assert failed(toy(positions="rotary"), "P3", "P4", "P6") == {"P3", "P4", "P6"}


def test_an_absolute_angle_breaks_the_common_shift_of_P3_and_P5(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decoder.rotary_tables

    def uneven(positions: Tensor, d_head: int, base: float, dtype: torch.dtype) -> Any:
        # Right below 500: only a shift beyond shows it.
        return right(positions + (positions >= 500) * positions // 2, d_head, base, dtype)

    monkeypatch.setattr(decoder, "rotary_tables", uneven)
    assert failed(toy(positions="rotary"), "P3", "P4", "P6") == {"P3"}


def test_values_that_are_turned_too_fail_P5(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Attention._attend

    def turned(self: Attention, q: Tensor, k: Tensor, v: Tensor, context: PassContext) -> Tensor:
        assert context.rotary is not None
        cos, sin = context.rotary
        first, second = v.chunk(2, -1)
        v = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return right(self, q, k, v, context)

    monkeypatch.setattr(Attention, "_attend", turned)
    assert failed(toy(positions="rotary"), "P4", "P5", "P6") == {"P5"}


def test_a_wrong_base_fails_P6_and_P3(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decoder.rotary_tables
    monkeypatch.setattr(
        decoder,
        "rotary_tables",
        lambda ids, d_head, base, dtype: right(ids, d_head, base * (1 + 1e-6), dtype),
    )
    found = failed(toy(positions="rotary"), "M2", "P3", "P4", "P5", "P6")
    assert found == {"M2", "P3", "P6"}


def test_rows_say_what_they_compare_with(toy: Make) -> None:
    rows = {row["id"]: row["worst"] for row in audit(toy(positions="rotary")).details["rows"]}
    assert "with the pattern free: " in rows["P5"]
    moved = float(rows["P5"].split("with the pattern free: ")[1].rstrip(")"))
    assert moved > 1e-3, "the position ids matter where the pattern is free"
    # d_head 8: four pairs, the slowest of 10000^(-6/8) = 0.001 a token.
    assert "one turn in 6.3 to 6,283.2 tokens" in rows["P6"]


def test_shares_of_variation_by_hand() -> None:
    # One query of two keys has scores 3 and 0, in terms 1 and 2; constants of a query drop out.
    terms = torch.zeros(2, 1, 1, 2, 2, dtype=torch.float64)
    terms[0, ..., 1, :] = torch.tensor([6.0, 5.0])
    terms[1, ..., 1, :] = torch.tensor([2.0, 0.0])
    # What no query may read does not count.
    terms[..., 0, 1] = 99.0
    assert shares_of_variation(terms).flatten().tolist() == pytest.approx([1 / 3, 2 / 3])
    flat = torch.ones_like(terms)
    assert bool(shares_of_variation(flat).isnan().all())


def test_share_of_position_is_none_without_vectors_and_all_without_content(
    toy: Make, measured: Measured
) -> None:
    model = toy(norm="none")
    with torch.no_grad():
        model.pos_embed.W_pos.zero_()
    (share,) = measured(model, "P2")
    assert share.value == pytest.approx(0.0)
    model = toy(norm="none")
    with torch.no_grad():
        model.embed.W_E.zero_()
    (share,) = measured(model, "P2")
    assert share.value == pytest.approx(1.0)
    assert "heads of layer 0" in share.reason
    assert "position-position 1.00" in share.reason
    (share,) = measured(toy(positions="shortformer"), "P2")
    assert "all heads" in share.reason


def test_share_of_fast_pairs_follows_the_weights(toy: Make, measured: Measured) -> None:
    model = toy(positions="rotary")
    # Pairs turn once in 6.3, 63, 628 and 6283 tokens; the text has 16.
    with torch.no_grad():
        for block in model.blocks:
            keep = torch.zeros(8)
            keep[[0, 4]] = 1.0
            block.attn.W_Q *= keep
    (share,) = measured(model, "P6")
    assert share.value == pytest.approx(1.0)
    assert "1 of 4 pairs turn once in 16 tokens" in share.reason
    assert "from the fastest: 1.00, 0.00, 0.00, 0.00" in share.reason
