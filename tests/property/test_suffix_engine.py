"""The suffix engine gives the definition's numbers, whatever is patched where in which model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstream.analyses.patching.engines import open_sweep
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.sites import SITES
from headstream.analyses.patching.suffix import spread
from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

N_TOKENS = 11


@st.composite
def configs(draw: st.DrawFn, *, mlp: bool = False) -> dict[str, Any]:
    d_mlp = draw(st.sampled_from([5, 8] if mlp else [None, 5, 8]))
    return dict(
        n_layers=draw(st.integers(1, 3)),
        n_heads=4,
        n_kv_heads=draw(st.sampled_from([1, 2, 4])),
        d_model=8,
        d_head=draw(st.sampled_from([2, 4])),
        d_mlp=d_mlp,
        d_vocab=N_TOKENS,
        n_ctx=10,
        positions=draw(st.sampled_from(["learned", "shortformer", "sinusoidal", "rotary", "none"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm", "none"])),
        activation=draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        gated_mlp=d_mlp is not None and draw(st.booleans()),
        mlp_bias=d_mlp is not None and draw(st.booleans()),
        attn_bias=draw(st.booleans()),
        unembed_bias=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )


def built(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """Weights that give logits of unit scale, gains and biases that are not the identity."""
    model = Decoder(config, seed=1, dtype=dtype)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
            if name.endswith(".w"):
                parameter.copy_(1 + 0.3 * noise)
            elif not name.rsplit(".", 1)[-1].startswith("W_"):
                parameter.copy_(0.3 * noise)
    return model


tasks = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "longest": st.integers(2, 5),
        "seed": st.integers(0, 2**16),
        "share": st.sampled_from([0.3, 1.0]),
        "layout": st.sampled_from(["whole", "left", "right", "holes"]),
        "read_last": st.booleans(),
        "metric": st.sampled_from(["logit_difference", "kl", "log_prob", "entropy"]),
    }
)


def made(
    n: int, longest: int, seed: int, share: float, layout: str, read_last: bool, metric: str
) -> Task:
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(0, N_TOKENS, (n, longest), generator=generator)
    changed = torch.rand(n, longest, generator=generator) < share
    changed[:, 0] |= ~changed.any(1)
    shift = torch.randint(1, N_TOKENS, (n, longest), generator=generator)
    corrupted = torch.where(changed, (clean + shift) % N_TOKENS, clean)
    mask = torch.ones(n, longest, dtype=torch.bool)
    if layout in ("left", "right"):
        length = torch.randint(1, longest + 1, (n, 1), generator=generator)
        index = torch.arange(longest)
        mask = index >= longest - length if layout == "left" else index < length
    elif layout == "holes":
        mask = torch.rand(n, longest, generator=generator) < 0.7
        mask[:, 1] = True
    lengths = mask.sum(1)
    answer_pos = (torch.rand(n, generator=generator) * lengths).long()
    role = (torch.rand(2, n, generator=generator) * lengths).long().sort(0).values
    return Task(
        clean,
        corrupted,
        0,
        1,
        attention_mask=mask,
        answer_pos=-1 if read_last else answer_pos,
        roles={"early": role[0], "late": role[1]},
        metric=_entropy if metric == "entropy" else metric,
    )


def _entropy(logits: Tensor, task: Task) -> Tensor:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def positions(site: str) -> st.SearchStrategy[Any]:
    forms: list[Any] = ["all", "each", "roles", [0, -1]]
    if site == "pattern":
        forms += ["edges", [(-1, 0), ("late", "early")]]
    return st.sampled_from(forms)


def effects(model: Decoder, plan: SweepPlan, engine: str) -> np.ndarray:
    """[metric, cell, example], put together from the blocks."""
    opened = open_sweep(model, plan, engine)
    found = np.full((len(plan.metrics), plan.grid(model.config).size, len(plan.task)), np.inf)
    for block in blocks(plan, model.config, controls=False):
        found[:, list(block.cells)] = opened.run(block)
    return found


def agree(model: Decoder, plan: SweepPlan) -> None:
    expected, found = (effects(model, plan, engine) for engine in ("hooks", "suffix"))
    # The bars of the design: float64, and float32 at unit scale.
    bar = 1e-10 if model.dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=bar)


@pytest.mark.parametrize("site", sorted(SITES))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_site_agrees_with_the_definition(site: str, data: st.DataObject) -> None:
    config = DecoderConfig(**data.draw(configs(mlp=SITES[site].needs_mlp)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    plan = SweepPlan(
        made(**data.draw(tasks)),
        site,
        direction=data.draw(st.sampled_from(["denoise", "noise"])),
        values=data.draw(st.sampled_from(["pair", "zero", "mean", "resample"])),
        # Not the first head alone, so that a wrong group shows.
        heads=[2, 1] if SITES[site].heads in ("head", "neuron") else None,
        positions=data.draw(positions(site)),
        backend=data.draw(st.sampled_from(["naive", "auto"])),
    )
    agree(built(config, dtype), plan)


@pytest.mark.parametrize("site", ["resid_pre", "mlp_out", "z", "q"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_sums_of_what_heads_write_agree_with_the_definition(site: str, data: st.DataObject) -> None:
    """The way of `suffix.writes`, taken here where it would not pay yet."""
    config = DecoderConfig(**data.draw(configs(mlp=True)) | {"n_layers": 3})
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    plan = SweepPlan(
        made(**data.draw(tasks)),
        site,
        direction=data.draw(st.sampled_from(["denoise", "noise"])),
        values=data.draw(st.sampled_from(["pair", "zero", "mean", "resample"])),
        heads=[2, 1] if SITES[site].heads else None,
        positions=data.draw(st.sampled_from(["each", "roles", [0, -1]])),
        backend=data.draw(st.sampled_from(["naive", "auto"])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "pays", lambda base, layer, units, rows: not layer.is_last)
        patch.setattr(spread, "ROWS_PER_HEAD", 0)
        agree(built(config, dtype), plan)


@st.composite
def sites_of_sets(draw: st.DrawFn, layers: int, mlp: bool) -> tuple[Any, ...]:
    names = [name for name in sorted(SITES) if mlp or not SITES[name].needs_mlp]
    site = draw(st.sampled_from(names))
    head = draw(st.sampled_from([None, 0])) if SITES[site].heads else None
    places: list[Any] = [None, 0, -1, "late"] + ([(-1, 0)] if site == "pattern" else [])
    return site, draw(st.integers(0, layers - 1)), head, draw(st.sampled_from(places))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sets_of_sites_agree_with_the_definition(data: st.DataObject) -> None:
    config = DecoderConfig(**data.draw(configs()))
    one = sites_of_sets(config.n_layers, config.has_mlp)
    members = st.lists(one, min_size=1, max_size=4).map(lambda sites: [At(*site) for site in sites])
    plan = SweepPlan(
        made(**data.draw(tasks)),
        {"first": data.draw(members), "second": data.draw(members)},
        direction=data.draw(st.sampled_from(["denoise", "noise"])),
        values=data.draw(st.sampled_from(["pair", "zero", "mean", "resample"])),
        backend=data.draw(st.sampled_from(["naive", "auto"])),
    )
    agree(built(config, torch.float64), plan)
