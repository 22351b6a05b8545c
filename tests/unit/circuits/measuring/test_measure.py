"""Measured statistics: worked values, padding, batches, caches, labels, errors, memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xarray as xr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headstream.circuits.interventions import cut_edges
from headstream.circuits.measuring.flash_rows import FlashRows
from headstream.circuits.measuring.masses import (
    ColumnMass,
    Offset,
    SinkImportance,
    SinkMass,
    SinkRate,
)
from headstream.circuits.measuring.matches import DuplicateMass, InductionMass
from headstream.circuits.measuring.measure import attention_statistics, measure_attention
from headstream.circuits.measuring.second_pass import Layer
from headstream.circuits.measuring.segments import SegmentMass
from headstream.circuits.measuring.spread import Collision, EffectiveKeys, Entropy, ExpectedDistance
from headstream.circuits.measuring.statistic import LinearStatistic, Statistic
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import masked_scores, pattern_of, row_lse
from headstream.models.decoder import Decoder
from headstream.models.errors import BackendError, ShapeError, TokenError
from headstream.models.kv_cache import KVCache

Build = Callable[..., Decoder]

# Float64 sums of at most a few hundred terms of size about 1.
EXACT = 1e-10


def all_statistics(length: int = 12) -> list[Statistic]:
    return [
        SinkMass(),
        SinkMass(first=2),
        Offset(0),
        Offset(1),
        ColumnMass(),
        ColumnMass([0, 2], name="columns"),
        SinkImportance(),
        SinkRate(eps=0.2, T=4),
        InductionMass(),
        DuplicateMass(),
        Entropy(),
        Entropy(normalized=True),
        Collision(),
        EffectiveKeys(),
        ExpectedDistance(),
        SegmentMass(["a"] * 5 + ["b"] * (length - 5)),
    ]


BY_EXAMPLE = ("column_mass", "sink_rate_0.2_4")


def by_position(length: int = 12) -> list[Statistic]:
    return [each for each in all_statistics(length) if each.name not in BY_EXAMPLE]


def assert_equal(a: xr.Dataset, b: xr.Dataset, bound: float = EXACT) -> None:
    assert list(a) == list(b)
    for name in a:
        assert (a[name].isnull() == b[name].isnull()).all(), name
        assert float(abs(a[name] - b[name]).max().fillna(0)) <= bound, name


# Worked rows. Queries of width 1 with keys 1, 0, 0, ...: a score for key 0 alone, chosen by row.


def rows(to_first: Tensor, real: Tensor | None = None, tokens: Tensor | None = None) -> FlashRows:
    """`to_first` [head, pos]: score of each query for the first real token; 0 for the others."""
    heads, n = to_first.shape
    real = torch.ones(1, n, dtype=torch.bool) if real is None else real
    batch = TokenBatch(real, tokens)
    k = torch.zeros(1, n, heads, 1, dtype=torch.float64)
    k[0, int(real.int().argmax())] = 1
    q = to_first.double().T[None, :, :, None]
    _, lse = attend_flash(q, k, k, scale=1.0, key_mask=real)
    return FlashRows(Layer(q, k, lse, scale=1.0, batch=batch))


def constant_mass(a: float, n: int) -> Tensor:
    """Scores that put mass `a` on key 0 in every row but the first, where it is 1."""
    others = torch.arange(n, dtype=torch.float64)
    return (a / (1 - a) * others).clamp(min=1e-300).log()[None]


def test_sink_mass_by_head_without_the_first_query() -> None:
    """FR-57: head 0 all on token 0, heads 1 to 3 uniform."""
    found = SinkMass().of(rows(torch.tensor([[60.0], [0], [0], [0]]).expand(4, 8)))
    assert found[0] == pytest.approx([1.0, 0.2454, 0.2454, 0.2454], abs=5e-5)
    assert found.mean() == pytest.approx(0.434, abs=5e-4)


def test_sink_mass_under_padding() -> None:
    """FR-58: the sink is the first real token, and padding changes nothing."""
    real = torch.arange(10)[None] >= 2
    found = SinkMass().of(rows(torch.tensor([[60.0], [0], [0], [0]]).expand(4, 10), real))
    assert found[0] == pytest.approx([1.0, 0.2454, 0.2454, 0.2454], abs=5e-5)


def test_importance_of_uniform_attention() -> None:
    uniform = rows(torch.zeros(1, 64))
    found = SinkImportance([0, 1, 63]).of(uniform)[0, 0]
    assert found == pytest.approx([0.07412, 0.05943, 1 / 64], abs=5e-6)
    every_key = SinkImportance(None).of(uniform)[0, 0]
    assert every_key[[0, 1, 63]] == pytest.approx(found, abs=EXACT)


@pytest.mark.parametrize(("eps", "crosses"), [(0.3, 0.28889), (0.8, 0.79683)])
def test_the_sink_rate_crosses_its_threshold(eps: float, crosses: float) -> None:
    """A head with constant mass a on key 0: row 0 counts as 1, so alpha = (1 + 63 a) / 64."""
    rate = SinkRate(eps=eps)
    assert rate.of(rows(constant_mass(crosses - 1e-5, 64))).item() == 0
    assert rate.of(rows(constant_mass(crosses + 1e-5, 64))).item() == 1


def test_the_sink_rate_is_strict_and_looks_at_t_tokens() -> None:
    # Rows 0 and 1 put 1 and 1/2 on key 0: alpha over two tokens is 0.75, exactly.
    two = rows(torch.zeros(1, 5))
    assert SinkRate(eps=0.75, T=2).of(two).item() == 0
    assert SinkRate(eps=0.7499, T=2).of(two).item() == 1
    assert SinkRate(eps=0.7499, T=3).of(two).item() == 0
    assert SinkRate(eps=0.1, T=6).of(two).isnan().all()


def test_column_mass_of_uniform_attention_is_a_tail_of_the_harmonic_sum() -> None:
    found = ColumnMass().of(rows(torch.zeros(1, 4)))[0, 0]
    assert found == pytest.approx([25 / 12, 13 / 12, 7 / 12, 1 / 4], abs=EXACT)


def test_spread_of_uniform_attention() -> None:
    uniform = rows(torch.zeros(1, 16))
    logs = torch.arange(1, 17, dtype=torch.float64).log()
    assert Entropy().of(uniform).item() == pytest.approx(logs.mean().item(), abs=EXACT)
    assert Entropy(normalized=True).of(uniform).item() == pytest.approx(1.0, abs=EXACT)
    assert EffectiveKeys().of(uniform).item() == pytest.approx(8.5, abs=EXACT)
    assert ExpectedDistance().of(uniform).item() == pytest.approx(3.75, abs=EXACT)


def test_entropy_of_a_head_with_most_mass_on_one_key() -> None:
    """Mass 0.9 on one key and the rest uniform over 1023: 1.0181 nats."""
    last = rows(constant_mass(0.9, 1024))
    assert Entropy().of(last, per_position=True)[0, 0, -1].item() == pytest.approx(1.0181, abs=5e-5)


def test_normalised_entropy_needs_eight_keys() -> None:
    found = Entropy(normalized=True).of(rows(torch.zeros(1, 9)), per_position=True)[0, 0]
    assert found.isnan().tolist() == [True] * 7 + [False] * 2


def test_induction_and_duplicates_by_hand() -> None:
    """7 8 7 8 7: uniform rows, copies and what follows them."""
    uniform = rows(torch.zeros(1, 5), tokens=torch.tensor([[7, 8, 7, 8, 7]]))
    assert DuplicateMass().of(uniform).item() == pytest.approx((1 / 3 + 1 / 4 + 2 / 5) / 3)
    by_query = InductionMass().of(uniform, per_position=True)[0, 0]
    assert by_query.isnan().tolist() == [True, True, False, False, False]
    assert by_query[2:] == pytest.approx([1 / 3, 1 / 4, 2 / 5])
    # A head on the first token alone finds no token after a copy.
    sink = rows(torch.full((1, 5), 800.0), tokens=torch.tensor([[7, 8, 7, 8, 7]]))
    assert InductionMass().of(sink).item() == 0


def test_segments_of_uniform_attention() -> None:
    segments = SegmentMass([0, 0, 1, -1])
    found = segments.of(rows(torch.zeros(1, 4)))[0, 0]
    assert found == pytest.approx([(1 + 1 + 2 / 3 + 2 / 4) / 4, (1 / 3 + 1 / 4) / 4])


# Models.


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_both_backends_agree_on_every_statistic(model: Decoder, padding: str) -> None:
    tokens = draw(3, 12)
    mask = padding_mask(padding)
    for statistics, per_position in ((all_statistics(), False), (by_position(), True)):
        flash, naive = (
            measure_attention(
                model,
                tokens,
                statistics,
                backend=backend,
                attention_mask=mask,
                per_position=per_position,
            )
            for backend in ("flash", "naive")
        )
        assert_equal(flash, naive)
        assert flash.sizes["layer"] == 2
        assert flash.sizes["head"] == 4


def draw(batch: int, length: int, vocabulary: int = 6) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def padding_mask(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(3, 12, dtype=torch.int64)
    if kind == "left":
        mask[0, :4] = 0
    elif kind == "right":
        mask[0, 8:] = 0
    else:
        mask[0, ::3] = 0
    mask[2] = 0
    return mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_number(model: Decoder, side: str) -> None:
    tokens = draw(1, 8)
    blank = torch.zeros(1, 4, dtype=torch.int64)
    padded = torch.cat((blank, tokens) if side == "left" else (tokens, blank), 1)
    labels = ["a", "a", "a", "b", "b", "b", "b", "b"]
    around = ["c"] * 4
    statistics = [
        each for each in all_statistics() if not isinstance(each, (SegmentMass, ColumnMass))
    ]
    alone = measure_attention(model, tokens, [*statistics, SegmentMass(labels)])
    mask = torch.cat((blank, blank[:, :1].expand(1, 8) + 1), 1)
    mask = mask if side == "left" else mask.flip(1)
    around = [*around, *labels] if side == "left" else [*labels, *around]
    with pytest.raises(ShapeError, match="segment 'c' of 'segment_mass' has no real token"):
        measure_attention(model, padded, SegmentMass(around), attention_mask=mask)
    around = ["" if label == "c" else label for label in around]
    both = measure_attention(model, padded, [*statistics, SegmentMass(around)], attention_mask=mask)
    assert_equal(alone, both)
    for name in alone:
        assert (alone[f"queries_{name}"] == both[f"queries_{name}"]).all()
        chance = abs(alone[f"chance_{name}"] - both[f"chance_{name}"]).max()
        assert not chance > EXACT


@pytest.mark.parametrize("batch", [4, 12])  # as many as heads, as many as positions (FR-37)
def test_a_batch_is_its_rows_alone(model: Decoder, batch: int) -> None:
    tokens = draw(batch, 12)
    together = measure_attention(model, tokens, all_statistics())
    for row in (0, 2, batch - 1):
        alone = measure_attention(model, tokens[row : row + 1], all_statistics())
        assert_equal(together.isel(example=[row]).assign_coords(example=[0]), alone)


def test_a_row_of_padding_has_no_value_and_says_why(model_a: Decoder) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1] = 0
    data = measure_attention(model_a, draw(2, 12), all_statistics(), attention_mask=mask)
    for name in data:
        assert data[name].isel(example=1).isnull().all()
        assert not data[name].isel(example=0).isnull().any() or name == "column_mass"
        assert "example 1" in data[name].attrs["not_applicable"]
    assert data["entropy"].attrs["not_applicable"] == "it has no real token: example 1"


def test_tokens_without_repeats_have_no_induction(model_a: Decoder) -> None:
    tokens = torch.stack((torch.arange(8), torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])))
    data = measure_attention(model_a, tokens, [InductionMass(), DuplicateMass()])
    for name in ("induction_mass", "duplicate_mass"):
        assert data[name].isnull().all(("layer", "head")).values.tolist() == [True, False]
        assert data[name].attrs["not_applicable"] == "no token recurs in it: example 0"
        assert data[f"chance_{name}"].isnull().values.tolist() == [True, False]
        assert data[f"queries_{name}"].values.tolist() == [0, 4]


def test_a_segment_that_one_example_lacks(model_a: Decoder) -> None:
    labels = [[0, 0, 1, 1], [0, 0, 0, 0]]
    data = measure_attention(model_a, draw(2, 4), SegmentMass(labels, ["said", "read"]))
    mass = data["segment_mass"]
    assert mass.sel(segment="read", example=1).isnull().all()
    assert mass.attrs["not_applicable"] == (
        "it has no real token in that segment: example 1 (segment read)"
    )
    assert abs(mass.isel(example=0).sum("segment") - 1).max() <= EXACT


def test_short_sequences_have_no_sink_rate(model_a: Decoder) -> None:
    data = measure_attention(model_a, draw(2, 12), SinkRate())
    assert data["sink_rate_0.3_64"].isnull().all()
    assert data["sink_rate_0.3_64"].attrs["not_applicable"] == (
        "it has fewer than T real tokens: example 0, example 1"
    )


def test_a_reason_names_some_and_counts_the_rest(model_a: Decoder) -> None:
    mask = (torch.arange(12) < 2).long()[None]
    data = measure_attention(model_a, draw(1, 12), ColumnMass(), attention_mask=mask)
    assert data["column_mass"].attrs["not_applicable"] == (
        "it has no such token: "
        + ", ".join(f"example 0 (key {key})" for key in range(2, 10))
        + ", and 2 more"
    )


def test_the_dataset_is_labelled(model_r: Decoder) -> None:
    data = measure_attention(
        model_r,
        draw(3, 12),
        [
            Offset(1),
            Offset(2, name="two_back"),
            SegmentMass([0] * 12, name="s"),
            ColumnMass([1, 4]),
            ColumnMass([0], name="sink"),
        ],
        per_position=True,
    )
    assert list(data) == ["offset_1", "two_back", "s", "column_mass", "sink"]
    assert data["offset_1"].dims == ("layer", "head", "example", "pos")
    assert data["s"].dims == ("layer", "head", "example", "pos", "segment")
    # Two that put different keys on an axis of one name do not share it.
    assert data["column_mass"].dims[-1] == "key"
    assert data["sink"].dims[-1] == "key_sink"
    assert data["key"].values.tolist() == [1, 4]
    assert data["chance_offset_1"].dims == ("example", "pos")
    assert data["chance_offset_1"].values[0, 1:] == pytest.approx(1 / torch.arange(2.0, 13))
    assert data["queries_two_back"].values.tolist() == [10, 10, 10]
    assert data["offset_1"].attrs["definition"].startswith("Attention to the token `distance`")
    assert data["offset_1"].attrs["unit"] == "fraction of attention"
    plain = attention_statistics(model_r, draw(3, 12), [Offset(1)], per_position=True)
    values = data["offset_1"].transpose("layer", "example", "head", "pos").values
    assert plain["offset_1"].detach().numpy() == pytest.approx(values, abs=EXACT, nan_ok=True)


def test_the_mean_by_position_is_the_value(model: Decoder) -> None:
    mask = padding_mask("holes")
    whole = measure_attention(model, draw(3, 12), by_position(), attention_mask=mask)
    each = measure_attention(
        model, draw(3, 12), by_position(), attention_mask=mask, per_position=True
    )
    for name in whole:
        if name == "columns":  # a sum
            assert abs(each[name].sum("pos", min_count=1) - whole[name]).max() <= EXACT
        else:
            assert abs(each[name].mean("pos") - whole[name]).max() <= EXACT


def test_a_statistic_may_be_named() -> None:
    named = SinkMass(first=4, name="four_first")
    assert named.name == "four_first"
    named.name = "renamed"
    assert named.name == "renamed"
    assert [each.name for each in all_statistics()][:5] == [
        "sink_mass_1",
        "sink_mass_2",
        "offset_0",
        "offset_1",
        "column_mass",
    ]


class MassOnToken(LinearStatistic):
    """Attention to all occurrences of one token."""

    needs_tokens = True

    def values(self, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
        assert batch.tokens is not None
        return (batch.tokens == 3)[..., None].to(dtype)


def test_a_new_statistic_is_a_few_lines(model_r: Decoder) -> None:
    tokens = draw(3, 12)
    flash = measure_attention(model_r, tokens, MassOnToken())
    naive = measure_attention(model_r, tokens, MassOnToken(), backend="naive")
    assert list(flash) == ["mass_on_token"]
    assert_equal(flash, naive)
    assert (flash["mass_on_token"] > 0).any()
    expected = ((tokens == 3).cumsum(1) / torch.arange(1, 13)).mean(1)
    assert flash["chance_mass_on_token"].values == pytest.approx(expected.double())


# A key/value cache.


@pytest.mark.parametrize("backend", ["flash", "naive"])
def test_chunks_on_a_cache_are_the_whole(model: Decoder, backend: str) -> None:
    tokens, mask = draw(3, 12), padding_mask("holes")
    assert mask is not None
    statistics = by_position()
    whole = measure_attention(
        model, tokens, statistics, attention_mask=mask, per_position=True, backend=backend
    )
    cache = KVCache(model, 3)
    parts = []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        parts.append(
            measure_attention(
                model,
                tokens[:, start:stop],
                [each for each in statistics if each.name != "segment_mass"]
                + [SegmentMass((["a"] * 5 + ["b"] * 7)[:stop])],
                attention_mask=mask[:, start:stop],
                per_position=True,
                backend=backend,
                kv_cache=cache,
                past_tokens=tokens[:, :start],
            )
        )
    assert parts[1]["pos"].values.tolist() == [5]
    assert cache.length == 12
    joined = {name: [part[name] for part in parts] for name in whole if name != "segment_mass"}
    for name, pieces in joined.items():
        chunks = xr.concat(pieces, "pos", coords="minimal", compat="override", join="outer")
        assert (chunks.isnull() == whole[name].isnull()).all(), name
        assert abs(chunks - whole[name]).max() <= EXACT, name
    assert abs(parts[2]["segment_mass"] - whole["segment_mass"]).max() <= EXACT


def test_reduced_values_on_a_cache_agree(model_r: Decoder) -> None:
    tokens = draw(2, 12)

    def last(backend: str) -> xr.Dataset:
        cache = KVCache(model_r, 2)
        model_r(tokens[:, :5], kv_cache=cache)
        return measure_attention(
            model_r,
            tokens[:, 5:],
            all_statistics(),
            backend=backend,
            kv_cache=cache,
            past_tokens=tokens[:, :5],
        )

    assert_equal(last("flash"), last("naive"))


# Gradients.


@pytest.mark.parametrize("padding", ["none", "holes"])
def test_gradients_of_weights_and_activations_agree(model: Decoder, padding: str) -> None:
    statistics = [each for each in all_statistics() if each.name != "sink_rate_0.2_4"]
    tokens, mask = draw(3, 12), padding_mask(padding)
    weights = [
        parameter
        for name, parameter in model.named_parameters()
        if name.rsplit(".")[-1] in ("W_Q", "W_K", "W_V", "W_E")
    ]
    bump = torch.zeros(3, 12, 16, dtype=torch.float64, requires_grad=True)
    grads: dict[str, dict[str, Any]] = {}
    for backend in ("flash", "naive"):
        with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x + bump)]):
            values = attention_statistics(
                model, tokens, statistics, backend=backend, attention_mask=mask
            )
        grads[backend] = {
            name: torch.autograd.grad(
                value.nan_to_num().pow(2).sum(),
                [*weights, bump],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for name, value in values.items()
        }
    for name, naive in grads["naive"].items():
        assert any(grad.abs().max() > 0 for grad in naive), name
        for expected, got in zip(naive, grads["flash"][name], strict=True):
            # Gradients of sums of squares: up to some hundreds here.
            assert (expected - got).abs().max() <= EXACT * max(1, expected.abs().max()), name


def test_a_step_down_the_gradient_makes_a_head_sink_less(model_r: Decoder) -> None:
    tokens = draw(2, 12)

    def sinks() -> Tensor:
        return attention_statistics(model_r, tokens, SinkMass())["sink_mass_1"]

    before = sinks()[1, :, 2].mean()
    before.backward()
    with torch.no_grad():
        attention = model_r.blocks[1].attn
        attention.W_Q -= 0.05 * attention.W_Q.grad / attention.W_Q.grad.norm()
        assert sinks()[1, :, 2].mean() < before


def test_measuring_leaves_no_gradient_and_no_hook(model_r: Decoder) -> None:
    tokens = draw(2, 12)
    before = model_r(tokens)
    measure_attention(model_r, tokens, all_statistics())
    assert model_r.hooks_active() == 0
    assert torch.equal(model_r(tokens), before)
    assert all(parameter.grad is None for parameter in model_r.parameters())


def test_an_outer_edit_is_seen(model_r: Decoder) -> None:
    """D-3: what is measured is what ran, edits of other hooks included."""
    tokens = draw(2, 12)
    edits = [("blocks.1.attn.hook_rot_q", lambda q, hook: 3 * q)]
    with model_r.hooks(fwd_hooks=edits):
        flash = measure_attention(model_r, tokens, all_statistics())
        naive = measure_attention(model_r, tokens, all_statistics(), backend="naive")
    assert_equal(flash, naive)
    plain = measure_attention(model_r, tokens, SinkMass())
    assert abs(flash["sink_mass_1"] - plain["sink_mass_1"]).sel(layer=1).min() > 1e-6


# Precision.


def test_bf16_sums_in_float32(build: Build) -> None:
    fields = {"n_kv_heads": 2, "d_head": 8, "positions": "rotary", "n_ctx": 128}
    model = build(fields, dtype=torch.bfloat16)
    tokens = draw(2, 100)
    flash, naive = (
        measure_attention(model, tokens, all_statistics(100), backend=backend)
        for backend in ("flash", "naive")
    )
    for name in flash:
        if name == "sink_rate_0.2_4":
            continue
        assert flash[name].dtype == "float32"
        # Layer 0 reads the same rounded q and k on both: what differs is float32 rounding. A
        # bfloat16 sum would be off by 4e-3.
        error = abs(flash[name] - naive[name]).isel(layer=0) / abs(naive[name]).clip(min=1)
        assert error.isel(layer=slice(None)).max() <= 2e-5, name


@pytest.mark.parametrize("largest", [6.0, 42.0, 420.0, 4203.0])
def test_precision_at_large_scores(largest: float) -> None:
    """Float32 against float64 on the same rows; docstrings state these bounds."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 256, 2, 16, generator=generator) for _ in range(2))
    lse = row_lse(masked_scores(q.double(), k.double(), scale=1.0))
    for _ in range(30):  # the largest |lse| grows all but linearly with the scores
        q = q * (largest / lse.abs().max()).float()
        lse = row_lse(masked_scores(q.double(), k.double(), scale=1.0))
    assert lse.abs().max() == pytest.approx(largest, rel=0.01)
    batch = TokenBatch(torch.ones(1, 256, dtype=torch.bool))
    _, lse32 = attend_flash(q, k, k, scale=1.0)
    measured = FlashRows(Layer(q, k, lse32, scale=1.0, batch=batch))
    scores = masked_scores(q.double(), k.double(), scale=1.0)
    pattern = pattern_of(scores, row_lse(scores))
    eps = torch.finfo(torch.float32).eps
    bounds = {
        Entropy(): {6.0: 2e-6, 42.0: 1e-5, 420.0: 1e-4, 4203.0: 3e-4}[largest],
        SinkMass(): 2 * eps * largest,
        Offset(1): 2 * eps * largest,
        Collision(): 6 * eps * largest,
        ExpectedDistance(): 256 * 4 * eps * largest,
    }
    for each, bound in bounds.items():
        exact = each.reduced(each.from_pattern(pattern, batch), batch, per_position=True)
        found = each.of(measured, per_position=True).double()
        assert (found - exact).abs().nan_to_num().max() <= bound, each.name
        if isinstance(each, Entropy):
            assert found.min() >= 0


