"""Continue a prompt, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from headstream.models.errors import ShapeError
from headstream.models.kv_cache import KVCache
from headstream.models.resolve import resolve
from headstream.models.vocabulary import check_tokens

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor | str,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    fwd_hooks: Iterable[tuple[str | Callable[[str], bool], Callable[..., Any]]] = (),
) -> Int[Tensor, "batch pos"]:
    """Append `max_new_tokens` tokens to each row.

    Args:
        tokens: int64 `[batch, pos]` or `[pos]`, or text.
        temperature: 0 takes the most likely token (the first of equals); otherwise logits are
            divided by it and a token is drawn.
        seed: of the draws; required when `temperature` > 0, so that a result can be repeated.
        fwd_hooks: active at every step. With these, or with hooks already on the model, steps run
            over the whole sequence without a cache, so that a hook sees absolute positions and
            edits every token it means to.
    Returns:
        `[batch, pos + max_new_tokens]`, the prompt included.
    Raises:
        ShapeError: if the result would pass n_ctx, or an argument is out of range.
        HookError: as `run_with_hooks`.
    """
    if isinstance(tokens, str):
        tokens = model.to_tokens(tokens)
    rows = check_tokens(tokens, model.config.d_vocab)
    if (
        isinstance(max_new_tokens, bool)
        or not isinstance(max_new_tokens, int)
        or max_new_tokens < 0
    ):
        raise ShapeError(f"max_new_tokens must be a whole number >= 0, got {max_new_tokens!r}")
    if rows.shape[1] + max_new_tokens > model.config.n_ctx:
        raise ShapeError(
            f"{rows.shape[1]} tokens and max_new_tokens={max_new_tokens} pass "
            f"n_ctx = {model.config.n_ctx}"
        )
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not 0.0 <= temperature < float("inf"):
        raise ShapeError(f"temperature must be a finite number >= 0, got {temperature!r}")
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    if not whole and (seed is not None or temperature > 0):
        raise ShapeError(
            f"temperature={temperature} draws tokens and needs a whole number as seed, got {seed!r}"
        )
    hooks = list(fwd_hooks)
    for name, _ in hooks:
        resolve(model.hook_dict, name)
    draws = torch.Generator().manual_seed(0 if seed is None else seed)
    listened = any(point.wanted for point in model.hook_dict.values())
    cache = None if hooks or listened else KVCache(model, batch=rows.shape[0])
    fresh = rows
    for _ in range(max_new_tokens):
        if cache is None:
            logits = model.run_with_hooks(rows, fwd_hooks=hooks)
        else:
            logits = model(fresh, kv_cache=cache)
        fresh = _pick(logits[:, -1], temperature, draws)[:, None]
        rows = torch.cat((rows, fresh), 1)
    return rows


def _pick(logits: Tensor, temperature: float, draws: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    weights = (logits.double().cpu() / temperature).softmax(-1)
    return torch.multinomial(weights, 1, generator=draws)[:, 0].to(logits.device)
