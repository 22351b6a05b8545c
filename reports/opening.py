"""The opening sections: what is claimed and how well it is known; which model, run how."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.result import Provenance
from headstream.models.zoo.card_words import Part, card_parts
from headstream.reports import formats
from headstream.reports.blocks import (
    Block,
    Command,
    Fold,
    Heading,
    Legend,
    Prose,
    Section,
    Term,
    Terms,
)
from headstream.reports.study import PAIRED, Item, Study
from headstream.reports.tables import Cell, Column, Group, Table, exact, table
from headstream.reports.tokens import cut

# Findings first: what a reader came for stands above the identities that hold in every model.
_ORDER = (
    Evidence.FAILED,
    Evidence.CAUSAL,
    Evidence.MEASURED,
    Evidence.UNKNOWN,
    Evidence.PROVEN,
)
_HEADINGS = {
    Evidence.FAILED: "Over their bound",
    Evidence.CAUSAL: "Something was changed inside the model, and the output moved",
    Evidence.MEASURED: "Seen on these inputs; nothing was changed",
    Evidence.UNKNOWN: "Not established",
    Evidence.PROVEN: "Holds by arithmetic, and was checked on this model",
}
_LONGEST = 300
# What of a model's card stands in view; the rest of it is folded below.
_STORY = ("purpose", "task", "loss", "circuit")


def claims(study: Study) -> Section | None:
    """Every statement of the page with its evidence, or None if nothing is claimed."""
    pairs = study.claims()
    if not pairs:
        return None
    groups = []
    for evidence in _ORDER:
        rows = tuple(_claim_row(c, item, study) for c, item in pairs if c.evidence is evidence)
        if rows:
            groups.append(
                Group(_HEADINGS[evidence], rows, note=formats.count(len(rows), "statement"))
            )
    columns = (
        Column("statement", "id"),
        Column("evidence"),
        Column("value", "95% interval, n", numeric=True),
        Column("rests on"),
        Column("shown in"),
    )
    return Section(
        "claims",
        "What is claimed, and how well it is known",
        "Each row is one statement. The mark and the word beside it say what the statement rests "
        "on; they are computed by fixed rules, not chosen by an author. A value in brackets is "
        "a range that should hold the true value in 95 of 100 repetitions.",
        (
            Legend(),
            Table("Statements, grouped by evidence", columns, tuple(groups), sortable=False),
        ),
    )


def _claim_row(claim: Claim, item: Item, study: Study) -> tuple[Cell, ...]:
    behind = []
    if claim.interval is not None:
        behind.append(formats.interval(*claim.interval, sign=formats.is_signed(claim.unit)))
    if claim.n is not None:
        behind.append(f"n = {claim.n}")
    anchor, title = _place(claim, item, study)
    return (
        Cell(
            formats.sentence(claim.statement),
            note=" · ".join([claim.id, *([item.manner] if item.kind in PAIRED else [])]),
        ),
        Cell(evidence=claim.evidence),
        Cell(
            formats.with_unit(claim.value, claim.unit),
            note=", ".join(behind),
            value=exact(claim.value),
        ),
        Cell(_reason(claim, item) or "–"),
        Cell(title, href=f"#{anchor}"),
    )


def _reason(claim: Claim, item: Item) -> str:
    """What a claim rests on; the six choices of a circuit's share stand once, in its section."""
    choices = item.details.get("choices") if item.kind == "faithfulness" else None
    said = "; ".join(f"{what}: {choice}" for what, choice in (choices or {}).items())
    reason = claim.reason.removesuffix(f"; {said}") if said else claim.reason
    return formats.minus(reason)


def _place(claim: Claim, item: Item, study: Study) -> tuple[str, str]:
    """Anchor and name of the part that shows a claim."""
    names = {"patching": "map", "heads": "heads", "decomposition": "writes", "audit": "checks"}
    names |= {"redundant_set": "set", "faithfulness": "circuit", "ablation": "cuts"}
    if claim.evidence in (Evidence.PROVEN, Evidence.FAILED):
        return "audit", names["audit"]
    number = [other.anchor for other in study.of_kind(item.kind)].index(item.anchor) + 1
    several = len(study.of_kind(item.kind)) > 1
    return item.anchor, names.get(item.kind, item.kind) + (f" {number}" if several else "")


def model(study: Study) -> Section:
    """Which model, with which weights, run how, and the command that does it again."""
    blocks: list[Block] = []
    origins = _origins(study)
    for place, origin in enumerate(origins, 1):
        if len(origins) > 1:
            blocks.append(Heading(f"Model {place}: {origin.model}", f"model-{place}"))
        blocks += _origin_blocks(origin)
    blocks.append(_runs(study))
    commands = dict.fromkeys(_command(item.result.provenance) for item in study.items)
    blocks.append(Prose("To compute it again:"))
    blocks.append(Command("\n".join(commands)))
    return Section(
        "model",
        "Model and run",
        "The SHA-256 is a fingerprint of the weights: two models with the same one are the same "
        "model, whatever their files are called. Together with the seed and the versions it is "
        "what somebody else needs to get the same numbers.",
        tuple(blocks),
    )


