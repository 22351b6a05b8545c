"""A head's anatomy as a page of text: every number beside its chance level."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.circuits.anatomy import HeadAnatomy, TokenPair

# Terms of the scores named, the largest first, if they are at least this share.
_MOST_TERMS = 3
_LEAST_SHARE = 0.01


def anatomy_text(head: HeadAnatomy) -> str:
    """What `str(anatomy)` prints."""
    lines = [
        f"{head.name} of {head.model}",
        "",
        "reads (QK)" + _taken_at(head),
        f"  best matches: {_pairs(head, head.matches)}{_alone(head)}",
        f"  looks back:   {looks_back(head)}",
        f"  scores from:  {scores_from(head)}",
        *(f"  through {name}: {words}" for name, words in through(head)),
        f"  rank:         {_rank(head, 'qk')}",
        "moves (OV)",
        f"  raises most:  {_pairs(head, head.moves)}",
        f"  copying:      {copies(head)}",
        f"  behaviour:    {behaves(head)}",
        f"  rank:         {_rank(head, 'ov')}",
        "partners (above the largest of as many random pairs)",
        *(f"  {line}" for line in partners(head) or ["none"]),
    ]
    if head.caveats:
        lines += ["left out of the circuits", *(f"  {words}" for words in head.caveats)]
    return "\n".join(lines)


def _taken_at(head: HeadAnatomy) -> str:
    """The distance of a rotary head's QK circuit, and how it came about."""
    if head.distance is None:
        return ""
    words = f", keys {head.distance} tokens back"
    mean = head.by_distance.mean("example")
    highest = int(mean["distance"].values[int(np.argmax(mean.values))])
    if head.distance != highest:
        return words
    if head.preferred_distance is None:
        return f"{words} (its highest mean score, though no distance stands out)"
    return f"{words} (its highest mean score)"


def _alone(head: HeadAnatomy) -> str:
    """In later layers an embedding is not what stands in the stream."""
    return " (by embeddings alone)" if head.layer and any(p.value for p in head.matches) else ""


def looks_back(head: HeadAnatomy) -> str:
    """The distance that its scores prefer, and by how much; or that none stands out."""
    found = head.preferred_distance
    if found is None:
        return f"no distance stands out (n = {head.n})"
    where = {0: "its own token", 1: "the token before"}.get(
        found.distance, f"{found.distance} tokens back"
    )
    low, high = found.interval
    return (
        f"{where}, {found.excess:+.2f} [{low:+.2f}, {high:+.2f}] over the mean of the row "
        f"(n = {head.n})"
    )


def scores_from(head: HeadAnatomy) -> str:
    """The terms that its scores on the sample consist of, as shares of their variance."""
    flat = head.shares.values.ravel()
    if not np.isfinite(flat).all():
        return "nothing: its scores are the same for every key"
    dims = head.shares.dims
    names = []
    for place in np.ndindex(*head.shares.shape):
        labels = [str(head.shares[dim].values[at]) for dim, at in zip(dims, place, strict=True)]
        names.append(f"rotary pair {labels[0]}" if dims == ("pair",) else " x ".join(labels))
    order = np.argsort(-np.abs(flat), kind="stable")[:_MOST_TERMS].tolist()
    kept = [i for i in order if abs(flat[i]) >= _LEAST_SHARE]
    words = ", ".join(f"{names[i]} {flat[i]:.0%}" for i in kept)
    return words + ("" if dims == ("pair",) else " (query x key)")


def through(head: HeadAnatomy) -> list[tuple[str, str]]:
    """For each earlier head its keys hold: whether it looks for its own token there."""
    return [
        (
            head_name(*one.earlier),
            f"its own token is the best match for {one.own_first:.0%} of tokens "
            f"(chance {1 / head.d_vocab:.0%})",
        )
        for one in head.through
    ]


def copies(head: HeadAnatomy) -> str:
    """The eigenvalue score beside random heads, and how many tokens raise themselves most."""
    copying = head.copying
    if math.isnan(copying.score):
        return "the circuit is zero: nothing is moved"
    low, high = copying.random
    return (
        f"eigenvalues {copying.score:+.2f} (random heads {low:+.2f} to {high:+.2f}); "
        f"{copying.first:.0%} of tokens raise themselves most (chance {copying.first_chance:.0%})"
    )


def behaves(head: HeadAnatomy) -> str:
    """The behavioural copying score with its interval and chance."""
    copying = head.copying
    if math.isnan(copying.behaviour):
        return "no token of the samples is raised"
    low, high = copying.behaviour_interval
    return (
        f"{copying.behaviour:+.2f} [{low:+.2f}, {high:+.2f}] on random tokens (a head that ignores "
        f"its source {copying.behaviour_chance:+.2f}, one that raises nothing else +1)"
    )


def partners(head: HeadAnatomy) -> list[str]:
    """One line a partner."""
    return [
        f"{row.through}-composition {row.earlier} -> {row.later}  {row.score:.3f} "
        f"({row.excess:+.3f} over chance)"
        for row in head.partners.itertuples()
    ]


def _pairs(head: HeadAnatomy, pairs: tuple[TokenPair, ...]) -> str:
    if not any(pair.value for pair in pairs):
        return "none: the circuit is zero"
    return ", ".join(
        f"{head.token(pair.row)} -> {head.token(pair.column)} {pair.value:+.3g}" for pair in pairs
    )


def _rank(head: HeadAnatomy, circuit: str) -> str:
    total = head.singular.sizes["rank"]
    return f"{head.rank(circuit)} of {total} directions hold 90% of its square"
