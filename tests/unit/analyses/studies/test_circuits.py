"""The circuits of all heads as a result: what it says, what it claims, that it survives a file."""

import copy
from pathlib import Path

import numpy as np
import pytest

from headstream.analyses.evidence import Evidence
from headstream.analyses.stored import load_result
from headstream.analyses.studies.circuits import circuits
from headstream.models.decoder import Decoder
from headstream.models.store import load


@pytest.fixture(scope="module")
def constructed() -> Decoder:
    return load("constructed-induction")


def test_the_constructed_circuit_is_what_it_says(constructed: Decoder) -> None:
    result = circuits(constructed)
    assert result.summary() == (
        "L1H2 looks for its own token in what L0H1 wrote about earlier tokens and copies what it "
        "finds (weights alone)"
    )
    labels = {claim.id: claim.evidence for claim in result.claims}
    assert labels == {
        "circuits.L1H2.matching": Evidence.MEASURED,
        "circuits.K.L0H1.L1H2": Evidence.MEASURED,
        "circuits.used": Evidence.UNKNOWN,
    }
    idle = result.data["copying"].sel(layer=0, head=0)
    assert np.isnan(float(idle))


def test_idle_weights_claim_nothing(constructed: Decoder) -> None:
    model = copy.deepcopy(constructed)
    for block in model.blocks:
        block.attn.W_O.data.zero_()
    result = circuits(model)
    assert result.claims == ()
    assert result.summary() == "no head copies (weights alone)"


def test_rotary_models_take_each_head_where_it_looks(model_r: Decoder, tmp_path: Path) -> None:
    result = circuits(model_r)
    words = result.details["compositions"]
    assert "where the later head's mean score is highest" in words
    held = result.details["composition"]
    assert words.startswith(f"{held['out']} of {held['compared']} compositions are above ")
    assert all(isinstance(card["qk_distance"], int) for card in result.details["cards"])
    again = load_result(result.save(tmp_path / "circuits.json"))
    assert again.summary() == result.summary()
    assert again.details["cards"] == result.details["cards"]


def test_without_names_of_tokens_there_are_as_many(constructed: Decoder) -> None:
    """What was counted is all tokens, whether or not they have names."""
    model = copy.deepcopy(constructed)
    model.vocab = None
    (claim,) = (c for c in circuits(model).claims if c.id == "circuits.L1H2.matching")
    assert claim.n == 33
    assert claim.reason.endswith("chance 0.030")
