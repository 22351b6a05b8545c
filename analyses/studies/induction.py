"""Which heads continue repeats by content? Found by pattern, labelled by what cutting them costs.

    1. pattern    at every distance and at random gaps, clear of chance, of the position control and
                  of the content control (`circuits.induction_scores`): the candidates
    2. cut        candidates together, alone, all but one, on sequences of their own
    3. label      "induction head" takes both; a pattern alone is an "induction pattern"

A head that looks back one distance, whatever stands there, is a "fixed-distance copier"; without an
OV circuit that copies, "fixed-distance". All other labels are the census'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from torch import Generator

from headstream.analyses.kinds import InductionResult
from headstream.analyses.patching.inference import ALPHA
from headstream.analyses.result import Provenance
from headstream.analyses.studies.induction_claims import (
    COPIER,
    FIXED,
    HEAD,
    PATTERN,
    claims_of,
)
from headstream.analyses.studies.repeat_cuts import RepeatCuts, RepeatRuns, cut_on_repeats
from headstream.circuits.gapped_repeats import fewest_tokens, plan_gaps
from headstream.circuits.heads import scores_by_distance
from headstream.circuits.induction_scores import InductionScores, score_induction
from headstream.circuits.labels import LABEL_MARGIN, LABELS, label_heads, percentile_interval
from headstream.circuits.qk_ov.copying import copying_score, require_finite
from headstream.circuits.repeats import LONGEST, RepeatPlan, draw_orders, plan_repeats
from headstream.models.arguments import check_count, check_seed
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError
from headstream.models.names import head_name

DEFINITIONS = {
    "score": "mean attention, over the second occurrence of a random block, to the token after the "
    "earlier copy of the query's",
    "other content": "control: the same positions when the second block is other tokens",
    "content elsewhere": "control: as far back when the block recurs at another distance",
    "random gaps": "the score where a block recurs after gaps of random length; all earlier copies "
    "count",
    "fixed distance": "the d at which attention d - 1 back is largest on random tokens, less "
    "chance: what the usual test takes for induction",
    "copying": "eigenvalue sum of W_E W_V W_O W_U over the sum of moduli",
    "alone, restored": "loss on what a repeat predicts when the head is cut; share of the joint "
    "cut that it takes back, restored alone",
}


def induction(
    model: Decoder,
    *,
    n: Any = 64,
    seed: Any = 0,
    distances: Any = None,
    length: Any = None,
) -> InductionResult:
    """Find the heads that continue repeats by content, and those that only seem to.

    Args:
        model: the decoder.
        n: sequences of each kind, at least 2; CAUSAL takes 6.
        seed: of everything that is drawn.
        distances: of the repeats in tokens; None spreads up to four over `length`.
        length: tokens of the longest sequences, BOS included; None is the length that the model was
            trained on, or its context, and at most 128. No sequence draws a token twice within a
            block or gap, so single distances go no farther than the vocabulary.
    Returns:
        `InductionResult`: a candidate is an "induction head" when cutting all candidates together
        is CAUSAL by the one rule (more loss on what repeats predict, and more than where nothing
        repeats) and the head, restored alone, takes back a fifth of that, or cut alone is CAUSAL
        and takes a fifth.
    Raises:
        ShapeError, TokenError: if no repeat fits, or an argument is out of range; for weights that
            are NaN or infinite.
        BackendError: if scores overflow.
    Source:
        Olsson et al. 2022 (prefix matching, copying, ablation). The distances, both controls and
        the joint cut are ours: a head that copies from a fixed distance passes the usual test, and
        redundant heads pass an ablation one by one.
    Example:
        >>> from headstream.models import load
        >>> induction(load("constructed-induction"), n=8).found("induction head")
        ['L1H2']
    """
    n, seed = check_count("n", n, least=2, of="sequences"), check_seed(seed)
    plan, length = _plan(model.config, distances, length)
    # Before the runs: a NaN weight makes patterns that no score is defined on.
    require_finite(model)
    generator = Generator().manual_seed(seed)
    orders = draw_orders(plan, n, generator)
    of_pairs, levels = scores_by_distance(model, plan, orders, "naive")
    scores = score_induction(
        model, plan, orders, of_pairs, levels["induction"], length=length, generator=generator
    )
    found = np.argwhere(scores.follows_content(seed=seed))
    candidates = [(int(layer), int(head)) for layer, head in found]
    # Orders of their own: those that chose the candidates must not judge them.
    runs = RepeatRuns(model, plan, draw_orders(plan, n, generator))
    cuts = cut_on_repeats(model, runs, candidates, seed=seed) if candidates else None
    copying = copying_score(model, top=(), seed=seed)
    data = _arrays(plan, scores, copying["score"].values, cuts, seed)
    copies = copying["score"].values > float(copying["random_high"])
    chance = {name: float(level.mean()) for name, level in levels.items()}
    labels = label_heads(of_pairs, chance, seed=seed)
    # Early queries of a head that looks back far have nothing there, and rest on themselves, say.
    follows = scores.follows_distance(seed=seed) & _above(labels, scores.fixed, of_pairs, chance)
    data["label"] = (("layer", "head"), _labels(labels, follows, copies, cuts))
    gaps = plan_gaps(model.config, length)
    details = {
        "definitions": DEFINITIONS,
        "n": n,
        "seed": seed,
        "distances": list(plan.distances),
        "block": plan.length,
        "length": length,
        "gapped": {
            "block": gaps.block,
            "longest_gap": gaps.longest_gap,
            "chance": scores.gapped_chance,
        },
        "farthest": scores.farthest,
        "margin": LABEL_MARGIN,
        "alpha": ALPHA,
        "copying_random": [float(copying[f"random_{end}"]) for end in ("low", "high")],
        "loss": {
            "repeats": float(runs.loss.mean()),
            "control": float(runs.control_loss.mean()),
        },
        "joint": _joint(cuts),
        "notes": _notes(model, plan, scores, length),
    }
    result = InductionResult(
        title=f"Induction in {model.name}",
        data=data,
        provenance=Provenance.of(model, seed=seed),
        details=details,
    )
    return replace(result, claims=tuple(claims_of(result)))


def _plan(config: DecoderConfig, distances: Any, length: object) -> tuple[RepeatPlan, int]:
    """Single distances, and the length of the sequences with random gaps."""
    least = fewest_tokens(config)
    if length is None:
        chosen = min(config.n_train or config.n_ctx, config.n_ctx, LONGEST)
        chosen = min(max(chosen, least), config.n_ctx)
    else:
        chosen = check_count("length", length, of="tokens")
    if not least <= chosen <= config.n_ctx:
        raise ShapeError(
            f"length={chosen} is out of range: repeats at random gaps take at least {least} "
            f"tokens, and the model holds n_ctx={config.n_ctx}"
        )
    if distances is not None:
        return plan_repeats(config, distances), chosen
    return plan_repeats(replace(config, n_ctx=chosen, n_train=None)), chosen


def _arrays(
    plan: RepeatPlan,
    scores: InductionScores,
    copying: np.ndarray,
    cuts: RepeatCuts | None,
    seed: int,
) -> xr.Dataset:
    site, by_distance = ("layer", "head"), ("distance", "layer", "head")
    gapped_low, gapped_high = percentile_interval(scores.gapped, seed=seed)
    fixed_low, fixed_high = percentile_interval(scores.fixed, seed=seed)
    shape = scores.fixed_distance.shape
    arrays: dict[str, Any] = {
        "induction": (by_distance, scores.induction.mean(1)),
        "position_control": (by_distance, scores.position_control.mean(1)),
        "content_control": (by_distance, scores.content_control.mean(1)),
        "chance": (("distance",), scores.chance),
        "gapped": (site, scores.gapped.mean(0)),
        "gapped_low": (site, gapped_low),
        "gapped_high": (site, gapped_high),
        "gapped_control": (site, scores.gapped_control.mean(0)),
        "fixed": (site, scores.fixed.mean(0)),
        "fixed_low": (site, fixed_low),
        "fixed_high": (site, fixed_high),
        "fixed_distance": (site, scores.fixed_distance),
        "copying": (site, copying),
    }
    for name in ("alone", "restored"):
        for end in ("", "_low", "_high", *(("_p", "_control") if name == "alone" else ())):
            values = np.full(shape, np.nan)
            if cuts is not None:
                values[tuple(np.transpose(cuts.heads))] = getattr(cuts, name + end)
            arrays[name + end] = (site, values)
    if cuts is not None:
        arrays["joint"] = (("example",), cuts.joint)
    layers, heads = shape
    coords = {
        "distance": list(plan.distances),
        "layer": np.arange(layers),
        "head": np.arange(heads),
        "example": np.arange(scores.gapped.shape[0]),
    }
    return xr.Dataset(arrays, coords)


def _above(
    labels: np.ndarray,
    fixed: np.ndarray,
    of_pairs: Mapping[str, np.ndarray],
    chance: Mapping[str, float],
) -> np.ndarray:
    """[layer, head]: the fixed distance takes more, over chance, than what the label is named for.

    "sink" gives way in any case, as it does in the census.
    """
    above = np.ones(labels.shape, dtype=bool)
    for score, label in LABELS.items():
        if label not in ("sink", PATTERN):
            excess = of_pairs[score].mean((0, 1)) - chance[score]
            above &= (labels != label) | (fixed.mean(0) > excess)
    return above


def _labels(
    census: np.ndarray, follows: np.ndarray, copies: np.ndarray, cuts: RepeatCuts | None
) -> np.ndarray:
    """[layer, head] of strings; see the module.

    Args:
        census: its labels.
        follows, copies: [layer, head], whether the head looks a fixed distance back before all,
            and whether its OV circuit copies.
    """
    labels = census.astype(object)
    # The census asks for less: it has no random gaps and no content at another distance.
    labels[labels == PATTERN] = "none"
    labels[follows & copies], labels[follows & ~copies] = COPIER, FIXED
    if cuts is not None:
        labels[tuple(np.transpose(cuts.heads))] = np.where(cuts.members, HEAD, PATTERN)
    return labels.astype(np.str_)


def _joint(cuts: RepeatCuts | None) -> dict[str, Any] | None:
    """The joint cut as plain values."""
    if cuts is None:
        return None
    return {
        "heads": [head_name(*head) for head in cuts.heads],
        "mean": float(cuts.joint.mean()),
        "low": cuts.joint_low,
        "high": cuts.joint_high,
        "p": cuts.joint_p,
        "control": cuts.joint_control,
        "failed": list(cuts.joint_failed),
        "random": {
            "sets": len(cuts.random),
            "mean": float(cuts.random.mean()) if len(cuts.random) else None,
            "largest": float(cuts.random.max()) if len(cuts.random) else None,
        },
        "self_cut_max": cuts.self_cut,
        "self_cut_bound": cuts.self_bound,
    }


def _notes(model: Decoder, plan: RepeatPlan, scores: InductionScores, length: int) -> list[str]:
    notes = [*plan.notes]
    if plan.bos is None:
        notes.append("the model has no BOS, and is measured without one")
    if len(plan.distances) < 2:
        notes.append("with one distance there is no content control")
    reach = min(model.config.n_ctx, len(plan.content)) - (plan.bos is not None)
    if scores.farthest < reach // 2:
        notes.append(f"distances beyond {scores.farthest} were not looked at for fixed ones")
    if model.config.n_train is not None and length > model.config.n_train:
        notes.append(f"the model was trained on {model.config.n_train} positions, fewer than these")
    return notes
