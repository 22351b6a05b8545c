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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from headstream.analyses.patching.inference import ALPHA
from headstream.analyses.patching.words import count, none_moves, nouns, told, verb
from headstream.analyses.result import Result
from headstream.models.names import head_name

if TYPE_CHECKING:
    import pandas as pd

# Sites that the summary names before it says how many more there are.
_NAMED = 8
# Below this part of the gap an effect is not worth a sentence of its own, labelled sites apart.
_NOTABLE_PART = 0.05


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
        """The labelled sites, and those that only the unrelated-prompt control excludes.

        Sites that move less than half the gap move "part of the answer". Sites that pass
        the test but do no more than an unrelated prompt's values are named from 5% of the gap on.
        """
        cells = ranked_cells(self.data)
        causal = [cell for cell in cells if cell.causal]
        excluded = self._excluded(cells)
        total = self.data["mean"].size
        n = self.data.sizes["example"]
        metric = self.details["metric"]
        refused = self.details["normalized_refused"] is not None
        noun = nouns(self.data)
        if excluded:
            shown = [cell.briefly(refused, metric["unit"]) for cell in excluded[:_NAMED]]
            if len(excluded) > _NAMED:
                shown.append(f"{len(excluded) - _NAMED} more")
            untold = ", ".join(shown)
        if not causal and excluded:
            moves = verb(self.details, None, many=len(excluded) > 1)
            return (
                f"{count(len(excluded), noun)} of {total} {moves}, but no more than an unrelated "
                f"prompt's values: {untold} (n = {n})"
            )
        if not causal:
            none = f"No {noun[0]} of {total} is shown to {verb(self.details, 1.0, many=None)}"
            largest = max(cells, key=lambda cell: abs(cell.mean))
            what = f"largest {largest.worded(refused, metric['unit'])}"
            what = what if largest.mean else none_moves(self.details, self.data)
            return f"{none}; {what} (n = {n})"
        found = [(cell.normalized, cell.worded(refused, metric["unit"])) for cell in causal]
        text = told(self.details, found, noun, most=_NAMED)
        if excluded:
            text += f"; not told from an unrelated prompt's values: {untold}"
        return f"{text} (n = {n})"

    def _excluded(self, cells: Sequence[Cell]) -> list[Cell]:
        """The notable cells that pass the test and fail only by the unrelated-prompt control."""
        if self.details["self_patch_max"] > self.details["self_patch_bound"]:
            return []
        least = least_notable(self.data, self.details)
        return [
            cell
            for cell in cells
            if not cell.causal
            and cell.p_value <= ALPHA
            and abs(cell.mean) >= least
            and np.sign(cell.mean) * (cell.mean - cell.unrelated) <= 0
        ]

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
    second: float = math.nan  # mean effect in the second metric

    def worded(self, refused: bool, unit: str) -> str:
        """`L1H4 (+0.90 [0.82, 0.98] of the gap)`, or in metric units where that is refused."""
        refused = refused or math.isnan(self.normalized)
        value, ends = (
            (self.mean, self.interval) if refused else (self.normalized, self.normalized_interval)
        )
        after = f" {unit}" if refused else " of the gap"
        between = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if np.isfinite(ends).all() else ""
        return f"{self.label} ({value:+.2f}{between}{after})"

    def briefly(self, refused: bool, unit: str) -> str:
        """`L1H4 (+0.90)`, a share of the gap, or `L1H4 (+4.51 nats)` where that is refused."""
        refused = refused or math.isnan(self.normalized)
        value = f"{self.mean:+.2f} {unit}" if refused else f"{self.normalized:+.2f}"
        return f"{self.label} ({value})"


def ranked_cells(
    data: xr.Dataset, label: Callable[[Mapping[str, Any]], str] | None = None
) -> list[Cell]:
    """Every cell that was patched in some prompt, from most towards the other run to most against.

    By `normalized` where there is one, else by the mean effect: signed, never by size.

    Args:
        label: what a cell of these coordinates is called; a site by default.
    """
    named = site_label if label is None else label
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
                label=named(where),
                mean=mean,
                interval=(low, high),
                normalized=share,
                normalized_interval=(share_low, share_high),
                p_value=float(data["p_value"].values[index]),
                unrelated=float(data["unrelated"].values[index]),
                causal=bool(data["causal"].values[index]),
                n=int(counts[index]),
                second=float(data["second"].values[index]) if "second" in data else math.nan,
            )
        )
    return sorted(
        cells, key=lambda cell: -(cell.normalized if np.isfinite(cell.normalized) else cell.mean)
    )


def least_notable(data: xr.Dataset, details: Mapping[str, Any]) -> float:
    """The |mean effect| below which an unlabelled site is not worth a sentence.

    5% of the mean gap, or of the largest effect where the gap is within its own noise.
    """
    mean = data["mean"].values
    if details["normalized_refused"] is None:
        scale = abs(float(details["gap"]["mean"]))
    else:
        scale = float(np.abs(mean[np.isfinite(mean)]).max(initial=0.0))
    return _NOTABLE_PART * scale


def site_label(where: Mapping[str, Any]) -> str:
    """The short name of a cell: `L1H4`, `L1KV0` (a key/value head), `L1N37` (a neuron), `L1H4@7`,
    `L0@query`, `L1H4@9<-3` (an edge of the pattern), or the name of a set.

    Example:
        >>> site_label({"layer": 1, "head": 4, "role": "query"})
        'L1H4@query'
    """
    if "set" in where:
        return str(where["set"])
    layer = int(where["layer"])
    if "head" in where:
        label = head_name(layer, int(where["head"]))
    elif "kv_head" in where:
        label = f"L{layer}KV{int(where['kv_head'])}"
    elif "neuron" in where:
        label = f"L{layer}N{int(where['neuron'])}"
    else:
        label = f"L{layer}"
    place = where.get("pos", where.get("role", where.get("edge")))
    return label if place is None else f"{label}@{place}"
