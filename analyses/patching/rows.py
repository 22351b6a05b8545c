"""The arguments of a task as aligned tensors, or an error that names the argument.

Tokens become int64 rows on the CPU, positions become row-wise real positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstream.models.errors import ShapeError, TaskError, TokenError, nearest

_INT64 = 2**63


def rows_of(argument: str, value: Any) -> tuple[Tensor, Tensor | None]:
    """Tokens as int64 `[example, pos]` on the CPU, and the mask of a ragged list (else None)."""
    if isinstance(value, (list, tuple)):
        return rows_of_list(argument, list(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        value = torch.from_numpy(value.astype(np.int64))
    if not isinstance(value, Tensor):
        raise ShapeError(
            f"{argument} must be int64 tokens [example, pos] or lists of ids, "
            f"got {type(value).__name__}"
        )
    if value.dtype != torch.int64:
        raise ShapeError(
            f"{argument} must be int64 tokens [example, pos], got "
            f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        )
    if value.ndim not in (1, 2):
        raise ShapeError(f"{argument} must be [example, pos] or [pos], got {list(value.shape)}")
    rows = value.detach().cpu().reshape(-1, value.shape[-1]) if value.numel() else value
    if not rows.numel():
        raise TaskError(f"{argument} is empty: at least one pair is needed")
    if bool((rows < 0).any()):
        raise TokenError(f"{argument} must hold token ids >= 0, got {int(rows.min())}")
    return rows, None


def rows_of_list(argument: str, value: list[Any]) -> tuple[Tensor, Tensor | None]:
    if not value:
        raise TaskError(f"{argument} is empty: at least one pair is needed")
    rows = [value] if not isinstance(value[0], (list, tuple, Tensor, np.ndarray)) else value
    ids: list[list[int]] = []
    for number, row in enumerate(rows):
        items = row.tolist() if isinstance(row, (Tensor, np.ndarray)) else row
        whole = isinstance(items, (list, tuple)) and all(
            isinstance(token, int) and not isinstance(token, bool) for token in items
        )
        if not whole:
            raise ShapeError(f"{argument}[{number}] must be a list of token ids, got {row!r}")
        if not items:
            raise TaskError(f"{argument}[{number}] is an empty prompt")
        for token in items:
            check_token(f"{argument}[{number}]", token)
        ids.append(list(items))
    longest = max(map(len, ids))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    lengths = torch.tensor([len(row) for row in ids])
    mask = torch.arange(longest) < lengths[:, None]
    return padded, None if bool(mask.all()) else mask


def check_token(argument: str, token: int) -> None:
    """Refuse an id that no vocabulary holds, before a tensor overflows on it."""
    if token < 0:
        raise TokenError(f"{argument} must hold token ids >= 0, got {token}")
    if token >= _INT64:
        raise TokenError(f"{argument} must hold token ids below 2**63")


def check_seed(seed: object) -> None:
    """Refuse a seed that some generator would not take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _INT64:
        raise TaskError(f"seed must be a whole number in [0, 2**63), got {seed!r}")


def check_option(argument: str, value: object, options: Sequence[str]) -> None:
    """Refuse what is none of `options`, naming the nearest."""
    if value in options:
        return
    raise TaskError(
        f"{argument} must be one of {', '.join(map(repr, options))}, got {value!r}",
        hint=nearest(str(value), options),
    )


def check_aligned(
    clean: Tensor, corrupted: Tensor, clean_mask: Tensor | None, corrupted_mask: Tensor | None
) -> None:
    hint = "replace tokens one for one, so that positions stay aligned"
    if len(clean) != len(corrupted):
        raise TaskError(
            f"clean has {len(clean)} prompts and corrupted {len(corrupted)}; they must pair up"
        )
    lengths = [
        torch.full((len(rows),), rows.shape[1]) if mask is None else mask.sum(1)
        for rows, mask in ((clean, clean_mask), (corrupted, corrupted_mask))
    ]
    differs = lengths[0] != lengths[1]
    if bool(differs.any()):
        pair = int(differs.nonzero()[0])
        raise TaskError(
            f"corrupted has {int(lengths[1][pair])} tokens in pair {pair}, "
            f"clean has {int(lengths[0][pair])}; they must be equally long",
            hint=hint,
        )


def mask_of(value: Any, rows: Tensor) -> Tensor | None:
    mask = torch.as_tensor(value).cpu()
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != rows.shape:
        raise ShapeError(
            f"attention_mask must be [example, pos] = {list(rows.shape)}, got {list(mask.shape)}"
        )
    if mask.is_floating_point() or not bool(((mask == 0) | (mask == 1)).all()):
        raise ShapeError("attention_mask must hold 0 (masked) and 1 (real) only")
    mask = mask.bool()
    empty = ~mask.any(1)
    if bool(empty.any()):
        raise TaskError(f"attention_mask leaves no real token in pair {int(empty.nonzero()[0])}")
    # Nothing masked is no mask: the same task, by the faster path.
    return None if bool(mask.all()) else mask


def columns_of(mask: Tensor) -> Tensor:
    """Column of the r-th real token of each row; -1 past its end."""
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    lengths = mask.sum(1)
    longest = int(lengths.max())
    real = torch.arange(longest) < lengths[:, None]
    return torch.where(real, order[:, :longest], -1)


def per_pair(argument: str, value: Any, n: int) -> Tensor:
    """One whole number a pair; a single one holds for all."""
    if isinstance(value, Sequence) and len(value) == 0:
        raise ShapeError(f"{argument} must hold one number a pair, [{n}], got none")
    try:
        numbers = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(f"{argument} must hold one number a pair, got {value!r}") from None
    whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
    if not whole:
        raise ShapeError(
            f"{argument} must hold whole numbers, got {str(numbers.dtype).removeprefix('torch.')}"
        )
    if numbers.ndim == 0:
        numbers = numbers.expand(n)
    if numbers.shape != (n,):
        raise ShapeError(
            f"{argument} must hold one number a pair, [{n}], got {list(numbers.shape)}"
        )
    return numbers.to(torch.int64).clone()


def position_of(argument: str, value: Any, lengths: Tensor) -> Tensor:
    """Row-wise real positions, counted from the end where negative."""
    place = per_pair(argument, value, len(lengths))
    outside = (place < -lengths) | (place >= lengths)
    if bool(outside.any()):
        pair = int(outside.nonzero()[0])
        raise TaskError(
            f"{argument} is {int(place[pair])} in pair {pair}, which has "
            f"{int(lengths[pair])} real tokens",
            hint="positions count real tokens from 0; -1 is the last",
        )
    return torch.where(place < 0, place + lengths, place)
