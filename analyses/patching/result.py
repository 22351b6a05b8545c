"""What a patching sweep found: labelled effects, their inference, their controls.

Arrays (site dims are some of `layer`, `head` or `kv_head`, `pos` or `role`):

    effects     (site dims, example)   metric(patched) - metric(run patched into), metric units
    clean, corrupted       (example)   metric of the two runs
    mean low high         (site dims)  mean effect and its 95% interval over prompts
    normalized normalized_low normalized_high   share of the clean-corrupted gap that was moved,
                          (site dims)  ratio of means; NaN where refused
    p_value q_value       (site dims)  sign-flip with the maximum over the grid; Benjamini-Hochberg
    unrelated             (site dims)  mean effect with values of an unrelated pair
    second                (site dims)  mean effect in the second metric
    causal                (site dims)  whether the one rule gives the label CAUSAL

Read, printed and rendered without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from headstream.analyses.result import Result
from headstream.models.names import head_name

if TYPE_CHECKING:
    import pandas as pd

# Sites that the summary names before it says how many more there are.
_NAMED = 8
_NUMBERS = ["No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten"]


@dataclass(frozen=True, eq=False, repr=False)
class PatchingResult(Result):
    """Effects of patching one kind of site, cell by cell and prompt by prompt.

    `details` holds site, positions, direction, values, engine, metric, family, flips, the controls
    and the prompts; see `patch`. Effects keep their sign: sites are listed from the one that moves
    the metric most towards the other run to the one that works most against it, never by size.
    """

    kind: ClassVar[str] = "patching"

    @property
    def effects(self) -> xr.DataArray:
        """metric(patched) - metric(the run patched into), (site dims, example), metric units."""
        return self.data["effects"]

    @property
    def mean(self) -> xr.DataArray:
        """Mean effect over prompts, metric units."""
        return self.data["mean"]

    @property
    def normalized(self) -> xr.DataArray:
        """Share of the clean-corrupted gap that was moved, ratio of means.

        (patched - corrupted) / gap for denoise ("recovered"), (clean - patched) / gap for noise
        ("lost"): 0 is no effect, 1 the whole gap, values outside are legal. NaN where the gap is
        within its own noise; `details["normalized_refused"]` then says so.
        """
        return self.data["normalized"]

    @property
    def interval(self) -> xr.DataArray:
        """95% interval of the mean over prompts, with a last dim `end`: "low", "high"."""
        return self._ends("low", "high")

    @property
    def normalized_interval(self) -> xr.DataArray:
        """95% interval of `normalized`, with a last dim `end`: "low", "high"."""
        return self._ends("normalized_low", "normalized_high")

    def _ends(self, low: str, high: str) -> xr.DataArray:
        ends = xr.concat(
            [self.data[low], self.data[high]],
            dim=xr.Variable("end", ["low", "high"]),
            coords="minimal",
            compat="override",
        )
        return ends.transpose(..., "end").rename("interval")

    @property
    def p_value(self) -> xr.DataArray:
        """Sign-flip p with the maximum over the grid; NaN for cells that were not tested."""
        return self.data["p_value"]

    @property
    def q_value(self) -> xr.DataArray:
        """Benjamini-Hochberg q; for the map as a whole, gates no label."""
        return self.data["q_value"]

    @property
    def clean(self) -> xr.DataArray:
        """Metric of the clean run, per example."""
        return self.data["clean"]

    @property
    def corrupted(self) -> xr.DataArray:
        """Metric of the corrupted run, per example."""
        return self.data["corrupted"]

    @property
    def controls(self) -> dict[str, Any]:
        """What should not move, and the two baselines.

        `clean` and `corrupted` (means), `gap` (mean, low, high), `self_patch` (largest |effect| of
        a run's own values), `self_patch_bound`, `random_site_95` (95th percentile of |mean effect|
        outside the claimed set, or None), `unrelated` (mean effect per site).
        """
        return {
            "clean": float(self.clean.mean()),
            "corrupted": float(self.corrupted.mean()),
            "gap": dict(self.details["gap"]),
            "self_patch": self.details["self_patch_max"],
            "self_patch_bound": self.details["self_patch_bound"],
            "random_site_95": self.details["random_site_95"],
            "unrelated": self.data["unrelated"],
        }

    @property
    def shares(self) -> xr.Dataset:
        """Per-prompt share of the gap, its median and quartiles over prompts, beside the headline.

        Prompts whose own gap is under a tenth of the mean gap are left out (their ratio explodes);
        `details["gap"]["small"]` counts them.
        """
        gap = self.clean - self.corrupted
        kept = np.abs(gap) >= self.details["gap"]["floor"]
        sign = 1.0 if self.details["direction"] == "denoise" else -1.0
        ratios = (sign * self.effects / gap).where(kept & (gap != 0))
        quartiles = ratios.quantile([0.25, 0.5, 0.75], dim="example")
        names = {"low_quartile": 0.25, "median": 0.5, "high_quartile": 0.75}
        return xr.Dataset(
            {name: quartiles.sel(quantile=at, drop=True) for name, at in names.items()}
        )

    def summary(self) -> str:
        causal = [cell for cell in ranked_cells(self.data) if cell.causal]
        total = self.data["mean"].size
        n = self.data.sizes["example"]
        metric = self.details["metric"]
        refused = self.details["normalized_refused"] is not None
        nouns = _nouns(self.data)
        if not causal:
            none = f"No {nouns[0]} of {total} is shown to {_verb(self.details, 1.0, many=None)}"
            largest = max(ranked_cells(self.data), key=lambda cell: abs(cell.mean))
            what = f"largest {largest.worded(refused, metric['unit'])}"
            return f"{none}; {what if largest.mean else 'every effect is zero'} (n = {n})"
        if refused:
            moved = {_verb(self.details, None, many=len(causal) > 1): causal}
        else:
            towards = [cell for cell in causal if cell.normalized > 0]
            against = [cell for cell in reversed(causal) if not cell.normalized > 0]
            moved = {}
            for sign, cells in ((1.0, towards), (-1.0, against)):
                if cells:
                    moved[_verb(self.details, sign, many=len(cells) > 1)] = cells
        parts = []
        for verb, cells in moved.items():
            shown = [cell.worded(refused, metric["unit"]) for cell in cells[:_NAMED]]
            if len(cells) > _NAMED:
                shown.append(f"{len(cells) - _NAMED} more")
            parts.append(f"{_count(len(cells), nouns)} {verb}: {', '.join(shown)}")
        text = "; ".join([parts[0], *(part[0].lower() + part[1:] for part in parts[1:])])
        return f"{text} (n = {n})"

    def to_frame(self) -> pd.DataFrame:
        """One row a site; the per-example effects are `effects.to_dataframe()`."""
        arrays = [name for name, array in self.data.items() if "example" not in array.dims]
        return (
            self.data[arrays].to_dataframe().reset_index().drop(columns="example", errors="ignore")
        )


@dataclass(frozen=True)
class Cell:
    """One site of a sweep: its label and what was found there."""

    label: str
    mean: float
    interval: tuple[float, float]
    normalized: float
    normalized_interval: tuple[float, float]
    p_value: float
    unrelated: float
    causal: bool
    n: int

    def worded(self, refused: bool, unit: str) -> str:
        """`L1H4 (+0.90 [0.82, 0.98] of the gap)`, or in metric units where that is refused."""
        value, ends = (
            (self.mean, self.interval) if refused else (self.normalized, self.normalized_interval)
        )
        after = f" {unit}" if refused else " of the gap"
        between = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if np.isfinite(ends).all() else ""
        return f"{self.label} ({value:+.2f}{between}{after})"


def ranked_cells(data: xr.Dataset) -> list[Cell]:
    """Every cell that was patched in some prompt, from most towards the other run to most against.

    By `normalized` where there is one, else by the mean effect: signed, never by size.
    """
    names = ["mean", "low", "high", "normalized", "normalized_low", "normalized_high"]
    dims = data["mean"].dims
    counts = np.isfinite(data["effects"].values).sum(axis=-1)
    cells = []
    for index in np.ndindex(data["mean"].shape):
        where = {str(dim): data[dim].values[i].item() for dim, i in zip(dims, index)}
        mean, low, high, share, share_low, share_high = (
            float(data[name].values[index]) for name in names
        )
        if not np.isfinite(mean):
            continue
        cells.append(
            Cell(
                label=site_label(where),
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


def site_label(where: Mapping[str, Any]) -> str:
    """The short name of a cell: `L1H4`, `L1KV0` (a key/value head), `L1H4@7`, `L0@query`.

    Example:
        >>> site_label({"layer": 1, "head": 4, "role": "query"})
        'L1H4@query'
    """
    layer = int(where["layer"])
    if "head" in where:
        label = head_name(layer, int(where["head"]))
    elif "kv_head" in where:
        label = f"L{layer}KV{int(where['kv_head'])}"
    else:
        label = f"L{layer}"
    place = where.get("pos", where.get("role"))
    return label if place is None else f"{label}@{place}"


def sentence(details: Mapping[str, Any], label: str, towards: float | None) -> str:
    """The statement of a claim about one site; `towards` is the sign of the share it moved.

    Denoising shows that a site suffices to restore, noising that it is needed: the verb says which.
    """
    return f"{details['site']} of {label} {_verb(details, towards, many=False)}"


# (direction, towards the other run) -> the verb for one site, for many, and after "to".
_VERBS = {
    ("denoise", True): ("restores", "restore", "restore"),
    ("denoise", False): ("pushes away from", "push away from", "push away from"),
    ("noise", True): ("is needed for", "are needed for", "be needed for"),
    ("noise", False): ("works against", "work against", "work against"),
}


def _verb(details: Mapping[str, Any], towards: float | None, *, many: bool | None) -> str:
    """The verb and its object; `many` is None for the infinitive."""
    form = {False: 0, True: 1, None: 2}[many]
    if towards is None or not np.isfinite(towards):
        verb = ("moves", "move", "move")[form]
    else:
        verb = _VERBS[details["direction"], towards > 0][form]
    return f"{verb} {details['metric']['noun']}"


def _nouns(data: xr.Dataset) -> tuple[str, str]:
    dims = set(data["mean"].dims)
    if "pos" in dims or "role" in dims:
        return "site", "sites"
    if "head" in dims:
        return "head", "heads"
    if "kv_head" in dims:
        return "key/value head", "key/value heads"
    return "layer", "layers"


def _count(n: int, nouns: tuple[str, str]) -> str:
    number = _NUMBERS[n] if n < len(_NUMBERS) else str(n)
    return f"{number} {nouns[0] if n == 1 else nouns[1]}"
