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
        checked = CheckedHook(self, hook, by_name) if dir == "fwd" else hook
        handle = super().add_hook(checked, dir, is_permanent, level, prepend, alias_names)
        handle.user_hook = hook
        handle.by_name = by_name
        handle.checked = checked
        return handle

    @property
    def wanted(self) -> bool:
        """Whether anything listens here: a forward or backward hook of whatever kind."""
        return bool(
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
        )

    @property
    def wanted_by_name(self) -> bool:
        """Whether some hook was attached to this very point by its name."""
        handles = [*self.fwd_hooks, *self.bwd_hooks]
        return any(getattr(handle, "by_name", True) for handle in handles)


class CheckedHook:
    """A user's hook with its result checked; counts how often it fired."""

    def __init__(self, point: HookPoint, hook: HookFunction, by_name: bool) -> None:
        self.point = point
        self.hook = hook
        self.by_name = by_name
        self.calls = 0

    def __call__(self, tensor: Tensor, *, hook: Any) -> Tensor | None:
        self.calls += 1
        if self.point.spec is not None and not self.point.spec.writable:
            return self._read_only(tensor, hook)
        result = self.hook(tensor, hook=hook)
        if result is not None:
            self._check(result, tensor)
        return result

    def _read_only(self, tensor: Tensor, hook: Any) -> None:
        # An inference tensor counts no versions, so a copy tells whether it was written.
        before = tensor.clone() if tensor.is_inference() else tensor._version
        result = self.hook(tensor, hook=hook)
        written = (
            not torch.equal(before, tensor)
            if isinstance(before, Tensor)
            else tensor._version != before
        )
        if written or (result is not None and result is not tensor):
            raise HookError(
                f"'{self.point.name}' is read-only: its value follows from the scores",
                hint="edit hook_attn_scores or hook_pattern with backend='naive' instead",
            )

    def _check(self, result: object, tensor: Tensor) -> None:
        name = self.point.name
        if not isinstance(result, Tensor):
            raise HookError(
                f"the hook on '{name}' returned {type(result).__name__}, expected a tensor of "
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
                    f"the hook on '{name}'{axes} returned {what} {given}, expected {expected}",
                    hint="return a new tensor like the one that came in",
                )