# Memory (FR-36).


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor, in elements, that any torch operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, Tensor):
                self.numel = max(self.numel, item.numel())
        return result


def test_nothing_of_size_n_by_n_is_formed(build: Build) -> None:
    n = 4096
    fields = {"n_heads": 1, "d_head": 4, "n_layers": 1, "n_ctx": n, "d_vocab": 500}
    model = build(fields, dtype=torch.float32)
    tokens = draw(1, n, 500)
    with LargestTensor() as largest:
        measure_attention(model, tokens, all_statistics(n))
    assert largest.numel <= 2**20 < n * n // 8  # the tile, or the stream


def test_gradients_form_and_keep_nothing_of_size_n_by_n(build: Build) -> None:
    n = 2048
    fields = {"n_heads": 1, "d_head": 4, "n_layers": 1, "n_ctx": n, "d_vocab": 500}
    model = build(fields, dtype=torch.float32)
    statistics = [each for each in all_statistics(n) if each.name != "sink_rate_0.2_4"]
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        values = attention_statistics(model, draw(1, n, 500), statistics)
        torch.stack([value.sum() for value in values.values()]).sum().backward()
    assert largest.numel <= 2**20
    assert 0 < max(kept) <= n * 20


# Bad input.


def test_errors_say_what_to_do(model_r: Decoder) -> None:
    tokens = draw(2, 12)

    def measure(statistics: Any, **options: Any) -> None:
        measure_attention(model_r, tokens, statistics, **options)

    with pytest.raises(ShapeError, match=r"two statistics are named 'offset_1'; .* name='\.\.\.'"):
        measure([Offset(1), Offset(1)])
    with pytest.raises(ShapeError, match=r"no statistics were given; give some, such as SinkMass"):
        measure([])
    with pytest.raises(BackendError, match="backend must be one of naive, flash, auto, got 'fast'"):
        measure(SinkMass(), backend="fast")
    with pytest.raises(ShapeError, match="'column_mass' of every key by position is the n x n"):
        measure(ColumnMass(), per_position=True)
    with pytest.raises(ShapeError, match=r"'sink_rate_0.3_64' is one number an example and head"):
        measure(SinkRate(), per_position=True)
    with pytest.raises(ShapeError, match="asks for key 12, but there are 12 positions"):
        measure(ColumnMass([0, 12]))
    with pytest.raises(
        ShapeError,
        match=r"labels of 'segment_mass' have shape \[11\], expected \[pos\] or \[batch, pos\] = "
        r"\[2, 12\]; give every position a label",
    ):
        measure(SegmentMass([0] * 11))
    with pytest.raises(ShapeError, match="segment 'data' of 'segment_mass' has no real token"):
        measure(SegmentMass([0] * 12, names=["text", "data"]))


