"""Path patching with hooks as papers describe it, on any model with TransformerLens' hook names.

`transformer_lens.patching` has no sweep over paths, so its row of `bench_patching.py` is this
recipe (Wang et al. 2022, appendix B): for each sender one pass with every other head and MLP held,
which shows what reaches every receiver, and one pass a receiver with that put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

HeadPath = tuple[tuple[int, int], tuple[int, int, str]]


def head_paths(n_layers: int, n_heads: int) -> list[HeadPath]:
    """Every (head, later head's q, k or v), sender by sender."""
    return [
        ((la, h), (to, g, what))
        for la in range(n_layers)
        for h in range(n_heads)
        for what in "qkv"
        for to in range(la + 1, n_layers)
        for g in range(n_heads)
    ]


def recipe(
    model: Any, clean: Any, corrupted: Any, paths: Sequence[HeadPath], metric: Callable[[Any], Any]
) -> Callable[[], Any]:
    """A function that gives the metric with each path denoised; both unpatched runs are given."""
    layers = range(model.cfg.n_layers)
    held = [f"blocks.{la}.{name}" for la in layers for name in ("attn.hook_z", "hook_mlp_out")]
    with torch.no_grad():
        kept = {
            name: {hook: cache[hook] for hook in held}
            for name, cache in (
                ("clean", model.run_with_cache(clean)[1]),
                ("corrupted", model.run_with_cache(corrupted)[1]),
            )
        }
    by_sender: dict[tuple[int, int], list[tuple[int, tuple[int, int, str]]]] = {}
    for index, (sender, receiver) in enumerate(paths):
        by_sender.setdefault(sender, []).append((index, receiver))

    def reached(
        sender: tuple[int, int], receivers: Sequence[tuple[int, int, str]]
    ) -> dict[str, Any]:
        layer, head = sender
        sending = f"blocks.{layer}.attn.hook_z"
        sent = kept["corrupted"][sending].clone()
        sent[:, :, head] = kept["clean"][sending][:, :, head]
        values = {**kept["corrupted"], sending: sent}
        found: dict[str, Any] = {}

        # TransformerLens' native models know a hook by several names: the one asked for is bound.
        def hold(name: str) -> Callable[..., Any]:
            return lambda value, hook: values[name]

        def keep(name: str) -> Callable[..., Any]:
            return lambda value, hook: found.__setitem__(name, value.clone())

        wanted = sorted({_hook(receiver) for receiver in receivers})
        model.run_with_hooks(
            corrupted,
            fwd_hooks=[(name, hold(name)) for name in held]
            + [(name, keep(name)) for name in wanted],
        )
        return found

    def putting(receiver: tuple[int, int, str], found: dict[str, Any]) -> Callable[..., Any]:
        head = receiver[1]

        def put(value: Any, hook: Any) -> Any:
            value = value.clone()
            value[:, :, head] = found[_hook(receiver)][:, :, head]
            return value

        return put

    def job() -> Any:
        out = torch.empty(len(paths), dtype=torch.float64)
        with torch.no_grad():
            for sender, receivers in by_sender.items():
                found = reached(sender, [receiver for _, receiver in receivers])
                for index, receiver in receivers:
                    hook = (_hook(receiver), putting(receiver, found))
                    out[index] = metric(model.run_with_hooks(corrupted, fwd_hooks=[hook]))
        return out

    return job


def _hook(receiver: tuple[int, int, str]) -> str:
    layer, _, what = receiver
    return f"blocks.{layer}.attn.hook_{what}"
