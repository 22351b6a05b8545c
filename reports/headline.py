"""The first lines of a page: the finding as a sentence, and first what speaks against it."""

from __future__ import annotations

from dataclasses import dataclass

from headstream.analyses.evidence import Evidence
from headstream.models.names import head_name
from headstream.reports import formats
from headstream.reports.paths import dominant
from headstream.reports.study import CUTS, PAIRED, Item, Study
from headstream.reports.tokens import cut

FEWEST = 6  # design.md, Inference: below this no sign-flip p-value can reach 0.05


@dataclass(frozen=True)
class Headline:
    """What the page says first.

    Attributes:
        alarms: failed checks, too few examples; shown before the finding.
        finding: what was found, in sentences.
        facts: short facts about the run, one line in all.
        tally: how many statements carry each label.
    """

    alarms: tuple[str, ...]
    finding: tuple[str, ...]
    facts: tuple[str, ...]
    tally: tuple[tuple[Evidence, int], ...]


def headline(study: Study) -> Headline:
    """The head line of a study, computed from its claims.

    A finding that cannot be put into words becomes an alarm: the page is never without its top.
    """
    alarms = _alarms(study)
    try:
        finding = _finding(study)
    except Exception as error:
        # Any error: what the sections below can still show must not be lost with it.
        words = " ".join(f"{type(error).__name__}: {error}".split())
        alarms.append(f"The finding could not be put into words: {cut(words, 300)}.")
        finding = []
    return Headline(
        alarms=tuple(alarms),
        finding=tuple(finding),
        facts=tuple(_facts(study)),
        tally=tuple(study.tally().items()),
    )


def checks(study: Study) -> tuple[int, int]:
    """(passed, made): the rows that algebra demands and that were checked in this run."""
    labels = [claim.evidence for claim, _ in study.claims()]
    passed = labels.count(Evidence.PROVEN)
    return passed, passed + labels.count(Evidence.FAILED)


def _alarms(study: Study) -> list[str]:
    alarms = []
    failed = [claim for claim, _ in study.claims() if claim.evidence is Evidence.FAILED]
    if failed:
        _, made = checks(study)
        names = formats.listing([f"{claim.id} ({claim.statement})" for claim in failed], most=3)
        alarms.append(
            f"Warning: {len(failed)} of {formats.count(made, 'check')} FAILED: {names}. Nothing "
            "below can be relied on before this is explained."
        )
    counts = {item.n for item in study.of_kinds(*PAIRED) if item.n is not None}
    few = [n for n in sorted(counts) if n < FEWEST]
    if 1 in few:
        alarms.append(
            "A demonstration on one prompt pair: it shows that something can happen, not how "
            "often, and no statement about cause is made."
        )
    elif few:
        alarms.append(
            f"Only {few[0]} prompt pairs: too few to tell an effect from chance (six is the "
            "least), so no statement about cause is made."
        )
    return alarms


def _finding(study: Study) -> list[str]:
    patchings = study.of_kind("patching")
    headed = [item for item in patchings if _has_heads(item)]
    shown = (headed or list(patchings))[:2]
    sentences = [formats.summary(item.result.summary()) for item in shown]
    for item in study.of_kind("paths")[:1]:
        if not patchings:
            sentences.append(formats.summary(item.result.summary()).replace("->", " → "))
        strongest = dominant(item, _labels(study, item))
        sentences += [strongest] if strongest else []
    # A redundant set is what single places cannot show; a list of cuts is not news beside them.
    told = ("redundant_set",) if patchings else CUTS
    sentences += [_together(item) for kind in told for item in study.of_kind(kind)[:1]]
    # Heads that copy by position restore an answer as induction heads would.
    sentences += [
        formats.summary(item.result.summary())
        for item in study.of_kind("induction")[:1]
        if patchings and any("fixed-distance" in label for label in _of_heads(item).values())
    ]
    if not patchings:
        if not (study.of_kinds("sinks", "paths") or study.cutting):
            sentences.append("No intervention was run: nothing on this page is about cause.")
        sentences += [
            formats.summary(item.result.summary())
            for kind in ("induction", "sinks", "heads", "circuits", "decomposition")
            for item in study.of_kind(kind)[:1]
        ]
    return sentences


def _facts(study: Study) -> list[str]:
    facts = []
    counts = sorted({item.n for item in study.of_kinds(*PAIRED) if item.n is not None})
    if counts:
        many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        facts.append(f"{many} prompt pair" + ("" if counts == [1] else "s"))
    passed, made = checks(study)
    if made:
        facts.append(
            f"every check passed ({passed} of {made})"
            if passed == made
            else f"{passed} of {made} checks passed"
        )
    else:
        facts.append("no identity was checked")
    origins = [item.result.provenance for item in study.items]
    models = list(dict.fromkeys(origin.model for origin in origins))
    facts.append("model " + formats.listing(models, most=3))
    for values in (
        [f"seed {origin.seed}" for origin in origins if origin.seed is not None],
        [f"{origin.dtype} on {origin.device}" for origin in origins],
    ):
        facts += list(dict.fromkeys(values))[:2]
    return facts


def _together(item: Item) -> str:
    """What cuts showed; a set by its heads: up here no heading says which set is meant."""
    text = item.result.summary()
    if item.kind == "redundant_set":
        heads = formats.listing([str(name) for name in item.details["set"]])
        text = f"the set {heads} {text.removeprefix('the set ')}"
    return formats.summary(text)


def _labels(study: Study, item: Item) -> dict[str, str]:
    """What the studies of the same model on this page call its heads: cuts before patterns."""
    weights = item.result.provenance.weights_sha256
    found: dict[str, str] = {}
    # An induction study gives a head its census label, or a better founded one.
    for kind in ("heads", "induction"):
        same = (
            other
            for other in study.of_kind(kind)
            if other.result.provenance.weights_sha256 == weights
        )
        for other in list(same)[:1]:
            found |= {head: label for head, label in _of_heads(other).items() if label != "none"}
    return found


def _of_heads(item: Item) -> dict[str, str]:
    """The labels of a census or of an induction study by head."""
    labels = item.result.data["label"]
    layers, heads = (labels[dim].values.tolist() for dim in ("layer", "head"))
    return {
        head_name(layer, head): str(labels.sel(layer=layer, head=head).item())
        for layer in layers
        for head in heads
    }


def _has_heads(item: Item) -> bool:
    return bool({"head", "kv_head"} & {str(dim) for dim in item.result.data["mean"].dims})
