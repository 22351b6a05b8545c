"""What heads are worth to a model that continues repeats: the loss when they are cut.

    joint      all of the set cut
    alone      each cut while the others work
    restored   all but one cut: what that one gives back by itself
    control    the joint cut where the second block is other tokens: there is nothing to continue
    random     as many other heads (or all there are), drawn at random

The unit is the random order that makes the sequences of every distance; an effect is the change of
the mean loss over the tokens that the repeat predicts. Labels follow the one rule of inference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.analyses.patching.cuts.head_sets import Head, all_heads
from headstream.analyses.patching.cuts.inputs import SELF_CUT
from headstream.analyses.patching.cuts.runs import CutRuns, Prompts
from headstream.analyses.patching.cuts.sets import LEAST_RECOVERED
from headstream.analyses.patching.inference import (
    failed_conditions,
    mean_interval,
    ratio_interval,
    sign_flips,
)
from headstream.analyses.patching.suffix.state import unembedded
from headstream.circuits.repeats import RepeatPlan, make_pair
from headstream.models.decoder import Decoder
from headstream.models.loss import check_finite_loss

_RANDOM_SETS = 8

Array = np.ndarray


@dataclass(frozen=True)
class RepeatCuts:
    """Effects in nats; head axes follow `heads`.

    Attributes:
        heads: the set.
        loss, control_loss: uncut, on repeats and where the second block is other tokens, mean.
        joint: [example]; and its `joint_low`, `joint_high`, `joint_p`, `joint_control` (mean).
        joint_failed: conditions of CAUSAL that the joint cut fails, in words; first of them that
            the model does not continue repeats in the first place.
        alone, alone_low, alone_high, alone_p, alone_control: [head].
        restored, restored_low, restored_high: [head], share of the joint effect that the head,
            restored alone, takes back.
        members: [head], CAUSAL: the set is, and restored alone the head takes back a fifth or
            more, or cut alone it is CAUSAL too and takes a fifth of what the set takes.
        parts: [head]: the set is CAUSAL, and restored alone the head takes back a fifth or more
            of an equal part: what one of many heads that stand in for one another can show.
        random: [set], mean effect of as many other heads (or all, if there are fewer), at random;
            empty without others. `random_sets` are those heads.
        self_cut, self_bound: largest effect of cutting heads to their own values, and its bound.
    """

    heads: tuple[Head, ...]
    loss: float
    control_loss: float
    joint: Array
    joint_low: float
    joint_high: float
    joint_p: float
    joint_control: float
    joint_failed: tuple[str, ...]
    alone: Array
    alone_low: Array
    alone_high: Array
    alone_p: Array
    alone_control: Array
    restored: Array
    restored_low: Array
    restored_high: Array
    members: Array
    parts: Array
    random: Array
    random_sets: tuple[tuple[Head, ...], ...]
    self_cut: float
    self_bound: float


class RepeatLoss:
    """The mean loss of a row over the targets that are counted."""

    logits_per_token = True

    def __init__(self, prompts: Prompts, counted: Bool[Tensor, "example target"]) -> None:
        self._prompts, self._counted = prompts, counted

    def read(self, model: Decoder, resid: Tensor, rows: slice) -> Tensor:
        targets = self._prompts.rows[rows, 1:].to(resid.device)
        logits = unembedded(model, resid[:, :-1].flatten(0, 1))
        logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        loss = -logp.gather(1, targets.reshape(-1, 1)).view_as(targets).to("cpu", torch.float64)
        counted = self._counted[rows]
        return (loss * counted).sum(1) / counted.sum(1)

    def finish(self, parts: Sequence[Tensor]) -> Float[np.ndarray, " example"]:
        found: np.ndarray = torch.cat(list(parts)).numpy()
        return found


class RepeatRuns:
    """Repeats at every distance of a plan and their controls, run with any heads cut.

    Attributes:
        loss, control_loss: [example], uncut, mean over distances.
        uniform: loss of a uniform guess over the tokens that are drawn.
    """

    def __init__(self, model: Decoder, plan: RepeatPlan, orders: Tensor) -> None:
        pairs = [make_pair(plan, orders, distance) for distance in plan.distances]
        start = int(plan.bos is not None)
        # The first token of the second block is not predicted by what came before.
        spans = [(start + d + 1, start + d + plan.length) for d in plan.distances]
        self._model, self._distances = model, len(plan.distances)
        self.uniform = math.log(len(plan.content))
        self._repeats = self._runs([pair.repeated for pair in pairs], spans)
        self._control = self._runs([pair.control for pair in pairs], spans)
        self.loss = self._by_example(self._repeats.base)
        self.control_loss = self._by_example(self._control.base)

    def effect(self, heads: Sequence[Head]) -> Float[np.ndarray, " example"]:
        """Loss on repeats with the heads cut, minus the uncut one."""
        return self._by_example(self._repeats.effect(heads))

    def control(self, heads: Sequence[Head]) -> float:
        """The mean effect at the same positions where nothing repeats."""
        return float(self._by_example(self._control.effect(heads)).mean())

    def self_cut(self) -> float:
        """Largest effect when every head receives the values that it has."""
        return self._repeats.self_cut(all_heads(self._model.config))

    def _runs(self, texts: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> CutRuns:
        longest = max(text.shape[1] for text in texts)
        rows = [torch.nn.functional.pad(text, (0, longest - text.shape[1])) for text in texts]
        lengths = [torch.full((len(text),), text.shape[1]) for text in texts]
        at = torch.arange(1, longest)
        counted = [
            ((at >= first) & (at < end)).expand(len(text), -1)
            for text, (first, end) in zip(texts, spans, strict=True)
        ]
        prompts = Prompts(torch.cat(rows), torch.cat(lengths))
        return CutRuns(self._model, prompts, RepeatLoss(prompts, torch.cat(counted)), values="zero")

    def _by_example(self, values: Array) -> Array:
        check_finite_loss(values, self._model.dtype)
        mean: Array = values.reshape(self._distances, -1).mean(0)
        return mean


def cut_on_repeats(
    model: Decoder, runs: RepeatRuns, heads: Sequence[Head], *, seed: int
) -> RepeatCuts:
    """Cut a set of heads together, one by one, and all but one, and judge each by the one rule.

    The family of the sign-flip test is the joint cut and the single ones; the control that an
    effect must exceed in its own direction is the same cut where nothing repeats.

    Args:
        runs: on sequences that did not choose the set.
        heads: the set, at least one.
    """
    chosen = tuple(heads)
    joint = runs.effect(chosen)
    alone = np.stack([runs.effect([head]) for head in chosen])
    kept = np.stack([runs.effect([other for other in chosen if other != h]) for h in chosen])
    controls = [runs.control(chosen), *(runs.control([head]) for head in chosen)]
    largest = max(1.0, float(np.abs(runs.loss).max()))
    self_cut, bound = runs.self_cut(), SELF_CUT * largest
    floor = max(self_cut, 4 * torch.finfo(model.dtype).eps * largest)
    effects = np.concatenate([joint[None], alone])
    p_values = sign_flips(effects, seed=seed, floor=floor).p_value
    low, high = mean_interval(effects, seed=seed)
    means = effects.mean(1)
    failed = [
        _failed(float(means[i]), float(p_values[i]), controls[i], len(joint), self_cut <= bound)
        for i in range(len(effects))
    ]
    failed[0] = [*_not_continued(runs, seed), *failed[0]]
    share, share_low, share_high = _shares(joint, kept, seed)
    by_itself = np.array([not words for words in failed[1:]])
    with np.errstate(divide="ignore", invalid="ignore"):
        members = (share >= LEAST_RECOVERED) | (
            by_itself & (means[1:] / means[0] >= LEAST_RECOVERED)
        )
        parts = (share >= LEAST_RECOVERED / len(chosen)) & ~(share_low <= 0)
    sets, random = _random(model, runs, chosen, seed)
    return RepeatCuts(
        heads=chosen,
        loss=float(runs.loss.mean()),
        control_loss=float(runs.control_loss.mean()),
        joint=joint,
        joint_low=float(low[0]),
        joint_high=float(high[0]),
        joint_p=float(p_values[0]),
        joint_control=controls[0],
        joint_failed=tuple(failed[0]),
        alone=means[1:],
        alone_low=low[1:],
        alone_high=high[1:],
        alone_p=p_values[1:],
        alone_control=np.array(controls[1:]),
        restored=share,
        restored_low=share_low,
        restored_high=share_high,
        members=members & (not failed[0]),
        parts=parts & (not failed[0]),
        random=random,
        random_sets=sets,
        self_cut=self_cut,
        self_bound=bound,
    )


def _failed(mean: float, p: float, control: float, n: int, held: bool) -> list[str]:
    """The conditions of CAUSAL that a cut fails, in words; a cut must do harm."""
    words = failed_conditions(
        mean=mean,
        p_value=p,
        unrelated=control,
        n=n,
        unit="nats",
        self_patch_held=held,
        examples="sequences",
        control="the same cut does as much where nothing repeats",
    )
    return words if words or mean > 0 else ["the model continues repeats better without it"]


def _not_continued(runs: RepeatRuns, seed: int) -> list[str]:
    """Why what the heads do is no part of continuing repeats: the uncut model does not do it.

    Its loss on what repeats predict must be clearly below that where nothing repeats, and below
    that of a uniform guess: a model may lose less there without knowing which token comes.
    """
    gains = np.stack([runs.uniform - runs.loss, runs.control_loss - runs.loss])
    low, _ = mean_interval(gains, seed=seed)
    if (low > 0).all():
        return []
    return [
        f"the model does not continue repeats: its loss on what they predict is "
        f"{runs.loss.mean():.2f} nats, that of a uniform guess {runs.uniform:.2f}, its own where "
        f"nothing repeats {runs.control_loss.mean():.2f}"
    ]


def _shares(joint: Array, kept: Array, seed: int) -> tuple[Array, Array, Array]:
    """Share of the joint effect that each head, restored alone, takes back; with its interval."""
    if joint.mean() == 0:
        nothing = np.full(len(kept), np.nan)
        return nothing, nothing, nothing
    back = joint - kept
    low, high = ratio_interval(back, joint, seed=seed)
    return back.mean(1) / joint.mean(), low, high


def _random(
    model: Decoder, runs: RepeatRuns, chosen: Sequence[Head], seed: int
) -> tuple[tuple[tuple[Head, ...], ...], Array]:
    """Random sets of other heads, each as large as the set or all there are; their mean effects."""
    others = [head for head in all_heads(model.config) if head not in chosen]
    if not others:
        return (), np.zeros(0)
    rng = np.random.default_rng([seed, 4])
    size = min(len(chosen), len(others))
    drawn = {
        tuple(sorted(rng.choice(len(others), size, replace=False).tolist()))
        for _ in range(_RANDOM_SETS)
    }
    sets = tuple(tuple(others[i] for i in each) for each in sorted(drawn))
    return sets, np.array([float(runs.effect(each).mean()) for each in sets])
