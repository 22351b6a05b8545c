"""One head taken apart: the constructed circuit by hand, planted distances, idle heads, errors."""

import copy
import json
from collections.abc import Callable

import pytest
import torch

from headstream.circuits.anatomy import head_anatomies, head_anatomy
from headstream.circuits.composing.composition import composition_scores
from headstream.circuits.qk_ov.weights import ov_circuit, qk_circuit
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, HookError, ShapeError
from headstream.models.store import load

Build = Callable[..., Decoder]


@pytest.fixture(scope="module")
def constructed() -> Decoder:
    return load("constructed-induction")


def test_the_induction_head_by_hand(constructed: Decoder) -> None:
    found = head_anatomy(constructed, 1, 2)
    # Every content token raises itself by 10 and nothing else; BOS is not moved.
    assert [(p.row, p.column, p.value) for p in found.moves] == [(t, t, 10.0) for t in range(1, 6)]
    # Without what L0H1 wrote, its queries match BOS alone.
    assert {p.column for p in found.matches} == {0}
    assert found.matches[0].value == 30.0
    # Through it, each query's best match is its own token: all 33 of them.
    assert [(one.earlier, one.own_first) for one in found.through] == [((0, 1), 1.0)]
    assert found.copying.score == pytest.approx(1.0)
    assert found.copying.behaviour == pytest.approx(1.0, abs=1e-6)
    assert found.preferred_distance is None
    assert [(row.through, row.earlier, row.later) for row in found.partners.itertuples()] == [
        ("K", "L0H1", "L1H2")
    ]
    assert float(found.shares.sel(query_part="content", key_part="content")) == pytest.approx(1.0)


def test_the_previous_token_head_by_hand(constructed: Decoder) -> None:
    found = head_anatomy(constructed, 0, 1)
    preferred = found.preferred_distance
    assert preferred is not None
    assert preferred.distance == 1
    # Row i of the 32 content tokens (2 keys or more) holds one score of 30 among i keys, BOS apart.
    rows = range(2, 33)
    assert preferred.excess == pytest.approx(30 * (1 - sum(1 / i for i in rows) / len(rows)))
    assert float(found.shares.sel(query_part="position", key_part="position")) == pytest.approx(1.0)


def test_an_idle_head_says_so(constructed: Decoder) -> None:
    found = head_anatomy(constructed, 0, 0)
    text = str(found)
    assert "best matches: none: the circuit is zero" in text
    assert "no distance stands out" in text
    assert "nothing is moved" in text
    assert found.partners.empty
    assert found.rank("qk") == found.rank("ov") == 0


def test_the_parts_are_those_of_the_functions_it_gathers(model_r: Decoder) -> None:
    found = head_anatomy(model_r, 1, 3, distance=2, top=3)
    qk = qk_circuit(model_r, 1, 3, distance=2)
    dense = (qk.A @ qk.B).double()
    for pair in found.matches:
        assert pair.value == pytest.approx(float(dense[pair.row, pair.column]), rel=1e-5)
    assert found.matches[0].value == pytest.approx(float(dense.max()), rel=1e-5)
    ov = ov_circuit(model_r, 1, 3, space="residual")
    singular = torch.linalg.svdvals(ov.A.double() @ ov.B.double())[: ov.A.shape[1]]
    torch.testing.assert_close(
        torch.tensor(found.singular.sel(circuit="ov").values), singular, rtol=1e-6, atol=1e-9
    )
    scores = composition_scores(model_r, distance=2)
    largest = float(scores["random_largest"])
    assert all(row.score > largest for row in found.partners.itertuples())
    assert found.shares.dims == ("pair",)
    assert float(found.shares.sum()) == pytest.approx(1.0)


def test_a_rotary_head_is_taken_where_it_looks_most(model_r: Decoder) -> None:
    found = head_anatomy(model_r, 0, 0)
    assert found.distance == int(found.by_distance.mean("example").values.argmax())


