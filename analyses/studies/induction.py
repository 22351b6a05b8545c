"""Which heads continue repeats by content? Found by pattern, labelled by what cutting them costs.

    1. pattern    at every distance and at random gaps, clear of chance, of the position control and
                  of the content control (`circuits.induction_scores`): the candidates
    2. cut        candidates together, alone, all but one, on sequences of their own
    3. copying    that it raises what it attends to, by weights or by what it writes
    4. label      "induction head" takes all three; a pattern alone is an "induction pattern"

Where a set of candidates has the label and no head alone gives back a fifth, those that give back
their part are each an "induction head of a set". A head that looks back one distance, whatever
stands there, is a "fixed-distance copier"; without an OV circuit that copies, "fixed-distance". All
other labels are the census', which gives none of those without a control where sequences are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Generator

from headstream.analyses.kinds import InductionResult
from headstream.analyses.patching.inference import ALPHA
from headstream.analyses.result import Provenance
from headstream.analyses.studies.induction_claims import (
    COPIER,
    FIXED,
    HEAD,
    PART,
    PATTERN,
    claims_of,
)
from headstream.analyses.studies.induction_record import arrays_of, joint_of, notes_of
from headstream.analyses.studies.repeat_cuts import RepeatCuts, RepeatRuns, cut_on_repeats
from headstream.circuits.fixed_distance import NEAREST, SEQUENCES
from headstream.circuits.gapped_repeats import fewest_tokens, plan_gaps
from headstream.circuits.heads import scores_by_distance
from headstream.circuits.induction_scores import score_induction
from headstream.circuits.labels import LABEL_MARGIN, label_heads, short_notes
from headstream.circuits.qk_ov.behavioural_copying import behavioural_copying_score
from headstream.circuits.qk_ov.copying import copying_score, require_finite
from headstream.circuits.repeats import LONGEST, RepeatPlan, draw_orders, plan_repeats
from headstream.models.arguments import check_count, check_seed
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model

DEFINITIONS = {
    "score": "mean attention, over the second occurrence of a random block, to the token after the "
    "earlier copy of the query's",
    "other content": "control: the same positions when the second block is other tokens",
    "content elsewhere": "control: as far back when the block recurs at another distance",
    "random gaps": "the score where a block recurs after gaps of random length; all earlier copies "
    "count",
    "fixed distance": "the d at which attention d - 1 back is largest on random tokens, less "
    "chance, from early and from late positions: what the usual test takes for induction",
    "copying": "eigenvalue sum of W_E W_V W_O W_U over the sum of moduli; a candidate without it "
    "copies if its direct write raises what it attends to clearly more than other tokens",
    "alone, restored": "loss on what a repeat predicts when the head is cut; share of the joint "
    "cut that it takes back, restored alone",
}


@takes_model
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
        length: tokens of the repeats, BOS included (`distances` may ask for more); None is the
            length that the model was trained on, or its context, and at most 128. No sequence
            draws a token twice within a block or gap, so single distances go no farther than the
            vocabulary. Fixed distances are looked for in sequences no shorter than that of None:
            whether a head looks 31 back does not depend on how long a repeat is asked for.
    Returns:
        `InductionResult`: a candidate is an "induction head" when the model continues repeats
        (less loss than a uniform guess, and than where nothing repeats), cutting all candidates
        together is CAUSAL by the one rule (more loss on what repeats predict, and more than where
        nothing repeats), the head, restored alone, takes back a fifth of that, or cut alone is
        CAUSAL and takes a fifth, and it copies.
    Raises:
        ShapeError, TokenError: if no repeat fits, or an argument is out of range; for weights that
            are NaN or infinite, or so large that the loss is.
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
    scanned = max(_usual_length(model.config), length)
    # No farther than the usual repeats, unless the caller asked for such a distance.
    scanned = max(min(scanned, LONGEST), plan.distances[-1] + plan.length + (plan.bos is not None))
    scores = score_induction(
        model,
        plan,
        orders,
        of_pairs,
        levels["induction"],
        length=length,
        scanned=scanned,
        generator=generator,
    )
    found = np.argwhere(scores.follows_content(seed=seed))
    candidates = [(int(layer), int(head)) for layer, head in found]
    # Orders of their own: those that chose the candidates must not judge them.
    runs = RepeatRuns(model, plan, draw_orders(plan, n, generator))
    cuts = cut_on_repeats(model, runs, candidates, seed=seed) if candidates else None
    copying = copying_score(model, top=(), seed=seed)
    by_weights = copying["score"].values > float(copying["random_high"])
    raised, copies = _raising(model, by_weights, candidates, seed)
    data = arrays_of(plan, scores, copying["score"].values, cuts, seed)
    data["copies"] = (("layer", "head"), copies)
    if np.isfinite(raised).any():
        data["raised"] = (("layer", "head"), raised)
    chance = {name: float(level.mean()) for name, level in levels.items()}
    labels = label_heads(of_pairs, chance, seed=seed)
    follows = scores.fixed.stands_out(seed=seed)
    # Among copies it may look at those; nothing of the kind stands in the scan.
    duplicates = of_pairs["duplicate_token"].mean((0, 1)) - chance["duplicate_token"]
    follows &= (labels != "duplicate-token") | (scores.fixed.mass.mean(0) > duplicates)
    labels = _labels(labels, follows, copies, cuts)
    data["label"] = (("layer", "head"), labels)
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
        "scan": {
            "sequences": SEQUENCES,
            "length": scanned,
            "nearest": NEAREST,
            "farthest": scores.fixed.farthest,
            "start": scores.fixed.start,
        },
        "margin": LABEL_MARGIN,
        "alpha": ALPHA,
        "copying_random": [float(copying[f"random_{end}"]) for end in ("low", "high")],
        "loss": {
            "repeats": float(runs.loss.mean()),
            "control": float(runs.control_loss.mean()),
            "uniform": runs.uniform,
        },
        "joint": joint_of(cuts, labels),
        "notes": [*notes_of(model, plan, scores.fixed, length), *short_notes(chance)],
    }
    result = InductionResult(
        title=f"Induction in {model.name}",
        data=data,
        provenance=Provenance.of(model, seed=seed),
        details=details,
    )
    return replace(result, claims=tuple(claims_of(result)))


def _usual_length(config: DecoderConfig) -> int:
    """Tokens of a sequence when the caller names none."""
    chosen = min(config.n_train or config.n_ctx, config.n_ctx, LONGEST)
    return min(max(chosen, fewest_tokens(config)), config.n_ctx)


def _plan(config: DecoderConfig, distances: Any, length: object) -> tuple[RepeatPlan, int]:
    """Single distances, and the length of the sequences with random gaps."""
    least = fewest_tokens(config)
    if config.n_ctx < least:
        raise ShapeError(
            f"n_ctx={config.n_ctx} is too short: repeats at random gaps take at least {least} "
            "tokens"
        )
    chosen = _usual_length(config)
    if length is not None:
        chosen = check_count("length", length, of="tokens")
    if not least <= chosen <= config.n_ctx:
        raise ShapeError(
            f"length={chosen} is out of range: repeats at random gaps take at least {least} "
            f"tokens, and the model holds n_ctx={config.n_ctx}"
        )
    if distances is not None:
        return plan_repeats(config, distances), chosen
    return plan_repeats(replace(config, n_ctx=chosen, n_train=None)), chosen


def _raising(
    model: Decoder, by_weights: np.ndarray, candidates: Sequence[tuple[int, int]], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """[layer, head]: how much more the token attended to is raised than others, and who copies.

    Measured of candidates whose weights alone do not show it, NaN elsewhere: with an MLP, or with
    embeddings that are tied, the plain circuit describes a token poorly.
    """
    raised, copies = np.full(by_weights.shape, np.nan), by_weights.copy()
    if all(by_weights[at] for at in candidates):
        return raised, copies
    direct = behavioural_copying_score(model, seed=seed)
    for at in candidates:
        if not by_weights[at]:
            chance = float(direct["chance"].values[at])
            raised[at] = float(direct["mean"].values[at]) - chance
            copies[at] = float(direct["low"].values[at]) - chance >= LABEL_MARGIN
    return raised, copies


def _labels(
    census: np.ndarray, follows: np.ndarray, copies: np.ndarray, cuts: RepeatCuts | None
) -> np.ndarray:
    """[layer, head] of strings; see the module.

    Args:
        census: its labels.
        follows, copies: [layer, head], whether the head looks a fixed distance back before all,
            and whether it copies.
    """
    labels = census.astype(object)
    # The census asks for less: it has no random gaps and no content at another distance.
    labels[labels == PATTERN] = "none"
    labels[follows & copies], labels[follows & ~copies] = COPIER, FIXED
    if cuts is not None:
        at = tuple(np.transpose(cuts.heads))
        members, parts = cuts.members & copies[at], cuts.parts & copies[at]
        named = np.where(members, HEAD, PATTERN)
        if not members.any():
            named = np.where(parts, PART, named)
        labels[at] = named
    return labels.astype(np.str_)
