"""Edits of attention under flash are the same edits under naive, whatever they are.

The oracle is written out here: hooks on scores and pattern of the naive backend, with the edges as
a matrix made entry by entry.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstream.circuits.interventions import cut_edges, freeze_attention
from headstream.models import attend_edited
from headstream.models.attend_edited import EditedAttention
from headstream.models.attend_naive import pattern_of, row_lse, weigh
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.edits import EdgeCut, FrozenPattern
from headstream.models.hooks import capture
from headstream.models.position_set import PositionSet

# Float64 sums of at most 24 terms of size about 1, through two layers: rounding is near 1e-14.
EXACT = 1e-10
HEADS, LAYERS, LONGEST, BATCH = 4, 2, 24, 2


@cache
def decoder(positions: str, kv_heads: int) -> Decoder:
    """Random, with scores of a few units, so that some rows are sharp and some are not."""
    config = DecoderConfig(
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=kv_heads,
        d_model=12,
        d_head=4,
        d_vocab=11,
        n_ctx=LONGEST,
        positions=positions,
        attn_bias=True,
    )
    model = Decoder(config, dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=draws).double())
    return model


@dataclass
class Cut:
    """One cut: as it is given, and the edges [batch, query_pos, key_pos] that it means."""

    layer: int
    heads: list[int]
    renormalise: bool
    keys: Any
    queries: Any
    edges: Tensor


@dataclass
class Case:
    positions: str
    kv_heads: int
    tokens: Tensor
    mask: Tensor | None
    cuts: list[Cut]
    frozen_heads: list[int] = field(default_factory=list)
    other: Tensor | None = None
    other_mask: Tensor | None = None

    @property
    def model(self) -> Decoder:
        return decoder(self.positions, self.kv_heads)


def masks(length: int, draw: st.DrawFn) -> Tensor | None:
    """Padding on either side, holes, or none; some token of each row is real."""
    kind = draw(st.sampled_from(["none", "left", "right", "holes"]))
    if kind == "none":
        return None
    place, pad = torch.arange(length), draw(st.integers(0, length - 1))
    if kind == "holes":
        row = torch.rand(length, generator=torch.Generator().manual_seed(pad)) < 0.6
        row[0] = True
    else:
        row = place >= pad if kind == "left" else place < length - pad
    return torch.stack([row, torch.ones(length, dtype=torch.bool)])


@st.composite
def position_sets(draw: st.DrawFn, length: int) -> tuple[Any, list[list[int]]]:
    """Some positions in one of the three forms, and what they are in each row."""
    kind = draw(st.sampled_from(["list", "slice", "row mask", "mask"]))
    if kind == "slice":
        start = draw(st.integers(0, length - 1))
        stop = draw(st.one_of(st.none(), st.integers(start + 1, length)))
        step = draw(st.sampled_from([None, 1, 2]))
        return slice(start, stop, step), [list(range(length))[start:stop:step]] * BATCH
    some = st.lists(st.integers(0, length - 1), min_size=1, max_size=length, unique=True)
    rows = [draw(some), draw(some)]
    if kind == "list":
        return rows[0], [rows[0]] * BATCH
    if kind == "row mask":
        mask = torch.zeros(length, dtype=torch.bool)
        mask[rows[0]] = True
        return mask, [rows[0]] * BATCH
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    for row, places in enumerate(rows):
        mask[row, places] = True
    return mask, rows


@st.composite
def cuts(draw: st.DrawFn, length: int) -> Cut:
    keys, key_rows = draw(position_sets(length))
    queries, query_rows = draw(
        st.one_of(st.just((None, [list(range(length))] * BATCH)), position_sets(length))
    )
    edges = torch.zeros(BATCH, length, length, dtype=torch.bool)
    for row in range(BATCH):
        for query in query_rows[row]:
            for key in key_rows[row]:
                edges[row, query, key] = True
    heads = draw(st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True))
    layer = draw(st.integers(0, LAYERS - 1))
    return Cut(layer, heads, draw(st.booleans()), keys, queries, edges)


@st.composite
def cases(draw: st.DrawFn, *, frozen: bool = False) -> Case:
    kind = draw(st.sampled_from(["shortformer", "rotary"])), draw(st.sampled_from([1, 2, 4]))
    length = draw(st.integers(1, LONGEST))
    draws = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tokens, other = torch.randint(0, 11, (2, BATCH, length), generator=draws)
    mask = masks(length, draw)
    real = torch.ones(BATCH, 1, length, dtype=torch.bool) if mask is None else mask[:, None]
    exists = torch.ones(length, length).tril().bool() & real
    drawn = draw(st.lists(cuts(length), min_size=not frozen, max_size=3))
    # What cuts nothing is an error, tested elsewhere.
    made = [cut for cut in drawn if bool((cut.edges & exists).any())]
    heads = draw(st.lists(st.integers(0, HEADS - 1), min_size=1, unique=True)) if frozen else []
    return Case(*kind, tokens, mask, made, heads, other, masks(length, draw))


def by_edits(case: Case, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and log-sum-exps of the model under the interventions."""
    with ExitStack() as stack:
        for number, cut in enumerate(case.cuts):
            if number == 1 and case.frozen_heads:
                freeze(case, stack)
            stack.enter_context(
                cut_edges(
                    case.model,
                    cut.layer,
                    keys=cut.keys,
                    queries=cut.queries,
                    heads=cut.heads,
                    renormalise=cut.renormalise,
                )
            )
        if case.frozen_heads and len(case.cuts) < 2:
            freeze(case, stack)
        return run(case, backend)


