"""The resume folder: whose it is, what is damaged, what happens when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstream.analyses.patching import sweep_plan
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
from headstream.analyses.patching.sweeps import store as sweep_store
from headstream.analyses.patching.sweeps.store import SweepStore, describe, read_manifest
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.errors import SweepError

MakeTask = Callable[..., Task]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_plan, "BLOCK_TOKENS", 3 * 4 * 7)


@pytest.fixture
def task(model: Decoder, make_task: MakeTask) -> Task:
    return make_task(model, 4, roles={"source": 2})


def opened(folder: Path, model: Decoder, plan: SweepPlan, threads: int = 1) -> SweepStore:
    work = blocks(plan, model.config)
    return SweepStore(folder, describe(model, plan, "suffix", work, threads))


def begun(folder: Path, model: Decoder, plan: SweepPlan) -> SweepStore:
    """A folder with one finished block."""
    store, block = opened(folder, model, plan), blocks(plan, model.config)[0]
    store.add(block, np.zeros((2, len(block.cells), len(plan.task))))
    return store


def test_a_block_comes_back_to_the_bit(model: Decoder, task: Task, tmp_path: Path) -> None:
    plan = SweepPlan(task, "z", positions="each")
    work = blocks(plan, model.config)
    values = np.random.default_rng(0).standard_normal((2, len(work[0].cells), 4))
    values[0, 0, 0], values[1, 0, 1], values[0, 1, 2] = np.nan, -0.0, 5e-324
    opened(tmp_path, model, plan).add(work[0], values)
    ((block, found),) = opened(tmp_path, model, plan).finished(work, (2, 4))
    assert block is work[0]
    assert found.tobytes() == values.tobytes()
    # A file of another shape, of other metrics, is not this block's.
    assert list(opened(tmp_path, model, plan).finished(work, (1, 4))) == []


def test_nothing_in_the_folder_is_pickled(model: Decoder, task: Task, tmp_path: Path) -> None:
    store = begun(tmp_path, model, SweepPlan(task, "z"))
    store.save_model(model)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors", ".block"}


def other_weights(model: Decoder) -> Decoder:
    other = Decoder(model.config, seed=7)
    other.backend = model.backend
    return other


class TestAnotherSweep:
    """Every difference is named; those that fit a line with both values."""

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"site": "q"}, "site z there, q here"),
            ({"direction": "noise"}, "direction denoise there, noise here"),
            ({"values": "mean"}, "values pair there, mean here"),
            ({"layers": [1]}, "layers null there, [1] here"),
            ({"heads": (0, 2)}, "heads null there, [0, 2] here"),
            ({"positions": "each"}, "positions null there, each here"),
            ({"seed": 4}, "seed 0 there, 4 here"),
            ({"backend": "flash"}, "backend null there, flash here"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_arguments(
        self, model: Decoder, task: Task, tmp_path: Path, changed: dict[str, Any], words: str
    ) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        with pytest.raises(SweepError) as caught:
            opened(tmp_path, model, SweepPlan(task, **{"site": "z"} | changed))
        assert f"resume folder '{tmp_path}' belongs to another sweep: " in caught.value.message
        assert words in caught.value.message
        assert caught.value.hint.startswith("name another folder, or repeat the call")

    def test_model(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        other = other_weights(model)
        old, new = model.weights_sha256()[:12], other.weights_sha256()[:12]
        words = rf"another sweep: model weights {old}\.\.\. there, {new}\.\.\. here; name another"
        with pytest.raises(SweepError, match=words):
            opened(tmp_path, other, SweepPlan(task, "z"))

    def test_number_format(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        double = other_weights(model).to(dtype=torch.float64)
        with pytest.raises(SweepError, match="number format float32 there, float64 here"):
            opened(tmp_path, double, SweepPlan(task, "z"))

    def test_engine(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        plan = SweepPlan(task, "z")
        begun(tmp_path, model, plan)
        with pytest.raises(SweepError, match="sweep: engine suffix there, hooks here; name"):
            SweepStore(
                tmp_path, describe(model, plan, "hooks", blocks(plan, model.config), threads=1)
            )

    def test_version(
        self, model: Decoder, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        monkeypatch.setattr(sweep_store.metadata, "version", lambda name: "9.9")
        with pytest.raises(SweepError, match=r"headstream version .* there, 9\.9 here; torch vers"):
            opened(tmp_path, model, SweepPlan(task, "z"))

    def test_blocks(
        self, model: Decoder, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun(tmp_path, model, SweepPlan(task, "z", positions="each"))
        monkeypatch.setattr(sweep_plan, "BLOCK_TOKENS", 4 * 7)
        with pytest.raises(SweepError, match="another sweep: other division into blocks; name"):
            opened(tmp_path, model, SweepPlan(task, "z", positions="each"))

    @pytest.mark.parametrize(
        ("field", "words"),
        [
            ("clean", "other clean prompts"),
            ("corrupted", "other corrupted prompts"),
            ("answer", "other answers"),
            ("wrong", "other wrong answers"),
            ("answer_pos", "other answer positions"),
            ("roles", "other roles"),
            ("attention_mask", "other attention mask"),
            ("metric", "metric logit_difference there, log_prob here"),
        ],
    )
    def test_task(self, model: Decoder, task: Task, tmp_path: Path, field: str, words: str) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        fields: dict[str, Any] = {
            name: getattr(task, name)
            for name in ("clean", "corrupted", "answer", "wrong", "answer_pos", "roles")
        }
        shifted = {
            "clean": (task.clean + 1) % 20,
            "corrupted": (task.corrupted + 1) % 20,
            "answer": task.wrong,
            "wrong": task.answer,
            "answer_pos": -2,
            "roles": {"source": 1},
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]] * 4),
            "metric": "log_prob",
        }
        fields[field] = shifted[field]
        if field == "answer":
            fields["wrong"] = task.answer
        if field == "wrong":
            fields["answer"] = task.wrong
        if field == "attention_mask":
            del fields["answer_pos"], fields["roles"]
        with pytest.raises(SweepError) as caught:
            opened(tmp_path, model, SweepPlan(Task(**fields), "z"))
        assert words in caught.value.message

    def test_a_metric_of_the_same_name(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        def with_metric(function: Any) -> SweepPlan:
            function.__name__ = "mine"
            return SweepPlan(Task(task.clean, task.corrupted, task.answer, metric=function), "z")

        begun(tmp_path, model, with_metric(lambda logits, task: logits[:, 0]))
        opened(tmp_path, model, with_metric(lambda logits, task: logits[:, 0]))
        with pytest.raises(SweepError, match="another sweep: other the metric's function"):
            opened(tmp_path, model, with_metric(lambda logits, task: logits[:, 1]))

    def test_a_folder_without_finished_blocks_is_begun_anew(
        self, model: Decoder, task: Task, tmp_path: Path
    ) -> None:
        opened(tmp_path, model, SweepPlan(task, "z")).save_model(model)
        other = other_weights(model)
        store = opened(tmp_path, other, SweepPlan(task, "z"))
        store.save_model(other)
        assert read_manifest(tmp_path)["model"]["weights_sha256"] == other.weights_sha256()
        card = json.loads((tmp_path / "model" / "card.json").read_text(encoding="utf-8"))
        assert card["weights_sha256"] == other.weights_sha256()

    def test_a_block_of_another_sweep_is_not_read(
        self, model: Decoder, task: Task, tmp_path: Path
    ) -> None:
        one, other = SweepPlan(task, "z"), SweepPlan(task, "z", seed=1)
        begun(tmp_path / "one", model, one)
        begun(tmp_path / "other", model, other)
        name = "blocks/000000.block"
        (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
        store = opened(tmp_path / "one", model, one)
        assert list(store.finished(blocks(one, model.config), (2, 4))) == []


class TestTheFolder:
    def test_holds_other_things(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(SweepError, match=r"holds other things and no manifest.json; name"):
            opened(tmp_path, model, SweepPlan(task, "z"))
        assert (tmp_path / "thesis.txt").read_text() == "mine"

    def test_is_a_file(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("mine")
        with pytest.raises(SweepError, match=r"resume must be a folder, and '.*x' is a file"):
            opened(tmp_path / "x", model, SweepPlan(task, "z"))
        with pytest.raises(SweepError, match=r"cannot use '.*y' as resume folder: .*Not a direct"):
            opened(tmp_path / "x" / "y", model, SweepPlan(task, "z"))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "cannot read"),
            ("[1]", "schema None, expected 'headstream.sweep/1'; name another folder"),
            ('{"schema": "headstream.sweep/2"}', "schema 'headstream.sweep/2', expected"),
            ('{"schema": "headstream.sweep/1"}', "belongs to another sweep: model weights null"),
        ],
    )
    def test_has_a_damaged_manifest(
        self, model: Decoder, task: Task, tmp_path: Path, text: str, words: str
    ) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(SweepError) as caught:
            opened(tmp_path, model, SweepPlan(task, "z"))
        assert words in str(caught.value)

    def test_lost_its_manifest(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        (tmp_path / "manifest.json").unlink()
        with pytest.raises(SweepError, match=r"and no manifest\.json"):
            opened(tmp_path, model, SweepPlan(task, "z"))

    def test_is_swept_of_what_kills_left(self, model: Decoder, task: Task, tmp_path: Path) -> None:
        begun(tmp_path, model, SweepPlan(task, "z"))
        old = [tmp_path / ".m.part", tmp_path / "blocks" / ".b.part"]
        fresh = tmp_path / "blocks" / ".c.part"
        for path in (*old, fresh):
            path.write_bytes(b"half")
        (tmp_path / ".model.1234.new").mkdir()
        for path in (*old, tmp_path / ".model.1234.new"):
            os.utime(path, (time.time() - 1000,) * 2)
        store = opened(tmp_path, model, SweepPlan(task, "z"))
        left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_dir()}
        # What was written a moment ago may be another process's.
        assert left == {"manifest.json", "blocks/000000.block", "blocks/.c.part"}
        assert store.count() == 1


def test_a_full_disk(
    model: Decoder, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block that does not fit leaves nothing behind, those before it stay."""
    here = patch(model, task, "z", positions="each", n_flips=9)
    write, room = Path.write_bytes, [8]

    def filling(self: Path, data: bytes) -> int:
        room[0] -= 1
        if room[0] < 0:
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", filling)
    words = (
        r"cannot write block 7 to '.*blocks': No space left on device; 7 finished blocks are kept; "
        r"make room, and the same call goes on from there"
    )
    with pytest.raises(SweepError, match=words):
        patch(model, task, "z", positions="each", n_flips=9, resume=tmp_path)
    assert len(os.listdir(tmp_path / "blocks")) == 7
    monkeypatch.setattr(Path, "write_bytes", write)
    again = patch(model, task, "z", positions="each", n_flips=9, resume=tmp_path)
    assert again.to_json() == here.to_json()
