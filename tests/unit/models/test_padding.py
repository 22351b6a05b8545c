"""Padding on either side and holes: the real tokens compute what they compute alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.names import HookSpec

# float64 sums in another order; two orders above what is found.
EXACT = 1e-10
PROMPT = [0, 1, 2, 3]


def padded(row: list[int], left: int = 0, right: int = 0, pad: int = 9) -> tuple[Tensor, Tensor]:
    """Tokens and mask of one row between paddings."""
    tokens = torch.tensor([[pad] * left + row + [pad] * right])
    mask = torch.tensor([[0] * left + [1] * len(row) + [0] * right])
    return tokens, mask


def real_part(value: Tensor, spec: HookSpec, real: Tensor) -> Tensor:
    """The real positions of an activation, on the query and on the key axis."""
    value = value.index_select(spec.pos_axis, real)
    return value.index_select(3, real) if "key_pos" in spec.axes else value


def names_of(backend: str) -> list[str] | None:
    """Everything, `hook_result` included."""
    return ["*hook_[!ap]*", "*hook_attn_out"] if backend == "flash" else ["*"]


@pytest.mark.parametrize("positions", ["learned", "shortformer", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize(("left", "right"), [(1, 0), (3, 0), (8, 0), (0, 3), (2, 3)])
def test_real_positions_do_not_see_padding(
    build: Callable[..., Decoder], backend: str, positions: str, left: int, right: int
) -> None:
    """FR-01: logits, every activation and the loss, for padding left, right and on both sides."""
    model = build(
        {"positions": positions, "n_kv_heads": 2, "d_mlp": 8, "attn_bias": True, "mlp_bias": True}
    )
    solo = torch.tensor([PROMPT])
    tokens, mask = padded(PROMPT, left, right)
    real = torch.arange(left, left + len(PROMPT))
    names = names_of(backend)
    expected, alone = model.run_with_cache(solo, names_filter=names, backend=backend)
    logits, cache = model.run_with_cache(
        tokens, names_filter=names, backend=backend, attention_mask=mask
    )
    assert (logits[:, real] - expected).abs().max() < EXACT
    assert set(cache) == set(alone)
    for name in alone:
        part = real_part(cache[name], model.hook_dict[name].spec, real)
        assert torch.allclose(part, alone[name], rtol=0, atol=EXACT), name
    loss = model(tokens, attention_mask=mask, backend=backend, return_type="loss")
    assert abs(loss - model(solo, backend=backend, return_type="loss")) < EXACT


def test_which_pad_token_does_not_matter(model: Decoder, backend: str) -> None:
    for left, right in ((3, 0), (0, 3), (1, 2)):
        tokens, mask = padded(PROMPT, left, right, pad=9)
        others, _ = padded(PROMPT, left, right, pad=5)
        real = mask.bool()
        first = model(tokens, attention_mask=mask, backend=backend)
        second = model(others, attention_mask=mask, backend=backend)
        assert torch.equal(first[real], second[real])


def test_loss_of_a_ragged_batch(model: Decoder, backend: str) -> None:
    """FR-02: pad ids cannot move it, and it is the token-weighted mean of the rows' own losses."""
    long, short = [0, 1, 2, 3, 1, 2], [7, 8, 4]
    rows = {
        "right": ([long, [*short, 9, 9, 9]], [[1] * 6, [1, 1, 1, 0, 0, 0]]),
        "left": ([long, [9, 9, 9, *short]], [[1] * 6, [0, 0, 0, 1, 1, 1]]),
        "hole": ([long, [7, 9, 8, 9, 9, 4]], [[1] * 6, [1, 0, 1, 0, 0, 1]]),
    }
    solo = [
        model(torch.tensor([row]), backend=backend, return_type="loss") for row in (long, short)
    ]
    for tokens, mask in rows.values():
        batch, allowed = torch.tensor(tokens), torch.tensor(mask)
        options: dict[str, Any] = {"attention_mask": allowed, "backend": backend}
        loss = model(batch, return_type="loss", **options)
        assert abs(loss - (5 * solo[0] + 2 * solo[1]) / 7) < EXACT
        other = batch.masked_fill(allowed == 0, 5)
        assert torch.equal(model(other, return_type="loss", **options), loss)
        per_token = model(batch, return_type="loss_per_token", **options)
        assert per_token.shape == (2, 5)
        after_a_real_one = (allowed[:, 1:] == 1) & (allowed.cumsum(1)[:, :-1] > 0)
        assert torch.equal(~per_token.isnan(), after_a_real_one)
        assert int((~per_token.isnan()).sum()) == 7
        assert abs(per_token.nanmean() - loss) < EXACT


