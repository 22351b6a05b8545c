"""The study on models whose answer is known: all found, nothing else, no distance fools it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstream.analyses.evidence import Evidence
from headstream.analyses.result import Result
from headstream.analyses.stored import load_result
from headstream.analyses.studies.induction import induction
from headstream.analyses.studies.induction_claims import (
    COPIER,
    FIXED,
    HEAD,
    PART,
    PATTERN,
    fixed_distances,
)
from headstream.analyses.studies.repeat_cuts import RepeatRuns, cut_on_repeats
from headstream.circuits.repeats import draw_orders, make_pair, plan_repeats
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TokenError
from headstream.models.hooks import edited
from headstream.models.store import load
from headstream.models.zoo.registry import list_models

SHIPPED = {entry.name for entry in list_models()}
DECOYS = sorted(name for name in SHIPPED if name.startswith("decoy"))
LENGTHS = (16, 24, 28, 32, 40, 48, 56, 63, 64, 65, 72, 96, 128)
L1 = ["L1H0", "L1H1", "L1H2", "L1H3"]


def labels(result: Result) -> dict[str, str]:
    """Heads that have a label."""
    found = result.data["label"]
    return {
        f"L{layer}H{head}": str(found.sel(layer=layer, head=head).item())
        for layer in found["layer"].values
        for head in found["head"].values
        if str(found.sel(layer=layer, head=head).item()) != "none"
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_constructed_circuit_is_found_and_nothing_else(seed: int) -> None:
    result = induction(load("constructed-induction"), n=8, seed=seed)
    assert labels(result) == {"L0H1": "previous-token", "L1H2": HEAD}
    cell = result.data.sel(layer=1, head=2)
    assert float(cell["gapped"]) == pytest.approx(1.0, abs=1e-5), "however many copies there are"
    assert float(cell["induction"].min()) == pytest.approx(1.0, abs=1e-5)
    assert float(cell["restored"]) == pytest.approx(1.0)
    assert float(cell["content_control"].max()) < 1e-5


@pytest.mark.parametrize("name", DECOYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_no_length_makes_a_decoy_an_induction_head(name: str, length: int) -> None:
    model = load(name)
    if length > model.config.n_ctx:
        pytest.skip("the model does not take it")
    result = induction(model, n=8, length=length)
    assert not result.found(HEAD)
    assert not result.found(PATTERN)
    assert result.details["joint"] is None, "no candidate"
    # However short the repeats are, the distance is looked for in sequences that can hold it.
    copiers = result.found(COPIER)
    assert copiers == (["L0H0", "L1H0"] if name == "decoy-2l" else L1)
    distances = result.data["fixed_distance"].values[result.data["label"].values == COPIER]
    assert set(distances.tolist()) == {32}
    claim = next(c for c in result.claims if c.id == f"induction.{copiers[0]}")
    assert claim.evidence is Evidence.MEASURED
    assert claim.n == result.details["scan"]["sequences"] == 16
    assert "copies from a fixed distance of 32 tokens, whatever stands there" in claim.statement
    last = result.details["scan"]["length"] - 1
    assert f"31 tokens back in random tokens, at positions 33 to {last} (" in claim.reason


@pytest.mark.parametrize("distances", [[32], [16], [31, 32], [8, 32, 40]])
def test_not_even_at_the_distance_it_was_trained_at(distances: list[int]) -> None:
    result = induction(load("decoy-2l-rotary"), n=8, distances=distances)
    assert result.found(COPIER) == L1
    assert result.details["joint"] is None, "no candidate"
    if distances == [32]:
        # The usual test, and what it cannot see: the same attention where nothing repeats.
        trained = result.data.sel(distance=32, layer=1)
        assert float(trained["induction"].min()) > 0.85
        assert float(trained["position_control"].min()) > 0.85
        (note,) = (n for n in result.details["notes"] if "one repeat" in n or "no content" in n)
        assert note == "one repeat distance: only the control tells content from position"
        (claim,) = (c for c in result.claims if c.id == "induction.none")
        assert claim.statement.startswith(
            "no head clears chance and the position control by 0.3 at the one distance of 32, in"
        )
        assert claim.unit == "attention mass above chance and control, the best head's least"
        assert ", control at most 0." in claim.reason
        assert "least of distances" not in claim.reason


@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("distance", [2, 3, 6])
def test_a_short_repeat_gives_no_head_another_label(n: int, distance: int) -> None:
    result = induction(load("decoy-2l"), n=n, distances=[distance])
    own = {} if distance < 6 else {"L0H1": "current-token"}
    assert labels(result) == {"L0H0": COPIER, "L1H0": COPIER, **own}
    told = [note for note in result.details["notes"] if "too short for the labels" in note]
    assert len(told) == (distance < 6)


def test_one_distance_is_called_one_of_a_head_that_is_found() -> None:
    result = induction(load("constructed-induction"), n=6, distances=[16])
    (claim,) = (c for c in result.claims if c.id == "induction.L1H2")
    assert "its score is 1.00 or more at the one distance of 16, 1.00 at random" in claim.reason


def test_fixed_distances_are_listed_nearest_first() -> None:
    result = induction(load("decoy-2l"), n=6)
    assert fixed_distances(result) == {32: ["L0H0", "L1H0"]}
    moved = result.data.copy(deep=True)
    moved["fixed_distance"][1, 0] = 9
    moved["label"][1, 0] = FIXED
    again = replace(result, data=moved.transpose("head", ...))
    assert list(fixed_distances(again).items()) == [(9, ["L1H0"]), (32, ["L0H0"])]
    assert fixed_distances(induction(load("constructed-induction"), n=6)) == {}


# The labels of every shipped model at the usual length; the page docs/detectors.md has the same.
ZOO = {
    "backcopy-1l": {"L0H0": "sink"},
    "constructed-and": {},
    "constructed-induction": {"L0H1": "previous-token", "L1H2": HEAD},
    "constructed-or": {},
    "decoy-2l": {"L0H0": COPIER, "L0H1": "current-token", "L1H0": COPIER},
    "decoy-2l-rotary": dict.fromkeys(L1, COPIER),
    "induction-1l": {},
    "induction-2l": {"L0H0": "previous-token", **dict.fromkeys(L1, HEAD)},
    "induction-2l-rotary": {"L0H0": "previous-token", **dict.fromkeys(L1, HEAD)},
    "recall-2l": {},
}


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_labels_of_the_shipped_models(name: str) -> None:
    result = induction(load(name))
    assert labels(result) == ZOO[name]
    assert not any("too short" in note for note in result.details["notes"])


@pytest.mark.parametrize("name", ["induction-2l", "induction-2l-rotary"])
def test_every_content_matching_head_of_a_trained_model_is_causal(name: str) -> None:
    result = induction(load(name), n=16)
    assert labels(result) == {"L0H0": "previous-token", **dict.fromkeys(L1, HEAD)}
    claims = {claim.id: claim for claim in result.claims}
    assert all(claims[f"induction.{head}"].evidence is Evidence.CAUSAL for head in L1)
    assert claims["induction.set"].evidence is Evidence.CAUSAL
    # One by one they can be spared, together they cannot: only the joint cut shows them.
    alone = result.data["alone"].sel(layer=1).values
    joint = result.details["joint"]
    assert alone.max() < 0.1
    assert joint["mean"] > 3.0
    assert joint["control"] < 0, "where nothing repeats their guesses only do harm"
    assert float(result.data["restored"].sel(layer=1).min()) > 0.5
    assert result.details["loss"]["repeats"] < 0.1


def test_one_layer_cannot_do_it() -> None:
    result = induction(load("induction-1l"), n=16)
    assert labels(result) == {}
    assert result.details["joint"] is None
    assert result.details["loss"]["repeats"] > 1.5
    (claim,) = result.claims
    assert claim.id == "induction.none"
    assert claim.evidence is Evidence.MEASURED
    assert claim.statement.startswith("no head clears chance and both controls by 0.3 at every")
    assert claim.reason.startswith("nearest L0H")
    assert result.summary() == "no induction head (n = 16)"


def test_heads_that_come_near_are_not_denied() -> None:
    """recall-2l: three heads put a fifth of their mass there, which is short of the margin."""
    result = induction(load("recall-2l"), n=8)
    (claim,) = [c for c in result.claims if c.id == "induction.none"]
    scores = result.data["induction"].min("distance").sel(layer=1)
    assert scores.values[:3].min() > 0.15, "they do look there"
    assert "no head looks" not in claim.statement
    assert all(f"L1H{h} {float(scores[h]):.2f} (" in claim.reason for h in range(3))
    # Oracle: what the margin is held against, by hand, of every single distance.
    best = max(
        min(
            *(float(v) for v in (cell["induction"] - cell["position_control"]).values),
            *(float(v) for v in (cell["induction"] - cell["content_control"]).values),
            *(float(v) for v in (cell["induction"] - result.data["chance"]).values),
            float(cell["gapped"] - cell["gapped_control"]),
            float(cell["gapped"]) - result.details["gapped"]["chance"],
        )
        for cell in (result.data.sel(layer=1, head=h) for h in range(4))
    )
    assert claim.value == pytest.approx(best)
    assert 0.1 < best < 0.3
    (note,) = [note for note in result.details["notes"] if "random orders" in note]
    assert "trained on recall prompts" in note


def test_a_model_trained_on_repeats_has_no_such_note() -> None:
    notes = induction(load("constructed-induction"), n=6).details["notes"]
    assert not any("prompts" in note for note in notes)


@pytest.mark.parametrize("name", ["backcopy-1l", "recall-2l"])
def test_other_models_of_the_zoo_have_none(name: str) -> None:
    result = induction(load(name), n=8)
    assert not {HEAD, PATTERN, COPIER, FIXED} & set(labels(result).values())


@pytest.mark.parametrize("name", ["constructed-and", "constructed-or"])
def test_the_gates_have_none_whatever_is_drawn(name: str) -> None:
    model = load(name)
    gate = {"L0H0": "sink", "L0H2": "sink"}  # where a closed gate rests, about as much as counts
    for seed in range(20):
        assert labels(induction(model, n=4, seed=seed)).items() <= gate.items()


def test_a_pattern_whose_cut_costs_nothing_is_a_pattern_alone() -> None:
    model = load("constructed-induction")
    with torch.no_grad():
        # It looks where an induction head looks, and writes nothing.
        model.blocks[1].attn.W_O[2] = 0.0
    result = induction(model, n=8)
    assert labels(result)["L1H2"] == PATTERN
    claims = {claim.id: claim for claim in result.claims}
    assert claims["induction.L1H2"].evidence is Evidence.UNKNOWN
    assert claims["induction.set"].evidence is Evidence.UNKNOWN
    assert "zero to rounding" in claims["induction.set"].reason
    assert result.summary().startswith("no induction head")
    assert "L1H2 only by the pattern" in result.summary()


def test_a_head_that_copies_nothing_is_no_induction_head(hand) -> None:
    """It looks where induction heads look; what it writes unsays BOS, whatever stands there.

    Cutting it costs 11.5 nats, and the model does not continue repeats: it guesses evenly.
    """
    made = hand.with_previous(unembed_bias=True).match(1, 0).hush_bos(1, 0)
    result = induction(made.model, n=8)
    loss = result.details["loss"]
    assert loss["repeats"] == pytest.approx(np.log(33), abs=1e-3)
    assert loss["uniform"] == pytest.approx(np.log(32))
    assert loss["control"] > 14
    assert result.details["joint"]["mean"] > 10
    assert labels(result)["L1H0"] == PATTERN
    claims = {claim.id: claim for claim in result.claims}
    assert claims["induction.set"].evidence is Evidence.UNKNOWN
    assert claims["induction.set"].reason.startswith(
        "the model does not continue repeats: its loss"
    )
    assert "that of a uniform guess 3.47" in claims["induction.set"].reason
    assert claims["induction.L1H0"].evidence is Evidence.UNKNOWN
    assert result.summary().startswith("no induction head: cut alone +11.5")
    assert "the model does not continue repeats" in result.summary()


def test_beside_a_head_that_copies_it_is_none_either(hand) -> None:
    made = hand.with_previous(unembed_bias=True).match(1, 0).hush_bos(1, 0)
    result = induction(made.match(1, 1).copy(1, 1).model, n=8)
    assert labels(result) == {"L0H0": "previous-token", "L1H0": PATTERN, "L1H1": HEAD}
    claims = {claim.id: claim for claim in result.claims}
    assert claims["induction.set"].evidence is Evidence.CAUSAL
    assert "but nothing shows that it copies" in claims["induction.L1H0"].reason
    assert "no OV copying score" in claims["induction.L1H0"].reason
    assert "OV copying +1.00, random heads -0.0" in claims["induction.L1H1"].reason
    assert "cut together with L1H0 +15.00 nats" in result.summary()


def test_a_head_that_writes_another_token_than_it_reads_does_not_copy(hand) -> None:
    """Eigenvalues of a cyclic permutation lie around the circle and sum to nothing."""
    made = hand.with_previous().match(1, 0).copy(1, 0)
    attn = made.model.blocks[1].attn
    with torch.no_grad():
        attn.W_V[0, 1 : made.vocab, : made.vocab] = torch.roll(torch.eye(made.vocab)[1:], 1, 0)
    result = induction(made.model, n=8)
    assert labels(result)["L1H0"] == PATTERN
    assert result.data["copies"].sel(layer=1, head=0).item() is False
    assert float(result.data["raised"].sel(layer=1, head=0)) < 0.1


@pytest.mark.parametrize(("heads", "gain", "share"), [(16, 0.6, 0.165), (20, 0.5, 0.137)])
def test_many_equal_heads_are_a_set_where_none_gives_back_a_fifth(
    hand, heads: int, gain: float, share: float
) -> None:
    made = hand.with_previous(n_heads=heads)
    for head in range(heads):
        made.match(1, head).copy(1, head, gain=gain)
    result = induction(made.model, n=6)
    names = [f"L1H{head}" for head in range(heads)]
    assert result.found(PART) == names
    assert not result.found(HEAD)
    assert not result.found(PATTERN)
    claims = {claim.id: claim for claim in result.claims}
    assert claims["induction.set"].evidence is Evidence.CAUSAL
    claim = claims["induction.L1H3"]
    assert claim.evidence is Evidence.CAUSAL
    assert claim.value == pytest.approx(share, abs=1e-3)
    assert claim.statement == (
        f"L1H3 is an induction head, as one of a set of {heads} that stand in for one another"
    )
    assert "no head alone gives back a fifth; restored alone it takes back" in claim.reason
    assert result.summary().startswith(
        f"L1H0, L1H1, L1H2, L1H3 and {heads - 4} more are induction heads as a set of {heads}"
    )
    assert "no induction head" not in result.summary()


def test_an_idle_head_is_no_part_of_such_a_set(hand) -> None:
    made = hand.with_previous(n_heads=17)
    for head in range(16):
        made.match(1, head).copy(1, head, gain=0.6)
    made.match(1, 16)
    result = induction(made.model, n=6)
    assert result.found(PART) == [f"L1H{head}" for head in range(16)]
    assert result.found(PATTERN) == ["L1H16"]


def test_fifteen_heads_keep_the_label_itself(hand) -> None:
    """The settled rule stays for members: a fifth, restored alone."""
    made = hand.with_previous(n_heads=8)
    for head in range(8):
        made.match(1, head).copy(1, head, gain=1.5)
    result = induction(made.model, n=6)
    assert result.found(HEAD) == [f"L1H{head}" for head in range(8)]
    assert float(result.data["restored"].sel(layer=1).min()) > 0.2


def test_other_heads_are_counted_and_named(hand) -> None:
    """Three of four heads are the set: one other is left, and it is what they read."""
    made = hand.with_previous(n_layers=4, n_heads=1)
    for layer in (1, 2, 3):
        made.match(layer, 0).copy(layer, 0, gain=4.0)
    result = induction(made.model, n=6)
    assert result.found(HEAD) == ["L1H0", "L2H0", "L3H0"]
    (claim,) = [c for c in result.claims if c.id == "induction.set"]
    assert "the only other head +3." in claim.reason
    assert "(1, not 3 as in the set), no less than the set: L0H0 (previous-token)" in claim.reason
    assert "as many other heads" not in claim.reason


def test_heads_that_the_set_reads_are_named_among_the_others() -> None:
    result = induction(load("induction-2l"), n=6)
    (claim,) = [c for c in result.claims if c.id == "induction.set"]
    random = result.details["joint"]["random"]
    assert random["largest"] > result.details["joint"]["mean"]
    assert f"all 4 other heads {random['mean']:+.2f}, no less than the set: L0H0 " in (claim.reason)
    assert "L0H0 (previous-token), L0H1, L0H2, L0H3, among which may be what" in claim.reason


def test_five_sequences_are_too_few_for_the_label() -> None:
    result = induction(load("constructed-induction"), n=5)
    assert labels(result)["L1H2"] == PATTERN
    assert "at least 6 sequences are needed" in result.claims[0].reason


def test_the_cuts_are_the_losses_of_hooked_runs() -> None:
    """Oracle: losses by the model's own loss_per_token with z zeroed by a hook."""
    model = load("induction-2l")
    plan = plan_repeats(model.config, [10, 20], 6)
    orders = draw_orders(plan, 6, torch.Generator().manual_seed(3))
    runs = RepeatRuns(model, plan, orders)
    heads = [(1, 0), (1, 1), (1, 2), (1, 3)]
    cuts = cut_on_repeats(model, runs, heads, seed=0)

    def loss(cut: list[int], kind: str) -> np.ndarray:
        found = []
        for distance in plan.distances:
            tokens = getattr(make_pair(plan, orders, distance), kind)

            def zero(z: torch.Tensor) -> torch.Tensor:
                z = z.clone()
                z[:, :, cut] = 0.0
                return z

            with torch.no_grad(), edited(model, {"blocks.1.attn.hook_z": zero}):
                each = model(tokens, return_type="loss_per_token").double()
            # Targets: the second block but for its first token; loss i is that of token i + 1.
            first = 1 + distance
            found.append(each[:, first : first + plan.length - 1].mean(1).numpy())
        return np.mean(found, 0)

    base = loss([], "repeated")
    every = loss([0, 1, 2, 3], "repeated") - base
    # float32 losses of up to 20 nats, a shorter run here and a padded one there
    close = dict(abs=2e-4)
    assert cuts.loss == pytest.approx(base.mean(), **close)
    assert cuts.joint == pytest.approx(every, **close)
    assert cuts.alone[2] == pytest.approx((loss([2], "repeated") - base).mean(), **close)
    back = every - (loss([0, 1, 3], "repeated") - base)
    assert cuts.restored[2] == pytest.approx(back.mean() / every.mean(), **close)
    control = (loss([0, 1, 2, 3], "control") - loss([], "control")).mean()
    assert cuts.joint_control == pytest.approx(control, **close)
    assert cuts.random.shape == (1,), "four other heads make one set of four"


