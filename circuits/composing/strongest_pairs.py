"""The pairs of heads whose composition stands out, as a table and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from headstream.circuits.composing.composition import PAIR
from headstream.models.arguments import check_count
from headstream.models.errors import ShapeError
from headstream.models.names import head_name

if TYPE_CHECKING:
    import pandas as pd


def strongest_compositions(scores: xr.Dataset, *, top: int | None = 10) -> pd.DataFrame:
    """The pairs with the largest composition scores, the largest first.

    Args:
        scores: what `composition_scores` returned.
        top: how many rows; None for all.
    Returns:
        Columns `through` (Q, K or V), `earlier` and `later` ("L0H1"), `score`, `excess` over the
        expectation, and `stands_out`: above `random_largest`, which accounts for the number of
        pairs compared; being above `random_high` alone is what one random pair in forty does.
    Raises:
        ShapeError: if `scores` is something else, or `top` is no whole number >= 1.
    """
    import pandas as pd

    _check_scores(scores)
    limit = None if top is None else check_count("top", top)
    values = scores["score"].transpose("through", *PAIR).values
    places = np.argwhere(np.isfinite(values))
    order = np.argsort(-values[tuple(places.T)], kind="stable")[:limit]
    bar, expected = float(scores["random_largest"]), float(scores["expected"])
    through = scores["through"].values
    rows = [
        {
            "through": str(through[place[0]]),
            "earlier": head_name(int(place[1]), int(place[2])),
            "later": head_name(int(place[3]), int(place[4])),
            "score": float(values[tuple(place)]),
            "excess": float(values[tuple(place)]) - expected,
            "stands_out": bool(values[tuple(place)] > bar),
        }
        for place in places[order]
    ]
    names = ["through", "earlier", "later", "score", "excess", "stands_out"]
    return pd.DataFrame(rows, columns=names)


def summarise_compositions(scores: xr.Dataset, *, top: int = 5) -> str:
    """The strongest compositions in a few lines, with the chance level they are held against.

    Raises:
        ShapeError: as `strongest_compositions`.
    """
    _check_scores(scores)
    check_count("top", top)
    known = scores["score"].values[np.isfinite(scores["score"].values)]
    if not known.size:
        return "no pair of heads to compare: one layer, or heads that are zero"
    bar = float(scores["random_largest"])
    out = int((known > bar).sum())
    lines = [
        f"{out} of {known.size} compositions are above {bar:.3f}, which the largest of "
        f"{known.size} random pairs stays under in 95% of models (one random pair: "
        f"{float(scores['random_low']):.3f} to {float(scores['random_high']):.3f})"
    ]
    frame = strongest_compositions(scores, top=top)
    for row in frame[frame["stands_out"]].itertuples():
        lines.append(f"{row.through}: {row.earlier} -> {row.later}  {row.score:.3f}")
    if out > top:
        lines.append(f"and {out - top} more")
    return "\n".join(lines)


def _check_scores(scores: object) -> None:
    named = {"score", "expected", "random_low", "random_high", "random_largest"}
    if not isinstance(scores, xr.Dataset) or not named <= set(scores.data_vars):
        raise ShapeError(
            f"scores must be what composition_scores returned, got {type(scores).__name__}"
        )