def test_a_masked_key_is_read_by_nobody(model: Decoder, tokens: Tensor) -> None:
    """FR-03: the column is zero, rows sum to 1, and the result is the run without that token."""
    mask = torch.ones(3, 6, dtype=torch.int64)
    mask[:, 2] = 0
    kept = torch.tensor([0, 1, 3, 4, 5])
    logits, cache = model.run_with_cache(tokens, attention_mask=mask, backend="naive")
    assert (logits - model(tokens)).abs().max() > 0.1
    for layer in range(2):
        pattern = cache["pattern", layer]
        assert not pattern[..., 2].any()
        assert (pattern.sum(-1) - 1).abs().max() < EXACT
        assert torch.equal(
            torch.isneginf(cache["attn_scores", layer])[..., 2], pattern[..., 2] == 0
        )
    # A hole takes no position either.
    expected = model(tokens[:, kept])
    for backend in ("naive", "flash", "auto"):
        got = model(tokens, attention_mask=mask, backend=backend)
        assert (got[:, kept] - expected).abs().max() < EXACT
        assert (got - logits).abs().max() < EXACT


def test_rows_that_may_read_nothing(model: Decoder) -> None:
    """FR-04: zero pattern, zero z, lse -inf; nothing is NaN, not even a gradient."""
    tokens = torch.tensor([[9, 9, 0, 1, 2, 3], [9, 9, 9, 9, 9, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    results = {}
    for backend in ("naive", "flash"):
        logits, cache = model.run_with_cache(
            tokens, names_filter=names_of(backend), attention_mask=mask, backend=backend
        )
        assert torch.isfinite(logits).all()
        for name, value in cache.items():
            assert not value.isnan().any(), name
            if not name.endswith(("hook_lse", "hook_attn_scores")):
                assert torch.isfinite(value).all(), name
        for layer in range(2):
            empty = mask.cumsum(1) == 0
            assert not cache["z", layer][empty].any()
            assert not cache["result", layer][empty].any()
            lse = cache[f"blocks.{layer}.attn.hook_lse"]
            assert torch.equal(torch.isneginf(lse), empty[:, None].expand_as(lse))
            if backend == "naive":
                sums = cache["pattern", layer].sum(-1)
                assert (sums - (~empty[:, None]).double()).abs().max() < EXACT
        model.zero_grad()
        loss = model(tokens, attention_mask=mask, backend=backend, return_type="loss")
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(torch.isfinite(grad).all() for grad in grads)
        results[backend] = [logits.detach(), *grads]
    for naive, flash in zip(results["naive"], results["flash"], strict=True):
        assert (naive - flash).abs().max() < EXACT


def test_masks_of_every_kind_and_none(model: Decoder, tokens: Tensor, backend: str) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]] * 3)
    expected = model(tokens, attention_mask=mask, backend=backend)
    for dtype in (torch.bool, torch.int32, torch.uint8):
        assert torch.equal(model(tokens, attention_mask=mask.to(dtype), backend=backend), expected)
    # One row of tokens takes one row of mask.
    one = model(tokens[0], attention_mask=mask[0], backend=backend)
    assert (one - expected[:1]).abs().max() < EXACT
    # Nothing masked is no mask, bit for bit.
    ones = torch.ones_like(mask)
    plain = model(tokens, backend=backend)
    assert torch.equal(model(tokens, attention_mask=ones, backend=backend), plain)


def test_positions_of_a_row_are_its_own(model: Decoder, backend: str) -> None:
    """FR-43: in a left-padded batch "first" and "last" are row-wise, as in the solo runs."""
    rows = [[1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    left = torch.tensor([[0] * (6 - len(row)) + row for row in rows])
    right = torch.tensor([row + [0] * (6 - len(row)) for row in rows])
    left_mask = torch.tensor([[0] * (6 - len(row)) + [1] * len(row) for row in rows])
    right_mask = left_mask.flip(1)
    batch = model(left, attention_mask=left_mask, backend=backend)
    other = model(right, attention_mask=right_mask, backend=backend)
    for index, row in enumerate(rows):
        solo = model(torch.tensor([row]), backend=backend)[0]
        assert (batch[index, -len(row) :] - solo).abs().max() < EXACT
        assert (other[index, : len(row)] - solo).abs().max() < EXACT


def test_given_positions_win_over_the_mask(model: Decoder, backend: str) -> None:
    tokens, mask = padded(PROMPT, left=2)
    shifted = torch.tensor([[0, 0, 5, 6, 7, 8]])
    given = model(tokens, attention_mask=mask, position_ids=shifted, backend=backend)
    expected = model(torch.tensor([PROMPT]), position_ids=shifted[:, 2:], backend=backend)
    assert (given[:, 2:] - expected).abs().max() < EXACT
    if model.config.positions == "learned":
        assert (given - model(tokens, attention_mask=mask, backend=backend)).abs().max() > 0.1