def test_a_model_without_bos_is_measured_without_one() -> None:
    sizes = dict(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=20, n_ctx=24)
    result = induction(Decoder(DecoderConfig(**sizes)), n=4)  # type: ignore[arg-type]
    assert "the model has no BOS, and is measured without one" in result.details["notes"]
    assert labels(result) == {}


def test_what_does_not_fit_is_refused_by_name() -> None:
    model = load("constructed-induction")
    for length in (6, 49):
        words = f"length={length} is out of range: repeats at random gaps take at least 7 tokens"
        with pytest.raises(ShapeError, match=words):
            induction(model, length=length)
    with pytest.raises(ShapeError, match="n must be at least 2 sequences"):
        induction(model, n=1)
    with pytest.raises(ShapeError, match="distances"):
        induction(model, distances=[])
    with pytest.raises(ShapeError, match=r"distances must be a list .*, got tensor\(16\)"):
        induction(model, distances=torch.tensor(16))
    assert induction(model, n=2, distances=torch.tensor([16])).details["distances"] == [16]
    with pytest.raises(ShapeError, match="length must be a whole number"):
        induction(model, length="long")
    sizes = dict(n_layers=1, n_heads=1, d_model=8, d_head=4, d_vocab=3, n_ctx=24)
    with pytest.raises(TokenError, match="too few for a repeat"):
        induction(Decoder(DecoderConfig(**sizes)), n=4)  # type: ignore[arg-type]


