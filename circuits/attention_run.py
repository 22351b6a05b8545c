"""How the heads of a run attended, in O(n) memory: queries and keys instead of patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstream.circuits.selection import indices
from headstream.models.arguments import check_mask
from headstream.models.errors import HookError
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.vocabulary import check_tokens

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@dataclass(frozen=True)
class AttentionRun:
    """How the heads of a run attended, as the queries and keys from which their patterns follow.

    O(n) memory where patterns take O(n^2). The numbers are detached copies.

    Attributes:
        queries: by layer, [batch, pos, head, d_head], rotated where positions are rotary.
        keys: by layer, [batch, pos, kv_head, d_head].
        key_mask: boolean [batch, pos], keys that could be read; None if all.
        scales: by layer, what q . k is multiplied by.
    """

    queries: Mapping[int, Tensor]
    keys: Mapping[int, Tensor]
    key_mask: Tensor | None
    scales: Mapping[int, float]


@takes_model
def record_attention(
    model: Decoder,
    tokens: Any,
    *,
    layers: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
) -> AttentionRun:
    """Run the model, and keep how its heads attended.

    Args:
        tokens: as for the model.
        layers: which; None means all.
        attention_mask: as for the model.
    Raises:
        ShapeError: for a layer that does not exist.
        HookError: if attention in one of the layers is edited already, or a hook is on its scores
            or pattern: queries and keys would not tell how such a head attended.
    """
    run, _ = record_beside(model, tokens, layers, attention_mask, ())
    return run


def record_beside(
    model: Decoder,
    tokens: Any,
    layers: int | Sequence[int] | None,
    attention_mask: Tensor | None,
    names: Sequence[str],
) -> tuple[AttentionRun, dict[str, Tensor]]:
    """The attention of a run, and other activations of it by name."""
    chosen = indices(layers, "layer", model.config.n_layers)
    for layer in chosen:
        attn = model.blocks[layer].attn
        if attn.edits:
            raise HookError(
                f"attention of layer {layer} is edited: its queries and keys would not tell how it "
                "attends",
                hint="use record_attention outside the block, and give freeze_attention the run",
            )
        for point in (attn.hook_attn_scores, attn.hook_pattern):
            if point.wanted:
                raise HookError(
                    f"a hook is on '{point.name}': what it changes would not be in the queries and "
                    "keys",
                    hint="use record_attention without it, and give freeze_attention the run",
                )
    if isinstance(tokens, (str, list, tuple)):
        tokens = model.to_tokens(tokens)
    rows = check_tokens(tokens, model.config.d_vocab).to(model.device)
    turned = "rot_" if model.config.positions == "rotary" else ""
    at = {layer: f"blocks.{layer}.attn.hook_{turned}" for layer in chosen}
    wanted = [*(f"{stem}{what}" for stem in at.values() for what in "qk"), *names]
    with torch.no_grad():
        _, acts = capture(
            model, rows, wanted, attention_mask=attention_mask, stop_at_layer=max(chosen) + 1
        )
    run = AttentionRun(
        {layer: acts[f"{stem}q"] for layer, stem in at.items()},
        {layer: acts[f"{stem}k"] for layer, stem in at.items()},
        check_mask(attention_mask, rows.shape[0], rows.shape[1], model.device),
        {layer: model.blocks[layer].attn.scale for layer in chosen},
    )
    return run, acts
