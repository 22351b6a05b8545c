"""N2, and what is left over where the norm's scale moves: B3 and B4 measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstream.analyses.claims.ledger import audit
from headstream.analyses.evidence import Claim
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.decoder import Decoder
from headstream.models.norms import LayerNorm, RMSNorm

Make = Callable[..., Decoder]
Failed = Callable[..., set[str]]
Measured = Callable[..., list[Claim]]


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_with_eps_outside_the_root_fails_N2(
    toy: Make, failed: Failed, monkeypatch: pytest.MonkeyPatch, kind: type[LayerNorm | RMSNorm]
) -> None:
    def outside(self: LayerNorm | RMSNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if kind is LayerNorm else x
        scale = self.hook_scale(centred.square().mean(-1, keepdim=True).sqrt() + self.eps)
        out: Tensor = self.hook_normalized(centred / scale) * self.w
        return out + self.b if isinstance(self, LayerNorm) else out

    monkeypatch.setattr(kind, "forward", outside)
    norm = "layernorm" if kind is LayerNorm else "rmsnorm"
    assert failed(toy(norm=norm), "N2") == {"N2"}


def test_how_much_eps_moves_stands_beside(toy: Make) -> None:
    (row,) = (row for row in audit(toy(eps=0.1)).details["rows"] if row["id"] == "N2")
    assert row["passed"]
    moved = float(row["worst"].split("eps moves it by up to ")[1].rstrip(")"))
    assert moved > 0.01, "an eps that matters is known exactly all the same"


def test_nothing_is_left_over_where_writes_do_not_move_the_scale(
    toy: Make, measured: Measured
) -> None:
    tiny = toy(n_layers=1, norm="rmsnorm", positions="none")
    with torch.no_grad():
        tiny.blocks[0].attn.W_O *= 1e-9
        # What is left is the embedding: deleting it deletes its logit, whatever the scale is.
    (remainder,) = measured(tiny, "B3")
    assert remainder.value is not None
    assert remainder.value < 1e-6


def test_the_remainder_by_hand(toy: Make, measured: Measured) -> None:
    model = toy(n_layers=1, n_heads=1, norm="rmsnorm", positions="none").double()
    tokens = torch.tensor([[3, 5, 7]])
    (claim,) = measured(model, "B3", tokens)
    embed, head = (
        torch.as_tensor(decompose_residual(model, tokens).writes.values[i, 0, -1]) for i in (0, 1)
    )
    answer = int(model(tokens)[0, -1].argmax())
    reader = (model.W_U[:, answer] * model.ln_final.w).detach()

    def logit(stream: Tensor) -> float:
        return float(stream @ reader / (stream.square().mean() + model.config.eps).sqrt())

    whole = embed + head
    scale = float((whole.square().mean() + model.config.eps).sqrt())
    linear = torch.tensor([float(write @ reader) / scale for write in (embed, head)])
    effects = torch.tensor([logit(whole) - logit(head), logit(whole) - logit(embed)])
    by_hand = float((effects - linear).square().sum().sqrt() / linear.square().sum().sqrt())
    assert claim.value == pytest.approx(by_hand, rel=1e-5)
    assert claim.interval is None, "one sequence has no interval"


def test_linear_paths_explain_all_of_attention_alone_and_less_with_norms_and_mlps(
    toy: Make, measured: Measured
) -> None:
    (exact,) = measured(toy(norm="none"), "B4")
    assert exact.value == pytest.approx(1.0, abs=1e-12)
    assert "this attention-only model" in exact.reason
    (normed,), (full,) = measured(toy(), "B4"), measured(toy(d_mlp=24), "B4")
    assert normed.value is not None
    assert full.value is not None
    assert full.value < normed.value < 1 - 1e-3
    assert "each MLP's output at its mean" in full.reason
    assert full.reason.startswith("this model with MLPs, ")


def test_a_model_whose_logits_are_all_alike_has_no_share(toy: Make) -> None:
    model = toy(norm="none", unembed_bias=True)
    with torch.no_grad():
        model.unembed.W_U.zero_()
    (row,) = (row for row in audit(model).details["rows"] if row["id"] == "B4")
    assert "there is nothing to explain" in row["reason"]
