"""A run that is to be taken apart must be the model's own: edits of it are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstream.models.errors import HookError
from headstream.models.hook_point import HookPoint, InPlaceWatch

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

_HINT = "take it apart outside the block, or detach the hook"


@contextmanager
def undisturbed(model: Decoder, what: str) -> Iterator[None]:
    """Runs inside the block are the model's own, or this raises: nothing edits them.

    Hooks that only read are left alone. Every write must be the weights' at the inputs shown: with
    an edit the sum of the writes may still hold, and say something of another model.

    Args:
        what: what is being done, for the error: "decompose the stream".
    Raises:
        HookError: for edges that are cut or patterns that are frozen; for a hook of torch's own on
            a module, since what it does cannot be seen; and, at the end of the block, for a hook
            that replaced an activation by another value or wrote to it.
    """
    for layer, block in enumerate(model.blocks):
        if block.attn.edits:
            raise HookError(
                f"cannot {what}: attention of layer {layer} is edited (edges cut, or a pattern "
                "frozen)",
                hint="take it apart outside the block",
            )
    for name, module in model.named_modules():
        ours = len(module.fwd_hooks) if isinstance(module, HookPoint) else 0
        if len(module._forward_pre_hooks) or len(module._forward_hooks) > ours:
            where = f"'{name}'" if name else "the model"
            raise HookError(
                f"cannot {what}: a torch hook on {where} may edit the run",
                hint="detach it, or read through model.hooks",
            )
    watches = [_Watch(point) for point in model.hook_dict.values() if point.fwd_hooks]
    try:
        yield
    finally:
        for watch in watches:
            watch.detach()
    edited = [watch.point.name for watch in watches if watch.edited]
    if edited:
        more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
        raise HookError(f"cannot {what}: a hook edits '{edited[0]}'{more} in this run", hint=_HINT)


class _Watch:
    """Compares what enters a hook point with what leaves its hooks."""

    def __init__(self, point: HookPoint) -> None:
        self.point = point
        self.edited = False
        # Not by name: to watch must not make a backend form what nobody asked for.
        self._handles = [
            point.add_hook(self._enter, prepend=True, by_name=False),
            point.add_hook(self._leave, by_name=False),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            self.point.detach(handle)

    def _enter(self, tensor: Tensor, *, hook: Any) -> None:
        self._entered, self._watch = tensor, InPlaceWatch(tensor)

    def _leave(self, tensor: Tensor, *, hook: Any) -> None:
        replaced = tensor is not self._entered and not torch.equal(tensor, self._entered)
        self.edited |= replaced or self._watch.written()
        del self._entered, self._watch
