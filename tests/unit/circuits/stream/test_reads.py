"""What q, k and v read of each write: sums, values by hand, and what the frozen scale hides."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.stream import shares
from headstream.circuits.stream.reads import residual_reads
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError, HookError, ShapeError
from headstream.models.hooks import capture
from headstream.models.zoo.constructed import constructed_induction

BOUND = 1e-10  # float64; the issue's
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1]])
KINDS: dict[str, dict[str, Any]] = {
    "A": {"d_mlp": 10, "attn_bias": True, "mlp_bias": True, "unembed_bias": True},
    "grouped, rotary": {
        "d_mlp": 10,
        "gated_mlp": True,
        "norm": "rmsnorm",
        "positions": "rotary",
        "n_kv_heads": 2,
        "attn_bias": True,
    },
    "rotary, layernorm": {"positions": "rotary", "n_kv_heads": 1},
    "no norm": {"norm": "none", "positions": "sinusoidal", "attn_bias": True},
    "shortformer": {"positions": "shortformer", "attn_bias": True},
    "no positions": {"positions": "none", "norm": "none"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_shares_sum_to_q_k_and_v(build: Any, tokens: Tensor, kind: str, masked: bool) -> None:
    model = build(KINDS[kind])
    mask = MASK if masked else None
    _, acts = capture(model, tokens, "blocks.1.attn.hook_[qkv]", attention_mask=mask)
    for head in (1, 2):
        found = residual_reads(model, tokens, 1, head, attention_mask=mask)
        for letter in "qkv":
            real = acts[f"blocks.1.attn.hook_{letter}"]
            own = head if letter == "q" else head // model.config.group_size
            total = getattr(found, letter).sum("write")
            np.testing.assert_allclose(total, real[:, :, own], rtol=0, atol=BOUND)
        assert found.largest_error <= found.bound < BOUND
        assert found.kv_head == head // model.config.group_size


def test_rows_in_order(build: Any, tokens: Tensor) -> None:
    found = residual_reads(build(KINDS["A"]), tokens, 1, 0)
    heads = ["L0H0", "L0H1", "L0H2", "L0H3"]
    stream = ["embed", "pos_embed", *heads, "L0bO", "L0MLP", "L0bout"]
    assert found.q["write"].values.tolist() == [*stream, "ln1.b", "b_Q"]
    assert found.k["write"].values.tolist() == [*stream, "ln1.b", "b_K"]
    assert found.v["write"].values.tolist() == [*stream, "ln1.b", "b_V"]
    found = residual_reads(build(KINDS["shortformer"]), tokens, 0, 0)
    assert found.q["write"].values.tolist() == ["embed", "ln1.b", "shortformer_pos", "b_Q"]
    assert found.v["write"].values.tolist() == ["embed", "ln1.b", "b_V"]
    found = residual_reads(build(KINDS["A"]), tokens, 1, 0, per_neuron=True, split_value_bias=True)
    assert "L0N9" in found.q["write"]
    assert "L0bV" in found.q["write"]


@pytest.mark.parametrize("kind", ["A", "grouped, rotary"])
def test_a_share_by_hand(build: Any, tokens: Tensor, kind: str) -> None:
    """Head L0H2's share of k of head 3: its write, centred under LayerNorm, over the run's scale,
    times gain and W_K of the key/value head."""
    model = build(KINDS[kind])
    write = decompose_residual(model, tokens).writes.sel(component="L0H2").values
    _, acts = capture(model, tokens, "blocks.1.ln1.hook_scale")
    norm, attn = model.blocks[1].ln1, model.blocks[1].attn
    if model.config.norm == "layernorm":
        write = write - write.mean(-1, keepdims=True)
    read = write / acts["blocks.1.ln1.hook_scale"].numpy() * norm.w.detach().numpy()
    kv_head = {"A": 3, "grouped, rotary": 1}[kind]
    expected = read @ attn.W_K[kv_head].detach().numpy()
    found = residual_reads(model, tokens, 1, 3)
    np.testing.assert_allclose(found.k.sel(write="L0H2"), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_score_terms_sum_to_the_score(build: Any, tokens: Tensor, kind: str, masked: bool) -> None:
    """At every distance; rotary shares are turned first. Keys differ between the examples."""
    model = build(KINDS[kind])
    mask = MASK if masked else None
    _, acts = capture(
        model, tokens, "blocks.1.attn.hook_attn_scores", attention_mask=mask, backend="naive"
    )
    scores = acts["blocks.1.attn.hook_attn_scores"].numpy()
    found = residual_reads(model, tokens, 1, 2, attention_mask=mask)
    for query, keys in ((5, [0, 5, 3]), (4, [2, 3, 1]), (-1, [5, -2, 4])):
        terms = found.score_terms(query, torch.tensor(keys))
        assert terms.dims == ("query_write", "key_write", "example")
        expected = scores[np.arange(3), 2, query, keys]
        total = terms.sum(("query_write", "key_write"))
        np.testing.assert_allclose(total, expected, rtol=0, atol=BOUND)


def test_unturned_terms_would_miss(build: Any, tokens: Tensor) -> None:
    """The test above has teeth: without the rotation the sum is off by order 1."""
    model = build(KINDS["grouped, rotary"])
    found = residual_reads(model, tokens, 1, 2)
    score = found.score_terms(5, 2).sum(("query_write", "key_write"))
    flat = np.einsum("ek,ek->e", found.q.sum("write")[:, 5], found.k.sum("write")[:, 2])
    assert np.abs(score - model.config.scale * flat).max() > 0.5


def test_the_constructed_head_reads_its_key_through_the_previous_token_head() -> None:
    """K-composition by hand: the induction head's score is the query's own token times what the
    previous-token head wrote at the key, and no other pair adds to the choice."""
    model = constructed_induction()
    tokens = torch.tensor([[0, 7, 4, 9, 3, 4]])  # the second 4 looks for what followed the first
    found = residual_reads(model, tokens, 1, 2)
    on, off = found.score_terms(5, 3)[..., 0], found.score_terms(5, 2)[..., 0]
    difference = abs(on - off)
    query, key = np.unravel_index(difference.values.argmax(), difference.shape)
    assert difference["query_write"].values[query] == "embed"
    assert difference["key_write"].values[key].startswith("L0H")
    second = np.sort(difference.values.ravel())[-2]
    assert difference.values.max() > 100 * second


@pytest.mark.parametrize("kind", ["A", "grouped, rotary", "no norm"])
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_remainder_is_what_recomputing_the_norm_changes(
    build: Any, tokens: Tensor, kind: str, of: str
) -> None:
    model = build(KINDS[kind])
    found = residual_reads(model, tokens, 1, 3)
    parts = decompose_residual(model, tokens, at="blocks.1.hook_resid_pre")
    stream = torch.tensor(parts.stream.values)
    attn = model.blocks[1].attn
    head = 3 if of == "q" else 3 // model.config.group_size
    weight = getattr(attn, f"W_{of.upper()}")[head]
    with torch.no_grad():
        write = torch.tensor(parts.writes.sel(component="L0H1").values)

        def read(x: Tensor) -> Tensor:
            return model.blocks[1].ln1(x) @ weight

        shift = read(torch.zeros_like(stream))  # the norm's b alone
        effects = {
            "without": read(stream) - read(stream - write),
            "alone": read(write) - shift,
        }
    share = torch.tensor(getattr(found, of).sel(write="L0H1").values)
    for how, effect in effects.items():
        given = found.remainder(of, how).sel(write="L0H1")
        expected = {"share": share, "effect": effect, "remainder": effect - share}
        for name, value in expected.items():
            np.testing.assert_allclose(given[name], value.norm(dim=-1), rtol=0, atol=1e-10)
        largest = float(given["remainder"].max())
        assert largest == 0 if kind == "no norm" else largest > 0.05
    assert "ln1.b" not in found.remainder(of)["write"]


def test_the_bound_follows_the_dtype(build: Any, tokens: Tensor) -> None:
    for dtype, limit in ((torch.float32, 1e-2), (torch.bfloat16, 50)):
        found = residual_reads(build(KINDS["A"], dtype=dtype), tokens, 1, 1)
        assert 0 < found.largest_error <= found.bound < limit
        assert found.k.dtype == np.float64


def test_a_forgotten_row_would_be_caught(
    build: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = shares.ShareReader._constants

    def without(self: Any, letter: str, head: int) -> dict[str, Tensor]:
        found = constants(self, letter, head)
        if letter == "k":
            del found["b_K"]
        return found

    monkeypatch.setattr(shares.ShareReader, "_constants", without)
    with pytest.raises(
        ExactnessError,
        match=r"the shares of k do not sum to that of layer 1, head 2: largest error .*bound is",
    ):
        residual_reads(build(KINDS["A"]), tokens, 1, 2)


def test_backends_agree(build: Any, tokens: Tensor, backend: str) -> None:
    model = build(KINDS["grouped, rotary"])
    found = residual_reads(model, tokens, 1, 0, backend=backend)
    np.testing.assert_allclose(found.k, residual_reads(model, tokens, 1, 0).k, atol=1e-11)


def test_bad_input(model: Decoder, tokens: Tensor) -> None:
    with pytest.raises(ShapeError, match="there is no layer 2: the model has 2, 0 to 1"):
        residual_reads(model, tokens, 2, 0)
    with pytest.raises(ShapeError, match="there is no head -1: the model has 4, 0 to 3"):
        residual_reads(model, tokens, 1, -1)
    found = residual_reads(model, tokens, 1, 0, attention_mask=MASK)
    with pytest.raises(ShapeError, match=r"query at 2 may not read the key at 4: it comes after"):
        found.score_terms(2, 4)
    with pytest.raises(
        ShapeError, match=r"in example 1 the query at 5 may not read the key at 1: it is masked"
    ):
        found.score_terms(5, 1)
    with pytest.raises(ShapeError, match=r"query_pos must lie in \[-6, 6\), got \[6, 6, 6\]"):
        found.score_terms(6, 1)
    with pytest.raises(ShapeError, match=r"key_pos must be one whole number"):
        found.score_terms(5, [1, 2])
    with pytest.raises(ConfigError, match=r"of must be one of .*, got 'z'"):
        found.remainder("z")
    with pytest.raises(ConfigError, match=r"how must be .*, got 'witout'; nearest is 'without'"):
        found.remainder("k", "witout")


def test_an_edited_run_is_refused(model: Decoder, tokens: Tensor) -> None:
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_k", lambda k, hook: k + 1)]),
        pytest.raises(HookError, match=r"say what a head reads: a hook edits 'blocks.1.attn"),
    ):
        residual_reads(model, tokens, 1, 0)


def test_prints_as_a_line(model_a: Decoder, tokens: Tensor) -> None:
    words = repr(residual_reads(model_a, tokens, 1, 3))
    assert words.startswith(
        "<what L1H3 reads: q, k and v from 11 writes, 3 examples x 6 positions; largest error"
    )
