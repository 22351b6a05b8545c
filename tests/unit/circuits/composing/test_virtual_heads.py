"""Virtual heads against what the two heads really do when patterns are held."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.circuits.composing.virtual_heads import virtual_head, virtual_ov
from headstream.circuits.interventions import cut_edges, freeze_attention
from headstream.circuits.qk_ov.weights import ov_circuit
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, HookError, ShapeError
from headstream.models.hooks import capture, edited
from headstream.models.store import load

# Float64 sums of a few dozen terms of order 1 to 10.
EXACT = 1e-10
Build = Callable[..., Decoder]


def test_pattern_of_constructed_induction_by_hand() -> None:
    """L1H2 attends to the token after the earlier copy, L0H1 to the token before that: together
    they attend to the earlier copy itself."""
    model = load("constructed-induction")
    tokens = torch.tensor([[0, 5, 6, 7, 8, 5, 6, 7]])
    found = virtual_head(model, tokens, [(0, 1), (1, 2)])
    assert found.name == "L0H1 -> L1H2"
    expected = torch.zeros(8, 8, dtype=torch.float64)
    # Queries 5, 6, 7 find their copies at 1, 2, 3; the others rest on BOS, which sees itself.
    for query, key in zip(range(8), [0, 0, 0, 0, 0, 1, 2, 3], strict=True):
        expected[query, key] = 1.0
    torch.testing.assert_close(found.pattern[0], expected, rtol=0, atol=1e-8)
    assert repr(found) == "<virtual head L0H1 -> L1H2: 1 x 8 positions, rank <= 48>"


@pytest.mark.parametrize("mlp", [None, 8])
def test_its_write_is_what_the_second_head_loses_without_the_first(
    build: Build, tokens: Tensor, mlp: int | None
) -> None:
    """Take the first head's write out of the stream, patterns held: the second head's result falls
    by what the virtual head writes (no norm, grouped heads)."""
    model = build({"norm": "none", "n_kv_heads": 2, "d_mlp": mlp})
    result = "blocks.1.attn.hook_result"
    names = ["blocks.0.hook_resid_pre", "blocks.0.attn.hook_result", result]
    _, acts = capture(model, tokens, names)
    write = acts["blocks.0.attn.hook_result"][:, :, 1]
    edits: dict[str, Any] = {"blocks.1.hook_resid_pre": lambda stream: stream - write}
    with freeze_attention(model, tokens), edited(model, edits):
        _, after = capture(model, tokens, result)
    fallen = (acts[result] - after[result])[:, :, 2]
    found = virtual_head(model, tokens, [(0, 1), (1, 2)])
    expected = found.weights @ acts["blocks.0.hook_resid_pre"] @ found.ov.AB
    torch.testing.assert_close(fallen, expected, rtol=0, atol=EXACT)
    assert fallen.abs().max() > 0.1
    torch.testing.assert_close(found.weights, found.pattern, rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_on_the_way(build: Build, tokens: Tensor, norm: str) -> None:
    """Step by step from the activations of the run: gains, centring, and the run's scales."""
    model = build({"norm": norm, "n_kv_heads": 2, "d_mlp": 8})
    names = ["blocks.*.attn.hook_pattern", "blocks.*.ln1.*", "blocks.0.hook_resid_pre"]
    _, acts = capture(model, tokens, names, backend="naive")
    first, second = (block.attn for block in model.blocks)
    read = acts["blocks.0.ln1.hook_normalized"] * model.blocks[0].ln1.w  # type: ignore[union-attr]
    pattern = acts["blocks.0.attn.hook_pattern"][:, 3]
    write = pattern @ read @ first.W_V[1] @ first.W_O[3]
    if norm == "layernorm":
        write = write - write.mean(-1, keepdim=True)
    read = write / acts["blocks.1.ln1.hook_scale"] * model.blocks[1].ln1.w  # type: ignore[union-attr]
    write = acts["blocks.1.attn.hook_pattern"][:, 1] @ read @ second.W_V[0] @ second.W_O[1]
    if norm == "layernorm":  # `ov` leaves the mean out that nobody reads
        write = write - write.mean(-1, keepdim=True)
    found = virtual_head(model, tokens, [(0, 3), (1, 1)])
    expected = found.weights @ acts["blocks.0.hook_resid_pre"] @ found.ov.AB
    torch.testing.assert_close(write.detach(), expected, rtol=0, atol=EXACT)
    assert write.abs().max() > 0.1


