"""How heads are built: what each looks for (QK), what it hands on (OV), a card a head."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headstream.analyses.evidence import Evidence
from headstream.reports import formats
from headstream.reports.blocks import (
    Block,
    Bullets,
    Fold,
    Heading,
    Prose,
    Section,
)
from headstream.reports.compositions import Compositions, composition_blocks
from headstream.reports.head_cards import (
    MANY,
    HeadCard,
    bounds,
    by_path,
    card_blocks,
    head_cards,
    signed,
)
from headstream.reports.study import Item, Study
from headstream.reports.tables import Cell, Column, Table, number_cell, table

_LAYER = re.compile(r"'blocks\.\d+\.\w+'")
_LIMITS = (
    (
        "Could, not does.",
        "Weights say what a head could do, and runs on random tokens what it did there.",
    ),
    (
        "Pairs of tokens.",
        "A card lists the few strongest of all pairs; a head may do most of its work with weaker "
        "ones.",
    ),
)


def circuits(study: Study) -> Section | None:
    """The map of compositions, a table of heads and their cards; None without such a result."""
    items = study.of_kind("circuits")
    if not items:
        return None
    blocks: list[Block] = []
    open_questions: dict[str, str] = {}
    for number, item in enumerate(items, 1):
        several = f"Study {number}: " if len(items) > 1 else ""
        blocks.append(Heading(f"{several}{item.result.title}", item.anchor))
        blocks += _one(item)
        open_questions |= {
            claim.statement: claim.reason
            for claim in item.result.claims
            if claim.evidence is Evidence.UNKNOWN
        }
    unknown = tuple(
        ("UNKNOWN:", f"{formats.minus(words)}. {formats.sentence(reason)}")
        for words, reason in open_questions.items()
    )
    blocks.append(Bullets((*_LIMITS, *unknown)))
    return Section(
        "circuits",
        "How each head is built",
        "A head has two halves, and both can be read off its weights. One, called QK, decides what "
        "it looks for: how well a token that asks (the query) matches a token that can be found "
        "(the key). The other, OV, decides what it hands on from there: which tokens it makes "
        "likelier. Heads also work in chains: a later head can use what an earlier one wrote to "
        "choose what it asks for (through its queries, Q), by what it finds a token (keys, K), or "
        "what it hands on (values, V). Every number stands beside what random weights would give. "
        "It is what a head could do; whether the answer depends on it is tested by patching.",
        tuple(blocks),
    )


def _one(item: Item) -> list[Block]:
    compositions = Compositions.of(item.details)
    heads = head_cards(item, compositions)
    rows = _table(item, heads)
    whole: Block = rows
    if rows.n_rows > MANY:
        whole = Fold(f"All {rows.n_rows} heads as a table", (rows,))
    return [
        Prose(formats.summary(item.result.summary())),
        *composition_blocks(item, compositions),
        whole,
        *card_blocks(item, heads),
        *_left_out(item),
    ]


def _table(item: Item, heads: Sequence[HeadCard]) -> Table:
    details = item.details
    low, high = details["copying_random"]
    claimed = {
        part
        for claim in item.result.claims
        if claim.evidence is Evidence.MEASURED
        for part in claim.id.split(".")
    }
    chance = formats.share(details["first_chance"])
    kept, compared = len(details["pairs"]), details["composition"]["compared"]
    among = f" among the {kept} strongest" if kept < compared else ""
    chances = formats.finite(head.at["behaviour_chance"] for head in heads)
    ends = dict.fromkeys(formats.short(end(chances, default=0), sign=True) for end in (min, max))
    columns = (
        Column("head"),
        Column("evidence", "of claims"),
        Column(
            "copies",
            f"random {formats.short(low, sign=True)} to {formats.short(high, sign=True)}",
            numeric=True,
        ),
        Column("own first", f"chance {chance}", numeric=True),
        Column(
            "copies in runs",
            f"chance {' to '.join(ends)}" if chances else "",
            numeric=True,
        ),
        Column("prefers to look at", "score over its row's mean"),
        Column("own token through", f"share of tokens, chance {chance}"),
        Column("reads", f"what stands out{among}"),
    )
    rows = []
    for head in heads:
        at = head.at
        distance = at["distance"]
        through = [(str(name), float(share)) for name, share in head.card["through"][:1]]
        rows.append(
            (
                Cell(head.name, code=True),
                Cell(evidence=Evidence.MEASURED) if head.name in claimed else Cell("–"),
                signed(at["copying"]),
                Cell(formats.share(at["first"]), value=at["first"]) if not head.idle else Cell("–"),
                Cell(
                    formats.short(at["behaviour"], sign=True),
                    note=bounds(at["behaviour_low"], at["behaviour_high"]),
                    value=number_cell(at["behaviour"]).value,
                ),
                Cell("none stands out")
                if head.looks_back is None
                else Cell(
                    head.looks_back,
                    note=formats.short(at["distance_excess"], sign=True),
                    value=distance,
                ),
                *(
                    Cell(name, note=formats.share(share), value=share, code=True)
                    for name, share in through
                ),
                *([] if through else [Cell("–")]),
                Cell(by_path(head.reads, most=4) or "–"),
            )
        )
    caption = (
        "Every head. Copies: eigenvalues of OV, 1 if each token raises itself. Own first: tokens "
        f"that raise themselves most. In runs: the same seen in {details['n']} runs on random "
        "tokens, −1 to 1, with 95% intervals. Own token through: tokens whose best match in what "
        "that earlier head wrote is the token itself"
    )
    return table(caption, columns, rows)


def _left_out(item: Item) -> list[Block]:
    """What the circuits leave out, each once: for both halves and all layers together."""
    layers: dict[str, dict[str, None]] = {}
    halves: dict[str, dict[str, None]] = {}
    for caveat in item.details["caveats"]:
        half, _, words = str(caveat).partition(": ")
        names = _LAYER.findall(words)
        words = _LAYER.sub("{}", words.replace("{", "(").replace("}", ")"))
        halves.setdefault(words, {})[half] = None
        layers.setdefault(words, {}).update(dict.fromkeys(names))
    if not halves:
        return []
    items = tuple(
        (
            f"{' and '.join(of)}:",
            formats.sentence(words.replace("{}", formats.listing(list(layers[words]), most=3))),
        )
        for words, of in halves.items()
    )
    return [Fold("What these circuits leave out", (Bullets(items),))]