def test_parameters_are_checked() -> None:
    for make, words in (
        (lambda: Offset(-1), "distance must be a whole number >= 0, got -1"),
        (lambda: SinkMass(0), "first must be a whole number >= 1, got 0"),
        (lambda: ColumnMass([]), r"keys must be distinct and at least one, got \[\]"),
        (lambda: ColumnMass([1, 1]), r"keys must be distinct and at least one, got \[1, 1\]"),
        (lambda: ColumnMass([-1]), "each of keys must be a whole number >= 0, got -1"),
        (lambda: SinkImportance(0, T=0), "T must be a whole number >= 1, got 0"),
        (lambda: SinkRate(eps=1.0), r"eps must lie in \[0, 1\), got 1.0"),
        (lambda: SegmentMass([0.5]), "labels must be strings or whole numbers, got float64"),
        (lambda: SegmentMass(3), r"labels have shape \[\], expected \[pos\] or \[batch, pos\]"),
        (lambda: SegmentMass([-2, 0]), "labels must be whole numbers from -1 .* got -2 to 0"),
        (lambda: SegmentMass([0, 2], ["a"]), r"from -1 \(no segment\) to 0"),
        (lambda: SegmentMass(["a"], ["a"]), "names are for labels that are numbers"),
    ):
        with pytest.raises(ShapeError, match=words):
            make()  # type: ignore[no-untyped-call]


