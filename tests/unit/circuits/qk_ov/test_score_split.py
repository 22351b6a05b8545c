"""Scores split by content and position, by rotary pair, and against distance."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.interventions import cut_edges
from headstream.circuits.qk_ov import content_position
from headstream.circuits.qk_ov.content_position import score_terms
from headstream.circuits.qk_ov.rotary_profile import distance_profile, score_frequencies
from headstream.circuits.qk_ov.score_split import ScoreSplit
from headstream.circuits.qk_ov.weights import qk_circuit
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError, HookError, ShapeError, TokenError
from headstream.models.hooks import capture
from headstream.models.store import load

Build = Callable[..., Decoder]
# Sums of a few dozen float64 products of order 10.
EXACT = 1e-10
BIASED = {"n_kv_heads": 2, "attn_bias": True}


def real_scores(model: Decoder, tokens: Tensor, layer: int, head: int, **options: Any) -> Tensor:
    name = f"blocks.{layer}.attn.hook_attn_scores"
    return capture(model, tokens, name, backend="naive", **options)[1][name][:, head]


def total(split: ScoreSplit) -> Any:
    """Sum of the terms, -inf where they are NaN, as the model has it."""
    return split.terms.sum(split.term_dims, skipna=False).fillna(-np.inf)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "shortformer", "rotary", "none"])
@pytest.mark.parametrize("padded", [False, True])
def test_terms_sum_to_the_score(
    build: Build, tokens: Tensor, norm: str, positions: str, padded: bool
) -> None:
    model = build(BIASED | {"norm": norm, "positions": positions})
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :2], mask[1, -1], mask[2, 2] = 0, 0, 0  # left, right, and a hole
    for layer in (0, 1):
        for head in range(4):
            split = score_terms(model, tokens, layer, head, attention_mask=mask)
            real = real_scores(model, tokens, layer, head, attention_mask=mask).numpy()
            np.testing.assert_allclose(split.score, real, rtol=0, atol=EXACT)
            np.testing.assert_allclose(total(split), real, rtol=0, atol=EXACT)
            assert split.largest_error <= split.bound < EXACT
    parts = ["content", "position", "bias"]
    if positions in ("rotary", "none"):
        parts.remove("position")
    assert split.terms["query_part"].values.tolist() == parts


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "shortformer"])
@pytest.mark.parametrize("norm", ["layernorm", "none"])
def test_a_term_depends_on_its_own_parts_alone(
    build: Build, tokens: Tensor, positions: str, norm: str
) -> None:
    """Layer 0, from weights and the run's scale, one input at a time."""
    model = build(BIASED | {"positions": positions, "norm": norm})
    split = score_terms(model, tokens, 0, 2)
    block = model.blocks[0]
    with torch.no_grad():
        embedded = model.W_E[tokens]
        if positions == "sinusoidal":
            _, acts = capture(model, tokens, "hook_pos_embed")
            place = acts["hook_pos_embed"]
        else:
            place = model.W_pos[: tokens.shape[1]].expand_as(embedded)
        stream = embedded if positions == "shortformer" else embedded + place

        def read(x: Tensor) -> Tensor:
            if norm == "none":
                return x
            spread = stream - stream.mean(-1, keepdim=True)
            scale = (spread.square().mean(-1, keepdim=True) + model.config.eps).sqrt()
            return (x - x.mean(-1, keepdim=True)) / scale * block.ln1.w

        sides = {
            "content": read(embedded),
            "position": place if positions == "shortformer" else read(place),
        }
        seen = torch.ones(6, 6).tril().bool()
        for a, x in sides.items():
            for b, y in sides.items():
                q, k = x @ block.attn.W_Q[2], y @ block.attn.W_K[1]
                expected = model.config.scale * q @ k.mT
                found = torch.tensor(split.terms.sel(query_part=a, key_part=b).values)
                torch.testing.assert_close(found[:, seen], expected[:, seen], rtol=0, atol=EXACT)


