"""The entries of a factored matrix that stand out, over all of it or by row, without forming it.

A vocabulary circuit A B is [d_vocab, d_vocab]: 10 GB at 50257 tokens in float32. Rows are
multiplied out a block at a time, and a block only leaves behind what can still be among the top k,
so that memory is a few blocks and the factors. Equal values are ordered by row, then by column;
blocks depend on the shape alone, so that the same factors give the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.FactoredMatrix import FactoredMatrix

from headstream.circuits.selection import whole
from headstream.models.arguments import check_count
from headstream.models.errors import ConfigError, ShapeError, nearest

Order = Literal["largest", "smallest", "magnitude"]
# Of products held at once.
_BYTES = 2**24


def top_pairs(circuit: FactoredMatrix, k: int = 10, *, by: str = "largest") -> xr.Dataset:
    """The k entries of a circuit that stand out most, with their row and column.

    For `qk_circuit` these are the (query token, key token) pairs that a head matches best, for
    `ov_circuit` the (source token, output token) pairs it moves most.

    Args:
        circuit: two factors, `.A` [rows, rank] and `.B` [rank, columns].
        k: how many, at most rows x columns.
        by: "largest", "smallest" (most negative first), or "magnitude" (largest absolute value).
    Returns:
        `row`, `column` and `value` over `rank`, what stands out most first; equal values by row,
        then by column. Values are float64, computed in the factors' dtype (float32 at least).
    Raises:
        ShapeError: if `circuit` is no factored matrix, `k` is no whole number in range, or an
            entry that would stand out is NaN or infinite.
        ConfigError: if `by` is unknown.
    Example:
        >>> circuit = FactoredMatrix(torch.eye(2), torch.tensor([[1.0, -5.0], [3.0, 1.0]]))
        >>> found = top_pairs(circuit, 3)
        >>> found["row"].values.tolist(), found["column"].values.tolist()
        ([1, 0, 1], [0, 0, 1])
    """
    left, right = _factors(circuit, by)
    rows, columns = left.shape[0], right.shape[1]
    k = check_count("k", k)
    if k > rows * columns:
        raise ShapeError(f"k must lie in [1, {rows * columns}] = [1, rows x columns], got {k}")
    values = left.new_empty(0)
    places = torch.empty(0, dtype=torch.int64, device=left.device)
    step = _rows_at_once(left, right)
    for start in range(0, rows, step):
        block = (left[start : start + step] @ right).flatten()
        # The value that an entry must pass; where k are known, ties lose, since they come later.
        bar = _ranked(values[-1:], by) if len(values) == k else None
        found = _outstanding(_ranked(block, by), k, bar)
        if not len(found):
            continue
        values = torch.cat((values, block[found]))
        places = torch.cat((places, found + start * columns))
        # Places ascend among equals, so a stable sort keeps them in order.
        order = _ranked(values, by).sort(descending=True, stable=True).indices[:k]
        values, places = values[order], places[order]
    return xr.Dataset(
        {
            "row": (("rank",), (places // columns).cpu().numpy()),
            "column": (("rank",), (places % columns).cpu().numpy()),
            "value": (("rank",), values.double().cpu().numpy()),
        },
        coords={"rank": range(k)},
        attrs={"by": by, "shape": [rows, columns]},
    )


def top_per_row(
    circuit: FactoredMatrix,
    k: int = 5,
    *,
    rows: Iterable[int] | None = None,
    by: str = "largest",
) -> xr.Dataset:
    """For each row of a circuit its k entries that stand out most.

    For `ov_circuit`: what each source token raises. For `qk_circuit`: what each query looks for;
    with `circuit.T`, the queries that look for each key.

    Args:
        circuit: two factors, `.A` [rows, rank] and `.B` [rank, columns].
        k: how many a row, at most the number of columns.
        rows: which rows, in this order; None means all.
        by: as for `top_pairs`.
    Returns:
        `column` and `value` (row, rank), what stands out most first; equal values by column.
    Raises:
        ShapeError: as `top_pairs`; or if a row does not exist.
        ConfigError: if `by` is unknown.
    """
    left, right = _factors(circuit, by)
    columns = right.shape[1]
    k = check_count("k", k)
    if k > columns:
        raise ShapeError(f"k must lie in [1, {columns}] = [1, columns], got {k}")
    chosen = _chosen(rows, left.shape[0])
    asked = left if chosen is None else left[torch.tensor(chosen, device=left.device)]
    step = _rows_at_once(left, right)
    parts = [_top_of_rows(part @ right, k, by) for part in asked.split(step)]
    place = torch.cat([part[0] for part in parts])
    value = torch.cat([part[1] for part in parts])
    return xr.Dataset(
        {
            "column": (("row", "rank"), place.cpu().numpy()),
            "value": (("row", "rank"), value.double().cpu().numpy()),
        },
        coords={"row": range(left.shape[0]) if chosen is None else chosen, "rank": range(k)},
        attrs={"by": by, "shape": [left.shape[0], columns]},
    )


def _outstanding(
    ranked: Float[Tensor, " n"], k: int, bar: Float[Tensor, " one"] | None
) -> Int[Tensor, " found"]:
    """Places, ascending, of the k largest entries, of equals the first; only those over the bar."""
    if bar is not None:
        most = ranked.max()
        _require_finite(most)
        if not bool(most > bar):
            return torch.empty(0, dtype=torch.int64, device=ranked.device)
    kth = ranked.topk(min(k, len(ranked))).values
    _require_finite(kth)
    if bar is not None and bool(kth[-1] <= bar):
        return (ranked > bar).nonzero()[:, 0]
    over = (ranked > kth[-1]).nonzero()[:, 0]
    ties = (ranked == kth[-1]).nonzero()[: len(kth) - len(over), 0]
    return torch.cat((over, ties)).sort().values


def _top_of_rows(
    block: Float[Tensor, "rows columns"], k: int, by: str
) -> tuple[Int[Tensor, "rows k"], Float[Tensor, "rows k"]]:
    """Columns and values of the k largest entries of each row, of equals the first."""
    ranked = _ranked(block, by)
    kth, place = ranked.topk(k)
    _require_finite(kth)
    last = kth[:, -1:]
    # Where more entries tie for the last place than there is room, topk may have taken any.
    open_rows = ((ranked == last).sum(1) > (kth == last).sum(1)).nonzero()[:, 0]
    if len(open_rows):
        tied, bar = ranked[open_rows], last[open_rows]
        over, equal = tied > bar, tied == bar
        room = k - over.sum(1, keepdim=True)
        first = equal & (equal.cumsum(1, dtype=torch.int32) <= room)
        place[open_rows] = (over | first).nonzero()[:, 1].unflatten(0, (-1, k))
    place = place.sort(1).values
    order = ranked.gather(1, place).sort(dim=1, descending=True, stable=True).indices
    place = place.gather(1, order)
    return place, block.gather(1, place)


def _ranked(values: Tensor, by: str) -> Tensor:
    """What is to be large."""
    if by == "magnitude":
        return values.abs()
    return -values if by == "smallest" else values


def _rows_at_once(left: Tensor, right: Tensor) -> int:
    return max(1, _BYTES // (left.element_size() * right.shape[1]))


def _factors(circuit: object, by: str) -> tuple[Tensor, Tensor]:
    """Both factors, in float32 at least."""
    if by not in get_args(Order):
        raise ConfigError(
            f"by must be one of {', '.join(get_args(Order))}, got {by!r}",
            hint=nearest(str(by), get_args(Order)),
        )
    if not isinstance(circuit, FactoredMatrix):
        raise ShapeError(
            f"circuit must be a FactoredMatrix, got {type(circuit).__name__}",
            hint="qk_circuit and ov_circuit give one",
        )
    if circuit.ndim != 2:
        raise ShapeError(
            f"circuit must be one matrix [rows, columns], got {list(circuit.shape)}",
            hint="index one of them",
        )
    wide = torch.promote_types(circuit.A.dtype, torch.float32)
    return circuit.A.detach().to(wide), circuit.B.detach().to(wide)


def _require_finite(values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ShapeError("entries of the circuit must be finite, but one is NaN or infinite")


def _chosen(rows: Any, count: int) -> list[int] | None:
    if rows is None:
        return None
    listed = rows.tolist() if hasattr(rows, "tolist") else rows
    asked = list(listed) if isinstance(listed, Iterable) else [listed]
    if not asked:
        raise ShapeError("rows is empty, expected at least one row")
    chosen = []
    for given in asked:
        row = whole(given)
        if row is None or not 0 <= row < count:
            raise ShapeError(f"rows must be whole numbers in [0, {count}), got {given!r}")
        chosen.append(row)
    return chosen
