"""The census of heads: what each attends to on random repeats, beside chance and beside a control.

    previous_token     the token before                        on sequences without a repeat
    current_token      the query's own token                   "
    sink               the first token                         "
    duplicate_token    the earlier copy of the query's token   on repeats, every distance
    induction          the token after that copy               "
    induction_control  the same positions, content replaced    on the controls, every distance
    copying            eigenvalue score of W_E OV W_U          weights alone (`copying_score`)

Scores are those of `statistics`, sequences those of `repeats`. Labels name a measured pattern and
nothing more: "induction pattern" is what attention shows, and whether the head is an induction
head takes an intervention (`analyses`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.labels import (
    LABEL_MARGIN,
    LABELS,
    MOST_CHANCE,
    label_heads,
    percentile_interval,
    short_notes,
)
from headstream.circuits.measuring.second_pass import check_finite
from headstream.circuits.qk_ov.copying import copying_score, require_finite
from headstream.circuits.repeats import (
    RepeatPair,
    RepeatPlan,
    draw_orders,
    make_pair,
    plan_repeats,
)
from headstream.circuits.statistics import (
    Targets,
    chance_level,
    current_token_targets,
    previous_token_targets,
    sink_targets,
    target_mass,
)
from headstream.models.arguments import check_count, check_seed
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.names import head_name

if TYPE_CHECKING:
    import pandas as pd

    from headstream.models.decoder import Decoder

Array = npt.NDArray[np.floating]

SCORES = (
    "previous_token",
    "duplicate_token",
    "current_token",
    "induction",
    "induction_control",
    "sink",
    "copying",
)
DEFINITIONS = {
    "previous_token": "mean attention to the token before, over queries after the first, on "
    "random tokens without repeats",
    "duplicate_token": "mean attention to the earlier copy of the query's token, over the second "
    "occurrence of a random block, mean over distances",
    "current_token": "mean attention to the query's own token, over queries after the first, on "
    "random tokens without repeats",
    "induction": "mean attention to the token after the earlier copy of the query's token, over "
    "the second occurrence of a random block, mean over distances",
    "induction_control": "attention to the same positions as 'induction' when the second block "
    "is fresh random tokens: what position alone explains",
    "sink": "mean attention to the first token (BOS, if there is one), over later queries, on "
    "random tokens without repeats",
    "copying": "sum of the eigenvalues of W_E W_V W_O W_U over the sum of their moduli, from the "
    "weights alone; not a fraction of attention: -1 to 1, random heads 0",
}
_BYTES = 2**26  # of patterns held at once


@dataclass(frozen=True, eq=False, repr=False)
class HeadCensus:
    """Scores of every head.

    Attributes:
        data: `value`, `low`, `high`, `margin` (score, layer, head), the score's value, its 95%
            interval over sequences and its distance from chance; `chance` (score); `label`
            (layer, head);
            `induction_by_distance`, `control_by_distance`, `duplicate_by_distance`,
            `duplicate_control_by_distance` (distance, layer, head). `copying` comes from the
            weights: its interval is a point, and NaN marks a head whose OV circuit has no
            non-zero eigenvalue.
        n: sequences of each distance and kind. length: tokens of the repeated block.
        distances: of the repeats, in tokens. seed: of the sequences and intervals.
        notes: what the reader must know about this run; `details` adds which labels the sequences
            were too short for.
    """

    data: xr.Dataset
    n: int
    length: int
    distances: tuple[int, ...]
    seed: int
    notes: tuple[str, ...]

    @property
    def details(self) -> Mapping[str, Any]:
        """How it was measured, as plain values."""
        return {
            "definitions": dict(DEFINITIONS),
            "n": self.n,
            "length": self.length,
            "distances": list(self.distances),
            "seed": self.seed,
            "label_margin": LABEL_MARGIN,
            "label_most_chance": MOST_CHANCE,
            "notes": [*self._withheld(), *self.notes],
        }

    def _withheld(self) -> list[str]:
        chance = self.data["chance"]
        return short_notes({str(s): float(chance.sel(score=s)) for s in chance["score"].values})

    def found(self, label: str) -> list[str]:
        """Heads with this label, as "L1H4"."""
        places = np.argwhere(self.data["label"].values == label)
        return [head_name(int(layer), int(head)) for layer, head in places]

    def to_frame(self) -> pd.DataFrame:
        """One row a head: its label and its scores."""
        wide = self.data["value"].to_series().unstack("score")[list(SCORES)]
        wide.columns.name = None
        wide.insert(0, "label", self.data["label"].to_series())
        names = [head_name(layer, head) for layer, head in wide.index]
        return wide.reset_index(drop=True).set_axis(names).rename_axis("head")

    def __repr__(self) -> str:
        named = {label: self.found(label) for label in LABELS.values()}
        words = "; ".join(f"{k}: {', '.join(v)}" for k, v in named.items() if v)
        size = self.data["label"].size
        return f"<census of {size} heads, n = {self.n}; {words or 'none stands out'}>"

    def __str__(self) -> str:
        frame = self.to_frame()
        frame.loc["chance"] = ["", *self.data["chance"].values]
        table = frame.to_string(float_format=lambda x: f"{x:.3f}", na_rep="n/a")
        distances = ", ".join(map(str, self.distances))
        lines = [
            table,
            f"n = {self.n} sequences; blocks of {self.length} tokens at distances {distances}; "
            "labels are measured patterns, no head was intervened on",
            *self._withheld(),
            *self.notes,
        ]
        return "\n".join(lines)


@takes_model
def score_heads(
    model: Decoder,
    *,
    n: int = 64,
    seed: int = 0,
    distances: Sequence[int] | None = None,
    length: int | None = None,
    backend: str | None = None,
) -> HeadCensus:
    """Score every head on random repeats and label the patterns that stand out.

    The unit is the sequence: one random order of the content tokens makes the repeated sequence
    and its control at every distance, and intervals are percentile bootstraps over the n orders.

    A head gets the label of a score whose interval lies at least `LABEL_MARGIN` = 0.3 above
    chance. "induction pattern" and "duplicate-token" need that at every distance, and as much
    above the content control; so a head that looks back one learned distance gets neither. Of
    several labels the one farthest above chance stays; "sink" gives way to all, since heads of
    any kind rest on the first token when they find nothing. Idle heads are "none". The labels
    without a control, "previous-token", "current-token" and "sink", are given only where chance
    is at most `MOST_CHANCE` = 0.2, in sequences of about 12 tokens or more; a note says so.

    Args:
        model: the decoder.
        n: sequences of each distance and kind, at least 2.
        seed: of the sequences and of the intervals; the global random state is left alone.
        distances: of the repeats in tokens; None spreads up to four over what the model can hold
            (`plan_repeats`).
        length: tokens of the repeated block; None chooses.
        backend: must be able to form the pattern; None is "naive".
    Raises:
        TokenError, ShapeError: if no repeat fits the vocabulary or the context, or `distances`,
            `length`, `n` or `seed` are out of range, or a weight is NaN or infinite.
        BackendError: with `backend="flash"`; if scores overflow (the layer is named).
    Source:
        Olsson et al. 2022 (prefix matching, on 25 random tokens four times over); distances and
        content control are ours: a head that attends a fixed distance back passes the usual test.
    """
    n, seed = check_count("n", n, least=2, of="sequences"), check_seed(seed)
    # Before the runs: a NaN weight makes patterns that no score is defined on.
    require_finite(model)
    plan = plan_repeats(model.config, distances, length)
    orders = draw_orders(plan, n, torch.Generator().manual_seed(seed))
    per_distance, levels = scores_by_distance(model, plan, orders, backend or "naive")
    chance = {name: float(np.mean(level)) for name, level in levels.items()}
    copying = copying_score(model, top=(), seed=seed)
    data = assemble_census(per_distance, chance, copying, plan.distances, seed)
    notes = (
        *plan.notes,
        "of random heads of this shape 95% have a copying score between "
        f"{float(copying['random_low']):+.2f} and {float(copying['random_high']):+.2f}",
    )
    return HeadCensus(data, n, plan.length, plan.distances, seed, notes)


def scores_by_distance(
    model: Decoder, plan: RepeatPlan, orders: Tensor, backend: str
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The scores that need runs, [distance, sequence, layer, head], and chance [distance]."""
    runs = [
        _score_pair(model, make_pair(plan, orders, distance), backend)
        for distance in plan.distances
    ]
    scores, chance = zip(*runs, strict=True)
    return (
        {name: np.stack([each[name] for each in scores]) for name in scores[0]},
        {name: np.array([each[name] for each in chance]) for name in chance[0]},
    )


