"""How much a later head reads of what an earlier head writes, by weights alone.

    Q   || OV_1 QK_2 ||   / (||OV_1|| ||QK_2||)     through the later head's queries
    K   || OV_1 QK_2^T || / (||OV_1|| ||QK_2||)     through its keys
    V   || OV_1 OV_2 ||   / (||OV_1|| ||OV_2||)     through its values

Frobenius norms, rows acting from the left (Elhage et al. 2021; their columns are the transposes).
No [d_model, d_model] matrix is formed: with W_V = Q R, Q orthonormal, ||W_V W_O M|| = ||R W_O M||,
and R^T R is the d_head x d_head Gram matrix of W_V. (R instead of the Gram matrix itself keeps a
score of 1e-12 from drowning in the square root of rounding.)

A score is in [0, 1] and means nothing by itself: two random heads of this shape score about
1/sqrt(d_model) whatever d_head is, and two heads that do the same identity map score that too; 1
takes aligned rank-1 factors. So chance stands beside every score, and, since many pairs are
compared, what the largest of as many random pairs would reach.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from headstream.circuits.qk_ov.copying import require_finite
from headstream.circuits.qk_ov.head_factors import (
    check_norms,
    ov_factors,
    qk_factors,
    stream_dims,
    treatment,
)
from headstream.circuits.qk_ov.weights import qk_circuit
from headstream.models.arguments import check_count, check_seed
from headstream.models.given_model import takes_model

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Array = npt.NDArray[np.floating]

THROUGH = ("Q", "K", "V")
PAIR = ("earlier_layer", "earlier_head", "later_layer", "later_head")
# A product of unit factors this much smaller than they are is rounding.
_ROUNDING = 2.0**-44


@takes_model
def composition_scores(
    model: Decoder,
    *,
    distance: int | None = None,
    norms: str = "folded",
    n_random: int = 48,
    seed: int = 0,
) -> xr.Dataset:
    """Q-, K- and V-composition of every pair of heads, beside what random heads would score.

    Args:
        model: the decoder.
        distance: query position minus key position in the later head, in tokens: with rotary
            positions Q- and K-composition depend on it, and it is required; refused with others.
        norms: "folded": what a head really reads and writes: gain folded into W_Q W_K W_V, and
            under LayerNorm the mean taken off what is read and written (nobody sees it, and left
            in it dominates the norms). "ignored": the weights as they are, which is what
            TransformerLens' `all_composition_scores` gives. Without a norm they are the same.
        n_random: random heads on either side; n_random^2 pairs are scored.
        seed: of those draws; the global random state is left alone.
    Returns:
        Dataset with `score` (through, earlier_layer, earlier_head, later_layer, later_head),
        through in Q K V; NaN where the first layer is not before the second, and for a head whose
        OV or QK is zero. `excess` is `score` minus `expected`, 1/sqrt(d) with d the dimensions of
        the stream that are read (d_model; one less where the mean is taken off). For Gaussian
        factors of the same shape: `random_mean`, and `random_low` to `random_high`, between which
        95% fall; `random_largest`, which the largest of as many independent random pairs as are
        compared here stays under in 95% of models (Pearson III fitted to the draws; in
        simulations of 16 to 500 pairs at most 8% passed it). `attrs` say how many are
        `compared`, the `norms` and the `distance`.
    Raises:
        ConfigError: if `distance` is missing or does not apply, or `norms` is unknown.
        ShapeError: if a weight is NaN or infinite, or `n_random` or `seed` no whole number.
    Source:
        Elhage et al. 2021. The figure first published came from a library that multiplied the
        factors in another order; the order here is tested with matrices that do not commute.
    Note:
        Trained weights are no Gaussian draws: a score above chance says that two heads share
        directions, not that the model uses it. Biases and the norm's scale are left out.
    Example:
        >>> from headstream.models import load
        >>> scores = composition_scores(load("constructed-induction"))
        >>> pair = {"earlier_layer": 0, "earlier_head": 1, "later_layer": 1, "later_head": 2}
        >>> scores["score"].sel(pair).values.round(3).tolist(), round(scores["expected"].item(), 3)
        ([0.0, 0.156, 0.0], 0.082)
    """
    config = model.config
    check_seed(seed)
    check_norms(norms)
    check_count("n_random", n_random, least=2)
    require_finite(model)
    qk_circuit(model, 0, 0, distance=distance, space="residual")  # is the distance in order?
    layers, heads = range(config.n_layers), range(config.n_heads)
    score = np.full((len(THROUGH), *(2 * (config.n_layers, config.n_heads))), np.nan)
    writers: list[Tensor] = []
    for layer in layers:
        value, out = (_unit(factor) for factor in ov_factors(model, layer, norms=norms))
        if writers:
            query, key = (
                _unit(factor) for factor in qk_factors(model, layer, distance=distance, norms=norms)
            )
            readers = (
                _right(query, key.mT),
                _right(key, query.mT),
                _right(value, out),
            )
            for earlier, writer in enumerate(writers):
                for index, reader in enumerate(readers):
                    score[index, earlier, :, layer] = pair_scores(writer, reader).cpu().numpy()
        writers.append(_left(value, out))
    compared = int(np.isfinite(score).sum())
    dims = stream_dims(model, norms)
    expected = 1 / math.sqrt(dims) if dims else math.nan
    return xr.Dataset(
        {
            "score": (("through", *PAIR), score),
            "excess": (("through", *PAIR), score - expected),
            "expected": expected,
            **_chance(_random_scores(dims, config.d_head, n_random, seed), compared),
        },
        coords={
            "through": list(THROUGH),
            **{axis: list(layers if axis.endswith("layer") else heads) for axis in PAIR},
        },
        attrs={
            "compared": compared,
            "norms": treatment(model, norms),
            "distance": "does not apply" if distance is None else distance,
            "n_random": n_random**2,
            "seed": seed,
        },
    )


def pair_scores(
    left: Float[Tensor, "earlier rank d_model"], right: Float[Tensor, "later d_model width"]
) -> Float[Tensor, "earlier later"]:
    """||L R|| / (||L|| ||R||) of every pair; NaN where a side is zero."""
    first, second = left.shape[:2]
    product = left.flatten(0, 1) @ right.transpose(0, 1).flatten(1)
    squares = product.square().unflatten(0, (first, second)).unflatten(2, (right.shape[0], -1))
    sizes = _norm(left)[:, None] * _norm(right)
    return squares.sum((1, 3)).sqrt() / sizes


def _left(first: Tensor, second: Tensor) -> Tensor:
    """What has the norms of `first @ second @ M` for every M: R second, with first = Q R."""
    return torch.linalg.qr(first).R @ second


def _right(first: Tensor, second: Tensor) -> Tensor:
    """What has the norms of `M @ first @ second` for every M."""
    return first @ torch.linalg.qr(second.mT).R.mT


def _norm(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, " n"]:
    """Frobenius norm; NaN where it is that of rounding."""
    size = torch.linalg.matrix_norm(matrices)
    return torch.where(size > _ROUNDING, size, torch.nan)


def _unit(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Each matrix scaled to norm 1, so that no product over- or underflows; 0 stays 0."""
    largest = matrices.abs().amax((-2, -1), keepdim=True)
    scaled = matrices / torch.where(largest > 0, largest, 1.0)
    size = torch.linalg.matrix_norm(scaled, keepdim=True)
    return scaled / torch.where(size > 0, size, 1.0)


def _random_scores(dims: int, d_head: int, n: int, seed: int) -> Array:
    """Scores of n x n pairs of Gaussian heads. A norm's gain does not move them: the other side
    is isotropic."""
    generator = torch.Generator().manual_seed(seed)
    value, out, query, key = (
        _unit(torch.randn(n, dims, d_head, generator=generator, dtype=torch.float64))
        if dims
        else torch.zeros(n, 1, d_head, dtype=torch.float64)
        for _ in range(4)
    )
    found: Array = pair_scores(_left(value, out.mT), _right(query, key.mT)).flatten().numpy()
    return found


def _chance(scores: Array, compared: int) -> dict[str, float]:
    low, high = np.quantile(scores, [0.025, 0.975])
    spread, largest = float(scores.std()), math.nan
    if compared and spread > 1e-12:
        # The quantile that all `compared` pairs stay under at once, far outside the draws.
        tail = stats.pearson3.ppf(
            0.95 ** (1 / compared), stats.skew(scores), loc=scores.mean(), scale=spread
        )
        largest = min(float(tail), 1.0)
    elif compared:
        largest = float(scores.max())
    return {
        "random_mean": float(scores.mean()),
        "random_low": float(low),
        "random_high": float(high),
        "random_largest": largest,
    }
