"""The census on patterns built by hand: it finds what is there, and is not fooled by position."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.heads import DEFINITIONS, SCORES, score_heads
from headstream.circuits.labels import (
    LABELS,
    MOST_CHANCE,
    label_heads,
    percentile_interval,
    short_notes,
    too_short,
)
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import BackendError, ShapeError, TokenError
from headstream.models.store import load
from headstream.models.zoo.constructed import constructed_induction

HeadPattern = Callable[[Tensor], Tensor]
N = 8
VOCAB = 33


def on_keys(keys: Tensor) -> Tensor:
    """All mass of each query on one key; on the first token where the key is -1."""
    return torch.nn.functional.one_hot(keys.clamp(min=0), keys.shape[1]).float()


def last_copy(tokens: Tensor) -> Tensor:
    """Key of the last earlier copy of each query's token, -1 if there is none."""
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    return (same * torch.arange(1, tokens.shape[1] + 1)).amax(-1) - 1


def induction(tokens: Tensor) -> Tensor:
    copy = last_copy(tokens)
    return on_keys(torch.where(copy >= 0, copy + 1, -1))


def back(offset: int) -> HeadPattern:
    return lambda tokens: on_keys(
        (torch.arange(tokens.shape[1]) - offset).clamp(min=-1).expand_as(tokens)
    )


def uniform(tokens: Tensor) -> Tensor:
    n = tokens.shape[1]
    flat = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    return flat.expand(len(tokens), n, n)


def mixed(part: float, one: HeadPattern, other: HeadPattern) -> HeadPattern:
    return lambda tokens: part * one(tokens) + (1 - part) * other(tokens)


def model_with(*heads: HeadPattern) -> tuple[Decoder, AbstractContextManager[Any]]:
    """A one-layer model, and a context in which its heads have these patterns."""
    config = DecoderConfig(
        n_layers=1,
        n_heads=len(heads),
        d_model=VOCAB,
        d_head=2,
        d_vocab=VOCAB,
        n_ctx=40,
        positions="none",
        norm="none",
        bos_token_id=0,
    )
    model = Decoder(config)
    with torch.no_grad():
        model.embed.W_E.copy_(torch.eye(VOCAB))
    seen: dict[str, Tensor] = {}

    def read(embedding: Tensor, hook: Any) -> None:
        seen["tokens"] = embedding.argmax(-1)

    def write(pattern: Tensor, hook: Any) -> Tensor:
        return torch.stack([head(seen["tokens"]) for head in heads], 1)

    hooks = [("hook_embed", read), ("blocks.0.attn.hook_pattern", write)]
    return model, model.hooks(fwd_hooks=hooks)


def census(*heads: HeadPattern, **options: Any) -> Any:
    model, context = model_with(*heads)
    with context:
        return score_heads(model, n=N, **options)


def test_every_kind_is_found_and_nothing_else() -> None:
    found = census(back(1), lambda t: on_keys(last_copy(t)), back(0), induction, back(99), uniform)
    labels = [*(LABELS[name] for name in LABELS), "none"]
    assert found.data["label"].values[0].tolist() == labels
    assert found.found("induction pattern") == ["L0H3"]
    values = found.data["value"].squeeze("layer")
    for head, name in enumerate(LABELS):
        assert values.sel(score=name, head=head).item() == pytest.approx(1.0, abs=1e-6)
    # The ideal induction head never looks where the control looks for it, and rests on BOS else.
    assert values.sel(score="induction_control", head=3).item() == 0.0
    np.testing.assert_allclose(
        values.sel(head=5, score=values["score"] != "copying"),
        found.data["chance"][:-1],
        atol=1e-6,  # float32 patterns
    )


@pytest.mark.parametrize("distances", [None, [2, 16, 28], [6], [16]])
def test_the_constructed_circuit_is_found_whole_and_alone(distances: list[int] | None) -> None:
    """Ground truth: no miss and no false find, also where a distance of 2 helps position."""
    model = constructed_induction()
    assert model.card is not None
    found = score_heads(model, n=N, distances=distances)
    truth = model.card["circuit"]
    assert found.found("previous-token") == truth["previous-token"] == ["L0H1"]
    assert found.found("induction pattern") == truth["induction"] == ["L1H2"]
    assert found.found("none") == truth["idle"]
    copying = found.to_frame()["copying"]
    assert copying["L1H2"] == pytest.approx(1.0, abs=1e-9)
    assert copying.drop("L1H2").isna().all()  # they write nothing that W_U reads


