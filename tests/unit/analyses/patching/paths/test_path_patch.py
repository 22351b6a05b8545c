"""Path patching: identities, the known circuits, and the same numbers whatever the padding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headstream.analyses.evidence import Evidence
from headstream.analyses.patching.metrics import METRICS
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.paths.ends import ends_of
from headstream.analyses.patching.paths.path_patch import path_patch
from headstream.analyses.patching.paths.plan import PathBlock, PathPlan
from headstream.analyses.patching.paths.receivers import Receiver, received
from headstream.analyses.patching.paths.result import PathResult
from headstream.analyses.patching.paths.sweep import PathSweep
from headstream.analyses.patching.suffix.band import Band
from headstream.analyses.patching.suffix.state import unembedded
from headstream.analyses.patching.task import Task
from headstream.analyses.stored import load_result
from headstream.circuits import decompose_residual
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError, TaskError
from headstream.models.store import load

CIRCUIT = ["embed", "L0H1", "L1H2"]
Build = Callable[..., Decoder]
MakeTask = Callable[..., Task]


def causal(result: PathResult) -> list[str]:
    return [c.id.removeprefix("path.") for c in result.claims if c.evidence is Evidence.CAUSAL]


def test_a_direct_effect_is_the_difference_of_attributions(
    build: Build, make_task: MakeTask
) -> None:
    model = build({"norm": "none"})
    task = make_task(model, 8)
    result = path_patch(model, task, "heads", "logits", n_flips=1, progress=False)
    written = [
        decompose_residual(model, rows).logit_attribution(task.answer, task.wrong, pos=-1)
        for rows in (task.clean, task.corrupted)
    ]
    difference = (written[0] - written[1]).sel(component=result.data["sender"].values)
    # float64, sums of some dozen products.
    np.testing.assert_allclose(
        result.effects.sel(receiver="logits").values, difference.values, atol=1e-12
    )


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_direct_effects_sum_to_the_gap_where_the_readout_is_linear(
    build: Build, make_task: MakeTask, direction: str
) -> None:
    model = build({"norm": "none", "d_mlp": 24})
    result = path_patch(
        model, make_task(model, 8), None, "logits", direction=direction, n_flips=1, progress=False
    )
    sign = 1 if direction == "denoise" else -1
    np.testing.assert_allclose(
        result.effects.sum("sender").sel(receiver="logits").values,
        sign * (result.clean - result.corrupted).values,
        atol=1e-11,
    )


@pytest.mark.parametrize("fixture", ["model", "grouped"])
@pytest.mark.parametrize("channel", ["q", "k", "v"])
def test_the_only_sender_is_the_receivers_whole_input(
    request: pytest.FixtureRequest, make_task: MakeTask, fixture: str, channel: str
) -> None:
    """Before layer 0 there is only the embedding: the path is the patch of that channel."""
    model = request.getfixturevalue(fixture)
    task = make_task(model, 8)
    paths = path_patch(model, task, "embed", channel, n_flips=1, progress=False)
    patched = patch(model, task, channel, layers=[0], n_flips=1, progress=False)
    first = paths.effects.isel(sender=0)[: patched.effects.sizes[patched.effects.dims[1]]]
    # float32, effects of order 1.
    np.testing.assert_allclose(first.values, patched.effects.values[0], atol=1e-5)


@pytest.mark.parametrize("channel", ["q", "k", "v"])
def test_all_senders_together_are_the_receivers_whole_input(
    build: Build, make_task: MakeTask, channel: str
) -> None:
    model = build({"d_mlp": 24, "attn_bias": True})
    task = make_task(model, 6)
    senders, receivers = ends_of(model.config, None, [f"L1H{head}.{channel}" for head in range(4)])
    sweep = PathSweep(model, PathPlan(task, senders, receivers))
    changes, _ = sweep._changes(PathBlock(0, "effects", (), tuple(range(len(senders)))))
    pairs = torch.arange(len(task))
    band = Band(pairs, torch.zeros_like(pairs), task.answer_pos, 0, 7)
    receiver = Receiver(channel, 1, torch.arange(4))
    with torch.no_grad():
        stream, _ = received(sweep._spread, receiver, torch.stack(changes).sum(0), band)
        logits = unembedded(model, stream.flatten(0, 1)).unflatten(0, stream.shape[:2])
    moved = sweep._measure(logits.transpose(0, 1))[0] - sweep.base["corrupted"][0]
    patched = patch(model, task, channel, layers=[1], n_flips=1, progress=False)
    # float64; the sum of all writes rounds otherwise than the stream.
    np.testing.assert_allclose(moved, patched.effects.values[0], atol=1e-10)


def test_totals_are_patches(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 8)
    result = path_patch(model, task, n_flips=1, progress=False)
    heads = patch(model, task, "z", n_flips=1, progress=False)
    for layer in range(2):
        mlp = patch(model, task, "mlp_out", positions="all", n_flips=1, progress=False)
        found = result.total.sel(sender=f"L{layer}MLP")
        assert float(found) == pytest.approx(float(mlp.mean.sel(layer=layer)), abs=1e-5)
        for head in range(4):
            found = result.total.sel(sender=f"L{layer}H{head}")
            expected = float(heads.mean.sel(layer=layer, head=head))
            assert float(found) == pytest.approx(expected, abs=1e-5)
    # All that differs between the runs comes in with the embedding.
    gap = float((result.clean - result.corrupted).mean())
    assert float(result.total.sel(sender="embed")) == pytest.approx(gap, abs=1e-5)


def test_of_the_last_layer_the_total_effect_is_the_direct_one(
    model: Decoder, make_task: MakeTask
) -> None:
    result = path_patch(model, make_task(model, 8), "L1MLP", progress=False)
    assert result.data["receiver"].values.tolist() == ["logits"]
    np.testing.assert_allclose(result.total.values, result.direct.values, atol=1e-6)


@pytest.mark.parametrize("engine", ["suffix", "hooks"])
def test_the_constructed_circuit(engine: str) -> None:
    model = load("constructed-induction")
    task = Task.for_model(model, n=16)
    few = (CIRCUIT, ["L0H1.v", "L1H2.k", "logits"])
    senders, receivers = (None, None) if engine == "suffix" else few
    result = path_patch(model, task, senders, receivers, engine=engine, progress=False)
    assert set(causal(result)) == {"embed->L0H1.v", "L0H1->L1H2.k", "L1H2->logits"}
    found = result.normalized.values[result.data["causal"].values]
    np.testing.assert_allclose(found, 1.0, atol=1e-3)  # by hand: each carries the whole gap
    others = result.effects.values[~result.data["causal"].values]
    assert np.nanmax(np.abs(others)) == 0


def test_where_the_constructed_circuit_passes_what() -> None:
    model = load("constructed-induction")
    result = path_patch(
        model, Task.for_model(model, n=16), "L0H1", "k", positions="roles", progress=False
    )
    assert causal(result) == ["L0H1@answer_source->L1H2.k"]


def test_the_dominant_edge_of_the_trained_model() -> None:
    """Previous-token head to the keys of every induction head; nothing else between heads."""
    model = load("induction-2l")
    result = path_patch(model, Task.for_model(model, n=64), "heads", progress=False)
    between = result.normalized.where(result.data["channel"] != "logits", drop=True)
    order = between.stack(path=("sender", "receiver")).dropna("path").sortby(lambda x: -x)
    names = [f"{sender}->{receiver}" for sender, receiver in order["path"].values]
    dominant = {f"L0H0->L1H{head}.k" for head in range(4)}
    assert set(names[:4]) == dominant
    assert dominant <= set(causal(result))
    assert float(order[3]) > 20 * float(abs(order[4:]).max())


@pytest.mark.parametrize(("gate", "direction"), [("and", "noise"), ("or", "denoise")])
def test_the_gates(gate: str, direction: str) -> None:
    model = load(f"constructed-{gate}")
    result = path_patch(model, Task.for_model(model, n=16), direction=direction, progress=False)
    assert {"L0H0->L0MLP", "L0H2->L0MLP", "L0MLP->logits"} <= set(causal(result))


def test_mlps_between_are_held_or_recomputed() -> None:
    """A head of a gate reaches the logits through the MLP alone: a path only if it is run anew."""
    model = load("constructed-or")
    task = Task.for_model(model, n=16)
    recomputed = path_patch(model, task, "heads", "logits", freeze_mlps=False, progress=False)
    np.testing.assert_allclose(recomputed.normalized.values[:, 0], [1, 0, 1, 0], atol=1e-6)
    assert "MLPs between recomputed" in recomputed.claims[1].reason
    with pytest.warns(UserWarning, match="path_patch: every effect is exactly zero"):
        held = path_patch(model, task, "heads", "logits", progress=False)
    assert (held.effects == 0).all()
    assert held.summary().endswith("; every effect is zero (n = 16)")


def test_padding_changes_nothing(model: Decoder) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 20, (length,), generator=generator) for length in (4, 6, 6)]
    other = [row.clone() for row in rows]
    for row in other:
        row[1] = (row[1] + 5) % 20
    width = 8
    answers = {"answer": 3, "wrong": 4, "roles": {"changed": 1}}

    def padded(side: str) -> Task:
        blocks = []
        for given in (rows, other, [torch.ones_like(row) for row in rows]):
            block = torch.zeros(3, width, dtype=torch.int64)
            for i, row in enumerate(given):
                at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
                block[i, at] = row
            blocks.append(block)
        return Task(blocks[0], blocks[1], attention_mask=blocks[2], **answers)

    def run(task: Task, engine: str = "suffix") -> np.ndarray:
        ends = (["L0H1", "L0MLP"], ["L1H0.k", "L1MLP", "logits"])
        options = {"positions": "roles", "engine": engine, "n_flips": 1, "progress": False}
        return path_patch(model, task, *ends, **options).effects.values

    left = run(padded("left"))
    np.testing.assert_array_equal(run(padded("right")), left)
    np.testing.assert_allclose(run(padded("left"), "hooks"), left, atol=1e-5)
    alone = run(Task(rows[0][None], other[0][None], **answers))
    np.testing.assert_allclose(alone[..., 0], left[..., 0], atol=1e-5)


def test_a_run_sent_its_own_writes_stays_as_it_is(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 8)
    exact = path_patch(
        model, task, ["L0H1", "L0H2"], ["L1H1", "L1MLP"], n_flips=1, engine="hooks", progress=False
    )
    assert exact.details["self_patch_max"] == exact.details["self_patch_bound"] == 0.0
    fast = path_patch(model, task, "heads", n_flips=1, progress=False)
    assert fast.details["self_patch_bound"] > 0
    assert fast.claims[0].evidence is Evidence.PROVEN


def test_shared_keys_and_values_are_receivers_of_their_own(
    grouped: Decoder, make_task: MakeTask
) -> None:
    result = path_patch(grouped, make_task(grouped, 8), "L0H3", ["k", "q"], progress=False)
    names = ["L1H0.q", "L1H1.q", "L1H2.q", "L1H3.q", "L1KV0.k", "L1KV1.k"]
    assert result.data["receiver"].values.tolist() == names
    assert result.data["channel"].values.tolist() == ["q"] * 4 + ["k"] * 2


def test_what_is_saved_comes_back(model: Decoder, make_task: MakeTask, tmp_path: Path) -> None:
    result = path_patch(model, make_task(model, 8), "heads", progress=False)
    back = load_result(result.save(tmp_path / "paths.json"))
    assert isinstance(back, PathResult)
    assert back.summary() == result.summary()
    np.testing.assert_allclose(back.total.values, result.total.values, rtol=1e-6)
    assert back.data["channel"].values.tolist() == result.data["channel"].values.tolist()
    frame = back.to_frame()
    assert {"sender", "receiver", "mean", "p_value", "causal"} <= set(frame.columns)


def test_where_there_is_no_path_there_is_no_number(model: Decoder, make_task: MakeTask) -> None:
    mean = path_patch(model, make_task(model, 8), n_flips=1, progress=False).mean
    for sender, receiver, exists in (
        ("L0H1", "L0H2.q", False),
        ("L0H1", "L0MLP", True),
        ("L0MLP", "L0MLP", False),
        ("L0MLP", "L1H0.v", True),
        ("L1H0", "L0MLP", False),
        ("embed", "L0H0.k", True),
        ("L1MLP", "logits", True),
    ):
        found = float(mean.sel(sender=sender, receiver=receiver))
        assert np.isfinite(found) == exists, (sender, receiver)


def test_the_summary_says_what_an_unrelated_write_does_as_well() -> None:
    model = load("constructed-induction")
    task = Task.for_model(model, n=16)
    result = path_patch(model, task, direction="noise", progress=False)
    assert "not told from an unrelated prompt's writes: " in result.summary()
    assert "embed->L0H1.v (+1.00)" in result.summary()


def test_another_metric(model: Decoder, make_task: MakeTask) -> None:
    task = make_task(model, 8, metric="log_prob")
    result = path_patch(model, task, "L0H1", "logits", n_flips=1, progress=False)
    assert result.details["second_metric"]["name"] == METRICS["logit_difference"].name


@pytest.mark.parametrize(
    ("senders", "receivers", "words"),
    [
        ("L1H0", "L1H2.q", "sender L1H0 writes after every receiver has read: L1H2.q; a path"),
        ("L1H0", "L1H0", "sender L1H0 writes after every receiver has read"),
        ("L0MLP", "L0MLP", "sender L0MLP writes after every receiver has read"),
        ("heads", "L0H1.k", "receiver L0H1.k reads before any sender has written: L0H0, L0H1"),
        ("L0H9", None, r"senders names 'L0H9', and the model has embed .. L1MLP; nearest is"),
        (None, "L1H2.w", "receivers names 'L1H2.w', .* nearest is 'L1H2.v'"),
        (None, "heads", "receivers names 'heads', and the model has L0H0.q .. logits"),
        ([], None, "senders is empty; None means all"),
        (None, 3, "receivers must be names such as 'L0H1', got 3"),
        ([(0, 1), 2.5], None, "senders must be names such as 'L0H1', got 2.5"),
        ((0, 7), None, "senders names 'L0H7'"),
    ],
)
def test_ends_that_do_not_fit(
    model: Decoder, make_task: MakeTask, senders: object, receivers: object, words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        path_patch(model, make_task(model, 4), senders, receivers, progress=False)


def test_ends_of_other_models(
    grouped: Decoder, attention_only: Decoder, make_task: MakeTask
) -> None:
    with pytest.raises(TaskError, match=r"2 query heads share .* L1H3.q, L1KV1.k and L1KV1.v"):
        path_patch(grouped, make_task(grouped, 4), None, "L1H3", progress=False)
    with pytest.raises(TaskError, match="names 'mlps', and this model is attention only"):
        path_patch(attention_only, make_task(attention_only, 4), "mlps", progress=False)
    with pytest.raises(TaskError, match="no sender comes before a receiver"):
        path_patch(attention_only, make_task(attention_only, 4), "heads", "q", progress=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"direction": "denoising"}, "direction must be one of 'denoise', 'noise', got 'denoising"),
        ({"engine": "hook"}, "engine must be one of .*; nearest is 'hooks'"),
        ({"freeze_mlps": 1}, "freeze_mlps must be True or False, got 1"),
        ({"positions": "rolls"}, "positions must be 'all', 'each', 'roles' or a list"),
        ({"positions": "roles"}, "needs roles, and the task names none"),
        ({"seed": -1}, r"seed must be a whole number in \[0, 2\*\*63\)"),
        ({"n_flips": 0}, "n_flips must be a whole number >= 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_options_that_do_not_fit(
    model: Decoder, make_task: MakeTask, options: dict[str, object], words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        path_patch(model, make_task(model, 4), "L0H1", progress=False, **options)  # type: ignore[arg-type]


def test_no_task_and_hooks_on_the_model(model: Decoder, make_task: MakeTask) -> None:
    with pytest.raises(TaskError, match="task must be a Task, got str"):
        path_patch(model, "task", progress=False)
    with (
        model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x)]),
        pytest.raises(HookError, match="hooks or edits are on this one; use engine='hooks'"),
    ):
        path_patch(model, make_task(model, 4), "L0H1", progress=False)


def test_one_pair_is_a_demonstration(model: Decoder, make_task: MakeTask) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = path_patch(model, make_task(model, 1), "L0H1", "L1H2", progress=False)
    assert (
        "one pair is a demonstration: no interval, no p-value, no label"
        in (result.details["warnings"])
    )
    assert causal(result) == []
