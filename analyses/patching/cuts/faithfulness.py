"""`faithfulness`: how much of the model a given set of heads is, beside random sets of its size.

    m(full)       nothing cut            m(C)       all heads but the circuit cut
    m(empty)      every head cut         m(not C)   the circuit cut

    faithfulness  (m(C) - m(empty)) / (m(full) - m(empty))        1 if the circuit is the model
    left          (m(not C) - m(empty)) / (m(full) - m(empty))    0 if nothing works without it

Ratios of means over prompts. Neither is clipped: a circuit can do better than the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import xarray as xr
from tqdm import tqdm

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.patching import inference
from headstream.analyses.patching.cuts.head_sets import Head, all_heads, heads_of, names_of
from headstream.analyses.patching.cuts.inputs import open_cuts
from headstream.analyses.patching.cuts.results import FaithfulnessResult
from headstream.analyses.patching.cuts.verdicts import Verdicts
from headstream.analyses.patching.labelled import describe_gap
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.given_model import takes_model


@takes_model
def faithfulness(
    model: Decoder,
    task_or_tokens: Any,
    circuit: Any,
    *,
    values: str = "mean",
    n_random: Any = 100,
    attention_mask: Any = None,
    from_pos: Any = None,
    seed: Any = 0,
    n_flips: int = 5000,
    progress: bool = True,
    backend: str | None = None,
) -> FaithfulnessResult:
    """Faithfulness and completeness of a circuit of heads, and of random sets of the same size.

    The number depends on six choices, which stand in `details["choices"]`: what a unit is (a head's
    z, at all positions; embeddings, MLPs and biases are always there), nodes or edges (nodes), what
    a cut head receives (`values`), where (all positions), in which run (the clean one), and what is
    cut (the complement for faithfulness, the circuit for what is left).

    CAUSAL by the one rule: the circuit moves the score from m(empty), by sign flips over prompts,
    further than random sets do on average in the same direction; likewise for cutting it.

    Args:
        circuit: heads, `"L0H1"` or `(0, 1)`; not all of the model's.
        values: `mean`, `resample`, `zero` as for `ablate`, or `pair`: what the head has in the
            pair's corrupted run.
        n_random: random sets of other heads, distinct, none of them the circuit; all there are if
            there are no more than this.
        model, task_or_tokens, attention_mask, from_pos, seed, n_flips, progress, backend: as for
            `ablate`.
    Raises:
        TaskError, TokenError, ShapeError: naming the argument that does not fit.
    Source:
        Mueller et al. 2025 (arXiv 2504.13151) for the ratio; Miller et al. 2024 (arXiv 2407.08734)
        for what must be said beside it; Shi et al. 2024 (arXiv 2410.13032) for random circuits of
        equal size. We average before dividing, and leave the ratio out where m(full) - m(empty) is
        within its noise.
    Example:
        >>> from headstream.analyses import Task
        >>> from headstream.models import load
        >>> model = load("constructed-induction")
        >>> task = Task.for_model(model, n=8)
        >>> found = faithfulness(model, task, ["L0H1", "L1H2"], progress=False)
        >>> round(found.faithfulness, 3), round(found.left, 3) + 0.0
        (1.0, 0.0)
    """
    chosen = heads_of(model.config, "circuit", circuit)
    everything = all_heads(model.config)
    if len(chosen) == len(everything):
        raise TaskError(
            f"circuit holds all {len(everything)} heads of the model: it is the model",
            hint="leave out what the circuit should do without",
        )
    if isinstance(n_random, bool) or not isinstance(n_random, int) or n_random < 1:
        raise TaskError(f"n_random must be a whole number >= 1, got {n_random!r}")
    opened = open_cuts(
        model,
        task_or_tokens,
        values=values,
        seed=seed,
        n_flips=n_flips,
        attention_mask=attention_mask,
        from_pos=from_pos,
        backend=backend,
        pair=True,
    )
    runs = opened.runs
    others, every_set = _random_sets(everything, chosen, n_random, int(seed))
    sets = [everything, _rest(everything, chosen), chosen]
    sets += [cut for other in others for cut in (_rest(everything, other), other)]
    bar = tqdm(sets, desc="cuts", disable=None if progress else True)
    scores = np.stack([runs.effect(cut) for cut in bar]) + runs.base
    full = runs.base
    empty, kept, without = scores[0], scores[1], scores[2]
    random_kept, random_without = scores[3::2], scores[4::2]
    present = np.isfinite(empty)
    gap, refused = describe_gap((full - empty)[present], opened.metric.unit, seed=seed)
    verdicts = Verdicts.of(model, opened)
    moved = np.stack([kept - empty, full - without])
    flips = inference.sign_flips(moved, n_flips=n_flips, seed=seed, floor=verdicts.floor)
    random_moved = (random_kept - empty, full - random_without)
    failed = [
        verdicts.failed(
            float(inference.mean_over_prompts(moved[i])),
            float(flips.p_value[i]),
            float(inference.mean_over_prompts(random_moved[i]).mean()),
            int(present.sum()),
            excludes="random sets of the same size do as much",
        )
        for i in range(2)
    ]
    parts = {
        "faithfulness": _share(kept - empty, random_kept - empty, full - empty, seed, 1),
        "left": _share(without - empty, random_without - empty, full - empty, seed, -1),
    }
    if refused is not None:
        for part in parts.values():
            part |= {"value": None, "low": None, "high": None, "percentile": None}
    choices = {
        "unit": "attention heads (z before W_O); embeddings, MLPs and biases are always there",
        "nodes or edges": "nodes: a cut head is cut for everything that reads it",
        "values": opened.values_in_words,
        "positions": "all",
        "direction": f"heads are cut in the run on the {'clean ' if opened.gap is not None else ''}"
        "prompts",
        "circuit or complement": "all heads but the circuit for faithfulness, the circuit for what "
        "is left",
    }
    details: dict[str, Any] = {
        "circuit": names_of(chosen),
        "choices": choices,
        **verdicts.details(),
        **{name: {k: v for k, v in part.items() if k != "random"} for name, part in parts.items()},
        "gap": gap,
        "refused": refused and refused.replace("clean and corrupted", "the whole model and none"),
        "n_random": len(others),
        "all_sets": every_set,
        "random_sets": [names_of(other) for other in others],
        "p_values": [float(p) for p in flips.p_value],
        "failed": {part: words for part, words in zip(parts, failed) if words},
    }
    data = xr.Dataset(
        {
            "full": ("example", full),
            "empty": ("example", empty),
            "circuit": ("example", kept),
            "without": ("example", without),
            "random_faithfulness": ("random", parts["faithfulness"]["random"]),
            "random_left": ("random", parts["left"]["random"]),
        },
        coords={"example": np.arange(len(full)), "random": np.arange(len(others))},
    )
    return FaithfulnessResult(
        title=f"A circuit of {len(chosen)} heads of {model.name}, and the rest",
        data=data,
        provenance=Provenance.of(model, seed=seed, backend=backend),
        claims=(verdicts.held(), *_claims(details, failed)),
        details=details,
    )


def _rest(everything: tuple[Head, ...], heads: tuple[Head, ...]) -> tuple[Head, ...]:
    return tuple(head for head in everything if head not in heads)


def _random_sets(
    everything: tuple[Head, ...], chosen: tuple[Head, ...], n_random: int, seed: int
) -> tuple[list[tuple[Head, ...]], bool]:
    """Distinct sets of the circuit's size, none of them the circuit; whether they are all."""
    size = len(chosen)
    if comb(len(everything), size) - 1 <= n_random:
        found = [other for other in combinations(everything, size) if other != chosen]
        return found, True
    rng = np.random.default_rng([seed, 4])
    drawn: dict[tuple[Head, ...], None] = {}
    while len(drawn) < n_random:
        picked = sorted(rng.choice(len(everything), size, replace=False).tolist())
        other = tuple(everything[i] for i in picked)
        if other != chosen:
            drawn[other] = None
    return list(drawn), False