def test_constructed_heads_use_the_term_they_are_built_on() -> None:
    """L0H1 matches places and nothing else; L1H2's queries and keys hold no position."""
    model = load("constructed-induction")
    tokens = torch.tensor([[0, 5, 9, 3, 5, 9]])
    split = score_terms(model, tokens, 0, 1)
    assert split.terms["query_part"].values.tolist() == ["content", "position"]
    position = split.terms.sel(query_part="position", key_part="position")[0]
    expected = np.full((6, 6), 0.0)
    expected[np.arange(1, 6), np.arange(5)] = 30.0  # asks for the place before
    seen = np.tri(6, dtype=bool)
    np.testing.assert_array_equal(position.values[seen], expected[seen])
    shares = split.shares().isel(example=0)
    assert shares.sel(query_part="position", key_part="position") == 1
    assert float(abs(shares).sum()) == 1
    shares = score_terms(model, tokens, 1, 2).shares().isel(example=0)
    assert shares.sel(query_part="content", key_part="content") == 1


def test_shares_sum_to_one_and_ignore_what_is_the_same_for_every_key(
    model_a: Decoder, model_r: Decoder, tokens: Tensor
) -> None:
    shares = score_terms(model_a, tokens, 1, 3).shares()
    np.testing.assert_allclose(shares.sum(("query_part", "key_part")), 1, rtol=0, atol=1e-12)
    assert float(abs(shares.sel(key_part="bias")).max()) < 1e-12
    assert float(abs(shares.sel(query_part="bias", key_part="content")).max()) > 1e-3
    shares = score_frequencies(model_r, tokens, 1, 3).shares()
    assert shares.dims == ("pair", "example")
    np.testing.assert_allclose(shares.sum("pair"), 1, rtol=0, atol=1e-12)


def test_padding_takes_no_part_in_shares(model_a: Decoder) -> None:
    """On the left it has no key at all, on the right scores that nobody asked for."""
    plain = score_terms(model_a, torch.tensor([[3, 1, 4, 1]]), 1, 2).shares()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    padded = torch.tensor([[9, 9, 3, 1, 4, 1], [3, 1, 4, 1, 9, 9]])
    found = score_terms(model_a, padded, 1, 2, attention_mask=mask)
    assert found.terms[:, :, 0, :2].isnull().all()
    assert found.terms[:, :, 1, 4:, :4].notnull().all()
    for example in range(2):
        shares = found.shares()[:, :, example]
        np.testing.assert_allclose(shares, plain[:, :, 0], rtol=0, atol=1e-10)


def test_shares_of_a_head_that_scores_everything_alike_are_undefined(build: Build) -> None:
    model = build({"positions": "none"})
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    assert score_terms(model, torch.tensor([[1, 2]]), 0, 0).shares().isnull().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_lower_precision_is_held_to_its_own_rounding(
    build: Build, tokens: Tensor, dtype: torch.dtype, positions: str
) -> None:
    model = build(BIASED | {"positions": positions}, dtype=dtype)
    split = score_terms(model, tokens, 1, 2)
    eps = torch.finfo(dtype).eps
    assert 1e-3 * eps < split.largest_error <= split.bound < 1e4 * eps


@pytest.mark.parametrize("padded", [False, True])
def test_pairs_sum_to_the_score(build: Build, tokens: Tensor, padded: bool) -> None:
    model = build(BIASED | {"positions": "rotary", "d_head": 6, "rotary_base": 100.0})
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :2], mask[2, 2] = 0, 0
    for layer in (0, 1):
        for head in range(4):
            split = score_frequencies(model, tokens, layer, head, attention_mask=mask)
            real = real_scores(model, tokens, layer, head, attention_mask=mask).numpy()
            np.testing.assert_allclose(total(split), real, rtol=0, atol=EXACT)
    expected = [1, 100 ** (-1 / 3), 100 ** (-2 / 3)]
    np.testing.assert_allclose(split.terms["frequency"], expected, rtol=1e-15)


def test_a_pair_s_share_is_the_score_of_a_head_with_that_pair_alone(
    model_r: Decoder, tokens: Tensor
) -> None:
    split = score_frequencies(model_r, tokens, 0, 1)
    before = model_r.blocks[0].attn.W_Q.detach().clone()
    for pair in range(4):
        with torch.no_grad():
            alone = torch.zeros_like(before)
            alone[:, :, [pair, pair + 4]] = before[:, :, [pair, pair + 4]]
            model_r.blocks[0].attn.W_Q.copy_(alone)
        real = real_scores(model_r, tokens, 0, 1).numpy()
        found = split.terms.sel(pair=pair).fillna(-np.inf)
        np.testing.assert_allclose(found, real, rtol=0, atol=EXACT)


