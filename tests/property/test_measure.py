"""Every statistic without the n x n matrix equals its definition on the materialised pattern."""

from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstream.circuits import statistics as census
from headstream.circuits.measuring import flash_rows, second_pass
from headstream.circuits.measuring.flash_rows import FlashRows
from headstream.circuits.measuring.masses import (
    ColumnMass,
    Offset,
    SinkImportance,
    SinkMass,
    SinkRate,
)
from headstream.circuits.measuring.matches import DuplicateMass, InductionMass
from headstream.circuits.measuring.rows import UniformRows
from headstream.circuits.measuring.second_pass import Layer, carry
from headstream.circuits.measuring.segments import SegmentMass
from headstream.circuits.measuring.shards import RowSummary
from headstream.circuits.measuring.spread import Collision, EffectiveKeys, Entropy, ExpectedDistance
from headstream.circuits.measuring.statistic import LinearStatistic, Statistic
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.attend_blocks import row_entropy
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import masked_scores, pattern_of, row_lse

# Float64 sums of at most 257 terms of size about 1 (distances: 257): far above their rounding, far
# below any mistake.
EXACT = 1e-10


@dataclass
class Case:
    """Rows of one layer, the pattern they have, and the tokens under them."""

    q: Tensor
    k: Tensor
    scale: float
    batch: TokenBatch
    labels: Tensor

    def layer(self, *, grad: bool = False) -> Layer:
        _, lse = attend_flash(
            self.q,
            self.k,
            self.k,
            scale=self.scale,
            key_mask=self.batch.real,
            need_lse_grad=grad,
        )
        return Layer(self.q, self.k, lse, scale=self.scale, batch=self.batch)

    def pattern(self) -> Tensor:
        scores = masked_scores(self.q, self.k, scale=self.scale, key_mask=self.batch.real)
        return pattern_of(scores, row_lse(scores))

    def statistics(self) -> list[Statistic]:
        n = self.k.shape[1]
        some = sorted({0, n // 2, n - 1})
        found: list[Statistic] = [
            SinkMass(),
            SinkMass(first=3),
            Offset(0),
            Offset(1),
            Offset(5),
            ColumnMass(0, name="column"),
            ColumnMass(some, name="columns"),
            ColumnMass(),
            SinkImportance(),
            SinkImportance(range(n), T=max(1, n // 2), name="importances"),
            SinkRate(eps=0.1, T=max(1, n // 2), name="sink_rate"),
            InductionMass(),
            DuplicateMass(),
            Entropy(),
            Entropy(normalized=True),
            Collision(),
            EffectiveKeys(),
            ExpectedDistance(),
        ]
        in_text = [int(s) for s in self.labels[self.batch.real].unique() if s >= 0]
        if in_text:
            relabelled = torch.where(
                torch.isin(self.labels, torch.tensor(in_text)), self.labels, -1
            )
            found.append(SegmentMass(relabelled))
        return found


@st.composite
def cases(draw: st.DrawFn, longest: int = 257) -> Case:
    key_pos = draw(st.integers(1, longest))
    query_pos = draw(st.one_of(st.just(key_pos), st.integers(1, key_pos)))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    d_head = draw(st.sampled_from([3, 4]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, dtype=torch.float64, generator=generator)

    pad = draw(st.integers(0, key_pos))
    at = torch.arange(key_pos)
    everything, holes = at >= 0, torch.rand(key_pos, generator=generator) < 0.5
    rows = draw(
        st.sampled_from(
            [
                (everything, everything),
                (at >= pad, everything),
                (at >= pad, at < key_pos - pad),
                (holes, ~everything),
                (at < key_pos - pad, holes),
            ]
        )
    )
    vocabulary = draw(st.sampled_from([1, 2, 9, 300]))
    tokens = torch.randint(vocabulary, (2, key_pos), generator=generator)
    labels = torch.sort(torch.randint(-1, 3, (2, key_pos), generator=generator), 1).values
    if draw(st.booleans()):  # segments that alternate at every turn
        labels = torch.randint(-1, 2, (2, key_pos), generator=generator)
    return Case(
        normal(2, query_pos, kv_heads * group, d_head),
        normal(2, key_pos, kv_heads, d_head),
        0.6,
        TokenBatch(torch.stack(rows), tokens, query_pos),
        labels,
    )


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference; NaN must stand at the same places."""
    assert a.shape == b.shape
    assert torch.equal(torch.isnan(a), torch.isnan(b))
    return float((a - b).abs().nan_to_num().amax()) if a.numel() else 0.0


def rows_of(case: Case, statistics: list[Statistic], *, grad: bool = False) -> FlashRows:
    layer = case.layer(grad=grad)
    values = {
        each.name: each.values(case.batch, layer.lse.dtype)
        for each in statistics
        if isinstance(each, LinearStatistic)
    }
    return FlashRows(layer, values, entropy=True)


def uniform_pattern(batch: TokenBatch) -> Tensor:
    edges = batch.edges.double()
    return (edges / edges.sum(-1, keepdim=True).clamp(min=1))[:, None]


@settings(max_examples=40)
@given(cases(), st.sampled_from([(2**8, 0.0), (2**20, 2.0), (2**20, 1 / 32)]), st.booleans())
def test_every_statistic_is_its_definition(case, sizes, per_position):
    tile, dense = sizes
    statistics = case.statistics()
    pattern = case.pattern()
    with mock.patch.multiple(flash_rows, TILE=tile, DENSE=dense, PAIRS=300):
        rows = rows_of(case, statistics)
        for each in statistics:
            if per_position and each.name in ("column_mass", "sink_rate"):
                continue
            defined = each.reduced(each.from_pattern(pattern, case.batch), case.batch, per_position)
            if each.name == "sink_rate":
                # At a value within rounding of the threshold either answer is right.
                alpha = SinkImportance(0, each.T)
                near = alpha.reduced(alpha.from_pattern(pattern, case.batch), case.batch)
                if ((near - each.eps).abs() < EXACT).any():
                    continue
            assert difference(each.of(rows, per_position), defined) <= EXACT, each.name


@settings(max_examples=30)
@given(cases(longest=60), st.booleans())
def test_chance_is_the_statistic_of_uniform_attention(case, per_position):
    uniform, rows = uniform_pattern(case.batch), UniformRows(case.batch)
    for each in case.statistics():
        if per_position and each.name in ("column_mass", "sink_rate"):
            continue
        defined = each.reduced(each.from_pattern(uniform, case.batch), case.batch, per_position)
        assert difference(each.of(rows, per_position), defined) <= EXACT, each.name
        counted = each.counted(case.batch).reshape(2, case.batch.query_pos, -1)
        assert torch.equal(each.queries(case.batch), counted.sum(1)), each.name


@settings(max_examples=30)
@given(cases(longest=60))
def test_masses_are_the_scores_of_the_census(case):
    if case.batch.past:
        return
    pattern, real, tokens = case.pattern(), case.batch.real, case.batch.tokens
    rows = FlashRows(case.layer())
    for each, targets in (
        (SinkMass(), census.sink_targets(real)),
        (SinkMass(2), census.sink_targets(real, first=2)),
        (Offset(1), census.previous_token_targets(real)),
        (Offset(0), census.current_token_targets(real)),
        (InductionMass(), census.prefix_matching_targets(tokens, real)),
        (DuplicateMass(), census.duplicate_token_targets(tokens, real)),
    ):
        assert difference(each.of(rows), census.target_mass(pattern, targets)) <= EXACT
        chance = each.of(UniformRows(case.batch))[:, 0]
        assert difference(chance, census.chance_level(targets, real)) <= EXACT


@settings(max_examples=20)
@given(cases(longest=60), st.sampled_from([0.0, 2.0]), st.booleans())
def test_gradients_are_those_of_the_definition(case, dense, per_position):
    case.q.requires_grad_()
    case.k.requires_grad_()
    statistics = [each for each in case.statistics() if each.name != "sink_rate"]
    pattern = case.pattern()
    generator = torch.Generator().manual_seed(0)
    with mock.patch.multiple(flash_rows, TILE=2**8, DENSE=dense, PAIRS=30):
        rows = rows_of(case, statistics, grad=True)
        for each in statistics:
            by_position = per_position and each.name != "column_mass"
            defined = each.reduced(each.from_pattern(pattern, case.batch), case.batch, by_position)
            measured = each.of(rows, by_position)
            upstream = torch.randn(defined.shape, dtype=torch.float64, generator=generator)
            upstream = upstream.masked_fill(torch.isnan(defined.detach()), 0.0)
            for expected, got in zip(
                torch.autograd.grad((defined.nan_to_num() * upstream).sum(), inputs(case), **KEEP),
                torch.autograd.grad((measured.nan_to_num() * upstream).sum(), inputs(case), **KEEP),
            ):
                assert torch.isfinite(got).all(), each.name
                assert difference(got, expected) <= EXACT * max(1, expected.abs().amax()), each.name


KEEP = {"retain_graph": True, "materialize_grads": True}


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    return case.q, case.k


# Sets of keys: what one query at the end reads of them, in any order and any grouping.


def summary(case: Case, keys: Tensor) -> RowSummary:
    """What the last query reads of these keys, by the definition."""
    scores = masked_scores(
        case.q[:, -1:], case.k[:, keys], scale=case.scale, key_mask=case.batch.real[:, keys]
    )
    lse = row_lse(scores)
    pattern = pattern_of(scores, lse)
    entropy = torch.special.entr(pattern).sum(-1)
    members = (case.labels[:, keys, None] == torch.arange(3)).double()
    return RowSummary(lse, entropy, torch.einsum("bhqk,bkc->bhqc", pattern, members))


def assert_same(a: RowSummary, b: RowSummary) -> None:
    # Equal infinities differ by nothing.
    assert torch.where(a.lse == b.lse, 0.0, a.lse - b.lse).abs().amax() <= EXACT
    assert difference(a.entropy, b.entropy) <= EXACT
    assert difference(a.means, b.means) <= EXACT


@settings(max_examples=30)
@given(cases(longest=40), st.integers(0, 2**16))
def test_shards_of_keys_merge_in_any_order_and_any_grouping(case, seed):
    n = case.k.shape[1]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    cuts = torch.randint(0, n + 1, (2,), generator=generator).sort().values.tolist()
    shards = [part for part in order.tensor_split(cuts) if len(part)]
    whole = summary(case, torch.arange(n))
    parts = [summary(case, shard) for shard in shards]
    left = parts[0]
    for part in parts[1:]:
        left = left.merge(part)
    right = parts[-1]
    for part in parts[-2::-1]:
        right = part.merge(right)
    assert_same(left, whole)
    assert_same(right, whole)
    if len(parts) == 3:
        assert_same(parts[2].merge(parts[0]).merge(parts[1]), whole)


@settings(max_examples=40)
@given(cases(longest=130), st.sampled_from([1, 7, 64, 1000]), st.integers(0, 2**16))
def test_entropy_of_the_block_loop_at_any_block_size_and_key_order(case, block_size, seed):
    if case.k.shape[1] > 30:
        block_size = max(7, block_size)
    options = {"scale": case.scale, "block_size": block_size}
    whole = torch.special.entr(case.pattern()).sum(-1)
    blocks = row_entropy(case.q, case.k, key_mask=case.batch.real, **options)
    assert difference(blocks, whole) <= EXACT
    # The last query may read every key, so they may come in any order.
    order = torch.randperm(case.k.shape[1], generator=torch.Generator().manual_seed(seed))
    last = row_entropy(
        case.q[:, -1:], case.k[:, order], key_mask=case.batch.real[:, order], **options
    )
    assert difference(last, whole[..., -1:]) <= EXACT


@settings(max_examples=30)
@given(cases(longest=80), st.integers(1, 6))
def test_cutting_the_keys_gives_what_columns_give(case, pieces):
    layer = case.layer()
    steps = torch.arange(case.k.shape[1]) * pieces // case.k.shape[1]
    values = {
        "steps": torch.stack((steps == 0, steps % 2 == 1, steps), -1).double().expand(2, -1, -1),
        "ranks": case.batch.key_rank[..., None].double(),
    }
    cut = carry(layer, values, entropy=True)
    with mock.patch.object(second_pass, "MOST_PIECES", 0):
        columns = carry(layer, values, entropy=True)
    for name in values:
        assert difference(cut.means[name], columns.means[name]) <= EXACT
    assert difference(cut.entropy, columns.entropy) <= EXACT
