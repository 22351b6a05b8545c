"""What the arguments of a forward pass mean, and what is wrong with the ones that mean nothing."""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headstream.models.attention import Backend
from headstream.models.config import DecoderConfig
from headstream.models.errors import BackendError, ShapeError
from headstream.models.kv_cache import KVCache
from headstream.models.positions import count_positions

RETURN_TYPES = ("logits", "loss", "loss_per_token")


def check_count(name: str, value: object, *, least: int = 1, of: str = "") -> int:
    """`value` as an int.

    Raises:
        ShapeError: if it is no whole number, or less than `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ShapeError(f"{name} must be a whole number{of and f' of {of}'}, got {value!r}")
    number = operator.index(cast(SupportsIndex, value))
    if number < least:
        raise ShapeError(f"{name} must be at least {least}{of and f' {of}'}, got {number}")
    return number


def check_seed(seed: object) -> int:
    """`seed` as an int.

    Raises:
        ShapeError: unless it is a whole number that every generator takes.
    """
    whole = hasattr(seed, "__index__") and not isinstance(seed, bool)
    if not whole or not 0 <= operator.index(cast(SupportsIndex, seed)) < 2**63:
        raise ShapeError(f"seed must be a whole number in [0, 2**63), got {seed!r}")
    return operator.index(cast(SupportsIndex, seed))


def check_backend(backend: str) -> Backend:
    """`backend`, if there is one of that name.

    Raises:
        BackendError: if there is not.
    """
    if backend not in get_args(Backend):
        raise BackendError(
            f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}"
        )
    return cast(Backend, backend)


def check_return_type(return_type: str | None, *, start: int | None, stop: int | None) -> None:
    """Raise ShapeError for an unknown return type, or for a loss that the run cannot have."""
    if return_type not in (*RETURN_TYPES, None):
        raise ShapeError(
            f"return_type must be one of {', '.join(RETURN_TYPES)} or None, got {return_type!r}"
        )
    if return_type in ("loss", "loss_per_token"):
        if start is not None:
            raise ShapeError(
                f"return_type={return_type!r} needs tokens, but with start_at_layer={start} the "
                "first argument is a residual stream",
                hint="ask for logits",
            )
        if stop is not None:
            raise ShapeError(
                f"return_type={return_type!r} needs logits, but with stop_at_layer={stop} the "
                "residual stream is returned",
                hint="run all layers",
            )


def check_layers(
    start: int | None, stop: int | None, *, n_layers: int, cached: bool
) -> tuple[int, int]:
    """First block to run and first block not to run.

    Raises:
        ShapeError: for a layer that does not exist, or a part of the layers with a cache.
    """
    for name, value in (("start_at_layer", start), ("stop_at_layer", stop)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= n_layers:
            raise ShapeError(f"{name} must lie in [0, {n_layers}], got {value!r}")
        if cached:
            raise ShapeError(
                f"{name}={value} cannot be combined with kv_cache: the layers left out "
                "would cache nothing",
                hint="run all layers, or without a cache",
            )
    first, last = start or 0, n_layers if stop is None else stop
    if first > last:
        raise ShapeError(f"start_at_layer={first} lies after stop_at_layer={last}")
    return first, last


def check_stream(resid: object, *, d_model: int, dtype: torch.dtype) -> Tensor:
    """The first argument of a run that starts at a layer: `resid_pre` [batch, pos, d_model].

    Raises:
        ShapeError: on anything else.
    """
    expected = f"[batch, pos, {d_model}] {dtype}"
    if not isinstance(resid, Tensor):
        raise ShapeError(
            f"with start_at_layer the first argument is the residual stream {expected}, "
            f"got {type(resid).__name__}"
        )
    right = resid.ndim == 3 and resid.shape[2] == d_model and resid.numel() > 0
    if not right or resid.dtype != dtype:
        raise ShapeError(
            f"with start_at_layer the first argument is the residual stream {expected}, "
            f"got {list(resid.shape)} {resid.dtype}"
        )
    return resid


def check_cache(
    kv_cache: object, *, config: DecoderConfig, batch: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ShapeError unless `kv_cache` is None or fits this model and batch."""
    if kv_cache is None:
        return
    if not isinstance(kv_cache, KVCache):
        raise ShapeError(
            f"kv_cache must be a KVCache, got {type(kv_cache).__name__}",
            hint="make one with KVCache(model, batch)",
        )
    if kv_cache.config != config:
        raise ShapeError("kv_cache was made for a model of another configuration")
    if kv_cache.batch != batch:
        raise ShapeError(f"kv_cache has batch {kv_cache.batch}, tokens have {batch}")
    held = kv_cache.keys[0]
    if held.dtype != dtype or held.device != device:
        raise ShapeError(
            f"kv_cache holds {held.dtype} on {held.device}, the model is {dtype} on {device}",
            hint="make a new KVCache after moving the model",
        )