def _origins(study: Study) -> list[Provenance]:
    """One provenance a distinct model; what differs from run to run is in the table of runs."""
    found: dict[str, Provenance] = {}
    for item in study.items:
        origin = item.result.provenance
        key = json.dumps([origin.model, origin.weights_sha256, origin.config], sort_keys=True)
        found.setdefault(key, origin)
    return list(found.values())


def _origin_blocks(origin: Provenance) -> list[Block]:
    terms = [
        Term("Name", origin.model),
        Term("Weights SHA-256", origin.weights_sha256, code=True),
        Term("Shape", _shape(origin.config)),
    ]
    card = card_parts(origin.card)
    terms += [
        Term(part.word.capitalize(), cut(_story(part), _LONGEST))
        for word in _STORY
        for part in card
        if part.word == word
    ]
    blocks: list[Block] = [Terms(tuple(terms))]
    shown = {term.text for term in terms}
    whole = [(part.word.capitalize(), cut(part.line, 4 * _LONGEST)) for part in card]
    rest = tuple(Term(word, text) for word, text in whole if text not in shown)
    if rest:
        blocks.append(Fold("The rest of the model's card", (Terms(rest),)))
    config = tuple(Term(key, _flat(value), code=True) for key, value in origin.config.items())
    blocks.append(Fold("Full configuration", (Terms(config),)))
    versions = tuple(Term(name, text, code=True) for name, text in origin.versions.items())
    blocks.append(Fold("Versions", (Terms(versions),)))
    return blocks


def _story(part: Part) -> str:
    """A part in one line, without how a loss goes with this and that."""
    rows = tuple(row for row in part.rows if not row[0].startswith("by "))
    return replace(part, rows=rows).line


def _shape(config: Mapping[str, Any]) -> str:
    """The configuration as one line that a reader of transformers can take in."""

    def get(name: str) -> Any:
        return config.get(name)

    parts = []
    if get("n_layers") is not None:
        parts.append(formats.count(int(get("n_layers")), "layer"))
    if get("n_heads") is not None:
        one = get("n_heads") == 1
        heads = f"{get('n_heads')} {'head' if one else 'heads'} of width {get('d_head')} in each"
        if get("n_kv_heads") is not None and get("n_kv_heads") != get("n_heads"):
            heads += f" ({get('n_kv_heads')} key/value heads)"
        parts.append(heads)
    if get("d_model") is not None:
        parts.append(f"stream of width {get('d_model')}")
    parts.append(f"MLP of {get('d_mlp')} neurons" if get("d_mlp") else "attention only, no MLP")
    for name, text in (
        ("positions", "positions: {}"),
        ("norm", "norm: {}"),
        ("d_vocab", "{} tokens in the vocabulary"),
        ("n_ctx", "at most {} tokens at once"),
    ):
        if get(name) is not None:
            parts.append(text.format(get(name)))
    return " · ".join(parts)


def _runs(study: Study) -> Table:
    columns = (
        Column("result"),
        Column("backend"),
        Column("dtype"),
        Column("device"),
        Column("seed", numeric=True),
        Column("examples", numeric=True),
    )
    rows = []
    several = len(_origins(study)) > 1
    for item in study.items:
        origin = item.result.provenance
        # A title names the model: of one model's results it says no more than their names.
        title = item.result.title if several else ""
        n = item.n if item.n is not None else item.details.get("n")
        rows.append(
            (
                Cell(item.name, note=title, href=f"#{item.anchor}"),
                Cell(origin.backend, code=True),
                Cell(origin.dtype, code=True),
                Cell(origin.device, code=True),
                Cell("–" if origin.seed is None else str(origin.seed), value=origin.seed),
                Cell("–" if n is None else str(n), value=None if n is None else float(n)),
            )
        )
    return table("How each result was run", columns, rows, sortable=False)


def _command(origin: Provenance) -> str:
    if origin.command:
        return origin.command
    seed = f" --seed {origin.seed}" if origin.seed is not None else ""
    return f"headstream report {shlex.quote(origin.model)}{seed} -o report.html"


def _flat(value: Any) -> str:
    """Any plain JSON value as one line; a long one is cut in its middle."""
    if isinstance(value, str):
        return cut(value, 4 * _LONGEST)
    if isinstance(value, Mapping):
        return cut("; ".join(f"{key}: {_flat(item)}" for key, item in value.items()), 4 * _LONGEST)
    if isinstance(value, (list, tuple)):
        return cut(", ".join(_flat(item) for item in value), 2 * _LONGEST)
    return "–" if value is None else str(value)
