"""Rows of edited attention by hand, their precision, and what a gradient keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models import attend_edited
from headstream.models.attend_edited import EditedAttention
from headstream.models.edits import EdgeCut
from headstream.models.position_set import PositionSet


def attention(
    q: Tensor, k: Tensor, cut: EdgeCut, *, key_mask: Tensor | None = None
) -> EditedAttention:
    return EditedAttention([cut], q, k, scale=1.0, key_mask=key_mask, cached=False)


def cut_of(keys: Any, queries: Any = None, *, renormalise: bool = True) -> EdgeCut:
    places = None if queries is None else PositionSet(queries, "queries")
    return EdgeCut(PositionSet(keys, "keys"), places, (0,), renormalise, "layer 0")


@pytest.fixture
def row() -> tuple[Tensor, Tensor, Tensor]:
    """Scores 0, ln 2, ln 5 of the last query; keys carry the values 1, 10, 100."""
    scores = torch.tensor([1.0, 2.0, 5.0]).double().log()
    q = torch.zeros(1, 3, 1, 1).double()
    q[0, 2] = 1.0
    values = torch.tensor([1.0, 10.0, 100.0]).double()
    return q, scores.reshape(1, 3, 1, 1), values.reshape(1, 3, 1, 1)


def test_a_cut_with_renormalisation_by_hand(row: tuple[Tensor, Tensor, Tensor]) -> None:
    """Weights 1/8 2/8 5/8; without the last key 1/3 2/3, and e^lse = 3."""
    q, k, v = row
    z, lse = attention(q, k, cut_of([2])).flash(v, need_lse_grad=False)
    assert z[0, 2, 0, 0] == pytest.approx((1 + 2 * 10) / 3)
    assert lse[0, 0, 2].exp() == pytest.approx(3)
    # The others read nothing of key 2: uniform over one and two keys.
    assert z[0, :2, 0, 0].tolist() == pytest.approx([1, 5.5])


def test_a_cut_without_renormalisation_by_hand(row: tuple[Tensor, Tensor, Tensor]) -> None:
    """The other weights stay 1/8 and 2/8; the log-sum-exp is that of the scores, ln 8."""
    q, k, v = row
    z, lse = attention(q, k, cut_of([2], renormalise=False)).flash(v, need_lse_grad=False)
    assert z[0, 2, 0, 0] == pytest.approx((1 + 2 * 10) / 8)
    assert lse[0, 0, 2].exp() == pytest.approx(8)
    assert z[0, :2, 0, 0].tolist() == pytest.approx([1, 5.5])


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_query_whose_keys_are_all_cut(
    row: tuple[Tensor, Tensor, Tensor], renormalise: bool
) -> None:
    q, k, v = (x.requires_grad_() for x in row)
    cut = cut_of([0, 1, 2], [1, 2], renormalise=renormalise)
    z, lse = attention(q, k, cut).flash(v, need_lse_grad=True)
    assert z[0, :, 0, 0].tolist() == pytest.approx([1, 0, 0])
    expected = [0.0, -torch.inf, -torch.inf] if renormalise else [0.0, None, None]
    for got, value in zip(lse[0, 0].tolist(), expected, strict=True):
        assert value is None or got == value
    if not renormalise:
        assert lse[0, 0].exp().tolist() == pytest.approx([1, 2, 8])
    for gradient in torch.autograd.grad(z.sum() + lse[torch.isfinite(lse)].sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("score", [20.0, 80.0])
def test_cut_keys_that_hold_nearly_all_the_mass(score: float) -> None:
    """Without renormalisation nothing is subtracted: float32 keeps its relative precision."""
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 1, 4, generator=draws) for _ in "qkv")
    q[..., 0], k[..., 0], k[:, 0, 0, 0] = 1.0, 0.0, score
    narrow, _ = attention(q, k, cut_of([0], renormalise=False)).flash(v, need_lse_grad=False)
    exact, _ = attention(q.double(), k.double(), cut_of([0], renormalise=False)).flash(
        v.double(), need_lse_grad=False
    )
    kept = exact[0, 1:].abs().amax()
    assert kept < torch.exp(torch.tensor(12 - score))
    # eps * |lse| of relative error: 80 * 1.2e-7, and a few roundings of scores.
    assert (narrow - exact)[0, 1:].abs().amax() <= 5e-5 * kept


def test_what_is_kept_for_a_gradient_grows_like_n(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other query cut, each attended alone: not one copy of the keys for each of them."""
    monkeypatch.setattr(attend_edited, "GAP", 1)
    kept = []
    for length in (64, 128):
        q, k, v = (torch.ones(2, length, 2, 4).double().requires_grad_() for _ in "qkv")
        held: dict[int, int] = {}

        def pack(x: Tensor, held: dict[int, int] = held) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            cut = cut_of([0], slice(1, None, 2))
            attention(q, k, cut).flash(v, need_lse_grad=True)
        kept.append(sum(held.values()))
    assert kept[1] < 2.2 * kept[0]
