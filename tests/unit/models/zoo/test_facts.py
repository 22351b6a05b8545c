"""What a card says of a circuit, on the model whose circuit is known; and the shipped card."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Generator

from headstream.models.decoder import Decoder
from headstream.models.store import load
from headstream.models.zoo import facts
from headstream.models.zoo.constructed import constructed_induction
from headstream.models.zoo.facts import find_circuit, head_scores, loss_without, losses
from headstream.models.zoo.recipes import RECIPES
from headstream.models.zoo.registry import list_models
from headstream.models.zoo.repeats import Repeats
from headstream.models.zoo.sequences import RepeatedBlocks, repeated_blocks


@pytest.fixture(scope="module")
def constructed() -> Decoder:
    return constructed_induction()


@pytest.fixture(scope="module")
def repeats() -> RepeatedBlocks:
    return repeated_blocks(
        48, 48, 32, generator=Generator().manual_seed(0), block=(3, 12), gap=(0, 8), lead=(0, 6)
    )


def test_scores_of_the_known_circuit_are_one(constructed: Decoder, repeats: RepeatedBlocks) -> None:
    previous, induction = head_scores(constructed, repeats)
    assert float(previous[0, 1]) == pytest.approx(1.0, abs=1e-6)
    # Up to four copies share a row's mass; their sum is what counts.
    assert float(induction[1, 2]) == pytest.approx(1.0, abs=1e-6)


def test_scores_of_uniform_heads_are_chance(constructed: Decoder, repeats: RepeatedBlocks) -> None:
    previous, induction = head_scores(constructed, repeats)
    uniform = sum(1 / (i + 1) for i in range(1, 48)) / 47
    assert previous[0, [0, 2, 3]].tolist() == pytest.approx([uniform] * 3, abs=1e-6)
    by_hand = []
    for row, predictable in zip(repeats.tokens.tolist(), repeats.predictable.tolist()):
        for at in range(48):
            if predictable[at]:
                targets = sum(row[key - 1] == row[at - 1] for key in range(1, at))
                by_hand.append(targets / at)
    assert float(induction[1, 0]) == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-6)


def test_the_circuit_is_found_and_nothing_else(
    constructed: Decoder, repeats: RepeatedBlocks
) -> None:
    names, measured = find_circuit(constructed, repeats)
    assert constructed.card is not None
    expected = {k: v for k, v in constructed.card["circuit"].items() if k != "through"}
    assert names == expected
    without = measured["loss_on_repeats_without"]
    with torch.no_grad():
        base = round(float(losses(constructed, repeats)[0]), 4)
    assert all(without[head] == base for head in names["idle"])
    # Nothing written: uniform over the vocabulary of 33.
    assert without["L0H1"] == without["L1H2"] == pytest.approx(3.4965, abs=1e-3)
    assert without["all idle"] == base


def test_a_head_that_scores_elsewhere_too_keeps_its_name(
    constructed: Decoder, repeats: RepeatedBlocks
) -> None:
    other = repeated_blocks(
        48, 40, 32, generator=Generator().manual_seed(1), block=(11, 11), gap=(6, 6)
    )
    names, _ = find_circuit(constructed, repeats, [other])
    assert names["induction"] == ["L1H2"]
    assert "fixed-distance" not in names


@pytest.mark.parametrize(
    ("block", "gap", "distance"),
    [((32, 32), (0, 0), 32), ((8, 8), (3, 3), 11), ((8, 9), (3, 3), None), ((8, 9), (2, 3), None)],
)
def test_one_distance_or_many(
    block: tuple[int, int], gap: tuple[int, int], distance: int | None
) -> None:
    assert Repeats(block=block, gap=gap).fixed_distance == distance


def test_silencing_every_head_leaves_the_embedding(
    constructed: Decoder, repeats: RepeatedBlocks
) -> None:
    everything = [(layer, head) for layer in range(2) for head in range(4)]
    assert loss_without(constructed, repeats, everything) == pytest.approx(3.4965, abs=1e-3)
    with torch.no_grad():
        assert loss_without(constructed, repeats, []) == float(losses(constructed, repeats)[0])


@pytest.fixture(scope="module")
def trained() -> tuple[Decoder, dict[str, Any]]:
    model = load("induction-2l")
    assert model.card is not None
    return model, model.card


@pytest.fixture(scope="module")
def fresh_sequences() -> RepeatedBlocks:
    """Of the kind the recipe trains on, from a seed it never saw."""
    data = RECIPES["induction-2l"].data
    assert isinstance(data, Repeats)
    return data.blocks(128, 64, Generator().manual_seed(77))


def test_the_shipped_model_meets_its_bar_on_new_sequences(
    trained: tuple[Decoder, dict[str, Any]], fresh_sequences: RepeatedBlocks
) -> None:
    model, card = trained
    with torch.no_grad():
        repeats, _ = losses(model, fresh_sequences)
    assert float(repeats) < card["bars"]["loss.on_repeats"]["below"] == 0.02
    assert card["loss"]["on_repeats"] < 0.001


@pytest.mark.parametrize(("distance", "block"), [(2, 2), (6, 6), (17, 9), (29, 13), (38, 10)])
def test_it_copies_over_every_distance_and_only_by_content(
    trained: tuple[Decoder, dict[str, Any]], distance: int, block: int
) -> None:
    model, card = trained
    generator = Generator().manual_seed(distance)
    gap = distance - block
    made = repeated_blocks(
        64, distance + block + 1, 48, generator=generator, block=(block, block), gap=(gap, gap)
    )
    with torch.no_grad():
        assert float(losses(model, made)[0]) < 0.02
    # The control: same positions, the second block replaced by tokens that have not occurred.
    control = made.tokens.clone()
    for row in control:
        unused = (~torch.isin(torch.arange(49), row)).nonzero()[:, 0]
        row[-block:] = unused[torch.randperm(len(unused), generator=generator)[:block]]
    query = torch.arange(distance + 1, distance + block)
    target = query - distance + 1
    chance = float((1 / (query + 1)).mean())
    for tokens, low, high in ((made.tokens, 0.9, 1.0), (control, 0.0, chance + 0.1)):
        _, cache = model.run_with_cache(tokens, backend="naive")
        pattern = cache["blocks.1.attn.hook_pattern"][:, :, query, target].mean((0, 2))
        heads = [int(name[-1]) for name in card["circuit"]["induction"]]
        assert all(low <= float(pattern[head]) <= high + 1e-6 for head in heads)


def test_the_shipped_card_reports_this_model(
    trained: tuple[Decoder, dict[str, Any]], fresh_sequences: RepeatedBlocks
) -> None:
    model, card = trained
    names, measured = find_circuit(model, fresh_sequences)
    assert names == card["circuit"]
    assert len(names["previous-token"]) == 1
    head = names["previous-token"][0]
    assert measured["previous_token_score"][head] > 0.9
    for kind in ("previous_token_score", "induction_score"):
        for name, value in card["measured"][kind].items():
            # Another sample of 128 sequences; scores are means over thousands of queries.
            assert measured[kind][name] == pytest.approx(value, abs=0.03)
    without = measured["loss_on_repeats_without"]
    assert without[head] > 3.0
    # The induction heads stand in for one another: each alone can go, all together cannot.
    assert max(without[name] for name in names["induction"]) < 0.05
    assert without["all induction"] > 3.0
    assert without["all idle"] < 0.02


def stands_in(constructed: Decoder) -> Decoder:
    """The constructed model with its induction head twice, as L1H2 and L1H3."""
    attn = constructed.blocks[1].attn
    with torch.no_grad():
        for weights in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O):
            weights[3] = weights[2]
    return constructed


def test_heads_that_stand_in_for_one_another_are_not_idle(
    repeats: RepeatedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stands_in(constructed_induction())
    # No head scores enough for a name: what is left of the circuit is then told by cuts alone.
    monkeypatch.setattr(facts, "NAMED_FROM", 1.1)
    names, measured = find_circuit(model, repeats)
    assert names == {"other": [f"L{layer}H{head}" for layer in range(2) for head in range(4)]}
    without = measured["loss_on_repeats_without"]
    assert without["L1H2"] == without["L1H3"] < 0.1 < 3.0 < without["all other"]
    monkeypatch.setattr(facts, "NAMED_FROM", 0.5)
    assert find_circuit(model, repeats)[0]["idle"] == ["L0H0", "L0H2", "L0H3", "L1H0", "L1H1"]


def test_the_rest_is_other_where_only_the_cut_of_all_of_it_shows(
    repeats: RepeatedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = constructed_induction()
    found: dict[int, float] = {0: 0.5, 1: 0.5004, 6: 0.502}
    monkeypatch.setattr(
        facts, "loss_without", lambda model, made, heads: found.get(len(list(heads)), 1.0)
    )
    assert "other" in find_circuit(model, repeats)[0], "six at once move 0.002"
    found[6] = 0.4995
    assert "idle" in find_circuit(model, repeats)[0], "0.0005 less is within the bound too"
    found[6] = 0.498
    assert "other" in find_circuit(model, repeats)[0], "and 0.002 less is not"


@pytest.mark.parametrize(
    "card", [pytest.param(model.card, id=model.name) for model in list_models()]
)
def test_no_shipped_card_calls_a_head_idle_that_the_loss_needs(card: Mapping[str, Any]) -> None:
    assert all(members for members in card["circuit"].values()), "no empty kind"
    idle = card["circuit"].get("idle")
    if idle is None or not isinstance(card["recipe"], Mapping):
        return  # written by hand: tested bit for bit beside the weights
    without, intact = card["measured"]["loss_on_repeats_without"], card["loss"]["on_repeats"]
    # The card's loss is over other sequences than its cuts: both stand far below the bound.
    assert card["measured"]["idle_below"] == facts.IDLE_BELOW
    assert all(abs(without[head] - intact) < facts.IDLE_BELOW for head in [*idle, "all idle"])
