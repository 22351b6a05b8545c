"""Where a token stands: position ids, sinusoidal vectors, rotary rotations.

Positions count the allowed tokens of the attention mask (cumulative sum minus one), so padding and
holes take no position. Sinusoidal pairs are interleaved (Vaswani et al. 2017); rotary pairs are
half-split, channel i with channel i + d_head/2 (Su et al. 2021, in the layout of Llama).
Tables are computed in the model's dtype, in float32 for half precision: a float32 table inside a
float64 model would cost ten digits.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# cos and sin of the rotation of every position, [batch, pos, 1, d_head/2].
RotaryTables = tuple[
    Float[Tensor, "batch pos 1 half_head"],
    Float[Tensor, "batch pos 1 half_head"],
]


def count_positions(
    mask: Bool[Tensor, "batch pos"], past: Int[Tensor, " batch"]
) -> Int[Tensor, "batch pos"]:
    """Position of each token: allowed tokens before it, `past` of them in the cache.

    A masked token gets the position of the last allowed one before it (0 at the start); nothing
    reads it, so the value only has to be legal.
    """
    return (past[:, None] + mask.long().cumsum(-1) - 1).clamp(min=0)


def sinusoidal_vectors(
    positions: Int[Tensor, "*positions"], d_model: int, dtype: torch.dtype
) -> Float[Tensor, "*positions d_model"]:
    """PE(p)[2f] = sin(p w_f), PE(p)[2f+1] = cos(p w_f), w_f = 10000^(-2f/d_model)."""
    angles = _angles(positions, d_model, 10000.0, dtype)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).to(dtype)


def rotary_tables(
    positions: Int[Tensor, "batch pos"], d_head: int, base: float, dtype: torch.dtype
) -> RotaryTables:
    """cos and sin of p * base^(-2i/d_head) for every position p and pair i."""
    angles = _angles(positions, d_head, base, dtype)[:, :, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    x: Float[Tensor, "batch pos head d_head"], tables: RotaryTables
) -> Float[Tensor, "batch pos head d_head"]:
    """Turn every pair (x_i, x_{i + d_head/2}) by its position's angle; norms are unchanged."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _angles(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, width, 2, device=positions.device, dtype=wide)
    return positions[..., None].to(wide) * base ** (-pairs / width)