def _score_pair(
    model: Decoder, pair: RepeatPair, backend: str
) -> tuple[dict[str, Array], dict[str, float]]:
    """Scores [sequence, layer, head] of one distance, and the chance level of each."""
    real = torch.ones_like(pair.control, dtype=torch.bool)
    plain = {
        "previous_token": previous_token_targets(real),
        "current_token": current_token_targets(real),
        "sink": sink_targets(real),
        "induction_control": pair.after_copy,
        "duplicate_control": pair.copy,
    }
    copied = {"induction": pair.after_copy, "duplicate_token": pair.copy}
    scores = masses_on(model, pair.control, plain, backend)
    scores |= masses_on(model, pair.repeated, copied, backend)
    chance = {name: float(chance_level(t).mean()) for name, t in (plain | copied).items()}
    return scores, chance


def masses_on(
    model: Decoder, tokens: Tensor, targets: Mapping[str, Targets], backend: str
) -> dict[str, Array]:
    """Mass on each set of targets, [sequence, layer, head], a few sequences at a time."""
    parts: dict[str, list[Array]] = {name: [] for name in targets}
    for some, patterns in patterns_of(model, tokens, backend):
        for name, keys in targets.items():
            masses = [target_mass(pattern, keys[some]).double() for pattern in patterns]
            parts[name].append(torch.stack(masses, 1).numpy())
    return {name: np.concatenate(part) for name, part in parts.items()}


