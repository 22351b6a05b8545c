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

import numpy as np
import xarray as xr

from headstream.analyses.evidence import Claim, Evidence, proven
from headstream.analyses.patching.inference import MIN_PAIRS, failed_conditions
from headstream.analyses.patching.result import Cell, PatchingResult, least_notable
from headstream.analyses.patching.words import count, verb

_NOUN = ("path", "paths")
# Paths that the summary names before it says how many more there are.
_NAMED = 6
# Paths without the label that are still named, the largest effects first.
_NOTABLE = 3


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
            what = what if largest.mean else "every effect is zero"
            return f"{none}; {what}{self._untold(cells)} (n = {n})"
        groups: dict[float | None, list[Cell]]
        if refused:
            groups = {None: causal}
        else:
            groups = {
                group[0].normalized: group
                for group in (
                    [cell for cell in causal if cell.normalized > 0],
                    [cell for cell in reversed(causal) if not cell.normalized > 0],
                )
                if group
            }
        parts = []
        for share, group in groups.items():
            shown = [cell.worded(refused, unit) for cell in group[:_NAMED]]
            if len(group) > _NAMED:
                shown.append(f"{len(group) - _NAMED} more")
            moves = verb(self.details, share, many=len(group) > 1)
            parts.append(f"{count(len(group), _NOUN)} of {len(cells)} {moves}: {', '.join(shown)}")
        text = "; ".join([parts[0], *(part[0].lower() + part[1:] for part in parts[1:])])
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
    names = ["mean", "low", "high", "normalized", "normalized_low", "normalized_high"]
    dims = data["mean"].dims
    counts = np.isfinite(data["effects"].values).sum(axis=-1)
    cells = []
    for index in zip(*np.isfinite(data["mean"].values).nonzero()):
        where = {str(dim): data[dim].values[i].item() for dim, i in zip(dims, index)}
        mean, low, high, share, share_low, share_high = (
            float(data[name].values[index]) for name in names
        )
        cells.append(
            Cell(
                label=path_label(where),
                mean=mean,
                interval=(low, high),
                normalized=share,
                normalized_interval=(share_low, share_high),
                p_value=float(data["p_value"].values[index]),
                unrelated=float(data["unrelated"].values[index]),
                causal=bool(data["causal"].values[index]),
                n=int(counts[index]),
            )
        )
    return sorted(
        cells, key=lambda cell: -(cell.normalized if np.isfinite(cell.normalized) else cell.mean)
    )


def path_claims(data: xr.Dataset, details: Mapping[str, Any]) -> tuple[Claim, ...]:
    """The self-patch control, one claim a CAUSAL path, and the largest few that are not.

    A path without the label is named only if its effect is at least 5% of the gap.
    """
    cells = ranked_paths(data)
    least = least_notable(data, details)
    tested = [
        cell
        for cell in cells
        if not cell.causal
        and abs(cell.mean) >= least
        and cell.mean != 0
        and not (cell.n >= MIN_PAIRS and not np.isfinite(cell.p_value))
    ]
    notable = sorted(tested, key=lambda cell: -abs(cell.mean))[:_NOTABLE]
    held = proven(
        "self_patch.path",
        "sending a run its own writes changes nothing",
        error=details["self_patch_max"],
        bound=details["self_patch_bound"],
        reason=f"largest |effect| in {details['metric']['unit']} over all receivers",
    )
    return (held, *(_claim(cell, details) for cell in cells if cell.causal or cell in notable))


def _claim(cell: Cell, details: Mapping[str, Any]) -> Claim:
    refused = details["normalized_refused"] is not None or not np.isfinite(cell.normalized)
    unit = details["metric"]["unit"]
    value, ends = (
        (cell.mean, cell.interval) if refused else (cell.normalized, cell.normalized_interval)
    )
    failed = failed_conditions(
        mean=cell.mean,
        p_value=cell.p_value,
        unrelated=cell.unrelated,
        n=cell.n,
        unit=unit,
        self_patch_held=details["self_patch_max"] <= details["self_patch_bound"],
    )
    held = "held" if details["freeze_mlps"] else "recomputed"
    reason = (
        "; ".join(failed)
        if failed
        else (
            f"p = {cell.p_value:.2g} (sign-flip, maximum over {details['family']} paths); "
            f"{cell.mean:+.2f} {unit}, with an unrelated prompt's write {cell.unrelated:+.2f}; "
            f"MLPs between {held}"
        )
    )
    return Claim(
        f"path.{cell.label}",
        f"the path {cell.label} {verb(details, None if refused else cell.normalized, many=False)}",
        Evidence.UNKNOWN if failed else Evidence.CAUSAL,
        value=value,
        unit=unit if refused else "of the gap",
        interval=ends if np.isfinite(ends).all() else None,
        n=cell.n,
        reason=reason,
        where="patching",
    )