def test_a_cache_without_its_tokens_cannot_be_matched(model_r: Decoder) -> None:
    cache = KVCache(model_r, 2)
    tokens = draw(2, 12)
    model_r(tokens[:, :5], kv_cache=cache)
    with pytest.raises(
        TokenError,
        match=r"'induction_mass' compares tokens, .* give the earlier ones as past_tokens",
    ):
        measure_attention(model_r, tokens[:, 5:], InductionMass(), kv_cache=cache)
    with pytest.raises(ShapeError, match=r"past_tokens has shape \[2, 4\], expected .* \[2, 5\]"):
        measure_attention(
            model_r, tokens[:, 5:], InductionMass(), kv_cache=cache, past_tokens=tokens[:, :4]
        )
    assert cache.length == 5
    # Those that compare none need none.
    data = measure_attention(model_r, tokens[:, 5:], SinkMass(), kv_cache=cache)
    assert data["queries_sink_mass_1"].values.tolist() == [7, 7]
    assert not math.isnan(float(data["sink_mass_1"].mean()))


def test_progress_goes_to_stderr(model_a: Decoder, capfd: pytest.CaptureFixture[str]) -> None:
    measure_attention(model_a, draw(1, 12), SinkMass())
    assert capfd.readouterr() == ("", "")


def test_edges_that_are_cut_are_not_measured_as_if_they_were_there(
    build: Callable[..., Decoder],
) -> None:

    model = build({})
    tokens = torch.arange(8)
    with cut_edges(model, 0, keys=[0], queries=slice(1, None), renormalise=False):
        with pytest.raises(BackendError, match=r"do not show edges that are cut.*backend='naive'"):
            measure_attention(model, tokens, [SinkMass()])
        cut = measure_attention(model, tokens, [SinkMass()], backend="naive")
    assert cut["sink_mass_1"].sel(layer=0).values.max() == 0
    whole = measure_attention(model, tokens, [SinkMass()])
    assert whole["sink_mass_1"].sel(layer=0).values.min() > 0