@pytest.mark.parametrize("distances", [[2], [3], [4], [2, 5]])
@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("name", ["decoy-2l", "decoy-2l-rotary", "constructed-and"])
def test_a_head_that_rests_in_a_short_sequence_gets_no_label(
    name: str, n: int, distances: list[int]
) -> None:
    """Among 4 keys heads rest on their own token or the first; in long sequences they do not."""
    model = load(name)
    found = score_heads(model, n=n, distances=distances)
    assert float(found.data["chance"].sel(score="current_token")) > 0.2
    assert set(found.data["label"].values.ravel()) == {"none"}
    assert "too short for the labels previous-token, current-token, sink: chance" in str(found)
    # Where chance is low enough they have the labels of the usual sequences.
    usual, short = score_heads(model), score_heads(model, n=n, distances=[6])
    assert (short.data["label"].values == usual.data["label"].values).all()
    assert "too short" not in str(short)


def test_short_sequences_spare_what_has_a_control() -> None:
    found = score_heads(load("constructed-induction"), n=N, distances=[2, 5])
    assert found.found("induction pattern") == ["L1H2"]
    assert found.found("previous-token") == []
    note = (
        "sequences too short for the labels previous-token, current-token, sink: chance is 0.28 in "
        "them, and these labels need 0.2 or less"
    )
    # By hand: 1 + 4 and 1 + 7 tokens, queries after the first.
    by_hand = [np.mean([1 / (q + 1) for q in range(1, n)]) for n in (5, 8)]
    assert f"{np.mean(by_hand):.2f}" == "0.28"
    assert found.details["notes"][0] == note
    assert found.details["label_most_chance"] == MOST_CHANCE == 0.2


def test_the_rule_holds_from_chance_alone() -> None:
    chance = dict.fromkeys(LABELS, 0.2)
    assert too_short(chance) == short_notes(chance) == []
    chance = dict.fromkeys(LABELS, 0.201)
    assert too_short(chance) == ["previous_token", "current_token", "sink"]
    (note,) = short_notes(chance | {"sink": 0.1})
    assert "the labels previous-token, current-token: chance is 0.20" in note
    ones = np.ones((1, 4, 1, 1))
    scores = dict.fromkeys((*LABELS, "induction_control", "duplicate_control"), 0 * ones)
    for name in ("previous_token", "current_token", "sink"):
        assert label_heads(scores | {name: ones}, chance, seed=0).tolist() == [["none"]]
    for name in ("induction", "duplicate_token"):
        labels = label_heads(scores | {name: ones}, chance, seed=0)
        assert labels.tolist() == [[LABELS[name]]]


def test_a_head_that_copies_from_a_fixed_distance_is_no_induction_pattern() -> None:
    """Perfect at its own distance, where position alone explains it; blind at the others."""
    found = census(back(9), back(10), distances=[10, 14, 20])
    assert found.data["label"].values.tolist() == [["none", "none"]]
    by_distance = found.data["induction_by_distance"].squeeze("layer")
    control = found.data["control_by_distance"].squeeze("layer")
    # Offset 9 = distance 10 - 1.
    assert by_distance.sel(head=0).values.tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    assert control.sel(head=0).values.tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    duplicate = found.data["duplicate_by_distance"].squeeze("layer")
    assert duplicate.sel(head=1).values.tolist() == pytest.approx([1, 0, 0], abs=1e-6)


def test_at_its_own_distance_alone_only_the_control_unmasks_it() -> None:
    found = census(back(9), induction, distances=[10])
    assert found.data["value"].sel(score="induction").values[0].tolist() == [1.0, 1.0]
    assert found.data["value"].sel(score="induction_control").values[0].tolist() == [1.0, 0.0]
    assert found.found("induction pattern") == ["L0H1"]
    assert found.notes[0] == "one repeat distance: only the control tells content from position"


