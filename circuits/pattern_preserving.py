"""Ablate a head while every head attends as before: what remains acts through values alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from headstream.circuits.attention_run import record_beside
from headstream.circuits.interventions import freeze_attention
from headstream.circuits.selection import heads_by_layer
from headstream.models.errors import ConfigError, nearest
from headstream.models.given_model import takes_model
from headstream.models.hooks import edited

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Values = Literal["zero", "mean"]


@takes_model
@contextmanager
def pattern_preserving_ablation(
    model: Decoder,
    tokens: Any,
    heads: Sequence[tuple[int, int]],
    *,
    values: str = "zero",
    attention_mask: Tensor | None = None,
) -> Iterator[Decoder]:
    """Inside the block, the heads write nothing, and every head attends as in the run on `tokens`.

    What the ablation changes then is what the heads' output does through values, and through the
    stream to the logits; what it does to later queries and keys is cancelled. Passes inside the
    block should be on the same tokens.

    Args:
        model: the decoder; it is edited, not copied.
        tokens: of the clean run, as for the model.
        heads: pairs (layer, head).
        values: "zero": the head's result is 0. "mean": it is the mean of its results over the real
            positions of the clean run.
        attention_mask: of the clean run.
    Yields:
        The model.
    Raises:
        ShapeError: for no heads or one that does not exist; and as `freeze_attention`.
        ConfigError: if `values` is not one of the two.
        HookError: as `freeze_attention`.
    Source:
        Olsson et al. 2022, "In-context Learning and Induction Heads". They store the patterns;
        queries and keys give the same in O(n) memory.
    """
    if values not in get_args(Values):
        raise ConfigError(
            f"values must be 'zero' or 'mean', got {values!r}",
            hint=nearest(str(values), get_args(Values)),
        )
    by_layer = heads_by_layer(model, heads)
    names = {layer: f"blocks.{layer}.attn.hook_z" for layer in by_layer}
    wanted = tuple(names.values()) if values == "mean" else ()
    run, acts = record_beside(model, tokens, None, attention_mask, wanted)

    def without(layer: int) -> Any:
        concerned = by_layer[layer]
        # b_O is not a head's, so a head whose z is 0 writes 0, and a mean z a mean result.
        mean = None if values == "zero" else _mean(acts[names[layer]], run.key_mask)

        def ablate(z: Tensor) -> Tensor:
            ablated = z.clone()
            ablated[:, :, concerned] = 0.0 if mean is None else mean[concerned]
            return ablated

        return ablate

    ablations = {name: without(layer) for layer, name in names.items()}
    with freeze_attention(model, run), edited(model, ablations):
        yield model


def _mean(z: Float[Tensor, "batch pos head d_head"], real: Tensor | None) -> Tensor:
    """[head, d_head], over the real positions of all rows."""
    rows = z.flatten(0, 1) if real is None else z[real]
    return rows.mean(0)
