"""How much of a score's variation over the keys each of its terms carries."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.analyses.claims.ledger import NotApplicable, Observation, Subject
from headstream.analyses.patching.inference import mean_interval


def shares_of_variation(
    terms: Float[Tensor, "term batch head query_pos key_pos"],
) -> Float[Tensor, "term batch head"]:
    """cov(term, score) / var(score) over the keys that a query may read, summed over queries.

    The score is the sum of the terms, so a head's shares sum to 1; one may be negative, where a
    term works against the others. What is the same for all keys of a query is left out of all of
    them, as the softmax leaves it out. NaN where the score does not vary.
    """
    size = terms.shape[-1]
    visible = torch.ones(size, size, dtype=terms.dtype, device=terms.device).tril()
    mean = (terms * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    terms = (terms - mean) * visible
    total = terms.sum(0)
    return (terms * total).sum((-1, -2)) / total.square().sum((-1, -2))


def observed(
    subject: Subject, shares: Float[Tensor, "batch head"], unit: str, words: str
) -> Observation:
    """The mean share over heads, its interval over sequences, and the two extreme heads."""
    by_sequence = shares.nanmean(1).cpu().numpy()
    by_sequence = by_sequence[by_sequence == by_sequence]
    if not len(by_sequence):
        raise NotApplicable("no head's scores vary over the keys")
    low, high = mean_interval(by_sequence[None], seed=subject.seed)
    return Observation(
        value=float(by_sequence.mean()),
        unit=unit,
        interval=(float(low[0]), float(high[0])),
        n=len(by_sequence),
        on=f"{subject.sampled}; {words}",
    )
