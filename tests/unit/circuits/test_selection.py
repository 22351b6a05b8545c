"""Layers and heads as whole numbers of any kind; what is none is said to be none."""

import numpy as np
import pytest
import torch

from headstream.circuits.interventions import cut_edges
from headstream.circuits.pattern_preserving import pattern_preserving_ablation
from headstream.circuits.selection import heads_by_layer, indices
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError


@pytest.mark.parametrize(
    "given",
    [
        np.int64(1),
        torch.tensor(1),
        [np.int64(1), 1],
        np.array([1, 1]),
        torch.tensor([1]),
        range(1, 2),
    ],
)
def test_numbers_of_any_kind(given: object) -> None:
    found = indices(given, "layer", 2)
    assert found == (1,)
    assert type(found[0]) is int


@pytest.mark.parametrize("given", [np.int64(2), torch.tensor(-1), np.array([0.0]), [[0]], "0", 0.5])
def test_what_names_no_layer(given: object) -> None:
    with pytest.raises(ShapeError, match=r"there is no layer .*: the model has 2, 0 to 1"):
        indices(given, "layer", 2)


@pytest.mark.usefixtures("unchecked")
def test_heads_by_numbers_of_any_kind(model_a: Decoder) -> None:
    assert heads_by_layer(model_a, [(np.int64(1), 3), (1, 0)]) == {1: [3, 0]}
    with pytest.raises(ShapeError, match=r"no heads were given; give pairs such as"):
        heads_by_layer(model_a, None)
    with (
        pytest.raises(ShapeError, match="no heads were given"),
        pattern_preserving_ablation(model_a, torch.arange(4), None),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("renormalise", ["no", None, 0])
def test_renormalise_is_yes_or_no(model_a: Decoder, renormalise: object) -> None:
    """The word "no" is true to Python, and would have renormalised."""
    with (
        pytest.raises(ConfigError, match=f"renormalise must be True or False, got {renormalise!r}"),
        cut_edges(model_a, 0, keys=[0], renormalise=renormalise),  # type: ignore[arg-type]
    ):
        pass
