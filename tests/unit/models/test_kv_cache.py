"""Keys and values already computed never change: steps with a cache equal one full pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import HookError, ShapeError
from headstream.models.kv_cache import KVCache

# float64 sums in another order; two orders above what is found.
EXACT = 1e-10


def in_chunks(model: Decoder, tokens: Tensor, sizes: list[int], backend: str) -> Tensor:
    cache = KVCache(model, batch=tokens.shape[0])
    parts = [model(part, kv_cache=cache, backend=backend) for part in tokens.split(sizes, dim=1)]
    assert cache.length == tokens.shape[1]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("sizes", [[4, 1, 1], [2, 4], [1, 5], [3, 2, 1], [6], [1] * 6])
def test_steps_equal_one_pass(
    model: Decoder, tokens: Tensor, backend: str, sizes: list[int]
) -> None:
    """FR-10: a step sees everything before it, whatever its length."""
    expected = model(tokens, backend=backend)
    assert (in_chunks(model, tokens, sizes, backend) - expected).abs().max() < EXACT


@pytest.mark.parametrize("positions", ["shortformer", "sinusoidal", "none"])
def test_steps_equal_one_pass_for_other_positions(
    build: Callable[..., Decoder], tokens: Tensor, backend: str, positions: str
) -> None:
    model = build({"positions": positions, "n_kv_heads": 1})
    expected = model(tokens, backend=backend)
    assert (in_chunks(model, tokens, [2, 1, 3], backend) - expected).abs().max() < EXACT


def test_left_padding_in_the_cache(model: Decoder, backend: str) -> None:
    """Rows of different length go on together, each at its own position."""
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    tokens = torch.tensor([[1, 2, 3], [9, 9, 6]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    cache = KVCache(model, batch=2)
    model(tokens, attention_mask=mask, kv_cache=cache, backend=backend)
    assert (cache.length, cache.allowed.tolist()) == (3, [3, 1])
    more = model(torch.tensor([[4, 5], [7, 8]]), kv_cache=cache, backend=backend)
    for index, row in enumerate(rows):
        solo = model(torch.tensor([row]), backend=backend)[0]
        assert (more[index] - solo[-2:]).abs().max() < EXACT


def test_a_hole_after_the_cache(model: Decoder, backend: str) -> None:
    cache = KVCache(model)
    model(torch.tensor([[1, 2]]), kv_cache=cache, backend=backend)
    got = model(
        torch.tensor([[9, 3]]),
        kv_cache=cache,
        attention_mask=torch.tensor([[0, 1]]),
        backend=backend,
    )
    expected = model(torch.tensor([[1, 2, 3]]), backend=backend)
    assert (got[:, -1] - expected[:, -1]).abs().max() < EXACT
    assert (cache.length, cache.allowed.tolist()) == (4, [3])


def test_cached_keys_never_change(model: Decoder, tokens: Tensor) -> None:
    cache = KVCache(model, batch=3)
    model(tokens[:, :4], kv_cache=cache)
    before = [key.clone() for key in cache.keys]
    model(tokens[:, 4:], kv_cache=cache)
    assert all(torch.equal(key[:, :4], old) for key, old in zip(cache.keys, before, strict=True))
    shape = (3, 6, model.config.kv_heads, model.config.d_head)
    assert {tuple(value.shape) for value in (*cache.keys, *cache.values)} == {shape}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_pass_leaves_the_cache_as_it_was(
    model: Decoder, tokens: Tensor, backend: str, error: type[BaseException]
) -> None:
    cache = KVCache(model, batch=3)
    model(tokens[:, :3], kv_cache=cache, backend=backend)
    before = [value.clone() for value in (*cache.keys, *cache.values)]

    def stop(z: Tensor, hook: object) -> None:
        raise error

    with pytest.raises(error):
        model.run_with_hooks(
            tokens[:, 3:],
            kv_cache=cache,
            backend=backend,
            fwd_hooks=[("blocks.1.attn.hook_z", stop)],
        )
    assert cache.length == 3
    assert all(
        torch.equal(value, old)
        for value, old in zip((*cache.keys, *cache.values), before, strict=True)
    )
    assert {point.offset for point in model.hook_dict.values()} == {0}
    rest = model(tokens[:, 3:], kv_cache=cache, backend=backend)
    assert (rest - model(tokens, backend=backend)[:, 3:]).abs().max() < EXACT


def test_a_failed_loss_leaves_the_cache_as_it_was(model: Decoder, tokens: Tensor) -> None:
    cache = KVCache(model, batch=3)
    with pytest.raises(ShapeError, match="the loss has no target"):
        model(tokens[:, :1], kv_cache=cache, return_type="loss")
    assert cache.length == 0
    model(tokens[:, :3], kv_cache=cache, return_type=None)
    assert cache.length == 3


def test_hooks_learn_where_they_stand(model: Decoder, tokens: Tensor) -> None:
    """`hook.offset` is the absolute position of row 0, also where a hook runs the model itself."""
    seen = []

    def note(x: Tensor, hook: object) -> None:
        inner: list[int] = []
        model.run_with_hooks(
            tokens[:, :2],
            stop_at_layer=1,
            fwd_hooks=[("hook_embed", lambda x, hook: inner.append(hook.offset))],
        )
        seen.append((hook.offset, x.shape[1], inner))  # type: ignore[attr-defined]

    cache = KVCache(model, batch=3)
    for part in tokens.split([3, 1, 2], dim=1):
        with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", note)]):
            model(part, kv_cache=cache)
    assert seen == [(0, 3, [0]), (3, 1, [0]), (4, 2, [0])]
    assert {point.offset for point in model.hook_dict.values()} == {0}


def test_an_edit_by_absolute_position(model: Decoder, tokens: Tensor, backend: str) -> None:
    """An edit of position 4 written with `hook.offset` equals the same edit of the full pass."""

    def edit(x: Tensor, hook: object) -> Tensor | None:
        row = 4 - hook.offset  # type: ignore[attr-defined]
        if not 0 <= row < x.shape[1]:
            return None
        x = x.clone()
        x[:, row] = 0
        return x

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_mid", edit)]):
        expected = model(tokens, backend=backend)
        got = in_chunks(model, tokens, [3, 2, 1], backend)
    assert (got - expected).abs().max() < EXACT
    assert (model(tokens, backend=backend) - expected).abs().max() > 0.1


def test_pattern_over_cached_keys(model: Decoder, tokens: Tensor) -> None:
    _, full = model.run_with_cache(tokens, names_filter="*hook_pattern")
    cache = KVCache(model, batch=3)
    model(tokens[:, :4], kv_cache=cache)
    _, part = model.run_with_cache(tokens[:, 4:], names_filter="*hook_pattern", kv_cache=cache)
    for name, pattern in part.items():
        assert pattern.shape == (3, 4, 2, 6)
        assert (pattern - full[name][:, :, 4:]).abs().max() < EXACT


@pytest.mark.usefixtures("unchecked")
def test_caches_that_do_not_fit(model_a: Decoder, model_r: Decoder, tokens: Tensor) -> None:
    for batch in (0, -1, True, 2.0):
        with pytest.raises(ShapeError, match=r"batch must be a whole number >= 1, got"):
            KVCache(model_a, batch=batch)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"made for a model of another configuration"):
        model_a(tokens, kv_cache=KVCache(model_r, 3))
    with pytest.raises(ShapeError, match=r"kv_cache has batch 2, tokens have 3"):
        model_a(tokens, kv_cache=KVCache(model_a, 2))
    cache = KVCache(model_a, 3)
    model_a(tokens, kv_cache=cache)
    model_a(tokens, kv_cache=cache)
    words = r"tokens are 6 long after 12 cached ones, over n_ctx = 16"
    with pytest.raises(ShapeError, match=words):
        model_a(tokens, kv_cache=cache)
    for argument in ("start_at_layer", "stop_at_layer"):
        with pytest.raises(ShapeError, match=rf"{argument}=1 cannot be combined with kv_cache"):
            model_a(tokens, kv_cache=cache, **{argument: 1})
    with pytest.raises(ShapeError, match=r"kv_cache holds torch.float64 on cpu, the model is"):
        model_a.float()(tokens[:, :1], kv_cache=cache)


def test_an_unfired_hook_is_said_after_the_pass(model: Decoder, tokens: Tensor) -> None:
    cache = KVCache(model, batch=3)
    with pytest.raises(HookError, match="never fired"):
        model.run_with_hooks(
            tokens,
            kv_cache=cache,
            backend="flash",
            fwd_hooks=[("blocks.*.attn.hook_pattern", lambda x, hook: None)],
        )
    assert model.hooks_active() == 0
