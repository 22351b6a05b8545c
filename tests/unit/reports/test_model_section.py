"""What the section on the model says of its card."""

from __future__ import annotations

from dataclasses import replace

from headstream.models.zoo.registry import list_models
from headstream.reports.blocks import Fold, Terms
from headstream.reports.opening import model
from headstream.reports.study import Study

CARDS = {listed.name: dict(listed.card) for listed in list_models()}


def shown(samples, card) -> tuple[dict[str, str], dict[str, str]]:
    """Words in view and words in the folded card."""
    result = samples.patching()
    result = replace(result, provenance=replace(result.provenance, card=card))
    blocks = model(Study.of("toy", [result])).blocks
    terms = next(block for block in blocks if isinstance(block, Terms))
    folds = [block for block in blocks if isinstance(block, Fold) and "card" in block.summary]
    folded = {term.word: term.text for fold in folds for term in fold.blocks[0].terms}
    return {term.word: term.text for term in terms.terms}, folded


def test_the_story_of_the_card_is_in_view_in_words(samples) -> None:
    view, folded = shown(samples, CARDS["decoy-2l-rotary"])
    assert view["Circuit"] == (
        "fixed-distance: L1H0, L1H1, L1H2, L1H3; other: L0H0, L0H1, L0H2, L0H3"
    )
    assert view["Loss"].startswith("on repeats: 0.00002 nats, best possible 0; ")
    assert "by distance" not in view["Loss"]
    assert "by distance: 4: 13.6815" in folded["Loss"]
    assert not {"Circuit", "Purpose", "Task"} & set(folded), "said once"
    assert "loss, on repeats: 0.00002, must be below 0.02, met" in folded["Bars"]
    assert "loss on repeats without: L0H0 0.0351, " in folded["Measured"]
    assert "all other 5.3464; sequences: 128" in folded["Measured"]


def test_every_shipped_card_is_shown_without_its_nesting(samples) -> None:
    for card in CARDS.values():
        view, folded = shown(samples, card)
        assert {"Purpose", "Task", "Loss", "Circuit"} <= set(view)
        assert folded["Vocabulary"].startswith("<bos>")
        for text in folded.values():
            assert not set("{}[]") & set(text)


def test_a_model_without_a_card_has_no_fold(samples) -> None:
    view, folded = shown(samples, {})
    assert "Circuit" not in view
    assert not folded
