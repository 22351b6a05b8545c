"""Measured statistics with their labels: axes, chance, the number of queries, what has no value."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr
from torch import Tensor

from headstream.circuits.measuring.rows import UniformRows
from headstream.circuits.measuring.statistic import Statistic
from headstream.circuits.measuring.token_batch import TokenBatch

NAMED = 8  # examples that a reason names before it counts


def labelled(
    values: Mapping[str, Tensor],
    statistics: Sequence[Statistic],
    batch: TokenBatch,
    *,
    per_position: bool,
) -> xr.Dataset:
    """The Dataset of `measure_attention`, from its values [layer, batch, head, ...] by name."""
    uniform = UniformRows(batch)
    layers, examples, heads = next(iter(values.values())).shape[:3]
    coords: dict[str, Any] = {
        "layer": range(layers),
        "head": range(heads),
        "example": range(examples),
    }
    if per_position:
        coords["pos"] = range(batch.past, batch.real.shape[1])
    variables = {}
    for each in statistics:
        own = _own_axis(each, batch, coords)
        by_query = ("example", "pos") if per_position else ("example",)
        number = each.queries(batch).cpu().numpy()
        same = number.shape[1] == 1
        chance = each.of(uniform, per_position)[:, 0].cpu().numpy()
        coords[f"chance_{each.name}"] = ((*by_query, *own), chance)
        coords[f"queries_{each.name}"] = (
            ("example",) if same else ("example", *own),
            number[:, 0] if same else number,
        )
        attrs = {"definition": _definition(each), "unit": each.unit, "cost": each.cost}
        without = [
            f"example {example}" + ("" if same else f" ({own[0]} {coords[own[0]][column]})")
            for example, column in zip(*(number == 0).nonzero(), strict=True)
        ]
        if without:
            more = [f"and {len(without) - NAMED} more"] if len(without) > NAMED else []
            attrs["not_applicable"] = f"{each.why_none}: {', '.join(without[:NAMED] + more)}"
        dims = ("layer", "example", "head", *by_query[1:], *own)
        variable = xr.Variable(dims, values[each.name].detach().cpu().numpy(), attrs)
        variables[each.name] = variable.transpose("layer", "head", "example", ...)
    return xr.Dataset(variables, coords)


def coordinate_names(statistics: Sequence[Statistic]) -> set[str]:
    """Names that the Dataset needs for itself."""
    axes = {each.axis for each in statistics if each.axis is not None}
    beside = {f"{what}_{each.name}" for each in statistics for what in ("chance", "queries", *axes)}
    return {"layer", "head", "example", "pos"} | axes | beside


def _own_axis(statistic: Statistic, batch: TokenBatch, coords: dict[str, Any]) -> tuple[str, ...]:
    """The statistic's own dimension, if any, entered into `coords`.

    Two statistics that put different things on an axis of one name do not share it.
    """
    if statistic.axis is None:
        return ()
    along = list(statistic.coordinates(batch))
    axis = statistic.axis
    if coords.setdefault(axis, along) != along:
        axis = f"{axis}_{statistic.name}"
        coords[axis] = along
    return (axis,)


def _definition(statistic: Statistic) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join((inspect.getdoc(type(statistic)) or "").split("\n\n")[0].split())
