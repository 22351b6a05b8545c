"""The prompts: what the model read, token by token, and where the two versions differ."""

from __future__ import annotations

import json
from typing import Any

from headstream.models.errors import ResultError
from headstream.reports import formats
from headstream.reports.blocks import Block, Fold, Heading, Prose, Section
from headstream.reports.study import PAIRED, Item, Study
from headstream.reports.tables import Cell, Column, Group, Table, table
from headstream.reports.tokens import segments, visible

MOST_PAIRS = 100


def prompts(study: Study) -> Section | None:
    """The prompt pairs of the patching results, each distinct set once; None without any."""
    sets: dict[str, tuple[list[dict[str, Any]], list[Item]]] = {}
    for item in study.of_kinds(*PAIRED):
        pairs = list(item.details.get("prompts") or [])
        if pairs:
            sets.setdefault(json.dumps(pairs), (pairs, []))[1].append(item)
    if not sets:
        return None
    blocks: list[Block] = []
    for place, (pairs, items) in enumerate(sets.values(), 1):
        if len(sets) > 1:
            used = formats.listing([item.name for item in items])
            blocks.append(Heading(f"Prompts of: {used}", f"prompts-{place}"))
        blocks += _blocks(pairs, place)
    return Section(
        "prompts",
        "Prompts",
        "The model reads each prompt in two versions. On the clean one it should give the answer; "
        "the corrupted one has some tokens replaced, so that it should not. All else is equal, so "
        "what differs inside the model is due to the replaced tokens, which are marked and "
        "starred. Spaces are shown as ·, line breaks as ⏎.",
        tuple(blocks),
    )


def _blocks(pairs: list[dict[str, Any]], place: int) -> list[Block]:
    for number, pair in enumerate(pairs, 1):
        _check(pair, number)
    first = pairs[0]
    blocks: list[Block] = [Prose(_sentence(pairs)), diff_table(first, f"Pair 1 of {len(pairs)}")]
    if len(pairs) > 1:
        shown = pairs[:MOST_PAIRS]
        note = (
            []
            if len(shown) == len(pairs)
            else [
                Prose(f"Shown are the first {len(shown)}; all {len(pairs)} are in the page's JSON.")
            ]
        )
        summary = f"All {len(pairs)} pairs" if not note else f"The first {len(shown)} pairs"
        blocks.append(Fold(summary, (*note, _all_pairs(shown))))
    return blocks


def _check(pair: dict[str, Any], number: int) -> None:
    """Every list of a pair has one entry a position, or nothing may be drawn from it."""
    sizes = {name: len(pair[name]) for name in _SEQUENCES if pair.get(name) is not None}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ResultError(f"prompt pair {number} has lists of different lengths: {listed}")


_SEQUENCES = ("clean", "corrupted", "clean_tokens", "corrupted_tokens", "mask")


def changed(pair: dict[str, Any]) -> list[int]:
    """Positions whose token differs between the two versions."""
    both = zip(pair["clean"], pair["corrupted"], strict=True)
    return [index for index, (clean, corrupted) in enumerate(both) if clean != corrupted]


def _sentence(pairs: list[dict[str, Any]]) -> str:
    lengths = sorted({len(pair["clean"]) for pair in pairs})
    replaced = sorted({len(changed(pair)) for pair in pairs})
    return (
        f"{formats.sentence(formats.count(len(pairs), 'pair'))[:-1]}, "
        f"{_range(lengths)} tokens long, with {_range(replaced)} "
        f"{'token' if replaced == [1] else 'tokens'} replaced. The two versions of a pair have "
        "equal length, so positions line up."
    )


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def diff_table(pair: dict[str, Any], caption: str) -> Table:
    """One pair as rows of positions, clean above corrupted, broken into lines that fit a page."""
    n = len(pair["clean"])
    differing = set(changed(pair))
    mask = pair.get("mask") or [1] * n
    roles: dict[int, str] = {}
    for name, position in (pair.get("roles") or {}).items():
        roles[int(position)] = f"{roles[int(position)]}, {name}" if int(position) in roles else name
    answer_pos = pair.get("answer_pos")
    width = _columns(pair)
    groups = []
    for start in range(0, n, width):
        span = range(start, min(start + width, n))
        blank = [Cell()] * (width - len(span)) if n > width else []
        rows = [[Cell("position"), *(Cell(str(index), pad=not mask[index]) for index in span)]]
        for version in ("clean", "corrupted"):
            rows.append(
                [
                    Cell(version),
                    *(
                        Cell(
                            tokens=tuple(segments(pair[f"{version}_tokens"][index])),
                            changed=index in differing,
                            pad=not mask[index],
                        )
                        for index in span
                    ),
                ]
            )
        notes = [
            ", ".join(
                text
                for text in (
                    roles.get(index, ""),
                    "answer read here" if index == answer_pos else "",
                )
                if text
            )
            for index in span
        ]
        if any(notes):
            rows.append([Cell("role"), *(Cell(note=note) for note in notes)])
        groups.append(Group("", tuple((*row, *blank) for row in rows)))
    columns = (Column(""),) + (Column(""),) * min(width, n)
    return Table(f"{caption}. {_answer(pair)}", columns, tuple(groups), sortable=False)


def _columns(pair: dict[str, Any]) -> int:
    """How many positions fit on a line, by the longest token."""
    longest = max(
        (len(visible(token)) for token in pair["clean_tokens"] + pair["corrupted_tokens"]),
        default=1,
    )
    return max(6, min(12, 110 // (longest + 4)))


def _answer(pair: dict[str, Any]) -> str:
    answer = visible(str(pair["answer_token"]))
    if pair.get("wrong_token") is None:
        return f"Answer: {answer}"
    return f"Answer: {answer}, against {visible(str(pair['wrong_token']))}"


def _all_pairs(pairs: list[dict[str, Any]]) -> Table:
    rows = []
    for number, pair in enumerate(pairs, 1):
        differences = [
            f"{index}: {visible(pair['clean_tokens'][index])} → "
            f"{visible(pair['corrupted_tokens'][index])}"
            for index in changed(pair)
        ]
        mask = pair.get("mask") or [1] * len(pair["clean"])
        text = " ".join(
            visible(token) for token, kept in zip(pair["clean_tokens"], mask, strict=True) if kept
        )
        wrong = pair.get("wrong_token")
        rows.append(
            [
                Cell(str(number), value=float(number)),
                Cell(text, code=True),
                Cell(formats.listing(differences, most=8), code=True),
                Cell(visible(str(pair["answer_token"])), code=True),
                Cell("–" if wrong is None else visible(str(wrong)), code=True),
            ]
        )
    columns = (
        Column("pair", numeric=True),
        Column("clean prompt", "tokens with a space between"),
        Column("replaced", "position: clean → corrupted"),
        Column("answer"),
        Column("against"),
    )
    return table("All pairs, one a row", columns, rows)
