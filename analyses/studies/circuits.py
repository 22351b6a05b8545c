"""What is each head's circuit? The anatomy of every head as one result.

Weights and a sample of runs: MEASURED at best. What a head does for the answer takes an
intervention, and the claims say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from headstream.analyses.evidence import Claim, measured, unknown
from headstream.analyses.kinds import MOST_TOKENS, CircuitsResult
from headstream.analyses.result import Provenance
from headstream.circuits.anatomy import HeadAnatomy, head_anatomies
from headstream.circuits.anatomy_text import scores_from
from headstream.circuits.composing.strongest_pairs import (
    strongest_compositions,
    summarise_compositions,
)
from headstream.models.decoder import Decoder
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

if TYPE_CHECKING:
    import pandas as pd

# Strongest compositions that get a claim of their own, that a card names, and that are kept.
_CLAIMED = 3
_PARTNERS = 5
_KEPT = 500
_THROUGH = {"Q": "queries", "K": "keys", "V": "values"}


@takes_model
def circuits(
    model: Decoder, *, distance: int | None = None, top: int = 5, n: int = 16, seed: int = 0
) -> CircuitsResult:
    """Take every head of `model` apart: what it reads, what it moves, whom it composes with.

    Args:
        model: the decoder.
        distance: with rotary positions, at which all QK circuits and compositions are taken; None
            is where each head's mean score on the sample is highest. Refused with other positions.
        top: token pairs listed of each circuit.
        n: random sequences of the sample.
        seed: of everything drawn.
    Raises:
        ShapeError: if a count is out of range, a weight is NaN or infinite, or the context is too
            short for a sample.
        TokenError: if the vocabulary is too small for a sample.
        ConfigError: if `distance` does not apply.
        HookError: if something edits the model's runs.
    """
    found = head_anatomies(model, distance=distance, top=top, n=n, seed=seed)
    compositions = _compositions(found)
    config = model.config
    sites = (range(config.n_layers), range(config.n_heads))

    def per_head(value: Any) -> tuple[tuple[str, str], np.ndarray]:
        grid = np.array([value(one) for one in found], dtype=np.float64)
        return ("layer", "head"), grid.reshape(config.n_layers, config.n_heads)

    copying = [one.copying for one in found]
    preferred = {one.name: one.preferred_distance for one in found}
    data = xr.Dataset(
        {
            "copying": per_head(lambda one: one.copying.score),
            "first": per_head(lambda one: one.copying.first),
            "behaviour": per_head(lambda one: one.copying.behaviour),
            "behaviour_low": per_head(lambda one: one.copying.behaviour_interval[0]),
            "behaviour_high": per_head(lambda one: one.copying.behaviour_interval[1]),
            "behaviour_chance": per_head(lambda one: one.copying.behaviour_chance),
            "qk_rank": per_head(lambda one: one.rank("qk")),
            "ov_rank": per_head(lambda one: one.rank("ov")),
            "distance": per_head(lambda one: getattr(preferred[one.name], "distance", np.nan)),
            "distance_excess": per_head(lambda one: getattr(preferred[one.name], "excess", np.nan)),
        },
        coords={"layer": list(sites[0]), "head": list(sites[1])},
    )
    return CircuitsResult(
        title=f"Circuits of the heads of {model.name}",
        data=data,
        provenance=Provenance.of(model, seed=seed),
        claims=tuple(_claims(found, compositions)),
        details={
            "n": n,
            "positions": config.positions,
            "d_head": config.d_head,
            "copying_random": list(copying[0].random),
            "first_chance": copying[0].first_chance,
            "compositions": _in_words(found, compositions),
            "composition": _held_against(found)
            | {"out": int(compositions["stands_out"].astype(bool).sum())},
            "pairs": [
                [row.through, row.earlier, row.later, round(row.score, 4)]
                for row in _rows(compositions.head(_KEPT))
            ],
            "cards": [_card(one, compositions) for one in found],
            "caveats": list(dict.fromkeys(words for one in found for words in one.caveats)),
        },
    )


def _compositions(found: tuple[HeadAnatomy, ...]) -> pd.DataFrame:
    """Every pair of heads, the strongest first, each taken where the later head looks."""
    import pandas as pd

    distances = {one.distance: one.compositions for one in found}
    every = {at: strongest_compositions(scores, top=None) for at, scores in distances.items()}
    mine = [every[one.distance][every[one.distance]["later"] == one.name] for one in found]
    return pd.concat(mine).sort_values("score", ascending=False, kind="stable", ignore_index=True)


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    """Rows as named tuples, whose fields pandas does not type."""
    return iter(frame.itertuples())


def _in_words(found: tuple[HeadAnatomy, ...], compositions: pd.DataFrame) -> str:
    """How many compositions stand out, in words; heads that look elsewhere have no common count."""
    if len({one.distance for one in found}) == 1:
        return summarise_compositions(found[0].compositions).splitlines()[0]
    held = _held_against(found)
    if held["bar"] is None or compositions.empty:
        return "no pair of heads to compare"
    return (
        f"{int(compositions['stands_out'].astype(bool).sum())} of {len(compositions)} compositions "
        f"are above {held['bar']:.3f}, which the largest of {held['compared']} random pairs stays "
        "under in 95% of models; each is taken at the distance where the later head's mean score "
        "is highest"
    )


def _held_against(found: tuple[HeadAnatomy, ...]) -> dict[str, Any]:
    """Chance, and the bar over which a composition stands out; None where none can be compared."""
    bars = [float(one.compositions["random_largest"]) for one in found]
    chance = float(found[0].compositions["expected"])
    return {
        "chance": chance if math.isfinite(chance) else None,
        "bar": max(bars) if all(map(math.isfinite, bars)) else None,
        "compared": max(int(one.compositions.attrs["compared"]) for one in found),
    }


def _card(head: HeadAnatomy, compositions: pd.DataFrame) -> dict[str, Any]:
    """What a head card shows beside the arrays."""
    mine = (compositions["earlier"] == head.name) | (compositions["later"] == head.name)
    partners = compositions[mine & compositions["stands_out"].astype(bool)].head(_PARTNERS)

    def pairs(of: Any) -> list[list[Any]]:
        return [[head.token(p.row), head.token(p.column), round(p.value, 4)] for p in of]

    return {
        "head": head.name,
        "matches": pairs(head.matches),
        "moves": pairs(head.moves),
        "qk_distance": head.distance,
        "scores_from": scores_from(head),
        "partners": [
            [row.through, row.earlier, row.later, round(row.score, 4)] for row in _rows(partners)
        ],
        "through": [[head_name(*one.earlier), round(one.own_first, 4)] for one in head.through],
    }


def _claims(found: tuple[HeadAnatomy, ...], compositions: pd.DataFrame) -> list[Claim]:
    """MEASURED claims on what stands out most, and what weights alone leave UNKNOWN."""
    claims: list[Claim] = []
    for head in found:
        for one in head.through[:1]:
            if one.own_first < MOST_TOKENS:
                continue
            claims.append(
                measured(
                    f"circuits.{head.name}.matching",
                    f"through what {head_name(*one.earlier)} writes, {head.name} looks for its "
                    "own token",
                    value=one.own_first,
                    unit="share of tokens",
                    n=head.d_vocab,
                    reason="weights alone, the best match of each query token; chance "
                    f"{1 / head.d_vocab:.3f}",
                    where="circuits",
                )
            )
    out = compositions[compositions["stands_out"].astype(bool)]
    for row in _rows(out.head(_CLAIMED)):
        claims.append(
            measured(
                f"circuits.{row.through}.{row.earlier}.{row.later}",
                f"{row.later} reads what {row.earlier} writes through its {_THROUGH[row.through]}",
                value=row.score,
                unit="composition score",
                n=1,
                reason=f"weights alone, {row.excess:+.3f} over chance and above the largest of as "
                "many random pairs",
                where="circuits",
            )
        )
    if claims:
        claims.append(
            unknown(
                "circuits.used",
                "that the model uses these paths for the answer",
                reason="weights say what a head could do; patching the path would settle it",
                where="circuits",
            )
        )
    return claims
