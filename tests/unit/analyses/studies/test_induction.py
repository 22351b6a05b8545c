"""The study on models whose answer is known: all found, nothing else, no distance fools it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstream.analyses.evidence import Evidence
from headstream.analyses.result import Result
from headstream.analyses.stored import load_result
from headstream.analyses.studies.induction import induction
from headstream.analyses.studies.induction_claims import COPIER, FIXED, HEAD, PATTERN
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
LENGTHS = (16, 24, 32, 48, 64, 65, 96, 128)
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
    # A block of 32 tokens fits twice from 65 on: from there the distance itself is named.
    if length >= 65:
        copiers = result.found(COPIER)
        assert copiers
        distances = result.data["fixed_distance"].values[result.data["label"].values == COPIER]
        assert set(distances.tolist()) == {32}
        claim = next(c for c in result.claims if c.id == f"induction.{copiers[0]}")
        assert claim.evidence is Evidence.MEASURED
        assert "copies from a fixed distance of 32 tokens" in claim.statement


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
        assert "no content control" in " ".join(result.details["notes"])


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
    assert result.summary() == "no induction head (n = 16)"


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
    with pytest.raises(ShapeError, match="length must be a whole number"):
        induction(model, length="long")
    sizes = dict(n_layers=1, n_heads=1, d_model=8, d_head=4, d_vocab=3, n_ctx=24)
    with pytest.raises(TokenError, match="too few for a repeat"):
        induction(Decoder(DecoderConfig(**sizes)), n=4)  # type: ignore[arg-type]


def test_it_is_saved_and_read_back(tmp_path) -> None:
    result = induction(load("constructed-induction"), n=8)
    again = load_result(result.save(tmp_path / "induction.json"))
    assert again.summary() == result.summary()
    assert again.summary() == (
        "L1H2 is an induction head: cut alone +3.50 nats on what repeats predict [3.50, 3.50] "
        "(n = 8)"
    )
    assert again.claims[0].reason == result.claims[0].reason
