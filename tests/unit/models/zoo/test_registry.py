"""The list of shipped models: readable, and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from headstream.models.errors import StoreError
from headstream.models.store import load
from headstream.models.zoo.registry import list_models, path_of

NAMES = [model.name for model in list_models()]


def test_the_models_are_there_in_order() -> None:
    assert sorted(NAMES) == NAMES
    assert {"constructed-induction", "induction-2l"} <= set(NAMES)


def test_listing_and_finding_load_no_torch() -> None:
    code = (
        "import sys; from headstream.models.zoo.registry import list_models, path_of; "
        "path_of(list_models()[0].name); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_small_whole_and_described(name: str) -> None:
    listed = next(model for model in list_models() if model.name == name)
    folder = path_of(name)
    assert folder == listed.path
    assert folder.name == name
    assert (folder / "weights.safetensors").stat().st_size <= 2 * 2**20
    model = load(name)
    assert model.name == name
    assert model.weights_sha256() == listed.weights_sha256
    assert model.vocab is not None
    assert model.vocab[0] == "<bos>"
    assert {"purpose", "task", "circuit", "recipe", "positions", "norm"} <= set(listed.card)
    assert str(listed) == f"{name}: {listed.card['purpose']}"


def test_an_unknown_name_lists_the_zoo_and_the_nearest() -> None:
    with pytest.raises(StoreError, match=r"neither a folder nor one of .*induction-2l") as caught:
        path_of("indction-2l")
    assert "nearest is 'induction-2l'" in str(caught.value)


def test_a_name_is_never_a_path_out_of_the_zoo() -> None:
    outside = Path("..") / "checkpoints" / NAMES[0]
    with pytest.raises(StoreError, match="no model"):
        path_of(str(outside))