def test_where_a_rotary_circuit_was_taken_is_no_preference(model_r: Decoder) -> None:
    """The highest of many distances is always somewhere; only what stands out is a preference."""
    found = head_anatomy(model_r, 1, 0, n=4)
    assert found.preferred_distance is None
    words = f"keys {found.distance} tokens back (its highest mean score, though no distance stands"
    assert words in str(found)
    assert found.distance is not None
    other = head_anatomy(model_r, 1, 0, n=4, distance=found.distance + 1)
    assert f"reads (QK), keys {found.distance + 1} tokens back\n" in str(other)


def test_each_omission_is_said_once(model_a: Decoder) -> None:
    found = head_anatomy(model_a, 1, 0, n=4)
    words = [said.partition(": ")[2] for said in found.caveats]
    assert len(words) == len(set(words))
    assert (
        "QK and OV: the gain and shift of 'blocks.1.ln1' are left out: fold(model) puts them in"
        in found.caveats
    )


def test_chance_is_known_without_names_of_tokens(constructed: Decoder) -> None:
    model = copy.deepcopy(constructed)
    model.vocab = None
    text = str(head_anatomy(model, 1, 2))
    assert "best match for 100% of tokens (chance 3%)" in text
    assert "(by embeddings alone)" in text
    assert "(a head that ignores its source -1.00, one that raises nothing else +1)" in text


def test_a_planted_distance_is_found(build: Build) -> None:
    model = build(
        {
            "n_layers": 1,
            "n_heads": 1,
            "n_kv_heads": 1,
            "d_model": 24,
            "d_head": 24,
            "d_mlp": None,
            "n_ctx": 24,
            "d_vocab": 40,
            "norm": "none",
            "positions": "learned",
            "attn_bias": False,
            "mlp_bias": False,
            "unembed_bias": False,
        }
    )
    with torch.no_grad():
        model.pos_embed.W_pos.copy_(torch.eye(24))
        model.embed.W_E.mul_(0.01)
        model.blocks[0].attn.W_K.copy_(torch.eye(24)[None])
        # Position i asks for i - 3.
        model.blocks[0].attn.W_Q.copy_(20 * torch.eye(24).roll(-3, 1).tril()[None])
    found = head_anatomy(model, 0, 0).preferred_distance
    assert found is not None
    assert found.distance == 3


def test_all_heads_are_one_call(constructed: Decoder) -> None:
    found = head_anatomies(constructed)
    assert [one.name for one in found] == [f"L{at}H{head}" for at in (0, 1) for head in range(4)]
    assert str(found[6]) == str(head_anatomy(constructed, 1, 2))


def test_json_holds_no_nan(constructed: Decoder) -> None:
    for head in head_anatomies(constructed, [(0, 0), (1, 2)]):
        value = json.loads(json.dumps(head.to_json(), allow_nan=False))
        assert value["head"] == head.name
    assert value["ov"]["moves"][0] == {"row": "t01", "column": "t01", "value": 10.0}


def test_errors_say_what_was_expected(constructed: Decoder, model_r: Decoder) -> None:
    with pytest.raises(ShapeError, match="layer must be a whole number in"):
        head_anatomy(constructed, 2, 0)
    with pytest.raises(ShapeError, match="head must be a whole number in"):
        head_anatomy(constructed, 0, 4)
    with pytest.raises(ConfigError, match="does not depend on it"):
        head_anatomy(constructed, 0, 0, distance=1)
    with pytest.raises(ShapeError, match="heads is empty"):
        head_anatomies(constructed, [])
    with pytest.raises(ShapeError, match="n must be at least 4 sequences, got 2"):
        head_anatomy(model_r, 0, 0, n=2)


def test_an_edited_run_is_refused(constructed: Decoder) -> None:
    hooks = [("blocks.0.attn.hook_z", lambda z, hook: z * 0)]
    with (
        constructed.hooks(fwd_hooks=hooks),
        pytest.raises(HookError, match="cannot measure copying: a hook edits"),
    ):
        head_anatomy(constructed, 1, 2)