def _share(
    moved: np.ndarray, random_moved: np.ndarray, gap: np.ndarray, seed: int, better: int
) -> dict[str, Any]:
    """Ratio of means with its interval, that of the random sets, and how many do worse.

    Args:
        better: +1 if more is better, -1 if less is.
    """
    scale = float(inference.mean_over_prompts(gap))
    if scale == 0:
        nothing = np.full(len(random_moved), np.nan)
        return {"value": np.nan, "low": np.nan, "high": np.nan, "random": nothing} | {
            "random_mean": None,
            "percentile": None,
            "at_least": None,
        }
    value = float(inference.mean_over_prompts(moved)) / scale
    low, high = inference.ratio_interval(moved, gap, seed=seed)
    random = inference.mean_over_prompts(random_moved) / scale
    # Sets that differ by heads which do nothing tie with it up to rounding.
    worse = better * random < better * value - 1e-6
    return {
        "value": value,
        "low": float(low),
        "high": float(high),
        "random": random,
        "random_mean": float(random.mean()),
        "percentile": float(worse.mean()),
        "at_least": int((~worse).sum()),
    }


def _claims(details: Mapping[str, Any], failed: list[list[str]]) -> tuple[Claim, ...]:
    names, noun = ", ".join(details["circuit"]), details["metric"]["noun"]
    said = "; ".join(f"{what}: {choice}" for what, choice in details["choices"].items())
    claims = []
    for (part, id, words, than), reasons, p_value in zip(
        (
            ("faithfulness", "circuit.faithful", "carries", "keep less"),
            ("left", "circuit.complete", "is needed for", "leave more"),
        ),
        failed,
        details["p_values"],
    ):
        found = details[part]
        refused = details["refused"]
        beside = (
            f"no share: {refused}"
            if refused is not None
            else f"{100 * found['percentile']:.0f}% of {details['n_random']} other sets of "
            f"{len(details['circuit'])} heads {than} (mean {found['random_mean']:z.2f})"
        )
        label = "; ".join(reasons) or f"p = {p_value:.2g} (sign-flip, maximum over 2)"
        claims.append(
            Claim(
                id,
                f"the circuit {names} {words} {noun}",
                Evidence.UNKNOWN if reasons else Evidence.CAUSAL,
                value=found["value"],
                unit="kept" if part == "faithfulness" else "left without it",
                interval=None if refused is not None else (found["low"], found["high"]),
                n=details["n"],
                reason=f"{label}; {beside}; {said}",
                where="ablation",
            )
        )
    return tuple(claims)