def test_a_context_too_short_is_told_as_such() -> None:
    """The caller gave no length."""
    sizes = dict(n_layers=1, n_heads=1, d_model=8, d_head=4, d_vocab=20, n_ctx=5)
    words = "n_ctx=5 is too short: repeats at random gaps take at least 6 tokens"
    with pytest.raises(ShapeError, match=words):
        induction(Decoder(DecoderConfig(**sizes)), n=4)  # type: ignore[arg-type]


def test_logits_that_overflow_are_refused() -> None:
    model = load("constructed-induction")
    with torch.no_grad():
        model.unembed.W_U.mul_(3e38)
    with pytest.raises(ShapeError, match="loss of this model is not finite: its logits overflow"):
        induction(model, n=4)


def test_distances_that_too_few_queries_reach_are_told() -> None:
    sizes = dict(n_layers=1, n_heads=1, d_model=8, d_head=4, d_vocab=40, n_ctx=16)
    result = induction(Decoder(DecoderConfig(**sizes)), n=2)  # type: ignore[arg-type]
    assert result.details["distances"][-1] == 11
    assert result.details["scan"]["farthest"] == 8
    assert "too few queries of 16 tokens reach 9, 11" in " ".join(result.details["notes"])


def test_a_longer_context_than_was_scanned_is_told() -> None:
    sizes = dict(n_layers=1, n_heads=1, d_model=8, d_head=4, d_vocab=20, n_ctx=200)
    result = induction(Decoder(DecoderConfig(**sizes)), n=2)  # type: ignore[arg-type]
    assert "in sequences of 128; the model takes 200" in " ".join(result.details["notes"])


def test_it_is_saved_and_read_back(tmp_path) -> None:
    result = induction(load("constructed-induction"), n=8)
    again = load_result(result.save(tmp_path / "induction.json"))
    assert again.summary() == result.summary()
    assert again.summary() == (
        "L1H2 is an induction head: cut alone +3.50 nats on what repeats predict [3.50, 3.50] "
        "(n = 8)"
    )
    assert again.claims[0].reason == result.claims[0].reason
