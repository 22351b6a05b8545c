"""Whether a head copies: the eigenvalues of its full OV circuit, and what it does to each token.

    F = W_E W_V W_O W_U                            [d_vocab, d_vocab], never formed
                                                   (`embedding` names what stands for W_E)
    score = sum(lambda) / sum(|lambda|)            over the non-zero eigenvalues of F

The non-zero eigenvalues of A B are those of B A, here d_head x d_head. All eigenvalues positive
(score 1) means that F stretches tokens towards themselves; the authors' own caveat is that this
does not make every token raise its own logit, since eigenvectors need not be orthogonal. So a
direct measure stands beside it: the share of tokens s with s among the top k outputs of row s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.qk_ov.token_vectors import check_embedding, effective_embedding
from headstream.circuits.qk_ov.weights import ov_circuit
from headstream.models.arguments import check_count, check_seed
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

# Rows of F held at once: 256 x 50257 float64 is 100 MB.
_ROWS = 256


@takes_model
def copying_score(
    model: Decoder,
    *,
    top: int | Sequence[int] = (1, 5),
    n_random: int = 64,
    seed: int = 0,
    embedding: str = "plain",
) -> xr.Dataset:
    """How much each head copies the token it attends to, by its weights alone.

    Args:
        model: the decoder. Norms and biases are left out (`ov_circuit`).
        top: k of the companion measure, or several.
        n_random: heads drawn for the null's spread: Gaussian W_V and W_O of this shape between
            the model's own W_E and W_U.
        seed: of those draws; the global random state is left alone.
        embedding: what stands for a token, "plain" or "effective" (`effective_embedding`, with an
            MLP in layer 0), in the scores and in the null. The heads of layer 0 read before that
            MLP writes: with "effective" they have no score.
    Returns:
        Dataset with `score` (layer, head) in [-1, 1], NaN for a head whose circuit has no
        non-zero eigenvalue (it cannot copy or anti-copy); `top` (k, layer, head), the share of
        tokens among the top k outputs of their own row; `top_chance` (k), k / d_vocab: exact for
        a head whose output ignores what it attends to; `expected`, the mean of `score` over
        Gaussian heads: 0, since turning the sign of W_V turns the sign of the score; `random_low`
        and `random_high`, between which 95% of the drawn heads fall.
    Raises:
        ShapeError: if a k is not in [1, d_vocab], `seed` is no whole number >= 0, `n_random` none
            >= 1, or a weight is NaN or infinite (eigenvalues of those do not exist, and LAPACK may
            end the process).
        ConfigError: if `embedding` is unknown, or "effective" without an MLP.
    Source:
        Elhage et al. 2021 (eigenvalue score). With an MLP in layer 0 or tied weights W_E alone
        describes a token poorly: `embedding="effective"`.
    """
    config = model.config
    check_seed(seed)
    check_count("n_random", n_random, of="heads")
    check_embedding(embedding)
    require_finite(model)
    top = [top] if isinstance(top, str) or not isinstance(top, Iterable) else [*top]
    for k in top:
        if not 1 <= check_count("top", k) <= config.d_vocab:
            raise ShapeError(f"top holds {k}, expected values in [1, {config.d_vocab}]")
    tokens = effective_embedding(model) if embedding == "effective" else model.W_E.detach()
    tokens, unembed = tokens.double(), model.W_U.detach().double()
    sites = [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]
    score = np.empty((config.n_layers, config.n_heads))
    share = np.empty((len(top), config.n_layers, config.n_heads))
    for layer, head in sites:
        if layer == 0 and embedding == "effective":
            score[layer, head], share[:, layer, head] = np.nan, np.nan
            continue
        circuit = ov_circuit(model, layer, head, space="residual")
        left, right = tokens @ circuit.A.double(), circuit.B.double() @ unembed
        score[layer, head] = eigenvalue_score(left, right)
        if top:
            share[:, layer, head] = top_share(left, right, top)
    low, high = random_interval(unembed @ tokens, config.d_head, n_random=n_random, seed=seed)
    return xr.Dataset(
        {
            "score": (("layer", "head"), score),
            "top": (("k", "layer", "head"), share),
            "top_chance": (("k",), np.array([k / config.d_vocab for k in top])),
            "expected": 0.0,
            "random_low": low,
            "random_high": high,
        },
        coords={
            "layer": range(config.n_layers),
            "head": range(config.n_heads),
            "k": list(top),
        },
    )


def require_finite(model: Decoder) -> None:
    """Raise ShapeError, naming the tensor, if a weight of the model is NaN or infinite."""
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value).all()):
            raise ShapeError(
                f"weights must be finite, but {name} holds NaN or infinity",
                hint="train or export the model again",
            )


def eigenvalue_score(left: Float[Tensor, "n rank"], right: Float[Tensor, "rank n"]) -> float:
    """sum(lambda) / sum(|lambda|) of `left @ right`; NaN if every eigenvalue is zero.

    Eigenvalues below the square root of float64's precision, relative to the product, count as
    zero: rounding alone lends those to a nilpotent product.

    Raises:
        ShapeError: if the product is not finite. LAPACK must not see it: there it ends the process.
    """
    left, right = left.double(), right.double()
    _require_finite(left, right)
    # A B = (Q_a R_a) (Q_b R_b)^T: eigenvalues of R_a R_b^T (Q_b^T Q_a). Those of B A are the same,
    # but their rounding depends on the basis of the head, and here it depends on A B alone.
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    core = r_left @ r_right.T
    _require_finite(core)
    values = torch.linalg.eigvals(core @ (q_right.T @ q_left))
    size = values.abs().sum()
    eps = torch.finfo(torch.float64).eps
    # Below the second of these the product itself is rounding.
    noise = left.shape[1] * eps * left.norm() * right.norm()
    if size <= torch.maximum(eps**0.5 * core.norm(), noise):
        return float("nan")
    return float(values.real.sum() / size)


def _require_finite(*factors: Tensor) -> None:
    if not all(bool(torch.isfinite(factor).all()) for factor in factors):
        raise ShapeError(
            "an eigenvalue score needs a finite circuit, but the product of its factors holds "
            "NaN or infinity"
        )


def top_share(
    left: Float[Tensor, "n rank"], right: Float[Tensor, "rank n"], top: Sequence[int]
) -> list[float]:
    """For each k, the share of rows s of `left @ right` in which entry s is among the top k.

    An entry that ties with others stands behind them: a row of equal entries is no copying.
    """
    n = left.shape[0]
    hits = torch.zeros(len(top), dtype=torch.float64)
    for start in range(0, n, _ROWS):
        rows = left[start : start + _ROWS] @ right
        own = torch.arange(start, start + len(rows), device=rows.device)
        value = rows.gather(1, own[:, None])
        ahead = (rows >= value).sum(1) - 1  # itself
        for index, k in enumerate(top):
            hits[index] += (ahead < k).sum().cpu()
    return (hits / n).tolist()


def random_interval(
    between: Float[Tensor, "d_model d_model"], d_head: int, *, n_random: int, seed: int
) -> tuple[float, float]:
    """Where 95% of Gaussian heads of this shape have their eigenvalue score.

    The score depends on embedding and unembedding only through `between`, their product W_U W_E.
    """
    generator = torch.Generator().manual_seed(seed)
    between = between.cpu()
    shape = (len(between), d_head)
    scores = []
    for _ in range(n_random):
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        out = torch.randn(shape, generator=generator, dtype=torch.float64)
        scores.append(eigenvalue_score(between @ value, out.T))
    if np.isnan(scores).all():
        # W_U @ W_E is zero: no head of such a model has a score.
        return float("nan"), float("nan")
    low, high = np.nanquantile(scores, [0.025, 0.975])
    return float(low), float(high)
