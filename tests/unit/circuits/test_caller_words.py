"""What callers write: whole numbers of any kind are taken, anything else meets our own error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headstream import circuits
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ExactnessError, HeadstreamError, ShapeError

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENS = torch.tensor([[0, 1, 2, 3]])
# By head: (model, layer, head) -> anything.
BY_HEAD: dict[str, Callable[[Any, Any, Any], Any]] = {
    "qk_circuit": lambda m, la, h: circuits.qk_circuit(m, la, h, distance=1),
    "ov_circuit": circuits.ov_circuit,
    "qk_bias": lambda m, la, h: circuits.qk_bias(m, la, h, distance=1),
    "ov_bias": circuits.ov_bias,
    "score_terms": lambda m, la, h: circuits.score_terms(m, TOKENS, la, h),
    "score_frequencies": lambda m, la, h: circuits.score_frequencies(m, TOKENS, la, h),
    "distance_profile": lambda m, la, h: circuits.distance_profile(m, la, h, query=1, key=2),
    "residual_reads": lambda m, la, h: circuits.residual_reads(m, TOKENS, la, h),
    "source_writes": lambda m, la, h: circuits.source_writes(m, TOKENS, la, h),
    "source_reads": lambda m, la, h: circuits.source_reads(m, TOKENS, 1, 0, through=(la, h)),
    "principal_cosines": lambda m, la, h: circuits.principal_cosines(m, (la, h), (1, 0)),
    "virtual_ov": lambda m, la, h: circuits.virtual_ov(m, [(la, h), (1, 0)]),
    "head_anatomies": lambda m, la, h: circuits.head_anatomies(m, [(la, h)], n=4),
    "circuit_caveats": lambda m, la, h: circuits.circuit_caveats(m, la),
    "mlp_memory": lambda m, la, h: circuits.mlp_memory(m, la),
}


@pytest.mark.parametrize("name", BY_HEAD)
@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_whole_numbers_of_any_kind(model_r: Decoder, name: str, kind: Callable[[int], Any]) -> None:
    BY_HEAD[name](model_r, kind(0), kind(3))


@pytest.mark.parametrize("name", BY_HEAD)
@pytest.mark.parametrize(
    "given",
    [-1, 4, True, 1.0, "0", None, torch.tensor(0.5), torch.tensor([0, 1]), np.array([0, 1])],
)
def test_no_layer(model_r: Decoder, name: str, given: Any) -> None:
    with pytest.raises(ShapeError, match=r"layer must be a whole number in|there is no layer"):
        BY_HEAD[name](model_r, given, 0)


@pytest.mark.parametrize("heads", [5, (0, 1), [(0,)], "ab", [(0, 0, 0)], torch.tensor([0, 1])])
def test_no_pair(model_a: Decoder, heads: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: circuits.head_anatomies(model_a, heads, n=4),
        lambda: circuits.virtual_head(model_a, TOKENS, heads),
        lambda: circuits.virtual_ov(model_a, heads),
    ]
    for call in calls:
        with pytest.raises(ShapeError, match=r"a head is a pair \(layer, head\), got"):
            call()


def test_heads_in_an_array(model_a: Decoder) -> None:
    heads = np.array([[0, 1], [1, 2]])
    assert circuits.virtual_head(model_a, TOKENS, heads).heads == ((0, 1), (1, 2))
    assert [one.name for one in circuits.head_anatomies(model_a, heads, n=4)] == ["L0H1", "L1H2"]


@pytest.mark.parametrize("distance", [1.0, "1", True, [1], torch.tensor(1.5)])
def test_no_distance(model_r: Decoder, distance: Any) -> None:
    with pytest.raises(ConfigError, match="distance must be a whole number of tokens, got"):
        circuits.qk_circuit(model_r, 0, 0, distance=distance)
    with pytest.raises(ShapeError, match="distances must be whole numbers of tokens in"):
        circuits.distance_profile(model_r, 0, 0, query=1, key=2, distances=[distance])


def test_distances_of_any_kind_but_not_beyond_angles(model_r: Decoder) -> None:
    for distances in (np.arange(3), torch.arange(3), range(3)):
        found = circuits.distance_profile(
            model_r, 0, 0, query=np.int64(1), key=2, distances=distances
        )
        assert found["distance"].values.tolist() == [0, 1, 2]
    one = circuits.qk_circuit(model_r, 0, 0, distance=np.int64(3))
    assert torch.equal(one.A, circuits.qk_circuit(model_r, 0, 0, distance=3).A)
    with pytest.raises(ConfigError, match=r"distance must lie in \[-2\*\*31, 2\*\*31\], got 1180"):
        circuits.qk_circuit(model_r, 0, 0, distance=2**70)
    with pytest.raises(ShapeError, match=r"whole numbers of tokens in \[-2\*\*31, 2\*\*31\]"):
        circuits.distance_profile(model_r, 0, 0, query=1, key=2, distances=[2**70])
    with pytest.raises(ShapeError, match="query must be finite, but holds NaN or infinity"):
        circuits.distance_profile(model_r, 0, 0, query=torch.full((16,), torch.nan), key=2)


@pytest.mark.parametrize("given", [3, None, 1.5, ["x"]])
def test_no_word(model_a: Decoder, given: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: circuits.decompose_residual(model_a, TOKENS, at=given),
        lambda: circuits.logit_lens(model_a, TOKENS, scale=given),
        lambda: circuits.fold(model_a, norms=given),
        lambda: circuits.fold(model_a, centre=given),
    ]
    for call in calls:
        with pytest.raises(HeadstreamError, match=r"must be|names no residual stream"):
            call()


@pytest.mark.parametrize("given", [True, 1.5, "3", (), (1,)])
def test_no_count(model_a: Decoder, given: Any) -> None:
    with pytest.raises(ShapeError, match="top must be a whole number, got"):
        circuits.logit_lens(model_a, TOKENS, top=given)


@pytest.mark.parametrize("given", [True, [[True] * 4], "3"])
def test_no_targets(model_l1: Decoder, given: Any) -> None:
    with pytest.raises(ShapeError, match="targets must be a bool tensor"):
        circuits.importance_by_order(model_l1, TOKENS, targets=given)


def test_no_scores() -> None:
    for call in (circuits.strongest_compositions, circuits.summarise_compositions):
        with pytest.raises(ShapeError, match="scores must be what composition_scores returned"):
            call(3)


def test_one_k_of_copying(model_a: Decoder) -> None:
    assert circuits.copying_score(model_a, top=2)["k"].values.tolist() == [2]
    with pytest.raises(ShapeError, match="top must be a whole number, got '2'"):
        circuits.copying_score(model_a, top="2")


def test_rows_of_any_kind(model_a: Decoder) -> None:
    circuit = circuits.ov_circuit(model_a, 0, 0)
    found = circuits.top_per_row(circuit, 1, rows=[np.int64(3), torch.tensor(1)])
    assert found["row"].values.tolist() == [3, 1]
    with pytest.raises(ShapeError, match=r"rows must be whole numbers in \[0, 20\), got True"):
        circuits.top_per_row(circuit, 1, rows=[True])


def test_infinite_weights_are_no_exact_sum(model_a: Decoder) -> None:
    """A score of -inf looks masked, and an infinite bound holds for everything."""
    with torch.no_grad():
        model_a.blocks[1].attn.b_Q[0, 0] = -torch.inf
        model_a.blocks[1].attn.b_K[0, 0] = 100.0
    with pytest.raises(ExactnessError, match="the terms do not sum to the scores of L1H0"):
        circuits.score_terms(model_a, TOKENS, 1, 0)
