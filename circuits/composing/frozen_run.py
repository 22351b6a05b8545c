"""One run with everything that is not linear held: patterns and the norms' scales.

What remains is linear in the stream: a head writes A (x / scale * gain + shift) W_V W_O, and
virtual heads, path expansions and terms by order are sums and products of such maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.circuits.undisturbed import undisturbed
from headstream.models.arguments import check_mask
from headstream.models.errors import ExactnessError, ShapeError
from headstream.models.hooks import capture
from headstream.models.vocabulary import check_tokens

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

# What this way of looking at a model leaves out; results carry it.
NOT_IN_IT = (
    "patterns are held as they were in the run: what earlier heads do to later patterns (Q- and "
    "K-composition) is not in it"
)


@dataclass(frozen=True, eq=False)
class FrozenRun:
    """What a run computed, detached.

    Attributes:
        tokens: [batch, pos]. mask: [batch, pos], real tokens; None if all are.
        patterns: by layer, [batch, head, query_pos, key_pos], in the model's dtype.
        scales: by layer, what ln1 divided by, [batch, pos] float64; ones without a norm.
        final_scale: `ln_final.hook_scale`, None without a norm or if the run stopped before it.
        streams: the stream before each layer and after the last, [batch, pos, d_model].
        logits: [batch, pos, d_vocab]; None if the run stopped before them.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None
    patterns: tuple[Float[Tensor, "batch head query_pos key_pos"], ...]
    scales: tuple[Float[Tensor, "batch pos"], ...]
    final_scale: Float[Tensor, "batch pos 1"] | None
    streams: tuple[Float[Tensor, "batch pos d_model"], ...]
    logits: Float[Tensor, "batch pos d_vocab"] | None


def freeze_run(
    model: Decoder,
    tokens: Any,
    what: str,
    *,
    attention_mask: Tensor | None = None,
    layers: int | None = None,
) -> FrozenRun:
    """Run the model on the naive backend and keep its patterns and scales.

    Args:
        what: what it is for, in errors: "expand paths".
        layers: stop after so many; None runs all, and the unembedding.
    Raises:
        HookError: if something edits the run.
        ShapeError: if the patterns would take more than `model.naive_limit` bytes; and as the
            model.
    """
    config = model.config
    count = config.n_layers if layers is None else layers
    rows = checked_rows(model, tokens)
    batch, length = rows.shape
    needed = count * batch * config.n_heads * length**2 * max(model.W_E.element_size(), 4)
    if needed > model.naive_limit:
        raise ShapeError(
            f"to {what}, the patterns of {count} layers x {config.n_heads} heads for {batch} "
            f"examples of {length} tokens are held: {needed:,} bytes, over the limit of "
            f"{model.naive_limit:,}",
            hint="give fewer or shorter examples, or raise model.naive_limit",
        )
    last = f"blocks.{count - 1}.hook_resid_post"
    names = [f"blocks.{layer}.{x}" for layer in range(count) for x in _hooks(model)] + [last]
    final = layers is None and config.norm != "none"
    with torch.no_grad(), undisturbed(model, what):
        output, acts = capture(
            model,
            rows,
            [*names, "ln_final.hook_scale"] if final else names,
            attention_mask=attention_mask,
            backend="naive",
            stop_at_layer=layers,
        )
    ones = torch.ones(batch, length, dtype=torch.float64, device=model.device)
    return FrozenRun(
        tokens=rows,
        mask=check_mask(attention_mask, batch, length, model.device),
        patterns=tuple(acts[f"blocks.{layer}.attn.hook_pattern"] for layer in range(count)),
        scales=tuple(
            ones
            if config.norm == "none"
            else acts[f"blocks.{layer}.ln1.hook_scale"][..., 0].double()
            for layer in range(count)
        ),
        final_scale=acts.get("ln_final.hook_scale"),
        streams=(
            *(acts[f"blocks.{layer}.hook_resid_pre"] for layer in range(count)),
            acts[last],
        ),
        logits=output if layers is None else None,
    )


def checked_rows(model: Decoder, tokens: Any) -> Int[Tensor, "batch pos"]:
    """Tokens or text as int64 [batch, pos] on the model's device."""
    if isinstance(tokens, (str, list, tuple)):
        tokens = model.to_tokens(tokens)
    return check_tokens(tokens, model.config.d_vocab).to(model.device)


def require_attention_only(model: Decoder, what: str) -> None:
    """Raise ExactnessError, naming the model, if it has an MLP."""
    if model.config.has_mlp:
        raise ExactnessError(
            f"cannot {what} of '{model.name}': it has an MLP (d_mlp={model.config.d_mlp}), which "
            "is not linear in what it reads, so the paths through heads do not sum to the logits",
            hint="use an attention-only model, or decompose_residual for direct effects",
        )


def _hooks(model: Decoder) -> list[str]:
    scale = [] if model.config.norm == "none" else ["ln1.hook_scale"]
    return ["hook_resid_pre", *scale, "attn.hook_pattern"]
