"""One head, taken apart: what its weights and a sample of runs say about it, in one value.

    reads      the token pairs that its QK circuit matches best, how far back it prefers to look,
               which parts of its input its scores come from, and whether it looks for its own
               token in what an earlier head wrote about a key
    moves      the tokens that its OV circuit raises, and whether it copies
    partners   the heads it composes with beyond what random heads would

Everything here is MEASURED at best: a circuit says what a head could do, a sample what it did; what
it does for the answer takes an intervention (`analyses`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from jaxtyping import Int
from scipy import stats
from torch import Tensor

from headstream.circuits.composing.composition import composition_scores
from headstream.circuits.composing.strongest_pairs import strongest_compositions
from headstream.circuits.qk_ov.behavioural_copying import behavioural_copying_score
from headstream.circuits.qk_ov.content_position import score_terms
from headstream.circuits.qk_ov.copying import copying_score, require_finite, top_share
from headstream.circuits.qk_ov.head_factors import ov_factors, qk_factors
from headstream.circuits.qk_ov.left_out import circuit_caveats
from headstream.circuits.qk_ov.rotary_profile import score_frequencies
from headstream.circuits.qk_ov.score_split import ScoreSplit
from headstream.circuits.qk_ov.top_entries import top_pairs
from headstream.circuits.qk_ov.weights import check_head, ov_circuit, qk_circuit
from headstream.circuits.selection import head_pair
from headstream.circuits.undisturbed import undisturbed
from headstream.models.arguments import check_count, check_seed
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

if TYPE_CHECKING:
    import pandas as pd

    from headstream.models.decoder import Decoder

Array = npt.NDArray[np.floating]

# Tokens of a sampled sequence at most: the split of its scores holds every edge of every term.
_LONGEST = 64
# Earlier and later heads named in a head's partners, the strongest first.
_PARTNERS = 5
# A share of the squared singular values that counts as the whole circuit.
_RANK_SHARE = 0.9
_ROUNDING = 1e-6


class TokenPair(NamedTuple):
    """An entry of a vocabulary circuit: (query, key) of QK, (source, output) of OV."""

    row: int
    column: int
    value: float


class Copying(NamedTuple):
    """How much a head copies, each number beside what it is held against.

    Attributes:
        score: eigenvalue score in [-1, 1]; NaN where the circuit has no eigenvalue.
        random: where 95% of random heads have theirs.
        first, first_chance: share of tokens that raise themselves most, and chance.
        behaviour, behaviour_interval, behaviour_chance: the behavioural score on random tokens,
            its 95% interval, and the score of a head that ignores its source.
    """

    score: float
    random: tuple[float, float]
    first: float
    first_chance: float
    behaviour: float
    behaviour_interval: tuple[float, float]
    behaviour_chance: float


class Preference(NamedTuple):
    """A distance at which a head's scores are highest.

    Attributes:
        distance: query position minus key position, in tokens.
        excess, interval: mean score there over the mean of the row, and its 95% interval.
    """

    distance: int
    excess: float
    interval: tuple[float, float]


class Through(NamedTuple):
    """What a head's queries look for in what an earlier head wrote about the keys.

    Attributes:
        earlier: (layer, head) of that head.
        own_first: share of query tokens whose best match, of all tokens that the earlier head may
            have fetched, is the query's own. Chance is 1 / d_vocab.
    """

    earlier: tuple[int, int]
    own_first: float


@dataclass(frozen=True, eq=False, repr=False)
class HeadAnatomy:
    """What is known about one head. `str()` of it is a page to read.

    Attributes:
        model, layer, head: whose.
        distance: at which a rotary head's QK circuit was taken: as asked for, or where its mean
            score on the sample is highest, which need not stand out (`preferred_distance`). None
            with other positions.
        matches: (query token, key token) pairs that QK scores highest, before the scale.
        moves: (source token, output token) pairs that OV raises most.
        singular: (circuit, rank), singular values of QK and OV in the stream.
        copying: of the OV circuit.
        by_distance: (example, distance), mean score of a key that far back, over the mean of its
            row, on the sample: sequences in which no token repeats.
        shares: what the scores on the sample consist of: (query_part, key_part) of content,
            position and bias, or (pair) with rotary positions. They sum to 1.
        partners: compositions above chance in which this head takes part; columns as in
            `strongest_compositions`.
        compositions: of every pair of heads of the model, as `composition_scores` gives them at
            this head's distance.
        through: for each earlier head it K-composes with above chance.
        n: sequences of the sample.
        caveats: what the circuits leave out, in words.
        d_vocab: how many tokens there are.
        vocab: names of the tokens, or None.
    """

    model: str
    layer: int
    head: int
    distance: int | None
    matches: tuple[TokenPair, ...]
    moves: tuple[TokenPair, ...]
    singular: xr.DataArray
    copying: Copying
    by_distance: xr.DataArray
    shares: xr.DataArray
    partners: pd.DataFrame
    compositions: xr.Dataset
    through: tuple[Through, ...]
    n: int
    caveats: tuple[str, ...]
    d_vocab: int
    vocab: Sequence[str] | None

    @property
    def name(self) -> str:
        return head_name(self.layer, self.head)

    @property
    def preferred_distance(self) -> Preference | None:
        """How far back its scores are highest on the sample; None where no distance stands out.

        One half of the sample chooses the distance, the other says what it is worth: of many
        distances the best always looks like something on the sequences that chose it. It stands
        out if the 95% interval of that mean (Student's t over sequences) lies above 0.
        """
        values = self.by_distance.transpose("example", "distance").values
        chosen, held_out = values[::2], values[1::2]
        best = int(np.argmax(chosen.mean(0)))
        worth = held_out[:, best]
        mean, spread = float(worth.mean()), float(worth.std(ddof=1)) if len(worth) > 1 else np.nan
        half = float(stats.t.ppf(0.975, max(len(worth) - 1, 1))) * spread / np.sqrt(len(worth))
        # Idle heads score every key alike; what rounding leaves of that is no preference.
        if not mean - half > _ROUNDING * max(1.0, float(np.abs(values).max())):
            return None
        distance = int(self.by_distance["distance"].values[best])
        return Preference(distance, mean, (mean - half, mean + half))

    def rank(self, circuit: str) -> int:
        """Singular directions that hold 90% of a circuit ("qk" or "ov") by squared size."""
        squares = np.cumsum(self.singular.sel(circuit=circuit).values ** 2)
        return int(np.searchsorted(squares, _RANK_SHARE * squares[-1]) + 1) if squares[-1] else 0

    def token(self, index: int) -> str:
        return str(index) if self.vocab is None else self.vocab[index]

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values; what is not a number is None."""

        def pairs(of: tuple[TokenPair, ...]) -> list[dict[str, Any]]:
            return [
                {"row": self.token(p.row), "column": self.token(p.column), "value": p.value}
                for p in of
            ]

        found = self.preferred_distance
        return {
            "model": self.model,
            "head": self.name,
            "qk": {
                "distance": self.distance,
                "matches": pairs(self.matches),
                "preferred_distance": None if found is None else found._asdict(),
                "scores_from": _plain(self.shares.to_dict(encoding=False)),
                "through": [
                    {"earlier": head_name(*one.earlier), "own_first": one.own_first}
                    for one in self.through
                ],
                "singular_values": self.singular.sel(circuit="qk").values.tolist(),
            },
            "ov": {
                "moves": pairs(self.moves),
                "copying": _plain(self.copying._asdict()),
                "singular_values": self.singular.sel(circuit="ov").values.tolist(),
            },
            "partners": _plain(self.partners.to_dict("records")),
            "n": self.n,
            "left_out": list(self.caveats),
        }

    def __repr__(self) -> str:
        return f"<anatomy of {self.name} of {self.model}>"

    def __str__(self) -> str:
        from headstream.circuits.anatomy_text import anatomy_text

        return anatomy_text(self)


@takes_model
def head_anatomy(
    model: Decoder,
    layer: int,
    head: int,
    *,
    distance: int | None = None,
    top: int = 5,
    n: int = 16,
    seed: int = 0,
) -> HeadAnatomy:
    """Take one head apart.

    Args:
        model: the decoder.
        layer, head: which query head.
        distance: with rotary positions, at which to take the QK circuit, in tokens; None is where
            the head's mean score on the sample is highest. Refused with other positions.
        top: token pairs listed of each circuit.
        n: random sequences of the sample.
        seed: of everything drawn; the global random state is left alone.
    Raises:
        ShapeError: if the head does not exist, a count is out of range, a weight is NaN or
            infinite, or the context is too short for a sample (4 tokens beside BOS).
        TokenError: if the vocabulary is too small for a sample (4 tokens beside BOS and padding).
        ConfigError: if `distance` does not apply.
        HookError: if something edits the model's runs.
    """
    return head_anatomies(model, [(layer, head)], distance=distance, top=top, n=n, seed=seed)[0]


@takes_model
def head_anatomies(
    model: Decoder,
    heads: Iterable[tuple[int, int]] | None = None,
    *,
    distance: int | None = None,
    top: int = 5,
    n: int = 16,
    seed: int = 0,
) -> tuple[HeadAnatomy, ...]:
    """Take several heads apart; what all heads share is computed once.

    Args:
        heads: (layer, head) pairs; None is every head.
        Others as for `head_anatomy`.
    Raises:
        As `head_anatomy`.
    """
    config = model.config
    chosen = _chosen(model, heads)
    check_count("top", top)
    n = check_count("n", n, least=4, of="sequences")
    check_seed(seed)
    require_finite(model)
    if distance is not None:
        qk_circuit(model, 0, 0, distance=distance, space="residual")  # does it apply?
    top = min(top, config.d_vocab**2)
    copying = copying_score(model, top=(1,), seed=seed)
    with undisturbed(model, "take a head apart"):
        behaviour = behavioural_copying_score(model, n=n, seed=seed)
        sample = _sample(model, n, seed)
        splits = {at: _split(model, sample, *at) for at in chosen}
    found = []
    scored: dict[int | None, xr.Dataset] = {}
    for at in chosen:
        by_distance = _by_distance(splits[at], has_bos=config.bos_token_id is not None)
        lag = distance
        if config.positions == "rotary" and lag is None:
            lag = int(np.argmax(by_distance.mean("example").values))
        if lag not in scored:
            scored[lag] = composition_scores(model, distance=lag, seed=seed)
        compositions = scored[lag]
        matches, moves = (
            tuple(
                TokenPair(int(row), int(column), float(value))
                for row, column, value in zip(
                    *(pairs[part].values for part in ("row", "column", "value")), strict=True
                )
            )
            for pairs in (
                top_pairs(qk_circuit(model, *at, distance=lag), top),
                top_pairs(ov_circuit(model, *at), top),
            )
        )
        found.append(
            HeadAnatomy(
                model=model.name,
                layer=at[0],
                head=at[1],
                distance=lag,
                matches=matches,
                moves=moves,
                singular=_singular(model, *at, distance=lag),
                copying=_copying(copying, behaviour, at),
                by_distance=by_distance,
                shares=splits[at].shares().mean("example"),
                partners=_partners(compositions, head_name(*at)),
                compositions=compositions,
                through=tuple(_through(model, at, lag, compositions)),
                n=n,
                caveats=_caveats(model, at[0]),
                d_vocab=config.d_vocab,
                vocab=model.vocab,
            )
        )
    return tuple(found)


def _chosen(model: Decoder, heads: Iterable[tuple[int, int]] | None) -> list[tuple[int, int]]:
    config = model.config
    if heads is None:
        return [(at, head) for at in range(config.n_layers) for head in range(config.n_heads)]
    pairs = heads if isinstance(heads, Iterable) else [heads]
    chosen = [check_head(config, *head_pair(pair)) for pair in pairs]
    if not chosen:
        raise ShapeError("heads is empty: give at least one (layer, head), or None for all")
    return chosen


def _sample(model: Decoder, n: int, seed: int) -> Int[Tensor, "n pos"]:
    """Sequences in which no token repeats: BOS if there is one, then content in random order."""
    config = model.config
    special = [t for t in (config.bos_token_id, config.pad_token_id) if t is not None]
    content = torch.tensor([t for t in range(config.d_vocab) if t not in special])
    has_bos = config.bos_token_id is not None
    longest = min(_LONGEST, config.n_train or config.n_ctx, config.n_ctx) - has_bos
    length = min(longest, len(content))
    if length < 2:
        raise ShapeError(
            f"a sample needs 2 different content tokens and positions, this model has "
            f"{len(content)} (d_vocab={config.d_vocab}) and {longest} (n_ctx={config.n_ctx})"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(n, len(content), generator=generator).argsort(1)[:, :length]
    tokens = content[order]
    if config.bos_token_id is not None:
        tokens = torch.cat([torch.full((n, 1), config.bos_token_id), tokens], 1)
    return tokens.to(model.device)


def _split(model: Decoder, sample: Tensor, layer: int, head: int) -> ScoreSplit:
    split = score_frequencies if model.config.positions == "rotary" else score_terms
    return split(model, sample, layer, head)


def _by_distance(split: ScoreSplit, *, has_bos: bool) -> xr.DataArray:
    """Mean over rows of a key's score above the mean of its row, by example and distance.

    BOS is left out: it stands at another distance in every row, and often above all others.
    """
    score = split.score.where(np.isfinite(split.score))
    if has_bos:
        score = score.isel(query_pos=slice(1, None), key_pos=slice(1, None))
    above = (score - score.mean("key_pos")).transpose("example", "query_pos", "key_pos").values
    # Far distances occur in few rows: half the length is the last that half of the rows have.
    kept = max(1, above.shape[1] // 2)
    found = [np.diagonal(above, -lag, 1, 2).mean(1) for lag in range(kept)]
    return xr.DataArray(
        np.stack(found, 1), dims=("example", "distance"), coords={"distance": range(kept)}
    )


def _singular(model: Decoder, layer: int, head: int, *, distance: int | None) -> xr.DataArray:
    circuits = {
        "qk": qk_circuit(model, layer, head, distance=distance, space="residual"),
        "ov": ov_circuit(model, layer, head, space="residual"),
    }
    # The triangles of A and of B's transpose have the singular values of A B, at d_head's size.
    values = [
        torch.linalg.svdvals(
            torch.linalg.qr(circuit.A.double()).R @ torch.linalg.qr(circuit.B.double().mT).R.mT
        )
        .cpu()
        .numpy()
        for circuit in circuits.values()
    ]
    return xr.DataArray(
        np.stack(values),
        dims=("circuit", "rank"),
        coords={"circuit": list(circuits), "rank": range(1, len(values[0]) + 1)},
    )


def _copying(weights: xr.Dataset, behaviour: xr.Dataset, at: tuple[int, int]) -> Copying:
    of = {"layer": at[0], "head": at[1]}
    return Copying(
        score=float(weights["score"].sel(of)),
        random=(float(weights["random_low"]), float(weights["random_high"])),
        first=float(weights["top"].sel(k=1, layer=at[0], head=at[1])),
        first_chance=float(weights["top_chance"].sel(k=1)),
        behaviour=float(behaviour["mean"].sel(of)),
        behaviour_interval=(float(behaviour["low"].sel(of)), float(behaviour["high"].sel(of))),
        behaviour_chance=float(behaviour["chance"].sel(of)),
    )


def _partners(compositions: xr.Dataset, name: str) -> pd.DataFrame:
    frame = strongest_compositions(compositions, top=None)
    mine = (frame["earlier"] == name) | (frame["later"] == name)
    return frame[mine & frame["stands_out"].astype(bool)].head(_PARTNERS).reset_index(drop=True)


def _through(
    model: Decoder, at: tuple[int, int], distance: int | None, compositions: xr.Dataset
) -> Iterable[Through]:
    """Earlier heads whose write this head's keys hold above chance, the strongest first."""
    layer, head = at
    scores = compositions["score"].sel(through="K", later_layer=layer, later_head=head)
    bar = float(compositions["random_largest"])
    pairs = [
        (float(scores.sel(earlier_layer=one, earlier_head=other)), one, other)
        for one in range(layer)
        for other in range(model.config.n_heads)
    ]
    query, key = qk_factors(model, layer, distance=distance, norms="folded")
    embedding = model.W_E.detach().double()
    for _, earlier_layer, earlier_head in sorted((p for p in pairs if p[0] > bar), reverse=True):
        value, out = ov_factors(model, earlier_layer, norms="folded")
        written = embedding @ value[earlier_head] @ (out[earlier_head] @ key[head])
        own = top_share(embedding @ query[head], written.mT, (1,))[0]
        yield Through((earlier_layer, earlier_head), own)


def _caveats(model: Decoder, layer: int) -> tuple[str, ...]:
    said: dict[str, list[str]] = {}
    for circuit in ("qk", "ov"):
        for words in circuit_caveats(model, layer, circuit=circuit):
            said.setdefault(words, []).append(circuit.upper())
    return tuple(f"{' and '.join(circuits)}: {words}" for words, circuits in said.items())


def _plain(value: Any) -> Any:
    """`value` with tuples as lists and NaN as None: what JSON can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
