"""Head cards: one head's circuits in a few lines, and what stands out about it first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

from headstream.analyses.kinds import CircuitsResult
from headstream.reports import formats
from headstream.reports.blocks import Block, Fold, Heading, Prose, Term, Terms
from headstream.reports.compositions import THROUGH, Compositions
from headstream.reports.study import Item
from headstream.reports.tables import Cell, Column, Table, number_cell, table
from headstream.reports.tokens import cut, segments

# Heads beyond which only those that stand out get a card.
MANY = 24
# Strongest compositions whose heads then count as standing out.
_STRONGEST = 10
_LONGEST_TOKEN = 24


@dataclass(frozen=True)
class HeadCard:
    """One head's card with its numbers, and what stands out about it.

    Attributes:
        card: from the result's details.
        at: its entries of the result's arrays, by name.
        copies: whether it copies, by the rule of `CircuitsResult`.
        through: the earlier head in whose writes it looks for its own token, if it does.
        reads, read_by: (through, other head, score) of what stands out, the strongest first.
    """

    card: dict[str, Any]
    at: dict[str, float]
    copies: bool
    through: str | None
    reads: tuple[tuple[str, str, float], ...]
    read_by: tuple[tuple[str, str, float], ...]

    @property
    def name(self) -> str:
        return str(self.card["head"])

    @property
    def idle(self) -> bool:
        """Whether its OV circuit is zero: whatever it looks at, it hands on nothing."""
        return self.at["ov_rank"] == 0

    @property
    def looks_back(self) -> str | None:
        """The distance that its scores prefer, in words."""
        distance = self.at["distance"]
        if not math.isfinite(distance):
            return None
        known = {0: "its own token", 1: "the token before"}
        return known.get(int(distance), f"{distance:.0f} tokens back")

    def gist(self) -> str:
        """What stands out about it, in a few words."""
        words = []
        if self.through is not None:
            words.append(f"looks for its own token in what {self.through} wrote")
        if self.copies:
            words.append("copies")
        back = self.looks_back
        if back is not None:
            words.append(f"prefers {back}" if int(self.at["distance"]) < 2 else f"looks {back}")
        readers = list(dict.fromkeys(name for _, name, _ in self.read_by))
        if readers:
            words.append(f"read by {formats.listing(readers, most=4)}")
        return ", ".join(words) or "nothing stands out"


def head_cards(item: Item, compositions: Compositions) -> list[HeadCard]:
    """Every head of a circuits result, in the order of the model."""
    result = cast(CircuitsResult, item.result)
    arrays = {
        str(name): array.transpose("layer", "head").values.ravel().tolist()
        for name, array in result.data.data_vars.items()
    }
    copiers, matching = set(result.copiers), result.matching
    heads = []
    for index, card in enumerate(result.details["cards"]):
        name = str(card["head"])
        heads.append(
            HeadCard(
                card=dict(card),
                at={key: float(values[index]) for key, values in arrays.items()},
                copies=name in copiers,
                through=matching.get(name),
                reads=compositions.read_by(name),
                read_by=compositions.readers_of(name),
            )
        )
    return heads


def card_blocks(item: Item, heads: Sequence[HeadCard]) -> list[Block]:
    """A folded card a head under their heading; heads that hand on nothing share one line."""
    idle = [head.name for head in heads if head.idle]
    working = [head for head in heads if not head.idle]
    chosen = _chosen(working, item)
    blocks: list[Block] = [Heading("Each head by itself", f"{item.anchor}-cards")]
    if working and not chosen:
        blocks.append(Prose(f"None of {len(working)} heads stands out; all are in the table."))
    elif len(chosen) < len(working):
        blocks.append(
            Prose(
                f"Cards of the {len(chosen)} heads that stand out most of {len(working)}: they "
                "copy, look for their own token in what another head wrote, or take part in one "
                f"of the {_STRONGEST} strongest compositions. The others are in the table."
            )
        )
    blocks += [_card(item, head) for head in chosen]
    if idle:
        verb = "hands" if len(idle) == 1 else "hand"
        blocks.append(
            Prose(
                f"Idle: {formats.listing(idle, most=12)} {verb} on nothing, whatever "
                f"{'it looks' if len(idle) == 1 else 'they look'} at (OV is zero)."
            )
        )
    return blocks


def _chosen(heads: Sequence[HeadCard], item: Item) -> list[HeadCard]:
    """Heads that get a card: all of a small model, else those that stand out most."""
    if len(heads) <= MANY:
        return list(heads)
    strongest = Compositions.of(item.details).standing_out()[:_STRONGEST]
    named = {name for pair in strongest for name in (pair.earlier, pair.later)}
    standing = [h for h in heads if h.through is not None or h.copies or h.name in named]

    def rank(head: HeadCard) -> tuple[float, bool, float]:
        share = float(head.card["through"][0][1]) if head.through is not None else 0.0
        best = max((score for _, _, score in (*head.reads, *head.read_by)), default=0.0)
        return (-share, not head.copies, -best)

    kept = {head.name for head in sorted(standing, key=rank)[:MANY]}
    return [head for head in heads if head.name in kept]


def _card(item: Item, head: HeadCard) -> Fold:
    details, at, card = item.details, head.at, head.card
    low, high = details["copying_random"]
    chance = formats.share(details["first_chance"])
    terms = []
    if card["through"]:
        shares = [f"{name} {formats.share(share)}" for name, share in card["through"]]
        terms.append(
            Term(
                "Looks for its own token",
                "the best match for it, of all tokens that an earlier head may have noted about a "
                f"key, is the token itself: {formats.listing(shares)} of tokens (chance {chance})",
            )
        )
    back = head.looks_back
    terms.append(
        Term(
            "Prefers to look at",
            f"no distance stands out (n\u00a0=\u00a0{details['n']})"
            if back is None
            else f"{back}: the score there is {formats.short(at['distance_excess'], sign=True)} "
            f"over the mean of its row (n\u00a0=\u00a0{details['n']})",
        )
    )
    terms.append(
        Term("Scores come from", formats.minus(str(card["scores_from"]).replace(" x ", " × ")))
    )
    for word, partners in (("Reads", head.reads), ("Is read by", head.read_by)):
        if partners:
            terms.append(Term(word, by_path(partners, most=6, scores=True)))
    eigen = formats.short(at["copying"], sign=True)
    random = f"{formats.short(low, sign=True)} to {formats.short(high, sign=True)}"
    runs = (
        f"{formats.short(at['behaviour'], sign=True)} "
        f"{bounds(at['behaviour_low'], at['behaviour_high'])} in runs, "
        f"chance {formats.short(at['behaviour_chance'], sign=True)}"
        if math.isfinite(at["behaviour"])
        else "no token is raised in runs"
    )
    terms.append(
        Term(
            "Copies",
            f"eigenvalues {eigen} (random heads {random}); {formats.share(at['first'])} of tokens "
            f"raise themselves most (chance {chance}); {runs}",
        )
    )
    width = int(details["d_head"])
    terms.append(
        Term(
            "Directions in use",
            f"{at['qk_rank']:.0f} of {width} hold 90% of QK, {at['ov_rank']:.0f} of {width} of OV",
        )
    )
    return Fold(f"{head.name}: {head.gist()}", (Terms(tuple(terms)), *_pairs(head)))


def _pairs(head: HeadCard) -> list[Table]:
    """The strongest token pairs of QK and, beside them, of OV; nothing where both are zero."""
    card = head.card
    matches, moves = (
        [pair for pair in card[half] if float(pair[2]) != 0] for half in ("matches", "moves")
    )
    if not matches and not moves:
        return []
    lag = card.get("qk_distance")
    columns = (
        Column("QK: this token"),
        Column("matches this one", "" if lag is None else f"{lag} tokens back"),
        Column("score", "before scaling", numeric=True),
        Column("OV: this token"),
        Column("raises this one"),
        Column("by", "logits", numeric=True),
    )
    rows = [
        [*_pair_cells(match), *_pair_cells(move)]
        for match, move in zip_longest(matches, moves, fillvalue=None)
    ]
    caption = f"{head.name}: the strongest token pairs of each half"
    if head.reads:
        caption += ", by their own embeddings: what earlier heads wrote about them is not in it"
    return [table(caption, columns, rows, sortable=False)]


def _pair_cells(pair: Sequence[Any] | None) -> list[Cell]:
    if pair is None:
        return [Cell("–"), Cell("–"), Cell("–")]
    return [*(_token(str(token)) for token in pair[:2]), signed(float(pair[2]))]


def _token(text: str) -> Cell:
    return Cell(tokens=tuple(segments(cut(text, _LONGEST_TOKEN))))


def signed(value: float) -> Cell:
    """A score with its sign and two decimals."""
    return Cell(formats.short(value, sign=True), value=number_cell(value).value)


def bounds(low: float, high: float) -> str:
    """The interval of such a score; nothing where an end is missing."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"[{formats.short(low, sign=True)}, {formats.short(high, sign=True)}]"


def by_path(partners: Sequence[tuple[str, str, float]], *, most: int, scores: bool = False) -> str:
    """Partners grouped by what they are read through: "keys: L0H0, L0H3"."""
    groups: dict[str, list[str]] = {}
    for through, name, score in partners:
        words = f"{name} {formats.number(score)}" if scores else name
        groups.setdefault(through, []).append(words)
    return "; ".join(
        f"{THROUGH.get(through, through)}: {formats.listing(names, most=most)}"
        for through, names in groups.items()
    )
