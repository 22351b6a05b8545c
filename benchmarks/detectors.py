"""What the usual test and ours say of the decoys and of true induction heads, side by side.

    python benchmarks/detectors.py                     prints the page
    python benchmarks/detectors.py docs/detectors.md   writes it

The usual test is TransformerLens' `detect_head(model, "block block", "induction_head")`, on a
block of random tokens that recurs at once: at the distance that the decoys were trained at, and at
another. Ours is `induction(model)`. Half a minute on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Generator
from transformer_lens.head_detector import detect_head

from headstream.analyses import InductionResult, induction
from headstream.analyses.patching.cuts.sets import LEAST_RECOVERED
from headstream.analyses.studies.induction_claims import HEAD, PART
from headstream.models import Decoder, list_models, load
from headstream.models.names import head_name

WANTED = (
    "constructed-induction",
    "induction-2l",
    "induction-2l-rotary",
    "decoy-2l",
    "decoy-2l-rotary",
    "induction-1l",
)
TRAINED_AT, ELSEWHERE = 32, 20
BLOCKS = 16
# The usual test calls a head an induction head from about here on, as a share of an ideal head's.
PASSES = 0.4


def main(arguments: Sequence[str]) -> None:
    """Print the page, or write it to the file that is named."""
    shipped = {card.name for card in list_models()}
    text = page([load(name) for name in WANTED if name in shipped])
    if arguments:
        Path(arguments[0]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


def page(models: Sequence[Decoder]) -> str:
    """The whole page as Markdown."""
    rows = [row for model in models for row in table_rows(model)]
    share = f"{LEAST_RECOVERED:.0%}"
    parts = [f"{row[0]} {row[1]}" for row in rows if row[9] == PART]
    part = f"these are {', '.join(parts)}" if parts else "no head is one"
    head = [
        "model",
        "head",
        "`detect_head`, 32 (of ideal)",
        f"`detect_head`, {ELSEWHERE} (of ideal)",
        "usual verdict",
        "score, least",
        "random gaps",
        "other content",
        "elsewhere",
        "our label",
        "evidence",
    ]
    lines = [
        "# Two tests for induction heads, side by side",
        "",
        "Made by `python benchmarks/detectors.py docs/detectors.md` "
        f"(transformer-lens {version('transformer-lens')}); not edited by hand.",
        "",
        "The usual test repeats a block of random tokens at once, `<bos> BLOCK BLOCK`, and asks "
        "how much attention goes to the token after the earlier copy. A head that copies from one "
        "fixed distance, whatever stands there, passes it if the block has that length. Both "
        "decoys were trained at distance 32. `detect_head` is TransformerLens' (measure `mul`, "
        f"mean of {BLOCKS} blocks), with its share of what an ideal head scores in brackets, since "
        "it divides by rows that have nothing to find. Columns name the length of the block in "
        "tokens; a model too short for 32 is tested at the longest that fits (31 or 23). The usual "
        f"verdict is that of the longer block: yes from {PASSES:g} of ideal on.",
        "",
        "Ours is `headstream induction MODEL`: the least score over several distances, the score "
        "at random gaps, and the most that two controls take (the same positions with other "
        'content; as far back with the content elsewhere). "induction head" also needs a model '
        "that continues repeats, a head that copies, and the cut: all such heads cut together must "
        f"raise the loss on repeats, by the one rule, and the head must take back {share} of that "
        f"when it is restored alone, or else cost {share} of it, by the same rule, when it is cut "
        "alone. Many equal heads that stand in for one another may each give back less: where "
        "none has the label, those that copy and, restored alone, surely give something back and "
        f'{share} of an equal part or more, are each an "induction head of a set". In the table '
        f"{part}.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *summary(rows),
    ]
    return "\n".join(lines) + "\n"


def table_rows(model: Decoder) -> list[list[str]]:
    """One row a head: both tests."""
    longest = min(TRAINED_AT, (model.config.n_ctx - 1) // 2, model.config.d_vocab - 1)
    usual = {length: usual_scores(model, length) for length in (longest, ELSEWHERE)}
    found = induction(model)
    rows = []
    for layer, head in np.ndindex(model.config.n_layers, model.config.n_heads):
        cell = found.data.sel(layer=layer, head=head)
        shares = {length: scores[layer, head] / ideal(length) for length, scores in usual.items()}
        rows.append(
            [
                model.name,
                head_name(layer, head),
                *(f"{usual[at][layer, head]:.2f} ({shares[at]:.2f})" for at in usual),
                "induction head" if shares[longest] >= PASSES else "no",
                f"{float(cell['induction'].min()):.2f}",
                f"{float(cell['gapped']):.2f}",
                f"{float(cell['position_control'].max()):.2f}",
                f"{float(cell['content_control'].max()):.2f}",
                label := str(cell["label"].item()),
                evidence(found, head_name(layer, head), label),
            ]
        )
    return rows


def usual_scores(model: Decoder, length: int) -> np.ndarray:
    """[layer, head], mean over blocks of `length` tokens drawn without replacement."""
    assert model.vocab is not None
    bos = model.config.bos_token_id
    words = [word for token, word in enumerate(model.vocab) if token != bos]
    generator = Generator().manual_seed(0)
    found = []
    for _ in range(BLOCKS):
        order = torch.randperm(len(words), generator=generator)[:length].tolist()
        block = " ".join(words[token] for token in order)
        with torch.no_grad():
            found.append(detect_head(model, f"{block} {block}", "induction_head"))
    mean: np.ndarray = torch.stack(found).mean(0).numpy()
    return mean


def ideal(length: int) -> float:
    """What `detect_head` gives a perfect head: the rows that have a target, of all rows."""
    return length / (2 * length + 1)


def evidence(found: InductionResult, head: str, label: str) -> str:
    """What the label rests on; those of the census are measured."""
    said = {claim.id: str(claim.evidence) for claim in found.claims}
    return said.get(f"induction.{head}", "-" if label == "none" else "MEASURED")


def summary(rows: Sequence[Sequence[str]]) -> list[str]:
    """How often the two agree, in words."""
    fooled = [row for row in rows if row[4] != "no" and row[9] not in (HEAD, PART)]
    both = [row for row in rows if row[4] != "no" and row[9] in (HEAD, PART)]
    missed = [row for row in rows if row[4] == "no" and row[9] in (HEAD, PART)]
    names = sorted({row[0] for row in fooled})
    return [
        f"The usual test names {len(fooled) + len(both)} of {len(rows)} heads. {len(both)} of them "
        f"are induction heads by ours as well; {len(fooled)} are not"
        + (f" ({', '.join(names)})." if names else ".")
        + f" Ours names {len(missed)} that the usual test does not."
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
