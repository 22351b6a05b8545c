"""What TransformerLens' tools ask of a model, made strict.

`LensSurface` is the base of `Decoder`: hooks and caches with TransformerLens' names and meanings
here, weight views with its shapes in `weight_views.py`, text with its method names in
`text_methods.py`. Its own methods are kept where they are right; those that are silent about a
mistake are overridden here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule

from headstream.models.errors import HookError, ShapeError
from headstream.models.hook_point import HookFunction, HookPoint
from headstream.models.keeper import Keeper
from headstream.models.lens_config import LensConfig
from headstream.models.resolve import resolve
from headstream.models.text_methods import TextMethods

Direction = Literal["fwd", "bwd"]
HookName = str | Callable[[str], bool]
NamedHook = tuple[HookName, HookFunction]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None


class LensSurface(TextMethods, HookedRootModule):
    """TransformerLens' surface over `config`, `blocks`, `embed`, `unembed` and `ln_final`."""

    hook_dict: dict[str, HookPoint]

    @property
    def cfg(self) -> LensConfig:
        """The configuration as TransformerLens' tools want it; ours is behind every other name."""
        return LensConfig(self.config, dtype=self.dtype, device=self.device)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Iterable[NamedHook] = (),
        bwd_hooks: Iterable[NamedHook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[LensSurface]:
        """Attach hooks for the duration of a `with` block.

        Arguments as in TransformerLens; a name may be a glob. Exactly the hooks attached here are
        taken off at the end, also after an exception. A backward hook belongs to the passes run
        inside the block, whenever their `backward` is called.

        Raises:
            HookError: for a name that matches nothing (before anything is attached), and at the
                end of the block for a forward hook that never fired.
        """
        named = [
            *(("fwd", name, hook) for name, hook in _pairs("fwd_hooks", fwd_hooks)),
            *(("bwd", name, hook) for name, hook in _pairs("bwd_hooks", bwd_hooks)),
        ]
        matches = [self._matches(name, direction) for direction, name, _ in named]
        with self._level(reset_hooks_end, clear_contexts) as attach:
            handles = [
                [attach(match, hook, direction, _is_exact(name)) for match in found]
                for (direction, name, hook), found in zip(named, matches, strict=True)
            ]
            yield self
            for (direction, name, _), found, attached in zip(named, matches, handles, strict=True):
                if direction == "fwd" and not any(handle.checked.calls for handle in attached):
                    raise HookError(
                        f"the hook on {name!r} never fired", hint=self._why_unfired(found[0])
                    )

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Iterable[NamedHook] = (),
        bwd_hooks: Iterable[NamedHook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward pass with hooks attached; see `hooks`."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        return_cache_object: bool = True,
        **model_kwargs: Any,
    ) -> tuple[Any, Any]:
        """One forward pass, and what it computed.

        Arguments as in TransformerLens, with these differences: a name may be a glob, and one that
        matches nothing is an error; everything (`None`) leaves out `hook_result`, which costs
        n_heads times the stream and is given when named; `pos_slice` cuts the position axis of
        every activation, `hook_lse` included; cached tensors share storage with nothing else.

        Returns:
            (output, ActivationCache). Gradients, with `incl_bwd=True` on a scalar output, are
            under `name + "_grad"`; as in TransformerLens they also reach the weights' `.grad`.
        Raises:
            HookError: for a name that matches nothing or a hook that never fired.
            ShapeError: if `incl_bwd` is asked of an output that is no scalar or carries no
                gradient, or `remove_batch_dim` of more than one row.
        """
        exact = self._cached_names(names_filter)
        keeper = Keeper(
            device=device,
            remove_batch_dim=remove_batch_dim,
            pos_slice=pos_slice,
            alone=not any(point.wanted for point in self.hook_dict.values()),
            arguments=(*model_args, *model_kwargs.values()),
        )
        with (
            self._level(reset_hooks_end, clear_contexts) as attach,
            torch.set_grad_enabled(torch.is_grad_enabled() or incl_bwd),
        ):
            for name, by_name in exact.items():
                attach(name, keeper.forward, "fwd", by_name)
                if incl_bwd and self._takes_gradient(name):
                    attach(name, keeper.backward, "bwd", by_name)
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                _backward(output)
        missing = [name for name in exact if name not in keeper.kept]
        for name in missing:
            if exact[name]:
                raise HookError(f"'{name}' never fired in this pass", hint=self._why_unfired(name))
        if len(missing) == len(exact):
            raise HookError("none of the names asked for fired in this pass")
        kept, output = keeper.in_order(exact), keeper.unshared(output)
        if not return_cache_object:
            return output, kept
        return output, ActivationCache(kept, self, has_batch_dim=not remove_batch_dim)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[NamedHook], list[NamedHook]]:
        """A dictionary, and the hooks that will fill it once they are attached.

        Raises:
            HookError: for a name that matches nothing.
        """
        keeper = Keeper(
            device=device, remove_batch_dim=remove_batch_dim, pos_slice=pos_slice, kept=cache
        )
        names = list(self._cached_names(names_filter))
        takers = [name for name in names if incl_bwd and self._takes_gradient(name)]
        forward: list[NamedHook] = [(name, keeper.forward) for name in names]
        return keeper.kept, forward, [(name, keeper.backward) for name in takers]

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Attach hooks that fill the returned dictionary until `reset_hooks`.

        Raises:
            HookError: for a name that matches nothing.
        """
        kept, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache
        )
        for name, hook in forward:
            self.add_hook(name, hook)
        for name, hook in backward:
            self.add_hook(name, hook, "bwd")
        return kept

    def hooks_active(self) -> int:
        """How many hooks are attached, forward and backward, over all points."""
        return sum(len(point.fwd_hooks) + len(point.bwd_hooks) for point in self.hook_dict.values())

    def add_hook(
        self,
        name: HookName,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Attach a hook until `reset_hooks`; the name may be a glob and must match."""
        by_name = _is_exact(name)
        for match in self._matches(name, dir):
            point = self.hook_dict[match]
            point.add_hook(hook, dir, is_permanent, level, prepend, by_name=by_name)

    @contextmanager
    def _level(self, reset_hooks_end: bool, clear_contexts: bool) -> Iterator[Callable[..., Any]]:
        """A function that attaches hooks; those, and no others, are taken off at the end."""
        attached: list[tuple[HookPoint, Any]] = []
        self.context_level += 1

        def attach(name: str, hook: HookFunction, direction: Direction, by_name: bool) -> Any:
            point = self.hook_dict[name]
            handle = point.add_hook(hook, direction, level=self.context_level, by_name=by_name)
            attached.append((point, handle))
            return handle

        try:
            yield attach
        finally:
            if reset_hooks_end:
                for point, handle in attached:
                    point.detach(handle)
                if clear_contexts:
                    self.clear_contexts()
            self.context_level -= 1

    def _cached_names(self, names_filter: NamesFilter) -> dict[str, bool]:
        """The names meant, in firing order, and whether each was named as such."""
        points = self.hook_dict
        if names_filter is None:
            return {n: False for n, p in points.items() if p.spec is None or not p.spec.on_request}
        one = isinstance(names_filter, str) or callable(names_filter)
        wanted = [names_filter] if one else list(cast("Sequence[HookName]", names_filter))
        exact: dict[str, bool] = {}
        for name in cast("list[HookName]", wanted):
            for match in resolve(points, name):
                exact[match] = exact.get(match, False) or _is_exact(name)
        if not exact:
            raise HookError("names_filter names no hook", hint="None means every hook")
        return {name: exact[name] for name in points if name in exact}

    def _matches(self, name: HookName, direction: str) -> list[str]:
        """The points that `name` means; a set of names takes backward hooks where they can be."""
        matches = resolve(self.hook_dict, name)
        if direction == "fwd" or _is_exact(name):
            return matches
        return [match for match in matches if self._takes_gradient(match)] or matches

    def _takes_gradient(self, name: str) -> bool:
        spec = self.hook_dict[name].spec
        return spec is None or spec.writable

    def _why_unfired(self, name: str) -> str:
        spec = self.hook_dict[name].spec
        if spec is not None and spec.naive_only:
            return "backend 'flash' does not form the n x n matrix; use backend='naive' or 'auto'"
        return "no pass that reaches it was run inside the block"


def _pairs(argument: str, named: Iterable[NamedHook]) -> list[NamedHook]:
    """`named` as a list, which may be walked more than once."""
    pairs = list(named)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise HookError(f"{argument} must be pairs (name, function), got {pair!r}")
    return pairs


def _is_exact(name: object) -> bool:
    return isinstance(name, str) and not any(sign in name for sign in "*?[")


def _backward(output: Any) -> None:
    if not isinstance(output, Tensor) or output.ndim:
        given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ShapeError(
            f"incl_bwd=True needs a scalar output, got {given}", hint="pass return_type='loss'"
        )
    if not output.requires_grad:
        raise ShapeError(
            "incl_bwd=True needs an output that carries a gradient, and no weight requires one",
            hint="use model.requires_grad_(True), outside torch.inference_mode()",
        )
    output.backward()