def freeze(case: Case, stack: ExitStack) -> None:
    """In the midst of the cuts: the run is recorded without them."""
    edits = [block.attn.edits[:] for block in case.model.blocks]
    for block in case.model.blocks:
        block.attn.edits.clear()
    freezing = freeze_attention(
        case.model, case.other, heads=case.frozen_heads, attention_mask=case.other_mask
    )
    stack.enter_context(freezing)
    for block, before in zip(case.model.blocks, edits, strict=True):
        block.attn.edits[:0] = before


def by_hooks(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The definition: hooks on the scores and the pattern of the naive backend."""
    stored: dict[str, Tensor] = {}
    if case.frozen_heads:
        _, stored = capture(
            case.model,
            case.other,
            "*hook_pattern",
            attention_mask=case.other_mask,
            backend="naive",
        )
    hooks: list[Any] = []
    for layer in range(LAYERS):
        removed, zeroed = (
            torch.zeros(BATCH, HEADS, *case.tokens.shape[1:] * 2, dtype=torch.bool) for _ in "ab"
        )
        for cut in case.cuts:
            if cut.layer == layer:
                (removed if cut.renormalise else zeroed)[:, cut.heads] |= cut.edges[:, None]

        def cut_scores(scores: Tensor, hook: Any, removed: Tensor = removed) -> Tensor:
            return scores.masked_fill(removed, -torch.inf)

        def cut_pattern(
            pattern: Tensor, hook: Any, removed: Tensor = removed, zeroed: Tensor = zeroed
        ) -> Tensor:
            pattern = pattern.clone()
            if stored:
                kept = stored[hook.name].masked_fill(removed, 0.0)
                rows = kept.sum(-1, keepdim=True)
                kept = kept / rows.masked_fill(rows == 0, 1.0)
                pattern[:, case.frozen_heads] = kept[:, case.frozen_heads]
            return pattern.masked_fill(zeroed, 0.0)

        at = f"blocks.{layer}.attn.hook_"
        hooks += [(f"{at}attn_scores", cut_scores), (f"{at}pattern", cut_pattern)]
    with case.model.hooks(fwd_hooks=hooks):
        return run(case, "naive")


def run(case: Case, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    names = ["*hook_lse", "*hook_z"]
    options: dict[str, Any] = {"attention_mask": case.mask, "backend": backend, "grads": True}
    return capture(case.model, case.tokens, names, **options)


def assert_equal(got: Any, expected: Any, frozen_heads: list[int]) -> None:
    assert largest_difference(got[0], expected[0]) <= EXACT
    for name, value in expected[1].items():
        if name.endswith("lse"):
            # The oracle forces patterns, which leaves the log-sum-exp of a frozen head behind.
            free = [head for head in range(HEADS) if head not in frozen_heads]
            assert largest_difference(got[1][name][:, free], value[:, free]) <= EXACT
        else:
            assert largest_difference(got[1][name], value) <= EXACT


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Over the entries where they are not the same infinity."""
    return float(torch.where(a == b, 0.0, a - b).detach().abs().amax()) if a.numel() else 0.0


@settings(max_examples=20)
@given(cases())
def test_cut_edges_is_the_same_edit_of_scores_and_pattern(case: Case) -> None:
    expected = by_hooks(case)
    for backend in ("flash", "naive"):
        assert_equal(by_edits(case, backend), expected, [])


@settings(max_examples=20)
@given(cases(frozen=True))
def test_freezing_is_forcing_the_stored_pattern(case: Case) -> None:
    expected = by_hooks(case)
    for backend in ("flash", "naive"):
        assert_equal(by_edits(case, backend), expected, case.frozen_heads)


@settings(max_examples=12)
@given(st.one_of(cases(), cases(frozen=True)))
def test_gradients_are_those_of_the_same_edit(case: Case) -> None:
    gradients = []
    weights = list(case.model.parameters())
    for output, acts in (by_hooks(case), by_edits(case, "flash")):
        draws = torch.Generator().manual_seed(0)
        loss = (output * torch.randn(output.shape, generator=draws).double()).sum()
        if not case.frozen_heads:
            for name, lse in acts.items():
                if name.endswith("lse"):
                    to_lse = torch.randn(lse.shape, generator=draws).double()
                    loss = loss + (lse * to_lse)[torch.isfinite(lse)].sum()
        gradients.append(torch.autograd.grad(loss, weights, allow_unused=True))
    for by_naive, by_flash in zip(*gradients, strict=True):
        if by_naive is None or by_flash is None:
            assert by_naive is None or float(by_naive.abs().max()) == 0
            assert by_flash is None or float(by_flash.abs().max()) == 0
            continue
        assert torch.isfinite(by_flash).all()
        # A gradient sums over the positions of the batch.
        assert largest_difference(by_naive, by_flash) <= 10 * EXACT


@settings(max_examples=15)
@given(st.sampled_from([0, 1, 64]), st.data())
def test_rows_are_the_same_however_they_are_gathered(gap: int, data: st.DataObject) -> None:
    """Queries of one set are attended in one call or many; earlier keys may be cached."""
    key_pos = data.draw(st.integers(1, 20))
    query_pos = data.draw(st.integers(1, key_pos))
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_()

    q = normal(BATCH, query_pos, HEADS, 3)
    k, v = normal(BATCH, key_pos, 2, 3), normal(BATCH, key_pos, 2, 5)
    real = torch.rand(BATCH, key_pos, generator=draws) < 0.8
    edits: list[EdgeCut | FrozenPattern] = []
    for head in range(3):
        keys, queries = (torch.rand(BATCH, key_pos, generator=draws) < 0.5 for _ in "ab")
        keys[0, 0] = queries[1, -1] = True
        places = PositionSet(keys, "keys"), PositionSet(queries, "queries")
        edits.append(EdgeCut(*places, (head, head + 1), bool(head % 2), "layer 0"))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_edited, "GAP", gap)
        attention = EditedAttention(edits, q, k, scale=0.7, key_mask=real, cached=True)
        scores = attention.scores()
        lse = row_lse(scores)
        results.append((weigh(attention.zero(pattern_of(scores, lse)), v), lse))
        results.append(attention.flash(v, need_lse_grad=True))
        gradients = []
        for z, lse in results:
            weight = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).reshape(z.shape)
            loss = (z * weight).sum() + lse[torch.isfinite(lse)].sum()
            gradients.append(torch.autograd.grad(loss, (q, k, v)))
    for naive, flash in (*zip(*results, strict=True), *zip(*gradients, strict=True)):
        assert largest_difference(naive, flash) <= EXACT