def test_one_blind_distance_takes_the_label_away() -> None:
    def near(tokens: Tensor) -> Tensor:
        copy = last_copy(tokens)
        close = (copy >= 0) & (torch.arange(tokens.shape[1]) - copy < 15)
        return on_keys(torch.where(close, copy + 1, -1))

    assert census(near, distances=[8, 14]).found("induction pattern") == ["L0H0"]
    found = census(near, distances=[8, 10, 14, 20])
    assert found.found("induction pattern") == []
    # Three of four distances: the mean would have passed.
    assert found.data["value"].sel(score="induction").item() == pytest.approx(0.75, abs=1e-6)


def test_the_strongest_label_stays_and_a_sink_gives_way() -> None:
    found = census(
        mixed(0.6, back(1), back(0)), mixed(0.45, induction, back(99)), mixed(0.9, uniform, back(1))
    )
    assert found.data["label"].values[0].tolist() == ["previous-token", "induction pattern", "none"]
    assert found.data["value"].sel(score="sink")[0, 1] > 0.9


def test_chance_is_uniform_attention_by_hand() -> None:
    found = census(uniform, distances=[4, 6], length=3)
    chance = {str(s): found.data["chance"].sel(score=s).item() for s in SCORES}

    def mean(start: int, stop: int) -> float:
        return float(np.mean([1 / (q + 1) for q in range(start, stop)]))

    # BOS + 4 + 3 and BOS + 6 + 3 tokens; queries of the second block are 5..7 and 7..9.
    assert chance["induction"] == pytest.approx((mean(5, 8) + mean(7, 10)) / 2, abs=1e-12)
    assert chance["sink"] == pytest.approx((mean(1, 8) + mean(1, 10)) / 2, abs=1e-12)
    assert chance["induction_control"] == chance["duplicate_token"] == chance["induction"]
    assert chance["previous_token"] == chance["current_token"] == chance["sink"]
    assert chance["copying"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_models_have_no_labels(seed: int) -> None:
    for positions in ("learned", "shortformer", "rotary", "none"):
        config = DecoderConfig(
            n_layers=2,
            n_heads=4,
            d_model=32,
            d_head=8,
            d_vocab=40,
            n_ctx=40,
            positions=positions,
            d_mlp=64,
        )
        found = score_heads(Decoder(config, seed=seed), n=N, seed=seed)
        assert set(found.data["label"].values.ravel()) == {"none"}
        assert repr(found) == "<census of 8 heads, n = 8; none stands out>"


def test_intervals_hold_the_score_and_shrink_with_certainty() -> None:
    def noisy(tokens: Tensor) -> Tensor:
        part = (tokens[:, 1] % 5 / 5.0)[:, None, None]
        return part * back(1)(tokens) + (1 - part) * back(99)(tokens)

    found = census(noisy, back(1)).data.sel(score="previous_token")
    low, value, high = (found[name].values[0] for name in ("low", "value", "high"))
    assert low[0] < value[0] < high[0]
    assert low[1] == pytest.approx(value[1], abs=1e-6)
    assert found["margin"].values[0] == pytest.approx(value - found["chance"].item())


def test_percentile_interval_of_a_mean() -> None:
    values = np.random.default_rng(0).normal([0.0, 5.0, 10.0], size=(400, 3))
    low, high = percentile_interval(values, seed=0)
    # 1.96 standard errors; the bootstrap's own noise at 1000 draws is a few per cent of that.
    np.testing.assert_allclose(high - low, 2 * 1.96 * values.std(0) / 20, rtol=0.15)
    assert np.all((low < values.mean(0)) & (values.mean(0) < high))


def test_a_score_just_below_the_margin_earns_nothing() -> None:
    still = np.zeros((1, 4, 1, 2))
    scores = dict.fromkeys((*LABELS, "induction_control", "duplicate_control"), still)
    chance = dict.fromkeys(LABELS, 0.1)
    scores["current_token"] = still + np.array([0.39, 0.41])
    assert label_heads(scores, chance, seed=0).tolist() == [["none", "current-token"]]


def test_same_seed_same_census_and_no_global_state() -> None:
    before = torch.random.get_rng_state()
    model = Decoder(
        DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=20, n_ctx=20), seed=0
    )
    first, again = score_heads(model, n=4, seed=3), score_heads(model, n=4, seed=3)
    assert first.data.identical(again.data)
    assert not first.data["value"].equals(score_heads(model, n=4, seed=4).data["value"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_frame_and_table() -> None:
    found = census(back(1), uniform)
    frame = found.to_frame()
    assert frame.index.tolist() == ["L0H0", "L0H1"]
    assert frame.columns.tolist() == ["label", *SCORES]
    assert frame.loc["L0H0", "label"] == "previous-token"
    assert frame.loc["L0H0", "previous_token"] == pytest.approx(1.0, abs=1e-6)
    table = str(found)
    assert "previous-token" in table.splitlines()[2]
    assert "chance" in table
    assert "labels are measured patterns, no head was intervened on" in table
    assert repr(found) == "<census of 2 heads, n = 8; previous-token: L0H0>"


def test_details_say_how_it_was_measured() -> None:
    details = census(uniform, distances=[8, 12]).details
    assert set(details["definitions"]) == set(SCORES) == set(DEFINITIONS)
    assert details["distances"] == [8, 12]
    assert (details["n"], details["length"], details["label_margin"]) == (N, 8, 0.3)
    assert "random heads of this shape" in details["notes"][-1]


def test_a_head_without_eigenvalues_has_no_copying_score() -> None:
    model, context = model_with(uniform, uniform)
    with torch.no_grad():
        model.blocks[0].attn.W_O[0] = 0
    with context:
        data = score_heads(model, n=N).data.sel(score="copying")
    assert np.isnan(data["value"].values[0, 0])
    assert data["low"].values[0, 1] == data["value"].values[0, 1] == data["high"].values[0, 1]
    assert "n/a" in str(score_heads(model, n=2))


def test_long_batches_are_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = census(back(1), induction)
    monkeypatch.setattr("headstream.circuits.heads._BYTES", 1)
    assert census(back(1), induction).data.equals(whole.data)


def test_bad_input() -> None:
    sizes = {"n_layers": 1, "n_heads": 1, "d_model": 4, "d_head": 4}
    model = Decoder(DecoderConfig(**sizes, d_vocab=20, n_ctx=20))
    with pytest.raises(ShapeError, match="n must be at least 2 sequences, got 1"):
        score_heads(model, n=1)
    with pytest.raises(BackendError, match="flash"):
        score_heads(model, backend="flash")
    with pytest.raises(TokenError, match="3 content tokens are too few"):
        score_heads(Decoder(DecoderConfig(**sizes, d_vocab=3, n_ctx=20)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 2.5}, r"n must be a whole number of sequences, got 2.5"),
        ({"n": True}, r"n must be a whole number of sequences, got True"),
        ({"seed": -1}, r"seed must be a whole number in \[0, 2\*\*63\), got -1"),
        ({"seed": "a"}, r"seed must be a whole number in \[0, 2\*\*63\), got 'a'"),
        ({"distances": "a"}, r"distances must be a list of whole numbers of tokens, got 'a'"),
        ({"distances": 5}, r"distances must be a list of whole numbers of tokens, got 5"),
        ({"distances": [2.5]}, r"a distance must be a whole number of tokens, got 2.5"),
        ({"distances": [99]}, r"distances \[99\] do not fit: each must lie in \[2, 18\] tokens"),
        ({"distances": []}, r"distances is empty"),
        ({"length": 2.5}, r"length must be a whole number of tokens, got 2.5"),
    ],
)
def test_arguments_of_the_wrong_kind(options: dict[str, Any], words: str) -> None:
    sizes = {"n_layers": 1, "n_heads": 1, "d_model": 4, "d_head": 4}
    model = Decoder(DecoderConfig(**sizes, d_vocab=20, n_ctx=20))
    with pytest.raises(ShapeError, match=words):
        score_heads(model, **options)


def test_a_model_with_nan_weights_is_not_scored() -> None:
    sizes = {"n_layers": 1, "n_heads": 1, "d_model": 4, "d_head": 4}
    model = Decoder(DecoderConfig(**sizes, d_vocab=20, n_ctx=20))
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0, 0, 0] = float("inf")
    with pytest.raises(ShapeError, match=r"finite, but blocks.0.attn.W_Q holds"):
        score_heads(model)


def test_scores_that_overflow_are_an_error_and_no_census() -> None:
    model = constructed_induction()
    with torch.no_grad():
        model.blocks[1].attn.W_Q.mul_(1e20)
        model.blocks[1].attn.W_K.mul_(1e20)
    with pytest.raises(BackendError, match="attention scores of layer 1 are not finite"):
        score_heads(model, n=2)
