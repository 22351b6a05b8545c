"""Where in given text each neuron of an MLP fires most: its keys, read by runs.

Source: Geva et al. 2021, who look for what the prefixes that fire a key most have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.memory.keys_values import require_mlp
from headstream.circuits.memory.running_top import RunningTop
from headstream.circuits.memory.tokens import check_top
from headstream.circuits.selection import indices
from headstream.circuits.undisturbed import undisturbed
from headstream.models.arguments import check_count, check_mask
from headstream.models.errors import ExactnessError
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.vocabulary import check_tokens

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@takes_model
def neuron_key_contexts(
    model: Decoder,
    layer: int,
    tokens: Tensor,
    *,
    neurons: int | Sequence[int] | None = None,
    top: int = 10,
    lowest: bool = False,
    batch: int = 8,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> xr.Dataset:
    """The positions at which each neuron fires most; the context is what stands up to there.

    Rows run `batch` at a time through the layers up to this one, and only the best positions so
    far are kept: memory is that of one batch's [batch, pos, d_mlp].

    Args:
        model: the decoder.
        layer: which MLP.
        tokens: int64 [example, pos], or [pos] as one row.
        neurons: which; None means all.
        top: positions a neuron.
        lowest: the positions with the lowest (most negative) activation instead.
        batch: rows at a time.
        attention_mask: [example, pos], 1 on real tokens; padding is no context.
        backend: as for the model.
    Returns:
        Dataset over (neuron, rank): `activation` (what the value is multiplied by), the highest
        first, `example`, `pos`, and `token`, the one at that position.
    Raises:
        ConfigError: if the model has no MLP.
        HookError: if a hook or an intervention edits a run.
        ShapeError: for a layer or neuron that does not exist, `top` outside [1, real positions],
            or weights that are not finite.
        ExactnessError: if an activation is NaN or infinite.
    Example:
        >>> from headstream.models import Decoder, DecoderConfig
        >>> sizes = dict(n_layers=1, n_heads=1, d_model=4, d_head=4, d_vocab=3, n_ctx=5)
        >>> model = Decoder(DecoderConfig(**sizes, d_mlp=6))
        >>> found = neuron_key_contexts(model, 0, torch.tensor([[0, 1, 2], [2, 1, 0]]), top=2)
        >>> dict(found.sizes)
        {'neuron': 6, 'rank': 2}
    """
    require_mlp(model, layer)
    chosen = list(indices(neurons, "neuron", model.config.d_mlp or 0))
    rows = check_tokens(tokens, model.config.d_vocab).to(model.device)
    step = check_count("batch", batch)
    mask = check_mask(attention_mask, rows.shape[0], rows.shape[1], model.device)
    real = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask
    count = check_top(top, int(real.sum()), "real positions")
    name = f"blocks.{layer}.mlp.hook_post"
    found = RunningTop(count, lowest=lowest)
    places = torch.arange(rows.numel(), device=rows.device).view_as(rows)
    with torch.no_grad(), undisturbed(model, "say what fires a neuron"):
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            if not bool(real[part].any()):
                continue
            _, acts = capture(
                model,
                rows[part],
                name,
                attention_mask=None if mask is None else mask[part],
                backend=backend,
                stop_at_layer=layer + 1,
            )
            post = acts[name][real[part]][:, chosen].double()
            if not bool(torch.isfinite(post).all()):
                raise ExactnessError(
                    f"activations of layer {layer} are NaN or infinite in rows {start} to "
                    f"{min(start + step, len(rows)) - 1}",
                    hint="run the model in a wider dtype",
                )
            found.add(post.T, places[part][real[part]])
    values, at = (tensor.cpu() for tensor in found.result())
    dims = ("neuron", "rank")
    return xr.Dataset(
        {
            "activation": (dims, values.numpy()),
            "example": (dims, (at // rows.shape[1]).numpy()),
            "pos": (dims, (at % rows.shape[1]).numpy()),
            "token": (dims, rows.cpu().flatten()[at].numpy()),
        },
        coords={"neuron": chosen, "rank": np.arange(count)},
        attrs={"layer": layer, "order": "lowest" if lowest else "highest"},
    )
