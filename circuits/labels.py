"""Which scores of a head stand out, and the one word for it.

A label names a measured pattern: what attention shows on these inputs, not what the head does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

# A score earns its label when the lower end of its interval is this far above chance (and, where
# there is a control, above the control, at every distance). Sinks are commonly counted from 0.3
# of the mass on (Gu et al. 2024); the same step serves for all.
LABEL_MARGIN = 0.3
# A score without a control earns its label only where chance is no more than this, which takes
# sequences of 12 tokens. A head that finds nothing to look at rests somewhere, and among few keys
# that is often its own token or the first one: at 5 tokens chance is 0.32, the margin is soon made
# up, and heads that have no label in longer sequences get one.
MOST_CHANCE = 0.2
RESAMPLES = 1000

LABELS = {
    "previous_token": "previous-token",
    "duplicate_token": "duplicate-token",
    "current_token": "current-token",
    "induction": "induction pattern",
    "sink": "sink",
}
# Scores with a content control, which must be beaten at every distance.
CONTROLS = {"induction": "induction_control", "duplicate_token": "duplicate_control"}


def label_heads(
    scores: Mapping[str, Array], chance: Mapping[str, float], *, seed: int
) -> npt.NDArray[Any]:
    """The label of every head, "none" where nothing stands out.

    Of several labels that a head has earned, the one farthest above chance stays; "sink" gives
    way to all, since heads of any kind rest on the first token when they find nothing. No head
    gets a label that these sequences are too short for (`too_short`).

    Args:
        scores: name -> [distance, sequence, layer, head], the controls among them.
        chance: name -> chance level.
        seed: of the bootstrap.
    Returns:
        [layer, head] of strings, values of `LABELS` or "none".
    """
    shape = scores["sink"].shape[2:]
    labels = np.full(shape, "none", dtype=object)
    told = [name for name in LABELS if name not in too_short(chance)]
    if "sink" in told:
        labels[_earned(scores, chance, "sink", seed)] = LABELS["sink"]
        told.remove("sink")
    best = np.full(shape, -np.inf)
    for name in told:
        margin = scores[name].mean((0, 1)) - chance[name]
        wins = _earned(scores, chance, name, seed) & (margin > best)
        labels[wins], best[wins] = LABELS[name], margin[wins]
    return labels.astype(np.str_)


def too_short(chance: Mapping[str, float]) -> list[str]:
    """Scores that give no label here: they have no control, and chance is above `MOST_CHANCE`.

    Where there is a control it shows what short sequences alone do to a score.
    """
    return [name for name in LABELS if name not in CONTROLS and chance[name] > MOST_CHANCE]


def short_notes(chance: Mapping[str, float]) -> list[str]:
    """A sentence on `too_short`, for the notes of a run; none if there is nothing to say."""
    names = too_short(chance)
    if not names:
        return []
    words = ", ".join(LABELS[name] for name in names)
    largest = max(chance[name] for name in names)
    return [
        f"sequences too short for the labels {words}: chance is {largest:.2f} in them, and these "
        f"labels need {MOST_CHANCE:g} or less"
    ]


def _earned(
    scores: Mapping[str, Array], chance: Mapping[str, float], name: str, seed: int
) -> npt.NDArray[np.bool_]:
    above = [scores[name].mean(0) - chance[name]]
    if name in CONTROLS:
        above += list(scores[name] - chance[name])
        above += list(scores[name] - scores[CONTROLS[name]])
    lows = [percentile_interval(difference, seed=seed)[0] for difference in above]
    return np.logical_and.reduce([low >= LABEL_MARGIN for low in lows])


def percentile_interval(values: Array, *, seed: int) -> tuple[Array, Array]:
    """95% percentile bootstrap of the mean over axis 0 (sequences), all other axes at once.

    All cells share the resamples.
    """
    n = values.shape[0]
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    means = draws @ values.reshape(n, -1) / n
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])