def check_length(length: int, *, past: int, n_ctx: int) -> None:
    """Raise ShapeError if the tokens, after `past` cached ones, pass n_ctx."""
    if past + length > n_ctx:
        cached = f" after {past} cached ones" if past else ""
        raise ShapeError(
            f"tokens are {length} long{cached}, over n_ctx = {n_ctx}", hint="shorten the prompt"
        )


def check_mask(
    mask: object, batch: int, length: int, device: torch.device
) -> Bool[Tensor, "batch pos"] | None:
    """The attention mask as booleans; None when nothing is masked.

    Raises:
        ShapeError: on another shape, or anything but whole zeros and ones.
    """
    if mask is None:
        return None
    expected = f"attention_mask must be [batch, pos] = [{batch}, {length}]"
    if not isinstance(mask, Tensor):
        raise ShapeError(f"{expected}, got {type(mask).__name__}", hint="use torch.tensor(mask)")
    rows = mask if mask.ndim != 1 else mask[None]
    if tuple(rows.shape) != (batch, length):
        raise ShapeError(f"{expected}, got {list(mask.shape)}")
    if rows.is_floating_point() or rows.is_complex():
        raise ShapeError(
            f"attention_mask must be bool or integers, 1 where a token is real, got {mask.dtype}",
            hint="use mask.bool() if it holds zeros and ones",
        )
    if not bool(((rows == 0) | (rows == 1)).all()):
        raise ShapeError(
            "attention_mask must hold 0 (masked) and 1 (real) only, got values in "
            f"[{int(rows.min())}, {int(rows.max())}]"
        )
    allowed = rows.bool().to(device)
    # Nothing masked is no mask: the same numbers, by the faster path.
    return None if bool(allowed.all()) else allowed


def token_positions(
    given: object,
    mask: Bool[Tensor, "batch pos"] | None,
    *,
    batch: int,
    length: int,
    kv_cache: KVCache | None,
    config: DecoderConfig,
    device: torch.device,
) -> Int[Tensor, "batch pos"]:
    """Position id of every token: as given, else the count of allowed tokens before it.

    Raises:
        ShapeError: on ids of another shape or dtype, or outside the position table.
    """
    if given is not None:
        expected = f"position_ids must be int64 [batch, pos] = [{batch}, {length}]"
        if not isinstance(given, Tensor):
            raise ShapeError(f"{expected}, got {type(given).__name__}")
        rows = given if given.ndim != 1 else given[None]
        if given.dtype != torch.int64 or tuple(rows.shape) != (batch, length):
            raise ShapeError(f"{expected}, got {given.dtype} {list(given.shape)}")
        table = config.positions in ("learned", "shortformer")
        if bool((rows < 0).any()) or (table and bool((rows >= config.n_ctx).any())):
            limit = f"[0, {config.n_ctx}) = [0, n_ctx)" if table else "[0, inf)"
            raise ShapeError(
                f"position_ids must lie in {limit}, got values in "
                f"[{int(rows.min())}, {int(rows.max())}]"
            )
        return rows.to(device)
    if mask is None and kv_cache is None:
        return torch.arange(length, device=device).expand(batch, length)
    new = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    past = torch.zeros(batch, dtype=torch.int64, device=device)
    return count_positions(new, past if kv_cache is None else kv_cache.allowed)


def readable_keys(
    mask: Bool[Tensor, "batch pos"] | None,
    *,
    batch: int,
    length: int,
    kv_cache: KVCache | None,
    device: torch.device,
) -> Bool[Tensor, "batch key_pos"] | None:
    """Keys that may be read, over cached and new tokens; None when all may."""
    if kv_cache is None:
        return mask
    if mask is None and bool(kv_cache.mask.all()):
        return None
    new = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    return torch.cat((kv_cache.mask, new), 1)
