"""The kinds of result beside patching: what their arrays are called, and the sentence they say.

heads          value, low, high   (score, layer, head)   chance (score)   label (layer, head)
               induction_by_distance, control_by_distance (distance, layer, head)
decomposition  attribution (component, example)   mean, low, high (component)   total (example)
audit          no arrays: one claim a statement that was checked or measured, and in
               details["rows"] every check, with those that do not apply
circuits       copying, first, behaviour (and _low, _high, _chance), qk_rank, ov_rank, distance,
               distance_excess (layer, head); in details["cards"] one card a head, in
               details["pairs"] the strongest compositions: through, earlier, later, score
sinks          sink_mass (and _low, _high), sink_rate, value_drain, written_drain (layer, head)
               mass_by_position (layer, head, position)   peak (layer)
               effect (and _low, _high, _p, _control, _causal) (cut, layer, head)
               together (likewise) (cut)   effects, together_effects (..., example)
induction      induction, position_control, content_control (distance, layer, head)
               chance (distance)   label, copying (layer, head)
               gapped (and _low, _high, _control), fixed (and _low, _high), fixed_distance,
               alone (and _low, _high, _p, _control), restored (and _low, _high) (layer, head)
               joint (example), where there are candidates; in details["joint"] its test
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.result import Result
from headstream.models.names import head_name

# "Most tokens" where a head is said to copy, or to look for its own token.
MOST_TOKENS = 0.5
_NAMED = 4


def _some(names: list[str]) -> str:
    """The first few names as a list in a sentence, the others counted."""
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(frozen=True, eq=False, repr=False)
class HeadsResult(Result):
    """The census: every score of every head, beside its chance level."""

    kind: ClassVar[str] = "heads"

    def summary(self) -> str:
        labels = self.data["label"]
        found: dict[str, list[str]] = {}
        for layer in labels["layer"].values.tolist():
            for head in labels["head"].values.tolist():
                label = str(labels.sel(layer=layer, head=head).item())
                if label != "none":
                    found.setdefault(label, []).append(head_name(layer, head))
        if not found:
            return f"no head of {labels.size} has a label"
        return "; ".join(f"{label}: {', '.join(heads)}" for label, heads in found.items())


@dataclass(frozen=True, eq=False, repr=False)
class DecompositionResult(Result):
    """Who writes the answer: direct logit attribution, component by component."""

    kind: ClassVar[str] = "decomposition"

    def summary(self) -> str:
        mean = self.data["mean"]
        size = abs(mean.values)
        # For or against the answer; rounding writes nothing.
        order = [i for i in (-size).argsort(kind="stable")[:3] if size[i] > 1e-3 * size.max()]
        top = ", ".join(f"{mean['component'].values[i]} {mean.values[i]:+.2f}" for i in order)
        if not order:
            top = "none"
        total = float(self.data["total"].mean())
        n = self.data.sizes["example"]
        return f"largest direct writes {top} of {total:+.2f} nats in all (n = {n})"


@dataclass(frozen=True, eq=False, repr=False)
class AuditResult(Result):
    """Identities of the forward pass, checked on this model, and what was measured beside them."""

    kind: ClassVar[str] = "audit"

    @property
    def failed(self) -> bool:
        return any(claim.evidence is Evidence.FAILED for claim in self.claims)

    @property
    def measured(self) -> tuple[Claim, ...]:
        """What stands beside the checks, under the same ids, because algebra stops there."""
        return tuple(claim for claim in self.claims if claim.evidence is Evidence.MEASURED)

    def summary(self) -> str:
        checked = [c for c in self.claims if c.evidence in (Evidence.PROVEN, Evidence.FAILED)]
        passed = sum(claim.evidence is Evidence.PROVEN for claim in checked)
        return f"{passed} of {len(checked)} checks passed"


@dataclass(frozen=True, eq=False, repr=False)
class CircuitsResult(Result):
    """Every head taken apart: what its circuits match and move, and whom it composes with."""

    kind: ClassVar[str] = "circuits"

    @property
    def copiers(self) -> list[str]:
        """Heads that copy: a score over random heads', and most tokens raise themselves most."""
        score, first = (
            self.data[name].transpose("layer", "head").values.ravel()
            for name in ("copying", "first")
        )
        above = (score > self.details["copying_random"][1]) & (first >= MOST_TOKENS)
        cards = self.details["cards"]
        return [str(card["head"]) for card, copies in zip(cards, above, strict=True) if copies]

    @property
    def matching(self) -> dict[str, str]:
        """Heads that look for their own token, and the earlier head in whose writes they do."""
        return {
            str(card["head"]): str(card["through"][0][0])
            for card in self.details["cards"]
            if card["through"] and card["through"][0][1] >= MOST_TOKENS
        }

    def summary(self) -> str:
        copiers, matching = self.copiers, self.matching
        groups: dict[tuple[str, bool], list[str]] = {}
        for head, through in matching.items():
            groups.setdefault((through, head in copiers), []).append(head)
        words = []
        for (through, copies), heads in groups.items():
            many = len(heads) > 1
            words.append(
                f"{_some(heads)} {'look for their' if many else 'looks for its'} own token in "
                f"what {through} wrote about earlier tokens"
            )
            if copies:
                words[-1] += " and copy what they find" if many else " and copies what it finds"
        rest = [head for head in copiers if head not in matching]
        if rest:
            words.append(f"{_some(rest)} {'copy' if len(rest) > 1 else 'copies'}")
        return "; ".join(words or ["no head copies"]) + " (weights alone)"


