"""FR-35, FR-36: nothing is kept alive, and flash forms no matrix."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstream.models.decoder import Decoder
from headstream.models.hooks import capture, edited
from headstream.models.kv_cache import KVCache


def use(model: Decoder, tokens: Tensor) -> None:
    """Every way of running a model with hooks, results dropped."""
    model.run_with_cache(tokens)
    model.run_with_cache(tokens, incl_bwd=True, return_type="loss")
    model.zero_grad()
    capture(model, tokens, "*hook_z", grads=True)
    model.run_with_hooks(tokens, fwd_hooks=[("*hook_z", lambda z, hook: z * 2)])
    with edited(model, {"hook_embed": torch.zeros_like}):
        model(tokens)
    model.generate(tokens, 2)
    model(tokens, kv_cache=KVCache(model, 3))


def live_bytes() -> int:
    gc.collect()
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        if isinstance(item, Tensor)
    }
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_runs_leave_no_tensor_behind(model_r: Decoder, tokens: Tensor) -> None:
    use(model_r, tokens)
    use(model_r, tokens)
    before = live_bytes()
    for _ in range(3):
        use(model_r, tokens)
    assert live_bytes() == before


def test_a_model_dies_when_it_is_dropped(build: Callable[..., Decoder], tokens: Tensor) -> None:
    """At once, by reference count: no cycle runs through a hook, a cache or a context."""
    model = build({"d_mlp": 8, "positions": "rotary"})
    use(model, tokens)
    _, cache = model.run_with_cache(tokens)
    gc.collect()
    gc.disable()
    try:
        dead = weakref.ref(model)
        del model
        assert dead() is not None  # the cache knows its model
        del cache
        assert dead() is None
    finally:
        gc.enable()


class Largest(TorchDispatchMode):
    """Records the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("name", ["blocks.1.hook_resid_post", "blocks.1.hook_resid_*"])
def test_flash_forms_no_square(build: Callable[..., Decoder], name: str) -> None:
    """One stream is asked for, and the largest tensor of the pass is a few streams."""
    length = 512
    model = build({"n_ctx": length, "n_kv_heads": 2, "d_mlp": 16}, dtype=torch.float32)
    tokens = torch.arange(length)[None] % 20
    padded = torch.ones_like(tokens)
    padded[:, :9] = 0
    largest = {}
    for backend in ("flash", "auto", "naive"):
        with torch.no_grad(), Largest() as seen:
            for mask in (None, padded):
                _, cache = model.run_with_cache(
                    tokens, names_filter=name, backend=backend, attention_mask=mask
                )
        assert set(cache) <= {n for n in model.hook_dict if n.startswith("blocks.1.hook_resid")}
        largest[backend] = seen.elements
    # The widest is n x 20 logits; the square is n x n for each of 4 heads.
    assert largest["flash"] == largest["auto"] <= 32 * length
    assert largest["naive"] >= 4 * length**2


def test_gradients_through_flash_form_no_square(build: Callable[..., Decoder]) -> None:
    length = 1024
    model = build({"n_ctx": length, "n_layers": 1, "positions": "rotary"}, dtype=torch.float32)
    tokens = torch.arange(length)[None] % 20
    with Largest() as seen:
        model(tokens, return_type="loss", backend="flash").backward()
    assert seen.elements <= 32 * length
    with Largest() as seen:
        _, acts = capture(model, tokens, "*hook_lse", grads=True, backend="flash")
        sum(value.sum() for value in acts.values()).backward()
    # A tile of the block loop over all heads; the square is four times as much.
    assert seen.elements <= length**2
