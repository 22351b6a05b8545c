"""A hook that keeps what passes, for `run_with_cache`: copied no more than safety asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformer_lens.utilities import Slice

from headstream.models.errors import ShapeError


class Keeper:
    """Keeps activations by hook name, gradients by `name + "_grad"`.

    Nothing kept shares storage with another entry, an argument or the output of the run, so that
    an edit in place of any of them changes none of the others. A tensor that is alone in its
    storage is kept as it is: copying everything would cost half a pass.

    Args:
        device: where to keep; None leaves each where it is.
        remove_batch_dim: drop the batch axis, which must have length 1.
        pos_slice: what to keep of the position axis, in TransformerLens' slice language.
        alone: no other hook is attached to the model. Otherwise everything is copied at once, as
            a later hook may edit in place what was kept before.
        arguments: of the run; their storage is never kept.
        kept: the dictionary to fill.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        pos_slice: Any = None,
        alone: bool = False,
        arguments: Iterable[Any] = (),
        kept: dict[str, Tensor] | None = None,
    ) -> None:
        self.device = device
        self.remove_batch_dim = remove_batch_dim
        self.cut = Slice.unwrap(pos_slice)
        self.alone = alone
        self.kept = {} if kept is None else kept
        self._storages = {_storage(value) for value in arguments if isinstance(value, Tensor)}

    def forward(self, tensor: Tensor, *, hook: Any) -> None:
        """Keep an activation."""
        self._keep(tensor, hook, "", copy=not self.alone)

    def backward(self, gradient: Tensor, *, hook: Any) -> None:
        """Keep a gradient; autograd may go on adding to the tensor it hands out."""
        self._keep(gradient, hook, "_grad", copy=True)

    def in_order(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What was kept: the activations in the order of `names`, then the gradients likewise."""
        ordered = [name + suffix for suffix in ("", "_grad") for name in names]
        return {name: self.kept[name] for name in ordered if name in self.kept}

    def unshared(self, output: Any) -> Any:
        """The run's output, copied if it is a tensor that was kept."""
        shared = isinstance(output, Tensor) and _storage(output) in self._storages
        return output.clone() if shared else output

    def _keep(self, tensor: Tensor, hook: Any, suffix: str, *, copy: bool) -> None:
        value = tensor.detach()
        if self.device is not None:
            value = value.to(self.device)
        if self.cut.mode != "identity":
            value = self.cut.apply(value, dim=hook.spec.pos_axis)
        if self.remove_batch_dim:
            if value.shape[0] != 1:
                raise ShapeError(
                    f"remove_batch_dim=True needs a batch of one, but '{hook.name}' has "
                    f"{value.shape[0]} rows"
                )
            value = value[0]
        # A part of a storage would keep all of it alive.
        partial = value.nbytes < value.untyped_storage().nbytes()
        pointer = _storage(value)
        if copy or partial or pointer in self._storages:
            value = value.clone()
            pointer = _storage(value)
        self._storages.add(pointer)
        self.kept[hook.name + suffix] = value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
