"""What the suffix engine owes beside its numbers (`tests/property/test_suffix_engine.py`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headstream.analyses.patching.engines import open_sweep
from headstream.analyses.patching.site_sets import At
from headstream.analyses.patching.sites import SITES
from headstream.analyses.patching.suffix import one_key, spread
from headstream.analyses.patching.suffix.writes import after_new_key
from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError, TaskError

MakeTask = Callable[..., Task]


def swept(model: Decoder, plan: SweepPlan, engine: str = "suffix") -> np.ndarray:
    opened = open_sweep(model, plan, engine)
    found = np.full((2, plan.grid(model.config).size, len(plan.task)), np.inf)
    for block in blocks(plan, model.config, controls=False):
        found[:, list(block.cells)] = opened.run(block)
    return found


def with_sink(length: int, strength: float) -> tuple[Decoder, Task]:
    """Every head of layer 1 gives nearly all of its weight to position 0, whose value is large."""
    config = DecoderConfig(
        n_layers=3, n_heads=2, d_model=8, d_head=4, d_mlp=8, d_vocab=10, n_ctx=length, norm="none"
    )
    model = Decoder(config, seed=0)
    with torch.no_grad():
        model.pos_embed.W_pos.zero_()
        model.pos_embed.W_pos[0, 0] = 3.0
        model.pos_embed.W_pos[:, 1] = 1.0
        attn = model.blocks[1].attn
        attn.W_Q[:, 1, 0] = strength
        attn.W_K[:, 0, 0] = strength
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, 10, (3, length), generator=generator)
    return model, Task(clean, (clean + 1) % 10, 1, 2)


@pytest.mark.parametrize("site", ["resid_pre", "k", "z"])
def test_a_sink_is_taken_out_without_loss(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    """Rows of which one key holds all but 1e-6: 1 - w has no digit left in float32."""
    model, task = with_sink(12, 3.0)
    attended = model.run_with_cache(task.corrupted)[1]["blocks.1.attn.hook_pattern"]
    assert float(attended[:, :, 1:, 0].detach().median()) > 0.99
    layer = 0 if site == "z" else 1
    # Zero is no sink: what the other keys hold, 1e-6 before, is all there is then.
    plan = SweepPlan(task, site, positions="each", layers=[layer], values="zero")
    expected = swept(model, plan, "hooks")
    # float32 at unit scale.
    np.testing.assert_allclose(swept(model, plan), expected, rtol=0, atol=1e-5)
    if site == "resid_pre":
        monkeypatch.setattr(one_key, "HEAVY", 2.0)
        worse = np.abs(swept(model, plan) - expected)
        assert not worse.max() <= 1e-5


def test_any_order_and_any_process_give_the_same_bits(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 5)
    plan = SweepPlan(task, "z", positions="each")
    work = blocks(plan, model.config)
    assert sorted(cell for block in work for cell in block.cells) == sorted([*range(56)] * 3)
    assert [block.index for block in work] == list(range(len(work)))
    first, again = open_sweep(model, plan), open_sweep(model, pickle.loads(pickle.dumps(plan)))
    for block, copy in zip(reversed(work), reversed(pickle.loads(pickle.dumps(work)))):
        assert block == copy
        assert first.run(block).tobytes() == again.run(copy).tobytes()


def test_blocks_split_large_grids(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 64, length=16)
    plan = SweepPlan(task, "z", positions="each")
    work = blocks(plan, model.config, controls=False)
    assert sorted(cell for block in work for cell in block.cells) == list(range(128))
    assert all(len(block.cells) * 64 * 16 <= 2**14 for block in work)
    np.testing.assert_allclose(swept(model, plan), swept(model, plan, "hooks"), atol=1e-5)


def test_resampling_has_no_control_of_its_own(model: Decoder, make_task: MakeTask) -> None:
    plan = SweepPlan(make_task(model, 4), "z", values="resample")
    assert {block.kind for block in blocks(plan, model.config)} == {"effects", "self"}


def test_hooks_and_edits_are_refused(model: Decoder, make_task: MakeTask) -> None:
    plan = SweepPlan(make_task(model, 2), "z")
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x)]):
        model(plan.task.clean)
        with pytest.raises(
            HookError, match=r"engine 'suffix' computes a model as it is, .*; use e"
        ):
            open_sweep(model, plan)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({}, r"the mapping of sets is empty; give \{name: \[At"),
        ({"": [At("z", 0)]}, "sets must be named by non-empty strings, got ''"),
        ({"a": []}, r"set 'a' must be a list of At\(site, layer, ...\), got \[\]"),
        ({"a": [("z", 0)]}, "set 'a' must be a list of At"),
        ({"a": [At("z", 5)]}, "layers holds 5"),
        ({"a": [At("z", 0, 9)]}, "heads holds 9"),
        ({"a": [At("z", 0, 0, "who")]}, "the task names none|names role 'who'"),
    ],
)
def test_sets_that_do_not_fit(
    model: Decoder, make_task: MakeTask, sets: object, words: str
) -> None:
    plan = SweepPlan(make_task(model, 2), sets)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=words):
        plan.grid(model.config)


@pytest.mark.parametrize(
    ("site", "positions", "words"),
    [
        ("z", "edges", "positions must be 'all', 'each', 'roles' or a list of positions, got"),
        ("z", [(3, 1)], r"positions holds the edge \(3, 1\), and only site 'pattern' has edges"),
        ("pattern", [(1, 3)], r"edge \(1, 3\) reads a later position in pair 0"),
        ("pattern", [(3, 1), (3, 1)], r"positions names an edge twice: \['3<-1', '3<-1'\]"),
        ("pattern", [("who", 0)], "positions names role 'who', and the task has none"),
        ("pattern", [(99, 0)], "positions holds 99, but the longest prompt has 7 real tokens"),
    ],
)
def test_edges_that_do_not_fit(
    model: Decoder, make_task: MakeTask, site: str, positions: object, words: str
) -> None:
    plan = SweepPlan(make_task(model, 2), site, positions=positions)
    with pytest.raises(TaskError, match=words):
        plan.grid(model.config)


def test_an_edge_is_its_share_of_the_value(model: Decoder, make_task: MakeTask) -> None:
    """By hand: taking an edge out removes its weight times the value, through W_O, from the row."""
    task = make_task(model, 3, length=4)
    plan = SweepPlan(task, "pattern", layers=[1], heads=[2], positions=[(3, 1)], values="zero")
    with torch.no_grad():
        _, cache = model.run_with_cache(task.corrupted)
        share = cache["blocks.1.attn.hook_pattern"][:, 2, 3, 1, None]
        lost = share * cache["blocks.1.attn.hook_v"][:, 1, 2] @ model.blocks[1].attn.W_O[2]
        mid = cache["blocks.1.hook_resid_mid"][:, 3] - lost
        post = mid + model.blocks[1].mlp(model.blocks[1].ln2(mid[:, None]))[:, 0]
        logits = model.ln_final(post[:, None])[:, 0] @ model.W_U + model.b_U
        rows = torch.arange(3)
        assert task.wrong is not None
        measured = logits[rows, task.answer] - logits[rows, task.wrong]
        before = model(task.corrupted)[:, -1]
        expected = measured - (before[rows, task.answer] - before[rows, task.wrong])
    # float32 at unit scale.
    np.testing.assert_allclose(swept(model, plan)[0, 0], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("values", ["pair", "mean"])
@pytest.mark.parametrize("site", sorted(SITES))
def test_half_precision_at_every_site(site: str, values: str) -> None:
    """Equal to the definition up to what bfloat16 rounds: 2^-8 of logits of about one."""
    config = DecoderConfig(
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_model=16,
        d_head=4,
        d_mlp=16,
        d_vocab=11,
        n_ctx=10,
        gated_mlp=True,
        norm="rmsnorm",
        positions="rotary",
    )
    model = Decoder(config, seed=1).to(torch.bfloat16)
    clean = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(0))
    task = Task(clean, (clean + 1) % 11, 1, 2)
    forms: list[Any] = ["all", "each"] + (["edges"] if site == "pattern" else [])
    for positions in forms:
        plan = SweepPlan(task, site, positions=positions, values=values)
        expected = swept(model, plan, "hooks")
        np.testing.assert_allclose(swept(model, plan), expected, rtol=0, atol=0.05)
        assert np.abs(expected).max() > 0.05


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_long_suffixes_go_by_what_heads_write(
    monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    """At a shape where it pays, that way is taken, and gives the definition's numbers."""
    config = DecoderConfig(
        n_layers=3,
        n_heads=2,
        d_model=32,
        d_head=8,
        d_mlp=64,
        d_vocab=11,
        n_ctx=24,
        positions=positions,
        attn_bias=True,
        mlp_bias=True,
    )
    model = Decoder(config, seed=2, dtype=torch.float64)
    clean = torch.randint(0, 11, (2, 24), generator=torch.Generator().manual_seed(0))
    plan = SweepPlan(Task(clean, (clean + 1) % 11, 1, 2), "z", positions="each")
    taken = []

    def counted(*arguments: Any) -> torch.Tensor:
        taken.append(arguments)
        return after_new_key(*arguments)

    monkeypatch.setattr(spread, "after_new_key", counted)
    expected = swept(model, plan, "hooks")
    np.testing.assert_allclose(swept(model, plan), expected, rtol=0, atol=1e-10)
    assert taken
    assert np.abs(expected).max() > 1e-3
