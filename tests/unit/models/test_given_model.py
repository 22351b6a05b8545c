"""Every public function whose first argument is a model says so when it is given something else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headstream.analyses
import headstream.circuits
import headstream.models
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model
from headstream.models.kv_cache import KVCache


def public() -> dict[str, Callable[..., Any]]:
    """Functions of the packages that take a model first."""
    found = {}
    for package in (headstream.models, headstream.circuits, headstream.analyses):
        for name in sorted(package.__all__):
            value = getattr(package, name)
            if inspect.isclass(value) or not callable(value):
                continue
            if next(iter(inspect.signature(value).parameters), "") == "model":
                found[name] = value
    return found


@pytest.mark.parametrize("name", sorted(public()))
def test_a_name_is_no_model(name: str) -> None:
    with pytest.raises(ShapeError) as raised:
        public()[name]("induction-2l")
    assert str(raised.value) == (
        "model must be a Decoder, got the name 'induction-2l'; pass load('induction-2l')"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [(None, "got NoneType"), (3, "got int"), (torch.nn.Linear(2, 2), "got Linear")],
)
def test_nor_is_anything_else(given: object, words: str) -> None:
    with pytest.raises(ShapeError, match=rf"must be a Decoder, {words}; load\("):
        headstream.circuits.score_heads(given)
    with pytest.raises(ShapeError, match=words):
        headstream.analyses.induction(model=given)
    with pytest.raises(ShapeError, match=words):
        KVCache.__wrapped__(given) if hasattr(KVCache, "__wrapped__") else _cache(given)


def _cache(given: Any) -> None:
    takes_model(lambda model: KVCache(model))(given)


def test_a_task_needs_the_model_too(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"pass load\('induction-2l'\)"):
        headstream.analyses.Task.for_model("induction-2l")
    with pytest.raises(ShapeError, match="got NoneType"):
        headstream.analyses.Task.from_jsonl(tmp_path / "pairs.jsonl", None)


def test_a_folder_is_shown_how_to_be_loaded() -> None:
    with pytest.raises(ShapeError, match=r"pass load\('some/where'\)"):
        headstream.circuits.logit_lens(Path("some/where"), [[0]])


def test_the_function_keeps_its_name_signature_and_answer() -> None:
    def count(model: Any, more: int = 1) -> int:
        """Layers, and more."""
        return model.config.n_layers + more

    wrapped = takes_model(count)
    assert wrapped.__doc__ == "Layers, and more."
    assert inspect.signature(wrapped) == inspect.signature(count)
    assert isinstance(wrapped, type(count)), "it pickles by its name"
    assert wrapped.__wrapped__ is count  # type: ignore[attr-defined]
    model = headstream.models.load("constructed-induction")
    assert wrapped(model, more=2) == functools.partial(wrapped, model)(2) == 4
    with pytest.raises(TypeError, match="model"):
        wrapped()  # type: ignore[call-arg]
