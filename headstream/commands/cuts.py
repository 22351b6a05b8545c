"""What `headstream patch` does with heads that are cut: alone, together, or all but a circuit."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Any

from headstream.commands.shared import number, signed
from headstream.commands.sweeps import cost_table, duration
from headstream.console import answer
from headstream.console import table as columns

if TYPE_CHECKING:
    from headstream.analyses.patching.cuts.results import (
        AblationResult,
        FaithfulnessResult,
        RedundancyResult,
    )
    from headstream.analyses.patching.task import Task
    from headstream.analyses.result import Result
    from headstream.cli import Options
    from headstream.models.decoder import Decoder

# Sets of other heads that a circuit is held against, as in the library.
_RANDOM = 100
# What is told of a circuit, and its name in the table.
_PARTS = {"faithfulness": "kept by the circuit", "left": "left without it"}
# What `--cut` takes for every head by itself.
EVERY = "heads"


@dataclass(frozen=True)
class Cuts:
    """One question about heads that are cut.

    Attributes:
        cut: sets of heads, each cut together and its heads alone.
        redundant: a set whose heads may stand in for one another.
        circuit: a set that should do the model's work by itself.
        values, how: as of `ablate`; None where the library decides.
    """

    cut: tuple[list[str], ...]
    redundant: list[str] | None
    circuit: list[str] | None
    values: str | None
    how: str | None

    def run(self, options: Options, model: Decoder, task: Task) -> Result:
        from headstream.analyses.patching.cuts.ablate import ablate
        from headstream.analyses.patching.cuts.faithfulness import faithfulness
        from headstream.analyses.patching.cuts.sets import redundant_set

        given: dict[str, Any] = {"values": self.values, "how": self.how}
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"seed": options.seed, "progress": options.progress}
        if self.circuit is not None:
            return faithfulness(model, task, self.circuit, n_random=_RANDOM, **given)
        if self.redundant is not None:
            return redundant_set(model, task, self.redundant, **given)
        return ablate(model, task, heads=self._heads(), sets=self._sets() or None, **given)

    def table(self, result: Any) -> list[str]:
        """What was found, cut by cut."""
        rows_of: dict[str, Any] = {
            "ablation": _ablation,
            "redundant_set": _redundant,
            "faithfulness": _faithfulness,
        }
        return [columns(*rows_of[result.kind](result))]

    def why_not(self, result: Any) -> dict[str, str]:
        """What cuts lack to be CAUSAL: those that are named, or of all heads the largest.

        Of all heads nothing if one is CAUSAL.
        """
        failed: dict[str, list[str]] = result.details["failed"]
        if self.cut and self._heads() is None:
            data = result.data
            largest = str(data["cut"].values[abs(data["mean"].fillna(0).values).argmax()])
            failed = {} if data["causal"].any() else {largest: failed[largest]}
        return {_PARTS.get(name, name): "; ".join(words) for name, words in failed.items()}

    def _heads(self) -> list[str] | None:
        """Every head that is named, once; None for all."""
        named = dict.fromkeys(name for heads in self.cut for name in heads)
        return None if EVERY in named else list(named)

    def _sets(self) -> dict[str, list[str]]:
        return {"+".join(heads): heads for heads in self.cut if len(heads) > 1}

    def cost(self, options: Options, model: Decoder, task: Task) -> None:
        """Print what it would cost."""
        from headstream.analyses.patching.cuts.head_sets import all_heads, heads_of, sets_of
        from headstream.analyses.patching.sweeps.cost import forward_seconds

        config = model.config
        every = len(all_heads(config))
        if self.circuit is not None:
            size = len(heads_of(config, "circuit", self.circuit))
            cuts = 3 + 2 * min(_RANDOM, comb(every, size) - 1)
            runs = cuts
        elif self.redundant is not None:
            cuts = 1 + 2 * len(heads_of(config, "heads", self.redundant))
            runs = cuts + 1  # the control cuts the set once
        else:
            heads, sets = self._heads(), self._sets()
            cuts = every if heads is None else len(heads_of(config, "heads", heads))
            cuts += len(sets_of(config, sets)) if sets else 0
            runs = 2 * cuts  # each once more as its control
        forwards = runs + 3  # both prompts uncut, and a cut with the values that are there
        each = forward_seconds(model, task, None)
        value = {
            "cuts": cuts,
            "forwards": forwards,
            "forward_seconds": each,
            "seconds": each * forwards,
        }
        lines = cost_table(
            [
                ("cuts", f"{cuts:,}, {len(task)} pairs of prompts"),
                ("forwards", f"at most {forwards:,} passes of all pairs, with the controls"),
                ("time", f"about {duration(each * forwards)}"),
            ]
        )
        answer(value, "\n".join(lines), as_json=options.as_json)


def _ablation(result: AblationResult) -> tuple[list[str], list[list[str]]]:
    data = result.data
    order = (-result.details["worse"] * data["mean"].values).argsort(kind="stable").tolist()
    rows = []
    for i in order:
        at = data.isel(cut=i)
        row = [str(at["cut"].item())]
        row += [signed(at[name]) for name in ("mean", "low", "high")]
        row += [number(at["lost"])] if "lost" in data else []
        row += [_p(at["p_value"]), signed(at["control"])]
        rows.append([*row, "CAUSAL" if at["causal"] else ""])
    lost = ["of gap"] if "lost" in data else []
    unit = result.details["metric"]["unit"]
    return ["cut", unit, "low", "high", *lost, "p", "control", ""], rows


def _redundant(result: RedundancyResult) -> tuple[list[str], list[list[str]]]:
    joint = result.details["joint"]
    whole = [signed(joint["mean"]), _p(joint["p_value"]), "-", "-", "-"]
    rows = [["all of them", *whole, "CAUSAL" if joint["causal"] else ""]]
    for i, name in enumerate(result.details["set"]):
        at = result.data.isel(head=i)
        row = [signed(at["alone_mean"]), _p(at["alone_p"])]
        row += [number(at[key]) for key in ("recovered", "recovered_low", "recovered_high")]
        rows.append([name, *row, "CAUSAL" if at["member"] else ""])
    return ["cut", result.details["metric"]["unit"], "p", "restored", "low", "high", ""], rows


def _faithfulness(result: FaithfulnessResult) -> tuple[list[str], list[list[str]]]:
    details, rows = result.details, []
    labels = {claim.id: str(claim.evidence) for claim in result.claims}
    for (part, words), claim in zip(_PARTS.items(), ("circuit.faithful", "circuit.complete")):
        found = details[part]
        row = [_or_dash(found[key]) for key in ("value", "low", "high", "random_mean")]
        rows.append([words, *row, "CAUSAL" if labels[claim] == "CAUSAL" else ""])
    return ["share of what heads do", "value", "low", "high", "random sets", ""], rows


def _p(value: Any) -> str:
    p = float(value)
    return f"{p:.4f}" if p == p else "-"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)