def patterns_of(
    model: Decoder, tokens: Tensor, backend: str
) -> Iterator[tuple[slice, list[Tensor]]]:
    """A few sequences at a time: which, and every layer's pattern of them on the CPU.

    Raises:
        BackendError: if the scores of a layer overflow.
    """
    config = model.config
    row = config.n_layers * config.n_heads * tokens.shape[1] ** 2 * 4
    step = max(1, _BYTES // row)
    for start in range(0, len(tokens), step):
        some = slice(start, start + step)
        with torch.no_grad():
            _, acts = capture(
                model, tokens[some].to(model.device), "blocks.*.attn.hook_pattern", backend=backend
            )
        patterns = [acts[f"blocks.{layer}.attn.hook_pattern"] for layer in range(config.n_layers)]
        for layer, pattern in enumerate(patterns):
            check_finite(pattern.sum(), layer)
        yield some, [pattern.cpu().float() for pattern in patterns]


def assemble_census(
    per_distance: Mapping[str, Array],
    chance: dict[str, float],
    copying: xr.Dataset,
    distances: Sequence[int],
    seed: int,
) -> xr.Dataset:
    chance = chance | {"copying": 0.0}
    low, high = {}, {}
    score = {name: values.mean((0, 1)) for name, values in per_distance.items()}
    for name, values in per_distance.items():
        low[name], high[name] = percentile_interval(values.mean(0), seed=seed)
    score["copying"] = low["copying"] = high["copying"] = copying["score"].values
    site = ("layer", "head")
    stacked = {
        name: (("score", *site), np.stack([values[s] for s in SCORES]))
        for name, values in (("value", score), ("low", low), ("high", high))
    }
    by_distance = {
        variable: (("distance", *site), per_distance[name].mean(1))
        for variable, name in (
            ("induction_by_distance", "induction"),
            ("control_by_distance", "induction_control"),
            ("duplicate_by_distance", "duplicate_token"),
            ("duplicate_control_by_distance", "duplicate_control"),
        )
    }
    data = xr.Dataset(
        stacked | {"chance": (("score",), [chance[s] for s in SCORES])} | by_distance,
        coords={
            "score": list(SCORES),
            "layer": copying["layer"],
            "head": copying["head"],
            "distance": list(distances),
        },
    )
    data["margin"] = data["value"] - data["chance"]
    data["label"] = (site, label_heads(per_distance, chance, seed=seed))
    return data
