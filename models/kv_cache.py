"""Keys and values already computed: two tensors a layer, kept between calls.

The causal mask makes them final: nothing at position i depends on tokens after i, so a cached key
never changes. New tokens are appended, one or several at a time; they see everything before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.models.errors import ShapeError
from headstream.models.given_model import check_model

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

# New tokens, and all tokens so far.
_New = Float[Tensor, "batch pos kv_head d_head"]
_All = Float[Tensor, "batch key_pos kv_head d_head"]


class KVCache:
    """Keys and values of one model and one batch.

    Args:
        model: the decoder that will fill it.
        batch: rows; each call must bring as many.

    A pass stages its keys and values layer by layer and commits them together at its end, so that
    a pass that raises leaves the cache as it was. 2 * batch * length * kv_heads * d_head numbers a
    layer.

    Example:
        >>> from headstream.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=5, n_ctx=9)
        >>> model = Decoder(config)
        >>> cache = KVCache(model)
        >>> first = model(torch.tensor([[0, 1, 2]]), kv_cache=cache)
        >>> last = model(torch.tensor([[3]]), kv_cache=cache)
        >>> cache.length, torch.allclose(last[0, 0], model(torch.tensor([[0, 1, 2, 3]]))[0, 3])
        (4, True)
    """

    def __init__(self, model: Decoder, batch: int = 1) -> None:
        check_model(model)
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ShapeError(f"batch must be a whole number >= 1, got {batch!r}")
        config = model.config
        shape = (batch, 0, config.kv_heads, config.d_head)
        empty = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.batch = batch
        self.config = config
        self.keys: list[_All] = [empty for _ in range(config.n_layers)]
        self.values: list[_All] = [empty for _ in range(config.n_layers)]
        self.mask: Bool[Tensor, "batch key_pos"] = torch.empty(
            (batch, 0), dtype=torch.bool, device=model.device
        )
        self._staged: dict[int, tuple[_All, _All]] = {}

    @property
    def length(self) -> int:
        """Tokens held, masked ones included: the absolute position of the next row."""
        return self.mask.shape[1]

    @property
    def allowed(self) -> Int[Tensor, " batch"]:
        """Allowed tokens held, per row: the position id of the next token."""
        return self.mask.sum(-1)

    def stage(self, layer: int, k: _New, v: _New) -> tuple[_All, _All]:
        """Keys and values of all tokens so far at `layer`; kept when the pass commits."""
        self._staged[layer] = (
            torch.cat((self.keys[layer], k), 1),
            torch.cat((self.values[layer], v), 1),
        )
        return self._staged[layer]

    def commit(self, mask: Bool[Tensor, "batch key_pos"]) -> None:
        """Keep what was staged, now that every layer has run. `mask` covers the whole length."""
        for layer, (k, v) in self._staged.items():
            self.keys[layer], self.values[layer] = k, v
        self.mask = mask
        self._staged = {}

    def discard(self) -> None:
        """Forget what was staged by a pass that did not finish."""
        self._staged = {}
