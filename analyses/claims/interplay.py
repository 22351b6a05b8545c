"""Whether heads share directions of the stream, and whether one reads another (M4, measured)."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headstream.analyses.claims.ledger import NotApplicable, Observation, Subject, measurement
from headstream.analyses.patching.inference import mean_interval
from headstream.circuits.composing.composition import THROUGH, composition_scores
from headstream.models.names import head_name

_MANY = 1000


@measurement("M4", "how far heads of a layer write to the same directions, above chance")
def _shared_directions(subject: Subject) -> Observation:
    config, width = subject.model.config, _width(subject)
    if config.n_heads == 1:
        raise NotApplicable("one head a layer: no two share a layer")
    if config.d_head >= width:
        raise NotApplicable("every head is as wide as the stream")
    found: dict[str, float] = {}
    chance = []
    for layer in range(config.n_layers):
        bases = [_span(write) for write in _writes(subject, layer)]
        for one, other in combinations(range(config.n_heads), 2):
            ranks = bases[one].shape[0], bases[other].shape[0]
            if min(ranks) == 0:
                continue
            # Squared cosines of the principal angles, averaged over the smaller of the two.
            shared = float((bases[one] @ bases[other].mT).square().sum()) / min(ranks)
            pair = f"{head_name(layer, one)} and {head_name(layer, other)}"
            found[pair] = shared - max(ranks) / width
            chance.append(max(ranks) / width)
    if not found:
        raise NotApplicable("no layer has two heads that write anything")
    words = f"squared cosines of principal angles; chance {float(np.mean(chance)):.2f}"
    return _over_pairs(subject, found, words)


@measurement(
    "M4", "how far a later head reads through Q, K or V what an earlier wrote, above chance"
)
def _composition(subject: Subject) -> Observation:
    config = subject.model.config
    if config.n_layers == 1:
        raise NotApplicable("one layer: no head comes after another")
    distance = 1 if config.positions == "rotary" else None
    scores = composition_scores(subject.model, distance=distance, seed=subject.seed)
    found = {}
    for place in np.argwhere(np.isfinite(scores["excess"].values)).tolist():
        kind, early, one, late, other = place
        pair = f"{THROUGH[kind]} of {head_name(early, one)} to {head_name(late, other)}"
        found[pair] = float(scores["excess"].values[tuple(place)])
    if not found:
        raise NotApplicable("no two heads of different layers read and write anything")
    low, high, largest = (float(scores[f"random_{name}"]) for name in ("low", "high", "largest"))
    over = int((scores["score"] > largest).sum())
    words = (
        f"composition score less {float(scores['expected']):.3f}; random pairs "
        f"[{low:.3f}, {high:.3f}], the largest of as many stays under {largest:.3f}, which {over} "
        "pass"
    )
    if distance is not None:
        words += "; Q and K at distance 1"
    return _over_pairs(subject, found, words)


def _over_pairs(subject: Subject, found: dict[str, float], words: str) -> Observation:
    values = np.array(list(found.values()))
    mean = float(values.mean())
    if len(values) > _MANY:
        # The bootstrap's memory is quadratic, and the mean of so many is normal.
        reach = 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))
        ends = (mean - reach, mean + reach)
    else:
        low, high = mean_interval(values[None], seed=subject.seed)
        ends = (float(low[0]), float(high[0]))
    most = max(found, key=lambda pair: found[pair])
    return Observation(
        value=mean,
        unit="above chance",
        interval=ends,
        n=len(values),
        on=f"the weights, mean over pairs; {words}; most: {most} {found[most]:+.2f}",
    )


def _writes(subject: Subject, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O, as a LayerNorm would read it: what it centres away is no direction to share."""
    write: Tensor = subject.model.blocks[layer].attn.W_O
    if subject.model.config.norm == "layernorm":
        write = write - write.mean(-1, keepdim=True)
    return write


def _width(subject: Subject) -> int:
    """Directions of the stream that a reader can tell apart."""
    config = subject.model.config
    return config.d_model - (config.norm == "layernorm")


def _span(rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "rank d_model"]:
    """Orthonormal rows with the same span."""
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    kept: Tensor = directions[sizes > 1e-10 * max(float(sizes[0]), 1e-30)]
    return kept