@dataclass(frozen=True, eq=False, repr=False)
class SinksResult(Result):
    """Attention sinks: how much of a head rests on the first token, and what cutting it moves."""

    kind: ClassVar[str] = "sinks"

    @property
    def resting(self) -> list[tuple[int, int]]:
        """Heads whose mass on the first token stands clear of chance, most first."""
        least = self.details["chance"] + self.details["margin"]
        low, mass = self.data["sink_mass_low"], self.data["sink_mass"]
        # One sequence has no interval; its value must do.
        clear = np.argwhere(np.where(np.isfinite(low), low, mass) >= least).tolist()
        return sorted(
            ((int(layer), int(head)) for layer, head in clear),
            key=lambda at: -float(mass[at]),
        )

    def summary(self) -> str:
        mass, details = self.data["sink_mass"], self.details
        n, resting = details["n"], self.resting
        if not resting:
            # A mass that is no number is no mass: -1 stands below all of them.
            top = np.unravel_index(int(np.nan_to_num(mass.values, nan=-1.0).argmax()), mass.shape)
            name = head_name(int(top[0]), int(top[1]))
            none, which = (
                (f"no head of {mass.size} rests", "the largest mass")
                if mass.size > 1
                else ("the only head does not rest", "its mass")
            )
            words = (
                f"{none} on the first token: {which} is {float(mass[top]):.2f} ({name}), chance "
                f"{details['chance']:.2f}"
            )
        else:
            shown = _some([f"{head_name(*at)} {float(mass[at]):.2f}" for at in resting])
            many = len(resting) > 1
            who = f"{len(resting)} of {mass.size} heads" if mass.size > 1 else "the only head"
            words = (
                f"{who} {'rest' if many else 'rests'} on the first token (share of "
                f"{'their' if many else 'its'} attention, chance {details['chance']:.2f}): {shown}"
            )
        cut = self._moved(bool(resting))
        at = f"at eps = {details['eps']:g}, T = {details['T']}"
        rate = (
            f"no sink rate {at}"
            if details["rate"] is None
            else f"sink rate {details['rate']:.1f}% {at}"
        )
        return f"{words}; {rate}; {cut} (n = {n})"

    def _moved(self, resting: bool) -> str:
        """Heads whose cut moves the loss, and which way: the larger of what its cuts do."""
        effect, causal = (
            self.data[name].transpose("layer", "head", "cut").values
            for name in ("effect", "effect_causal")
        )
        shown = np.where(causal, effect, 0.0)
        largest = np.take_along_axis(shown, np.abs(shown).argmax(-1)[..., None], -1)[..., 0]
        order = sorted(
            np.argwhere(causal.any(-1)).tolist(), key=lambda at: -abs(largest[tuple(at)])
        )
        if not order:
            return "no cut of a head moves the loss"
        words: list[str] = []
        for verb, sign in (("raises", 1), ("lowers", -1)):
            heads = [
                f"{head_name(*at)} {largest[tuple(at)]:+.2f}"
                for at in order
                if sign * largest[tuple(at)] > 0
            ]
            if heads:
                words.append(f"{verb} the loss: {_some(heads)} nats")
        what = "cutting it" if resting else "cutting the little that is there"
        return f"{what} {' and '.join(words)}"


@dataclass(frozen=True, eq=False, repr=False)
class InductionResult(Result):
    """Heads that continue repeats by content, those that only seem to, and what cuts say."""

    kind: ClassVar[str] = "induction"

    def found(self, label: str) -> list[str]:
        """Heads with this label, as "L1H4"."""
        places = np.argwhere(self.data["label"].transpose("layer", "head").values == label)
        return [head_name(int(layer), int(head)) for layer, head in places]

    def summary(self) -> str:
        joint, n = self.details["joint"], self.details["n"]
        shown, seen = self.found("induction head"), self.found("induction pattern")
        parts = self.found("induction head of a set")
        needed = joint is not None and not joint["failed"]
        words = []
        if shown:
            many = len(shown) > 1
            words.append(
                f"{_some(shown)} {'are induction heads' if many else 'is an induction head'}"
            )
        elif parts:
            words.append(
                f"{_some(parts)} are induction heads as a set of {len(joint['heads'])} that stand "
                "in for one another, none of which alone gives back a fifth"
            )
        elif needed:
            words.append(
                f"no head alone is an induction head, but continuing a repeat needs "
                f"{_some(joint['heads'])}"
            )
        else:
            words.append("no induction head")
        if joint is not None:
            cut = "together" if len(joint["heads"]) > 1 else "alone"
            others = [name for name in joint["heads"] if name not in (shown or parts)]
            if others and (shown or parts):
                cut += f" with {_some(others)}"
            words[-1] += (
                f": cut {cut} {joint['mean']:+.2f} nats on what repeats predict "
                f"[{joint['low']:.2f}, {joint['high']:.2f}]"
            )
            if not needed:
                words[-1] += f", but {joint['failed'][0]}"
        if seen:
            words.append(f"{_some(seen)} only by the pattern")
        for label, verbs, what in (
            ("fixed-distance copier", ("copy", "copies"), "from a fixed distance"),
            ("fixed-distance", ("look", "looks"), "a fixed distance back"),
        ):
            heads = self.found(label)
            if heads:
                words.append(f"{_some(heads)} {verbs[len(heads) == 1]} {what}")
        return f"{'; '.join(words)} (n = {n})"
