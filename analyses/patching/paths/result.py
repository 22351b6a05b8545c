"""What a sweep over paths found: who passes what to whom, and how much of it matters.

Arrays as of `PatchingResult`, over `sender`, `receiver` (and `role` or `pos`); NaN where the sender
does not come before the receiver. Beside them, by sender (and role or pos):

    total_effects         (sender dims, example)   effect of the sender's other write on everything
    total total_low total_high     (sender dims)   its mean over prompts and 95% interval
    channel                           (receiver)   q, k, v, mlp input, logits

Read, printed and rendered without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import xarray as xr

from headstream.analyses.evidence import Claim, proven
from headstream.analyses.patching.conclusions import claim_of, named_cells, share_of
from headstream.analyses.patching.result import Cell, PatchingResult, ranked_cells
from headstream.analyses.patching.words import none_moves, told, verb

_NOUN = ("path", "paths")
# Paths that the summary names before it says how many more there are.
_NAMED = 6


@dataclass(frozen=True, eq=False, repr=False)
class PathResult(PatchingResult):
    """Effects of patching single paths, from a sender to a receiver.

    `details` holds freeze_mlps and what a `PatchingResult` holds.
    """

    kind: ClassVar[str] = "paths"

    @property
    def direct(self) -> xr.DataArray:
        """Mean effect of each sender straight on the logits.

        Raises:
            KeyError: if the logits are not among the receivers.
        """
        return self.data["mean"].sel(receiver="logits", drop=True)

    @property
    def total(self) -> xr.DataArray:
        """Mean effect of each sender through everything that follows it."""
        return self.data["total"]

    def summary(self) -> str:
        cells = ranked_paths(self.data)
        causal = [cell for cell in cells if cell.causal]
        refused = self.details["normalized_refused"] is not None
        unit, n = self.details["metric"]["unit"], self.data.sizes["example"]
        if not causal:
            none = f"No path of {len(cells)} is shown to {verb(self.details, 1.0, many=None)}"
            largest = max(cells, key=lambda cell: abs(cell.mean))
            what = f"largest {largest.worded(refused, unit)}"
            what = what if largest.mean else none_moves(self.details, self.data)
            return f"{none}; {what}{self._untold(cells)} (n = {n})"
        found = [(cell.normalized, cell.worded(refused, unit)) for cell in causal]
        text = told(self.details, found, _NOUN, most=_NAMED, of=f" of {len(cells)}")
        return f"{text}{self._untold(cells)} (n = {n})"

    def _untold(self, cells: list[Cell]) -> str:
        """The notable paths that only the unrelated-prompt control excludes."""
        excluded = self._excluded(cells)
        if not excluded:
            return ""
        refused = self.details["normalized_refused"] is not None
        shown = [cell.briefly(refused, self.details["metric"]["unit"]) for cell in excluded]
        if len(shown) > _NAMED:
            shown = [*shown[:_NAMED], f"{len(shown) - _NAMED} more"]
        return f"; not told from an unrelated prompt's writes: {', '.join(shown)}"


def path_label(where: Mapping[str, Any]) -> str:
    """`L0H1->L1H2.k`, or `L0H1@source->L1H2.k` for the sender's write at one place.

    Example:
        >>> path_label({"sender": "L0H1", "receiver": "logits", "role": "query"})
        'L0H1@query->logits'
    """
    place = where.get("role", where.get("pos"))
    at = "" if place is None else f"@{place}"
    return f"{where['sender']}{at}->{where['receiver']}"


def ranked_paths(data: xr.Dataset) -> list[Cell]:
    """Every path that was patched in some prompt, signed, most towards the other run first."""
    return ranked_cells(data, path_label)


def path_claims(data: xr.Dataset, details: Mapping[str, Any]) -> tuple[Claim, ...]:
    """The self-patch control, one claim a CAUSAL path, and the largest few that are not.

    A path without the label is named only if its effect is at least 5% of the gap.
    """
    held = proven(
        "self_patch.path",
        "sending a run its own writes changes nothing",
        error=details["self_patch_max"],
        bound=details["self_patch_bound"],
        reason=f"largest |effect| in {details['metric']['unit']} over all receivers",
    )
    cells = named_cells(ranked_paths(data), data, details)
    between = f"MLPs between {'held' if details['freeze_mlps'] else 'recomputed'}"
    return (
        held,
        *(
            claim_of(
                cell,
                details,
                id=f"path.{cell.label}",
                statement=f"the path {cell.label} "
                f"{verb(details, share_of(cell, details), many=False)}",
                family="paths",
                foreign="write",
                beside=between,
            )
            for cell in cells
        ),
    )