def test_profile_of_tokens_is_the_real_score_in_layer_0(build: Build) -> None:
    """Of every token pair at every distance that one sequence shows, position ids apart."""
    model = build(BIASED | {"positions": "rotary", "rotary_base": 30.0})
    tokens = torch.tensor([[7, 3, 11, 3, 0, 18]])
    real = real_scores(model, tokens, 0, 3)[0]
    profile = distance_profile(model, 0, 3, query=tokens[0], key=tokens[0])
    assert profile["score"].dims == ("query", "key", "distance")
    assert profile["query"].values.tolist() == tokens[0].tolist()
    for i in range(6):
        for j in range(i + 1):
            found = profile["score"].values[i, j, i - j]
            assert found == pytest.approx(real[i, j].item(), abs=EXACT)
    np.testing.assert_allclose(profile["share"].sum("pair"), profile["score"], rtol=0, atol=1e-12)


def test_profile_of_normalised_inputs_is_qk_at_each_distance(model_r: Decoder) -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 16, generator=draws).double(), torch.randn(16, generator=draws).double()
    profile = distance_profile(model_r, 1, 2, query=x, key=y, distances=[5, 0, -2])
    assert profile["distance"].values.tolist() == [5, 0, -2]
    for place, distance in enumerate([5, 0, -2]):
        circuit = qk_circuit(model_r, 1, 2, distance=distance, space="residual").AB
        expected = model_r.config.scale * x @ circuit @ y
        found = profile["score"].values[:, 0, place]
        np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)


def test_profile_by_hand(build: Build) -> None:
    """One pair, q = (1, 0) and k = (1, 0): the cosine of the distance; k = (0, 1): its sine."""
    model = build(
        {"n_layers": 1, "n_heads": 1, "d_model": 2, "d_head": 2, "norm": "none"}
        | {"positions": "rotary", "attn_scale": 1.0}
    )
    attn = model.blocks[0].attn
    with torch.no_grad():
        attn.W_Q[0], attn.W_K[0] = torch.eye(2), torch.eye(2)
    # A query 2 further on is turned by 2 from channel 0 towards channel 1.
    for key, expected in (([1.0, 0.0], np.cos(2.0)), ([0.0, 1.0], np.sin(2.0))):
        found = distance_profile(
            model, 0, 0, query=torch.tensor([1.0, 0.0]), key=torch.tensor(key), distances=[2]
        )
        assert found["score"].item() == pytest.approx(expected, abs=1e-15)


def test_profile_of_one_token_in_float32(build: Build) -> None:
    """Whole numbers are tokens; the arithmetic is float64 whatever the model is in."""
    fields = {"positions": "rotary"}
    single, double = (build(fields, dtype=d) for d in (torch.float32, torch.float64))
    one, two = (distance_profile(m, 0, 1, query=3, key=4) for m in (single, double))
    assert one.sizes == {"query": 1, "key": 1, "distance": 16, "pair": 2}
    # The weights were rounded to float32, 6e-8 each; nothing else was.
    np.testing.assert_allclose(one["score"], two["score"], rtol=0, atol=1e-6)


def test_without_rotary_positions_there_is_no_profile(model_a: Decoder, tokens: Tensor) -> None:
    words = r"has positions='learned': no rotary pairs, and no score that depends on distance alone"
    with pytest.raises(ConfigError, match=words + "; leave the distance out: qk_circuit gives"):
        distance_profile(model_a, 0, 0, query=1, key=2)
    with pytest.raises(ConfigError, match=words + "; score_terms splits its scores by content"):
        score_frequencies(model_a, tokens, 0, 0)


