"""A model on disk: a folder of plain files, written whole or not at all, never pickled.

weights.safetensors   the state dict, and nothing that follows from the configuration
config.json           DecoderConfig
card.json             name, weights_sha256, and what is known about the model
vocab.json            list of strings, if the model has one
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder, build, check_dtype
from headstream.models.errors import HeadstreamError, StoreError
from headstream.models.zoo.registry import path_of

if TYPE_CHECKING:
    from torch import Tensor


FILES = ("weights.safetensors", "config.json", "card.json", "vocab.json")


def save(model: Decoder, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `model` to `folder`, which then exists complete or (after an error) not at all.

    Args:
        overwrite: replace a folder that holds a model and nothing else; any other existing folder
            is refused.
    Returns:
        The folder.
    Raises:
        StoreError: if the parent is missing, the folder exists and may not be replaced, or
            writing fails.
    """
    target = Path(os.path.realpath(folder))
    if not target.parent.is_dir():
        raise StoreError(
            f"cannot save to '{target}': folder '{target.parent}' does not exist",
            hint="create it first",
        )
    if target.exists():
        _require_replaceable(target, overwrite)
    # Beside the target, so that moving into place is one step of the file system.
    token = uuid.uuid4().hex[:8]
    staging = target.with_name(f".{target.name}.{token}.new")
    retired = target.with_name(f".{target.name}.{token}.old")
    try:
        staging.mkdir()
        _write(model, staging, target.name)
        if target.exists():
            target.rename(retired)
        staging.rename(target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if retired.exists() and not target.exists():
            retired.rename(target)
        if isinstance(error, (OSError, SafetensorError)) and not isinstance(error, StoreError):
            raise StoreError(f"cannot save to '{target}': {error}") from error
        raise
    shutil.rmtree(retired, ignore_errors=True)
    return target


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Decoder:
    """A model of the zoo, by name, or one that `save` wrote, by folder.

    Args:
        name_or_path: a zoo name (`headstream models` lists them) or a folder.
        dtype: of the weights; None keeps what was saved.
        device: where to put them.
    Raises:
        StoreError: for a name that is neither (the zoo and the nearest are named), a missing or
            damaged file, keys too many or too few, weights that are not finite (as saved, or as
            `dtype`) or do not match their card, or a device that is not there.
        ConfigError: if weights cannot be of `dtype`.
    """
    if dtype is not None:
        check_dtype(dtype)
    _check_device(device)
    if not isinstance(name_or_path, (str, os.PathLike)) or not os.fspath(name_or_path):
        raise StoreError(f"load takes the name of a model or a folder, got {name_or_path!r}")
    given = Path(name_or_path)
    folder = given if given.is_dir() else path_of(str(name_or_path))
    try:
        config = DecoderConfig.from_json(_read(folder / "config.json"))
        weights = _read_weights(folder / "weights.safetensors")
        model = build(config, weights)
        _require_finite(folder, weights)
        if (folder / "vocab.json").exists():
            model.vocab = _read_json(folder / "vocab.json", list)
    except StoreError:
        raise
    except HeadstreamError as error:
        raise StoreError(f"'{folder}' holds no usable model: {error}") from None
    if (folder / "card.json").exists():
        model.card = _read_json(folder / "card.json", dict)
        expected, found = model.card.get("weights_sha256"), model.weights_sha256()
        if expected is not None and expected != found:
            raise StoreError(
                f"the weights in '{folder}' are not the ones its card describes: "
                f"SHA-256 {found[:12]}..., expected {str(expected)[:12]}...",
                hint="restore the weights, or train the model again",
            )
    model.name = str((model.card or {}).get("name", folder.name))
    if dtype not in (None, model.dtype):
        model = model.to(dtype=dtype)
        _require_finite(folder, _state(model), f" as {str(dtype).removeprefix('torch.')}")
    return model.to(device=device)


def _check_device(device: object) -> None:
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines() or [""]
        raise StoreError(
            f"device {str(device)!r} cannot be used: {reason[0]}", hint="device='cpu' always can"
        ) from None


def _require_finite(folder: Path, weights: Mapping[str, Tensor], as_dtype: str = "") -> None:
    for name, value in sorted(weights.items()):
        finite = torch.isfinite(value)
        if not bool(finite.all()):
            raise StoreError(
                f"the weights in '{folder}' are not finite{as_dtype}: {name} holds NaN or infinity "
                f"in {int((~finite).sum())} of {value.numel()} entries",
                hint="load with a wider dtype" if as_dtype else "train or export the model again",
            )


def _require_replaceable(target: Path, overwrite: bool) -> None:
    if not (overwrite and (target / "config.json").is_file()):
        raise StoreError(
            f"cannot save to '{target}': it exists",
            hint="choose another folder, or overwrite=True to replace a saved model",
        )
    others = sorted(path.name for path in target.iterdir() if path.name not in FILES)
    if others:
        raise StoreError(
            f"cannot replace '{target}': beside a model it holds {', '.join(others[:3])}",
            hint="choose another folder; nothing but a saved model is deleted",
        )


def _write(model: Decoder, folder: Path, name: str) -> None:
    # Copies: safetensors refuses weights that share storage, and a user may have tied some.
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in _state(model).items()
    }
    # Through bytes: save_file makes a file that only its owner may read, whatever the umask.
    (folder / "weights.safetensors").write_bytes(safetensors.torch.save(weights))
    (folder / "config.json").write_text(model.config.to_json() + "\n", encoding="utf-8")
    card = {"name": name} | (model.card or {})
    if model.name != "unnamed":
        card["name"] = model.name
    card["weights_sha256"] = model.weights_sha256()
    try:
        text = json.dumps(card, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"model.card cannot be written as JSON: {error}") from None
    (folder / "card.json").write_text(text + "\n", encoding="utf-8")
    if model.vocab is not None:
        (folder / "vocab.json").write_text(
            json.dumps(model.vocab, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _state(model: Decoder) -> dict[str, Tensor]:
    state: dict[str, Tensor] = model.state_dict()
    return state


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StoreError(f"'{path}' is missing", hint="a model folder is written by save") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"'{path}' cannot be read: {error}") from None


def _read_json(path: Path, kind: type) -> Any:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"'{path}' is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise StoreError(f"'{path}' must hold a JSON {kind.__name__}, got {type(value).__name__}")
    return value


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = safetensors.torch.load(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(f"'{path}' is missing", hint="a model folder is written by save") from None
    except (OSError, SafetensorError) as error:
        raise StoreError(f"'{path}' is damaged: {error}") from None
    return weights
