"""What cutting heads did: single heads and sets, a redundant set, a circuit against the rest.

ablation        effects (cut, example)   base (example)   mean, low, high, control (cut)
                p_value, q_value, causal, size (cut)   lost, lost_low, lost_high (cut)
redundant_set   joint, base (example)   alone, restored (head, example): cutting the head alone,
                and all of the set but it   alone_mean, alone_p, recovered (and _low, _high),
                member (head)
faithfulness    full, empty, circuit, without (example): the whole model, every head cut, all but
                the circuit cut, the circuit cut   random_faithfulness, random_left (random)

`effects` are score(cut) - score(uncut). Read, printed and rendered without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from headstream.analyses.patching.words import count
from headstream.analyses.result import Result

if TYPE_CHECKING:
    import pandas as pd

# Cuts that a summary names before it says how many more there are.
_NAMED = 6


@dataclass(frozen=True, eq=False, repr=False)
class AblationResult(Result):
    """What each cut, of a head or of a set, does to the score of every prompt.

    `details`: values, how, metric, worse (the sign of a harmful effect), cuts (name -> heads),
    control, family, self_cut_max and its bound, failed (by cut, the conditions of CAUSAL that it
    fails), n.
    """

    kind: ClassVar[str] = "ablation"

    @property
    def effects(self) -> xr.DataArray:
        """score(cut) - score(uncut), (cut, example), metric units."""
        return self.data["effects"]

    @property
    def mean(self) -> xr.DataArray:
        """Mean effect over prompts, metric units."""
        return self.data["mean"]

    def summary(self) -> str:
        data, details = self.data, self.details
        unit, n = details["metric"]["unit"], data.sizes["example"]
        harm = details["worse"] * data["mean"].values
        order = np.argsort(-harm, kind="stable").tolist()
        causal = [i for i in order if data["causal"].values[i] and harm[i] > 0]

        def worded(i: int) -> str:
            return f"{data['cut'].values[i]} ({data['mean'].values[i]:+z.2f} {unit})"

        how = details["values"] + (
            ", every head attending as before" if details["how"] == "pattern_preserving" else ""
        )
        if not causal:
            return (
                f"No cut of {len(order)} is shown to be needed for {details['metric']['noun']}; "
                f"most harm {worded(order[0])} ({how}, n = {n})"
            )
        shown = [worded(i) for i in causal[:_NAMED]]
        if len(causal) > _NAMED:
            shown.append(f"{len(causal) - _NAMED} more")
        many = count(len(causal), ("cut", "cuts"))
        moves = "does harm to" if len(causal) == 1 else "do harm to"
        return (
            f"{many} of {len(order)} {moves} {details['metric']['noun']}: {', '.join(shown)} "
            f"({how}, n = {n})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row a cut; the per-example effects are `effects.to_dataframe()`."""
        return _without_examples(self.data)


@dataclass(frozen=True, eq=False, repr=False)
class RedundancyResult(Result):
    """A set of heads, cut together, one by one, and all but one.

    `details`: set (names), values, how, metric, worse, joint (mean, low, high, p_value, control,
    causal), least (the share that a member must recover), family, control, failed (the conditions
    of CAUSAL that the set fails), n.
    """

    kind: ClassVar[str] = "redundant_set"

    @property
    def members(self) -> list[str]:
        """The heads that carry the label: restored alone, each recovers at least a fifth."""
        member = self.data["member"]
        return [str(name) for name in member["head"].values[member.values]]

    @property
    def recovered(self) -> xr.DataArray:
        """Share of what the whole cut took that restoring each head alone gives back."""
        return self.data["recovered"]

    def summary(self) -> str:
        joint, data = self.details["joint"], self.data
        unit, noun, n = *map(self.details["metric"].get, ("unit", "noun")), data.sizes["example"]
        alone = self.details["worse"] * data["alone_mean"].values
        most = int(np.argmax(alone))
        took = f"cutting all {len(alone)} heads moves it by {joint['mean']:+z.2f} {unit}"
        single = (
            f"the most harmful cut of one, {data['head'].values[most]}, by "
            f"{data['alone_mean'].values[most]:+z.2f}"
        )
        if not joint["causal"]:
            return f"the set is not shown to be needed for {noun}: {took}, {single} (n = {n})"
        found = (
            f"restored alone, {', '.join(self.members)} "
            f"{'recovers' if len(self.members) == 1 else 'each recover'} at least a fifth"
            if self.members
            else "no head restored alone recovers a fifth"
        )
        return f"the set is needed for {noun}: {took}, {single}; {found} (n = {n})"

    def to_frame(self) -> pd.DataFrame:
        """One row a head."""
        return _without_examples(self.data)


@dataclass(frozen=True, eq=False, repr=False)
class FaithfulnessResult(Result):
    """How much of the model a circuit of heads is, beside random sets of the same size.

    `details`: circuit (names), choices (the six that the number depends on), faithfulness
    and left (value, low, high, random_mean, percentile, at_least), refused, n_random, all_sets,
    metric, failed (by part, the conditions of CAUSAL that it fails), n.
    """

    kind: ClassVar[str] = "faithfulness"

    @property
    def faithfulness(self) -> float:
        """(m(C) - m(empty)) / (m(full) - m(empty)), NaN where refused; not clipped."""
        value = self.details["faithfulness"]["value"]
        return float("nan") if value is None else float(value)

    @property
    def left(self) -> float:
        """The same of the model without the circuit: 0 if the circuit is complete."""
        value = self.details["left"]["value"]
        return float("nan") if value is None else float(value)

    def summary(self) -> str:
        details, n = self.details, self.data.sizes["example"]
        size = len(details["circuit"])
        heads = f"the circuit of {size} head{'s' if size > 1 else ''}"
        if details["refused"] is not None:
            return f"{heads}: no number, {details['refused']} (n = {n})"
        kept, left = details["faithfulness"], details["left"]

        def worded(part: dict[str, float]) -> str:
            return f"{part['value']:z.2f} [{part['low']:z.2f}, {part['high']:z.2f}]"

        return (
            f"{heads} keeps {worded(kept)} of {details['metric']['noun']}, more than "
            f"{100 * kept['percentile']:.0f}% of {details['n_random']} other sets of its size "
            f"(mean {kept['random_mean']:z.2f}); without it {worded(left)} is left, less than "
            f"without {100 * left['percentile']:.0f}% of them ({details['values']}, n = {n})"
        )


def _without_examples(data: xr.Dataset) -> pd.DataFrame:
    arrays = [name for name, array in data.items() if "example" not in array.dims]
    return data[arrays].to_dataframe().reset_index().drop(columns="example", errors="ignore")
