"""A hook point that checks what passes through it.

TransformerLens' HookPoint broadcasts a wrong shape, accepts another dtype and ignores a write that
cannot be honoured, all in silence. This one is the same class with those three made errors, however
the hook was attached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import transformer_lens.hook_points
from torch import Tensor

from headstream.models.errors import HookError
from headstream.models.names import HookSpec

# fn(tensor, hook) -> the replacement, or None to leave the tensor as it is.
HookFunction = Callable[..., Tensor | None]


class HookPoint(transformer_lens.hook_points.HookPoint):
    """An identity that hooks can read and, where its spec says so, replace.

    Attributes:
        spec: axes and rules of the tensor that passes; set by the model that owns the point.
        offset: absolute position of the first row of this pass. 0 unless a key/value cache holds
            earlier tokens: a hook that means position p edits row `p - hook.offset`.
    """

    spec: HookSpec | None = None
    offset: int = 0
    fwd_hooks: list[Any]
    bwd_hooks: list[Any]

    def add_hook(
        self,
        hook: HookFunction,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
        by_name: bool = True,
    ) -> Any:
        """Attach `hook`; arguments as in TransformerLens.

        Args:
            by_name: whether the caller named this very point (then it must fire, and asking for
                it under a backend that cannot form it is an error) or took it as part of a set.
        """
        if not callable(hook):
            raise HookError(
                f"the hook for '{self.name}' must be a function, got {type(hook).__name__}",
                hint="give fn(tensor, hook) -> tensor or None",
            )
        if dir == "bwd" and self.spec is not None and not self.spec.writable:
            raise HookError(
                f"'{self.name}' takes no backward hook: it is read-only and nothing depends on it",
                hint="differentiate what capture(..., grads=True) returns",
            )
        checked = CheckedHook(self, hook, dir)
        handle = super().add_hook(checked, dir, is_permanent, level, prepend, alias_names)
        handle.user_hook = hook
        handle.by_name = by_name
        handle.checked = checked
        return handle

    def detach(self, handle: Any) -> None:
        """Take off the one hook that `handle` stands for, and no other."""
        handle.hook.remove()
        for handles in (self.fwd_hooks, self.bwd_hooks):
            # In place: nn.Module is slow to set an attribute, and every hook comes by here.
            handles[:] = [kept for kept in handles if kept is not handle]

    @property
    def wanted(self) -> bool:
        """Whether anything listens here: a forward or backward hook of whatever kind."""
        return self._listeners() > 0

    @property
    def wanted_by_name(self) -> bool:
        """Whether some hook was attached to this very point, by its name or by torch's methods."""
        handles = [*self.fwd_hooks, *self.bwd_hooks]
        return self._listeners() > len(handles) or any(handle.by_name for handle in handles)

    def _listeners(self) -> int:
        return (
            len(self._forward_hooks)
            + len(self._forward_pre_hooks)
            + len(self._backward_hooks)
            + len(self._backward_pre_hooks)
        )


class CheckedHook:
    """A user's hook with its result checked; counts how often it fired."""

    def __init__(self, point: HookPoint, hook: HookFunction, dir: Literal["fwd", "bwd"]) -> None:
        self.point = point
        self.hook = hook
        self.dir = dir
        self.calls = 0

    def __call__(self, tensor: Tensor, *, hook: Any) -> Any:
        self.calls += 1
        if self.point.spec is not None and not self.point.spec.writable:
            return self._read_only(tensor, hook)
        result: Any = self.hook(tensor, hook=hook)
        if self.dir == "bwd" and isinstance(result, tuple) and len(result) == 1:
            result = result[0]
        if result is not None:
            self._check(result, tensor)
        return result

    def _read_only(self, tensor: Tensor, hook: Any) -> None:
        watch = InPlaceWatch(tensor)
        result = self.hook(tensor, hook=hook)
        if watch.written() or (result is not None and result is not tensor):
            raise HookError(
                f"'{self.point.name}' is read-only: its value follows from the scores",
                hint="edit hook_attn_scores or hook_pattern with backend='naive' instead",
            )

    def _check(self, result: object, tensor: Tensor) -> None:
        kind = "hook" if self.dir == "fwd" else "backward hook"
        name = self.point.name
        if not isinstance(result, Tensor):
            raise HookError(
                f"the {kind} on '{name}' returned {type(result).__name__}, expected a tensor of "
                f"shape {list(tensor.shape)} or None",
                hint="return None to leave the activation as it is",
            )
        for what in ("shape", "dtype", "device"):
            given, expected = getattr(result, what), getattr(tensor, what)
            if given != expected:
                if what == "shape":
                    given, expected = list(given), list(expected)
                axes = f" ({' '.join(self.point.spec.axes)})" if self.point.spec else ""
                raise HookError(
                    f"the {kind} on '{name}'{axes} returned {what} {given}, expected {expected}",
                    hint="return a new tensor like the one that came in",
                )


class InPlaceWatch:
    """Tells whether a tensor was written in place since the watch began."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        # An inference tensor counts no versions, so a copy has to tell.
        self.before = tensor.clone() if tensor.is_inference() else tensor._version

    def written(self) -> bool:
        if isinstance(self.before, Tensor):
            return not torch.equal(self.before.nan_to_num(), self.tensor.nan_to_num())
        return self.tensor._version != self.before