@pytest.mark.usefixtures("unchecked")
def test_bad_profiles(model_r: Decoder) -> None:
    def profile(**given: Any) -> Any:
        return distance_profile(model_r, 0, 0, **({"query": 1, "key": 2} | given))

    with pytest.raises(TokenError, match=r"query\[0, 0\] is 20, outside the vocabulary \[0, 20\)"):
        profile(query=20)
    with pytest.raises(ShapeError, match="key must be a token, an int64 tensor of tokens or a flo"):
        profile(key="a")
    with pytest.raises(
        ShapeError, match=r"normalised inputs \[n, d_model\] = \[n, 16\], got \[3\]"
    ):
        profile(key=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"query must be tokens \[n\], got \[1, 2\]"):
        profile(query=torch.tensor([[1, 2]]))
    with pytest.raises(ShapeError, match="distances must be whole numbers of tokens in"):
        profile(distances=[1.5])
    with pytest.raises(ShapeError, match="distances must be a list of whole numbers"):
        profile(distances=3)
    with pytest.raises(ShapeError, match=r"must be distinct and at least one, got \[\]"):
        profile(distances=[])
    with pytest.raises(ShapeError, match="take 12,800,000,000 bytes, over the limit"):
        profile(query=torch.zeros(20000, dtype=torch.long), key=torch.zeros(1250).long())
    with pytest.raises(ShapeError, match=r"layer must be a whole number in \[0, 2\)"):
        distance_profile(model_r, 2, 0, query=1, key=2)


def test_an_edited_run_is_refused(model_a: Decoder, model_r: Decoder, tokens: Tensor) -> None:
    """Upstream, too: the terms would sum, and be told as those of the weights."""

    def double(tensor: Tensor, hook: Any) -> Tensor:
        return 2 * tensor

    for name in ("blocks.1.attn.hook_q", "blocks.0.hook_attn_out", "hook_pos_embed"):
        words = f"cannot split the scores of a head: a hook edits '{name}' in this run"
        with model_a.hooks(fwd_hooks=[(name, double)]), pytest.raises(HookError, match=words):
            score_terms(model_a, tokens, 1, 0)
    for name in ("blocks.1.attn.hook_q", "blocks.1.attn.hook_attn_scores", "hook_embed"):
        words = f"cannot split the scores of a head: a hook edits '{name}' in this run"
        with model_r.hooks(fwd_hooks=[(name, double)]), pytest.raises(HookError, match=words):
            score_frequencies(model_r, tokens, 1, 0)
    for layer in (0, 1):
        with cut_edges(model_a, layer, keys=[0]):
            with pytest.raises(HookError, match=f"attention of layer {layer} is edited"):
                score_terms(model_a, tokens, 1, 0)
            model_a(tokens)  # a cut that never happens is an error of its own


def test_a_hook_that_reads_is_left_alone(model_a: Decoder, tokens: Tensor) -> None:
    seen = []

    def read(tensor: Tensor, hook: Any) -> None:
        seen.append(hook.name)

    plain = score_terms(model_a, tokens, 1, 0)
    with model_a.hooks(fwd_hooks=[("blocks.0.hook_attn_out", read)]):
        split = score_terms(model_a, tokens, 1, 0)
    assert seen == ["blocks.0.hook_attn_out"]
    xr.testing.assert_identical(split.terms, plain.terms)


def test_a_forgotten_shift_would_be_caught(
    model_a: Decoder, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros(16, dtype=torch.float64)
    monkeypatch.setattr(content_position, "_constants", lambda model, layer: zeros)
    with pytest.raises(
        ExactnessError,
        match=r"the terms do not sum to the scores of L1H0: largest error \d.* at example \d, "
        r"query_pos \d, key_pos \d; the bound is \d.\de-\d\d",
    ):
        score_terms(model_a, tokens, 1, 0)


def test_a_model_set_to_flash_is_split_all_the_same(model_a: Decoder, tokens: Tensor) -> None:
    model_a.backend = "flash"
    split = score_terms(model_a, tokens, 1, 0)
    assert split.largest_error <= split.bound


def test_repr_and_room(model_r: Decoder, tokens: Tensor) -> None:
    split = score_frequencies(model_r, tokens, 1, 3)
    assert repr(split).startswith("<scores of L1H3 as 4 pair terms; largest error ")
    with pytest.raises(ShapeError, match="1 terms for 1 rows of 20000 tokens take 16,000,000,000"):
        score_terms(model_r, torch.zeros(20000, dtype=torch.long), 1, 3)
    with pytest.raises(ShapeError, match=r"head must be a whole number in \[0, 4\)"):
        score_terms(model_r, tokens, 1, 4)
