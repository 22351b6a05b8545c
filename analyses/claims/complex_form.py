"""Rotary positions a second time, as complex numbers: what the ledger holds the model to.

The pair (x_i, x_{i + d_head/2}) is the number x_i + i x_{i + d_head/2}, and a position p turns it
by multiplication with e^{i p w_i}, w_i = rotary_base^(-2i/d_head). Nothing here calls
`headstream.models.positions`, whose real form is what is checked. Source: Su et al. 2021, 3.4.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor


def frequencies(d_head: int, base: float) -> Float[Tensor, " pair"]:
    """Radians that each pair turns a token, fastest first, float64."""
    pairs = torch.arange(d_head // 2, dtype=torch.float64)
    return torch.exp(-math.log(base) * 2 * pairs / d_head)


def as_complex(x: Float[Tensor, "*axes d_head"]) -> Complex[Tensor, "*axes pair"]:
    """Every pair as one complex number."""
    half = x.shape[-1] // 2
    return torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())


def as_real(x: Complex[Tensor, "*axes pair"]) -> Float[Tensor, "*axes d_head"]:
    """`as_complex` undone."""
    return torch.cat((x.real, x.imag), -1)


def turn(angle: Float[Tensor, "*axes"]) -> Complex[Tensor, "*axes"]:
    """e^{i angle}."""
    return torch.polar(torch.ones_like(angle), angle)


def score_terms(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    base: float,
) -> Float[Tensor, "pair batch head query_pos key_pos"]:
    """What each pair adds to q . k at positions 0, 1, ..: Re q_f conj(k_f) e^{i (m - n) w_f}.

    `q` and `k` as they are before they are turned, one key head a query head.
    """
    place = torch.arange(q.shape[1], dtype=torch.float64, device=q.device)
    speed = frequencies(q.shape[-1], base).to(q.device)
    turned = turn((place[:, None] - place)[..., None] * speed)
    return torch.einsum("bihf,bjhf,ijf->fbhij", as_complex(q), as_complex(k).conj(), turned).real
