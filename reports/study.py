"""The results of one page: each with its place, its anchor and the name it goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.result import Result

SITES = {
    "z": "attention heads",
    "q": "queries of heads",
    "k": "keys of heads",
    "v": "values of heads",
    "pattern": "attention patterns of heads",
    "resid_pre": "stream before each layer",
    "resid_mid": "stream between attention and MLP",
    "resid_post": "stream after each layer",
    "attn_out": "what each attention layer writes",
    "mlp_out": "what each MLP writes",
    "mlp_post": "neurons of the MLPs",
    "sets": "named sets of sites",
}
# Kinds that cut heads, and all that change something inside the model, in the order of a page.
CUTS = ("redundant_set", "faithfulness", "ablation")
PAIRED = ("patching", "paths")
_NAMES = {
    "heads": "head census",
    "decomposition": "residual decomposition",
    "sinks": "attention sinks",
    "induction": "induction",
    "circuits": "circuits of the heads",
    "redundant_set": "heads cut together",
    "faithfulness": "a circuit beside random sets",
    "ablation": "heads cut",
}
_DIRECTIONS = {"denoise": "denoising", "noise": "noising"}
_VALUES = {
    "zero": "with zeros",
    "mean": "with the mean over prompts",
    "resample": "with values of another pair",
}
_POSITIONS = {
    "all": "all positions at once",
    "each": "each position by itself",
    "roles": "by role of the position",
}


@dataclass(frozen=True)
class Item:
    """One result on the page: `anchor` is the id of the part that shows it."""

    result: Result
    anchor: str

    @property
    def kind(self) -> str:
        return self.result.kind

    @property
    def details(self) -> dict[str, Any]:
        return dict(self.result.details)

    @property
    def name(self) -> str:
        """What it is called where several stand together."""
        if self.kind == "paths":
            return f"paths, {self.manner}"
        if self.kind != "patching":
            return _NAMES.get(self.kind, self.kind)
        return f"{SITES.get(self.site, self.site)}, {self.manner}"

    @property
    def manner(self) -> str:
        """How its places were patched: direction, positions, and foreign values if any."""
        positions, values = str(self.details["positions"]), str(self.details.get("values", "pair"))
        parts = [self.direction, _POSITIONS.get(positions, positions)]
        if values != "pair":
            parts.append(_VALUES.get(values, values))
        return ", ".join(parts)

    @property
    def site(self) -> str:
        return str(self.details["site"])

    @property
    def direction(self) -> str:
        """The direction as a noun: "denoising" or "noising"."""
        direction = str(self.details["direction"])
        return _DIRECTIONS.get(direction, direction)

    @property
    def restores(self) -> bool:
        """Whether clean values were put into the corrupted run."""
        return bool(self.details["direction"] == "denoise")

    @property
    def n(self) -> int | None:
        """Examples behind it, where the result has examples."""
        size = self.result.data.sizes.get("example")
        return int(size) if size is not None else None

    @property
    def unit(self) -> str:
        return str(self.details["metric"]["unit"])


@dataclass(frozen=True)
class Study:
    """All results of a page, in the order given, and the title they stand under."""

    title: str
    items: tuple[Item, ...]

    @classmethod
    def of(cls, title: str, results: Sequence[Result]) -> Study:
        """Give each result its anchor: its kind and its place; audits share one table."""
        return cls(
            title,
            tuple(
                Item(result, "audit" if result.kind == "audit" else f"{result.kind}-{place}")
                for place, result in enumerate(results, 1)
            ),
        )

    def of_kind(self, kind: str) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.kind == kind)

    def of_kinds(self, *kinds: str) -> tuple[Item, ...]:
        """Items of several kinds, in the order given to the page."""
        return tuple(item for item in self.items if item.kind in kinds)

    @property
    def cutting(self) -> tuple[Item, ...]:
        """Items in which heads were cut: an induction study cuts only what it took for one."""
        found = (*CUTS, "induction")
        return tuple(
            item
            for item in self.of_kinds(*found)
            if item.kind != "induction" or item.details["joint"] is not None
        )

    def claims(self) -> list[tuple[Claim, Item]]:
        """Every claim with the result that makes it."""
        return [(claim, item) for item in self.items for claim in item.result.claims]

    def tally(self) -> dict[Evidence, int]:
        """How many claims carry each label; labels that none carries are left out."""
        counts = dict.fromkeys(Evidence, 0)
        for claim, _ in self.claims():
            counts[claim.evidence] += 1
        return {evidence: many for evidence, many in counts.items() if many}
