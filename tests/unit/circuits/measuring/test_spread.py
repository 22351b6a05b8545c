"""How a row is spread when an edit took some of it away; many sink tokens in O(n) memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstream.circuits.interventions import cut_edges
from headstream.circuits.measuring.masses import SinkMass
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.measuring.spread import Collision, EffectiveKeys, Entropy, ExpectedDistance
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.decoder import Decoder

Build = Callable[..., Decoder]


def test_a_row_of_which_a_part_is_left_is_spread_over_that_part() -> None:
    """Half of a row uniform over 4 keys, and a row of nothing."""
    pattern = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    pattern[..., 1, :2] = 0.25
    batch = TokenBatch(torch.ones(1, 4, dtype=torch.bool), query_pos=2)
    for statistic, nothing, half in (
        (Entropy(), 0.0, torch.tensor(2.0).log().item()),
        (Collision(), 0.0, 0.5),
        (EffectiveKeys(), 0.0, 2.0),
        (ExpectedDistance(), 0.0, 2.5),
    ):
        found = statistic.from_pattern(pattern, batch)[0, 0]
        assert found.tolist() == pytest.approx([nothing, half]), statistic.name


def test_cut_without_renormalising_no_head_has_more_keys_than_it_reads(model_a: Decoder) -> None:
    """FR-57's like: squares of what is left of a row once gave 225 effective keys of 9."""
    tokens = torch.arange(9)
    statistics = [EffectiveKeys(), Collision(), Entropy(), ExpectedDistance()]
    found = []
    for renormalise in (False, True):
        with cut_edges(model_a, 0, keys=slice(0, 3), renormalise=renormalise):
            found.append(
                measure_attention(model_a, tokens, statistics, backend="naive").sel(layer=0)
            )
    assert found[0]["effective_keys"].max() <= 9
    for name in found[0]:
        assert abs(found[0][name] - found[1][name]).max() <= 1e-10, name


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor, in elements, that any torch operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_the_mass_on_half_of_the_tokens_takes_no_n_by_n(build: Build) -> None:
    n = 2048
    fields = {"n_heads": 1, "d_head": 4, "n_layers": 1, "n_ctx": n, "d_vocab": 50}
    model = build(fields, dtype=torch.float32)
    tokens = torch.randint(50, (1, n), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        found = measure_attention(model, tokens, SinkMass(n // 2))
    assert largest.numel <= n * 64 < n * n // 2
    naive = measure_attention(model, tokens, SinkMass(n // 2), backend="naive")
    assert abs(found["sink_mass_1024"] - naive["sink_mass_1024"]).max() <= 1e-5


@pytest.mark.parametrize("first", [15, 16, 17])
def test_few_and_many_sink_tokens_are_the_definition(build: Build, first: int) -> None:
    model = build({"positions": "rotary", "n_kv_heads": 2, "n_ctx": 30})
    tokens = torch.randint(20, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(30) >= torch.tensor([[0], [9]])
    flash, naive = (
        measure_attention(model, tokens, SinkMass(first), backend=backend, attention_mask=mask)
        for backend in ("flash", "naive")
    )
    assert abs(flash - naive).to_array().max() <= 1e-10
