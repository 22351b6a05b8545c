"""A statistic that somebody adds: what its values may be, and what is refused."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.measuring.statistic import LinearStatistic
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError

pytestmark = pytest.mark.usefixtures("unchecked")


@dataclass(eq=False)
class Given(LinearStatistic):
    """Mean of given values."""

    given: Any

    def values(self, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
        found: Tensor = self.given
        return found


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 7.0])
def test_what_it_says_of_padding_does_not_matter(model: Decoder, backend: str, fill: float) -> None:
    tokens = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    values = torch.arange(10, dtype=torch.float64).reshape(2, 5, 1)
    found = [
        measure_attention(
            model,
            tokens,
            Given(torch.where(mask.bool()[..., None], values, padding)),
            attention_mask=mask,
            backend=backend,
        )
        for padding in (0.0, fill)
    ]
    assert found[1]["given"].notnull().all()
    assert found[1].identical(found[0])


def test_values_may_be_booleans(model: Decoder, backend: str) -> None:
    values = torch.tensor([1, 0, 0, 1, 0]).bool()[None, :, None]
    found = [
        measure_attention(model, torch.arange(5), Given(given), backend=backend)
        for given in (values, values.double())
    ]
    assert found[0].identical(found[1])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            (1, 5),
            r"values of 'given' are \[1, 5\], expected \[batch, key_pos, 1\] = \[1, 5, 1\]; add",
        ),
        ((1, 4, 1), r"values of 'given' are \[1, 4, 1\], expected"),
        ((1, 5, 2), r"values of 'given' are \[1, 5, 2\].*; name an axis if a key has several"),
    ],
)
def test_values_of_another_shape(
    model: Decoder, backend: str, shape: tuple[int, ...], words: str
) -> None:
    """Of two columns without an axis the second was once dropped in silence."""
    with pytest.raises(ShapeError, match=words):
        measure_attention(model, torch.arange(5), Given(torch.ones(shape)), backend=backend)
