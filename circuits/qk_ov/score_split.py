"""The scores of one head in a run as a sum of terms: the value, and the check that it is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.qk_ov.weights import check_head
from headstream.circuits.undisturbed import undisturbed
from headstream.models.arguments import check_mask
from headstream.models.errors import ExactnessError, ShapeError
from headstream.models.hooks import capture
from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

# Refuse to build more than this many bytes of terms.
_LIMIT = 8 * 2**30
_EDGES = ("query_pos", "key_pos")


@dataclass(frozen=True, eq=False, repr=False)
class ScoreSplit:
    """Terms that sum to the scores of one head.

    Attributes:
        terms: (query_part, key_part, example, query_pos, key_pos) or (pair, example, query_pos,
            key_pos), float64, with the scale in them; NaN where the query may not read the key.
        score: (example, query_pos, key_pos), as the model computed it; -inf where masked.
        asks: (example, query_pos), whether the query is a real token; padding has scores, too.
        layer, head: whose.
        largest_error, bound: largest |sum of terms - score|, and what it was held to.
    """

    terms: xr.DataArray
    score: xr.DataArray
    asks: xr.DataArray
    layer: int
    head: int
    largest_error: float
    bound: float

    @property
    def term_dims(self) -> tuple[str, ...]:
        """Axes of `terms` over which they sum to the score."""
        return tuple(str(dim) for dim in self.terms.dims[:-3])

    def shares(self) -> xr.DataArray:
        """Each term's share of what the softmax sees of the score; the shares sum to 1.

        The softmax sees differences within a row. With x~ the deviation from the row's mean over
        the keys that may be read, a term's share is the sum over all edges of term~ s~ over that
        of s~^2: the split of the score's variance by covariance. A term that is the same for every
        key of a row has share 0, one that works against the rest a negative share. Padding asks
        nothing and is asked nothing. The shares are those of the model on these tokens.

        Returns:
            (term dims..., example), NaN for an example in which no row's scores vary.
        """
        seen = self.score.where(np.isfinite(self.score) & self.asks)
        score = seen - seen.mean("key_pos")
        varied = self.terms - self.terms.mean("key_pos")
        total = (score**2).sum(_EDGES)
        return (varied * score).sum(_EDGES) / total.where(total > 0)

    def __repr__(self) -> str:
        sizes = " x ".join(f"{self.terms.sizes[dim]} {dim}" for dim in self.term_dims)
        return (
            f"<scores of {head_name(self.layer, self.head)} as {sizes} terms; largest error "
            f"{self.largest_error:.1e}, bound {self.bound:.1e}>"
        )


def run_scores(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    head: int,
    names: Sequence[str],
    *,
    n_terms: int,
    **forward: Any,
) -> tuple[dict[str, Tensor], Float[Tensor, "batch query_pos key_pos"]]:
    """The named activations of a run up to `layer`, and the scores of one of its heads.

    Raises:
        ShapeError: for a head that does not exist, or terms over the limit of memory.
        HookError: if something edits the run.
    """
    layer, head = check_head(model.config, layer, head)
    if isinstance(tokens, Tensor) and tokens.ndim in (1, 2):
        rows, length = (tokens if tokens.ndim == 2 else tokens[None]).shape
        needed = 8 * rows * length**2 * (n_terms + model.config.n_heads)
        if needed > _LIMIT:
            raise ShapeError(
                f"{n_terms} terms for {rows} rows of {length} tokens take {needed:,} bytes, over "
                f"the limit of {_LIMIT:,}",
                hint="split fewer or shorter rows at a time",
            )
    scores = f"blocks.{layer}.attn.hook_attn_scores"
    with torch.no_grad(), undisturbed(model, "split the scores of a head"):
        _, acts = capture(
            model,
            tokens,
            [*names, scores],
            backend="auto",
            stop_at_layer=layer + 1,
            **forward,
        )
    return acts, acts.pop(scores)[:, head]


def checked_split(
    model: Decoder,
    layer: int,
    head: int,
    terms: Float[Tensor, "*term batch query_pos key_pos"],
    score: Float[Tensor, "batch query_pos key_pos"],
    *,
    size: float,
    labels: Mapping[str, Sequence[Any]],
    attention_mask: Tensor | None,
) -> ScoreSplit:
    """The split, if the terms sum to the score.

    Args:
        size: largest sum of the moduli of all products in a score; rounding is held to it.
        labels: name and coordinate of each axis of the terms.
        attention_mask: of the run.
    Raises:
        ExactnessError: if they do not, with the largest error and where it is.
    """
    config = model.config
    masked = torch.isneginf(score)
    terms = terms.masked_fill(masked, torch.nan)
    error = terms.flatten(0, -4).sum(0) - score.double()
    error = error.masked_fill(masked, 0.0)
    largest = float(error.abs().max())
    steps = math.sqrt(config.d_model) + math.sqrt(config.d_head) + 4
    bound = 2 * steps * torch.finfo(model.dtype).eps * size
    # Infinite weights make the bound infinite, and everything is under it.
    if not (math.isfinite(bound) and largest <= bound):
        wrong = error.abs().nan_to_num(nan=torch.inf).flatten().argmax()
        example, query, key = (int(i) for i in torch.unravel_index(wrong, error.shape))
        raise ExactnessError(
            f"the terms do not sum to the scores of {head_name(layer, head)}: largest error "
            f"{largest:.1e} at example {example}, query_pos {query}, key_pos {key}; the bound is "
            f"{bound:.1e}"
        )
    batch, length = score.shape[:2]
    real = check_mask(attention_mask, batch, length, score.device)
    asks = torch.ones(batch, length, dtype=torch.bool) if real is None else real.cpu()
    edges: dict[str, Any] = {
        "example": range(score.shape[0]),
        "query_pos": range(score.shape[1]),
        "key_pos": range(score.shape[2]),
    }
    coords = {name: list(values) for name, values in labels.items()} | edges
    return ScoreSplit(
        terms=xr.DataArray(terms.cpu().numpy(), dims=tuple(coords), coords=coords),
        score=xr.DataArray(score.double().cpu().numpy(), dims=tuple(edges), coords=edges),
        asks=xr.DataArray(asks.numpy(), dims=tuple(edges)[:2]),
        layer=layer,
        head=head,
        largest_error=largest,
        bound=bound,
    )
