"""Reading and editing a run, with nothing silent: `capture` and `edited`.

Our own code uses these two and `model.hooks`, and nothing else of TransformerLens' hook methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstream.models.errors import HookError
from headstream.models.given_model import takes_model
from headstream.models.hook_point import InPlaceWatch
from headstream.models.resolve import resolve

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Edit = Callable[[Tensor], Tensor]


@takes_model
def capture(
    model: Decoder,
    tokens: Any,
    names: str | Sequence[str],
    *,
    grads: bool = False,
    **forward: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """Run the model and return the activations that pass the named hooks.

    Args:
        tokens: as for the model.
        names: hook names; globs may be among them.
        grads: keep the activations attached to the graph, as the very tensors that flow on, so
            that `torch.autograd.grad(f(logits), activation)` works, with frozen weights too.
            Otherwise they are detached copies that share storage with nothing.
        forward: passed to the model (`attention_mask`, `backend`, ...).
    Returns:
        `(output, {name: activation})` in firing order, values as they leave all other hooks.
    Raises:
        HookError: for a name that matches nothing or a hook that never fires, such as the
            pattern under `backend="flash"`.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise HookError("no hook names were given")
    matches = {match for name in wanted for match in resolve(model.hook_dict, name)}
    ordered = [name for name in model.hook_dict if name in matches]
    kept: dict[str, Tensor] = {}

    def keep(tensor: Tensor, *, hook: Any) -> Tensor | None:
        if not grads:
            kept[hook.name] = tensor.detach().clone()
            return None
        if not tensor.requires_grad and hook.spec.writable:
            # Frozen weights or a constant: a graph starts here, or there would be no gradient.
            tensor = tensor.detach().requires_grad_()
        kept[hook.name] = tensor
        return tensor

    with torch.set_grad_enabled(grads or torch.is_grad_enabled()):
        output = model.run_with_hooks(
            tokens, fwd_hooks=[(name, keep) for name in ordered], **forward
        )
    return output, {name: kept[name] for name in ordered}


@takes_model
@contextmanager
def edited(model: Decoder, edits: Mapping[str, Edit]) -> Iterator[Decoder]:
    """Inside the block, every run replaces each named activation by `edit(activation)`.

    Args:
        edits: hook name (globs allowed) to a function from the activation to a new tensor of the
            same shape, dtype and device. It must not change its argument in place.
    Raises:
        HookError: for a name that matches nothing, a result that does not fit, an edit in place,
            or an edit that never fired.
    """

    def hook_for(edit: Edit) -> Callable[..., Tensor]:
        def apply(tensor: Tensor, *, hook: Any) -> Tensor:
            watch = InPlaceWatch(tensor)
            result = edit(tensor)
            if watch.written():
                raise HookError(
                    f"the edit of '{hook.name}' changed its argument in place",
                    hint="clone it first; other activations may share its storage",
                )
            if result is None:
                raise HookError(
                    f"the edit of '{hook.name}' returned None, expected a tensor",
                    hint="return the argument itself to leave it as it is",
                )
            return result

        return apply

    with model.hooks(fwd_hooks=[(name, hook_for(edit)) for name, edit in edits.items()]):
        yield model
