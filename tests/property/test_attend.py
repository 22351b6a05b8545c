"""What must hold of attention whatever the lengths, masks, groups and tiles."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstream.models.attend_blocks import merge
from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import attend_naive, masked_scores, pattern_of, row_lse

# Float64 sums of at most 257 terms of size about 1: 1e-10 is far above their rounding and far
# below any mistake.
EXACT = 1e-10


@dataclass(frozen=True)
class Case:
    """One attention problem; `block_size` says how flash cuts it."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    block_size: int
    scale: float = 0.4

    def naive(self) -> tuple[Tensor, Tensor]:
        return attend_naive(self.q, self.k, self.v, scale=self.scale, key_mask=self.key_mask)

    def flash(self, kernel: str, *, need_lse_grad: bool = False) -> tuple[Tensor, Tensor]:
        return attend_flash(
            self.q,
            self.k,
            self.v,
            scale=self.scale,
            key_mask=self.key_mask,
            kernel=kernel,
            block_size=self.block_size,
            need_lse_grad=need_lse_grad,
        )


@st.composite
def cases(draw: st.DrawFn, longest: int = 257) -> Case:
    key_pos = draw(st.integers(1, longest))
    query_pos = draw(st.one_of(st.just(key_pos), st.integers(1, key_pos)))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    d_head, d_value = draw(st.sampled_from([(4, 4), (3, 5), (5, 2)]))
    batch = 2
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    pad = draw(st.integers(0, key_pos))
    left, right = torch.arange(key_pos) >= pad, torch.arange(key_pos) < key_pos - pad
    everything, nothing = torch.ones(key_pos).bool(), torch.zeros(key_pos).bool()
    holes = torch.rand(key_pos, generator=generator) < 0.5
    rows = draw(
        st.one_of(
            st.none(),
            st.sampled_from([(left, everything), (left, right), (holes, nothing), (right, holes)]),
        )
    )
    # Tiles of one element only where there are few: each costs a call.
    small = 1 if key_pos <= 20 else 7
    return Case(
        normal(batch, query_pos, kv_heads * group, d_head),
        normal(batch, key_pos, kv_heads, d_head),
        normal(batch, key_pos, kv_heads, d_value),
        None if rows is None else torch.stack(rows),
        draw(st.sampled_from([small, 7, 64, key_pos])),
    )


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Over the entries where they are not the same infinity."""
    return float(torch.where(a == b, 0.0, a - b).abs().amax()) if a.numel() else 0.0


@settings(max_examples=60, deadline=None)
@given(cases())
def test_both_flash_kernels_give_the_values_of_naive(case):
    z, lse = case.naive()
    for kernel in ("fused", "blocks"):
        flash_z, flash_lse = case.flash(kernel)
        assert torch.isfinite(flash_z).all()
        assert largest_difference(flash_z, z) <= EXACT
        assert largest_difference(flash_lse, lse) <= EXACT


@settings(max_examples=40, deadline=None)
@given(cases(longest=130), st.booleans())
def test_flash_gives_the_gradients_of_naive(case, through_lse):
    inputs = tuple(x.requires_grad_() for x in (case.q, case.k, case.v))
    grads = []
    for z, lse in (case.naive(), case.flash("auto", need_lse_grad=through_lse)):
        # By shape: `randn_like` draws in the order of the strides, which the backends do not share.
        generator = torch.Generator().manual_seed(0)
        loss = (z * torch.randn(z.shape, dtype=z.dtype, generator=generator)).sum()
        if through_lse:
            to_lse = torch.randn(lse.shape, dtype=lse.dtype, generator=generator)
            loss = loss + (lse * to_lse)[torch.isfinite(lse)].sum()
        grads.append(torch.autograd.grad(loss, inputs))
    for by_naive, by_flash in zip(*grads):
        assert torch.isfinite(by_flash).all()
        assert largest_difference(by_naive, by_flash) <= EXACT


@settings(max_examples=40, deadline=None)
@given(cases(longest=60))
def test_pattern_rows_sum_to_one_or_are_empty_and_agree_with_the_lse(case):
    scores = masked_scores(case.q, case.k, scale=case.scale, key_mask=case.key_mask)
    lse = row_lse(scores)
    pattern = pattern_of(scores, lse)
    empty = torch.isneginf(lse)
    assert largest_difference(pattern.sum(-1), (~empty).double()) <= EXACT
    assert (pattern[torch.isneginf(scores)] == 0).all()
    entries = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    assert largest_difference(entries, pattern) <= EXACT
    # Each entry from flash's lse: the natural logarithm, of the same scores.
    _, flash_lse = case.flash("fused")
    entries = torch.exp(scores - flash_lse.masked_fill(empty, 0.0)[..., None])
    assert largest_difference(entries.sum(-1), (~empty).double()) <= EXACT


@settings(max_examples=25, deadline=None)
@given(cases(longest=60), st.sampled_from(["fused", "blocks"]), st.data())
def test_what_comes_later_changes_nothing(case, kernel, data):
    z, lse = case.flash(kernel)
    query = data.draw(st.integers(0, case.q.shape[1] - 1))
    later = case.k.shape[1] - case.q.shape[1] + query + 1
    case.k[:, later:] += 100.0
    case.v[:, later:] -= 100.0
    changed_z, changed_lse = case.flash(kernel)
    # Not bit for bit: a tile's other rows have other maxima, but each row's own sums are the same.
    assert largest_difference(z[:, : query + 1], changed_z[:, : query + 1]) <= EXACT
    assert largest_difference(lse[..., : query + 1], changed_lse[..., : query + 1]) <= EXACT


@settings(max_examples=25, deadline=None)
@given(cases(longest=60), st.sampled_from(["fused", "blocks"]), st.data())
def test_merging_any_split_of_the_keys_is_reading_them_all(case, kernel, data):
    # One query at the end may read every key, so any set of them is a problem of its own.
    q = case.q[:, -1:]
    cut = data.draw(st.integers(1, max(1, case.k.shape[1] - 1)))
    order = torch.randperm(case.k.shape[1], generator=torch.Generator().manual_seed(cut))

    def read(keys: Tensor) -> tuple[Tensor, Tensor]:
        mask = None if case.key_mask is None else case.key_mask[:, keys]
        return attend_flash(
            q, case.k[:, keys], case.v[:, keys], scale=case.scale, key_mask=mask, kernel=kernel
        )

    first, second = order[:cut], order[cut:]
    if len(second) == 0:
        return
    z, lse = merge(*read(first), *read(second))
    all_z, all_lse = attend_naive(q, case.k, case.v, scale=case.scale, key_mask=case.key_mask)
    assert largest_difference(z, all_z) <= EXACT
    assert largest_difference(lse, all_lse) <= EXACT


@settings(max_examples=25, deadline=None)
@given(cases(longest=60), st.sampled_from(["fused", "blocks"]), st.data())
def test_a_full_pass_is_its_chunks_on_a_growing_cache(case, kernel, data):
    z, lse = case.naive()
    n, key_pos = case.q.shape[1], case.k.shape[1]
    start = 0
    while start < n:
        stop = start + data.draw(st.integers(1, n - start))
        seen = key_pos - n + stop
        chunk = Case(
            case.q[:, start:stop],
            case.k[:, :seen],
            case.v[:, :seen],
            None if case.key_mask is None else case.key_mask[:, :seen],
            case.block_size,
        )
        chunk_z, chunk_lse = chunk.flash(kernel)
        assert largest_difference(chunk_z, z[:, start:stop]) <= EXACT
        assert largest_difference(chunk_lse, lse[..., start:stop]) <= EXACT
        start = stop