def test_rows_sum_to_one_and_none_where_no_key_may_be_read(build: Build, tokens: Tensor) -> None:
    model = build({"n_layers": 3})
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    found = virtual_head(model, tokens, [(0, 1), (1, 2), (2, 0)], attention_mask=mask)
    sums = found.pattern.sum(-1)
    expected = torch.ones_like(sums)
    expected[1, :2] = 0.0
    torch.testing.assert_close(sums, expected, rtol=0, atol=EXACT)
    assert not bool(found.pattern.triu(1).any())


def test_ov_is_the_product_in_the_order_of_the_layers(build: Build) -> None:
    model = build({"n_layers": 3, "n_kv_heads": 2, "norm": "rmsnorm"})
    heads = [(0, 1), (1, 3), (2, 2)]
    plain = [ov_circuit(model, *pair, space="residual").AB for pair in heads]
    found = virtual_ov(model, heads, norms="ignored")
    assert found.A.shape == (16, 4)
    torch.testing.assert_close(found.AB, plain[0] @ plain[1] @ plain[2], rtol=0, atol=EXACT)
    wrong = plain[2] @ plain[1] @ plain[0]
    assert (found.AB - wrong).abs().max() > 0.01
    gains = [torch.diag(block.ln1.w.detach()) for block in model.blocks]  # type: ignore[union-attr]
    folded = gains[0] @ plain[0] @ gains[1] @ plain[1] @ gains[2] @ plain[2]
    torch.testing.assert_close(virtual_ov(model, heads).AB, folded, rtol=0, atol=EXACT)
    final = torch.diag(model.ln_final.w.detach())  # type: ignore[union-attr]
    words = model.W_E @ folded @ final @ model.W_U
    vocab = virtual_ov(model, heads, space="vocab")
    torch.testing.assert_close(vocab.AB, words.detach(), rtol=0, atol=EXACT)
    assert not vocab.A.requires_grad


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([(0, 1)], r"needs at least two heads, got \[\(0, 1\)\]; ov_circuit is the circuit of one"),
        ([(0, 1), (0, 2)], "rising layers, got L0H1, L0H2; a head reads what earlier layers"),
        ([(1, 0), (0, 0)], "rising layers, got L1H0, L0H0"),
        ([(0, 1), (2, 0)], "there is no layer 2: the model has 2, 0 to 1"),
        ([(0, 1), (1, 4)], "there is no head 4: the model has 4, 0 to 3"),
        ([], "no heads were given"),
    ],
)
def test_heads_that_are_no_chain(build: Build, tokens: Tensor, heads: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        virtual_head(build({}), tokens, heads)


def test_other_errors(build: Build, tokens: Tensor) -> None:
    model, heads = build({}), [(0, 0), (1, 0)]
    with pytest.raises(ConfigError, match=r"space must be 'vocab' or 'residual', got 'token'"):
        virtual_ov(model, heads, space="token")
    with pytest.raises(ConfigError, match="norms must be 'folded' or 'ignored', got 'fold'"):
        virtual_ov(model, heads, norms="fold")
    with (
        model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z * 2)]),
        pytest.raises(HookError, match=r"cannot form a virtual head: a hook edits 'blocks.0.attn"),
    ):
        virtual_head(model, tokens, heads)
    with cut_edges(model, 0, keys=[0], queries=[2]):
        with pytest.raises(HookError, match="cannot form a virtual head: attention of layer 0 is"):
            virtual_head(model, tokens, heads)
        with torch.no_grad():
            model(tokens)
    model.naive_limit = 1000
    with pytest.raises(ShapeError, match=r"held: 6,912 bytes, over the limit of 1,000; give fewer"):
        virtual_head(model, tokens, heads)
