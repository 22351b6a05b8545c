"""The resume folder of a long sweep: a manifest, and one file a finished block.

    manifest.json              what is swept, as plain values, and the hash that names it
    blocks/000012.block        effects [metric, cell, example] of block 12: one line of JSON that
                               says what they are, then float64, little-endian, in C order
    model/                     the model, once workers need it

Every file is written beside its place and moved there, so a kill leaves whole files or none. A
block's file states its sweep and the hash of its numbers: one that is damaged, cut short or of
another sweep is computed again. A folder of another sweep is refused, and what differs is named.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from headstream.analyses.patching.sweeps.plan_values import plan_to_values
from headstream.analyses.patching.sweeps.plans import Piece, Plan
from headstream.models.decoder import Decoder
from headstream.models.errors import SweepError

SCHEMA = "headstream.sweep/1"
MANIFEST = "manifest.json"
MODEL = "model"
_BLOCKS = "blocks"
_SUFFIX = ".block"
# Seconds after which a file that was never moved into place is a killed run's.
_STALE = 60.0


def describe(
    model: Decoder, plan: Plan, engine: str, work: Sequence[Piece], threads: int
) -> dict[str, Any]:
    """What decides every number of a sweep, as plain JSON values.

    Args:
        threads: that each process computes with: another number rounds otherwise.
    """
    return {
        "schema": SCHEMA,
        "model": {
            "name": model.name,
            "weights_sha256": model.weights_sha256(),
            "config": json.loads(model.config.to_json()),
        },
        "plan": plan_to_values(plan),
        "run": {
            "engine": engine,
            "backend": model.backend,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "threads": threads,
            "headstream": metadata.version("headstream"),
            "torch": metadata.version("torch"),
        },
        "blocks": _hash([[block.kind, block.cells] for block in work]),
    }


class SweepStore:
    """One sweep's folder.

    Args:
        folder: an empty or a new folder, or one that the same sweep was begun in.
        manifest: as `describe` gives it.
    Attributes:
        manifest: the folder's: as given, with the number of threads that the sweep was begun with.
        sha256: of the manifest; it names the sweep.
    Raises:
        SweepError: if the folder belongs to another sweep, holds other things, or cannot be
            written.
    """

    def __init__(self, folder: str | os.PathLike[str], manifest: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise SweepError(f"resume must be a folder, and '{self.folder}' is a file")
            (self.folder / _BLOCKS).mkdir(parents=True, exist_ok=True)
            self._clean()
        except OSError as error:
            raise SweepError(f"cannot use '{self.folder}' as resume folder: {error}") from None
        path = self.folder / MANIFEST
        self.manifest = dict(manifest)
        if path.exists():
            there = read_manifest(self.folder)
            different = list(_differences(there, manifest))
            if not different:
                self.manifest = there
            elif self.count():
                raise SweepError(
                    f"resume folder '{self.folder}' belongs to another sweep: "
                    f"{'; '.join(different)}",
                    hint="name another folder, or repeat the call that it was begun with",
                )
            else:
                # Begun, and nothing finished: nothing is lost by taking the folder.
                shutil.rmtree(self.folder / MODEL, ignore_errors=True)
                path.unlink()
        elif self.count() or any(
            name != _BLOCKS and not name.startswith(".") for name in os.listdir(self.folder)
        ):
            raise SweepError(
                f"resume folder '{self.folder}' holds other things and no {MANIFEST}",
                hint="name an empty or a new folder",
            )
        if not path.exists():
            text = json.dumps(self.manifest, ensure_ascii=False)
            self._write(path, text.encode("utf-8"), "the manifest")
        self.sha256 = _hash(self.manifest)

    def finished(
        self, work: Sequence[Piece], shape: tuple[int, int]
    ) -> Iterator[tuple[Piece, Float[np.ndarray, "metric cell example"]]]:
        """The blocks whose file is there and whole.

        Args:
            shape: metrics and examples of every block.
        """
        metrics, n = shape
        for block in work:
            found = self._read(block.index, (metrics, len(block.cells), n))
            if found is not None:
                yield block, found

    def add(self, block: Piece, effects: Float[np.ndarray, "metric cell example"]) -> None:
        """Write a finished block.

        Raises:
            SweepError: if the disk is full or cannot be written; what is there stays.
        """
        data = np.ascontiguousarray(effects, dtype="<f8").tobytes()
        head = self._head(block.index, effects.shape, data)
        self._write(self._path(block.index), head + data, f"block {block.index}")

    def _head(self, index: int, shape: Sequence[int], data: bytes) -> bytes:
        labels = {
            "sweep": self.sha256,
            "block": index,
            "shape": list(shape),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        return json.dumps(labels).encode("ascii") + b"\n"

    def count(self) -> int:
        """How many blocks have a file."""
        return sum(1 for _ in (self.folder / _BLOCKS).glob(f"*{_SUFFIX}"))

    def save_model(self, model: Decoder) -> None:
        """Put the model where workers find it, once.

        Raises:
            StoreError: if it cannot be written.
        """
        target = self.folder / MODEL
        if not target.exists():
            model.save(target)

    def _path(self, index: int) -> Path:
        return self.folder / _BLOCKS / f"{index:06}{_SUFFIX}"

    def _read(self, index: int, shape: tuple[int, int, int]) -> np.ndarray | None:
        """The numbers of a block, or None if its file is missing, damaged or not this sweep's."""
        try:
            head, _, data = self._path(index).read_bytes().partition(b"\n")
        except OSError:
            return None
        # What it must say of these numbers is known; nothing in the file is believed.
        if head + b"\n" != self._head(index, shape, data) or len(data) != 8 * np.prod(shape):
            return None
        return np.frombuffer(data, dtype="<f8").reshape(shape).astype(np.float64)

    def _write(self, path: Path, data: bytes, what: str) -> None:
        # Not a temporary file of the system's: those only their owner may read.
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise SweepError(
                f"cannot write {what} to '{path.parent}': {error.strerror or error}; "
                f"{self.count()} finished blocks are kept",
                hint="make room, and the same call goes on from there",
            ) from None

    def _clean(self) -> None:
        """Remove what killed runs left half written; files of a moment ago may be another's."""
        for pattern in (".*.part", f".{MODEL}.*", f"{_BLOCKS}/.*.part"):
            for path in self.folder.glob(pattern):
                if path.stat().st_mtime > time.time() - _STALE:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a folder says is swept in it.

    Raises:
        SweepError: if there is no manifest that this version can read.
    """
    path = Path(folder) / MANIFEST
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SweepError(
            f"cannot read '{path}': {error}", hint="name another folder to begin anew"
        ) from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        schema = value.get("schema") if isinstance(value, dict) else None
        raise SweepError(
            f"'{path}' is not of a sweep that this version reads: schema {schema!r}, "
            f"expected {SCHEMA!r}",
            hint="name another folder to begin anew",
        )
    return value


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """The name of a sweep."""
    return _hash(manifest)


def _hash(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


# What is compared, where it stands, and whether its value is short enough to be told.
_COMPARED: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("model weights", ("model", "weights_sha256"), True),
    ("model configuration", ("model", "config"), False),
    ("number format", ("run", "dtype"), True),
    *(
        (words, ("plan", "task", key), False)
        for key, words in (
            ("clean", "clean prompts"),
            ("corrupted", "corrupted prompts"),
            ("attention_mask", "attention mask"),
            ("answer", "answers"),
            ("wrong", "wrong answers"),
            ("answer_pos", "answer positions"),
            ("roles", "roles"),
        )
    ),
    ("what is swept", ("plan", "swept"), True),
    ("metric", ("plan", "task", "metric", "name"), True),
    ("the metric's function", ("plan", "task", "metric"), False),
    *(
        (key, ("plan", key), True)
        for key in ("site", "direction", "values", "layers", "heads", "positions", "seed")
    ),
    ("senders", ("plan", "senders"), False),
    ("receivers", ("plan", "receivers"), False),
    ("freeze_mlps", ("plan", "freeze_mlps"), True),
    ("second metric", ("plan", "second"), True),
    ("engine", ("run", "engine"), True),
    ("backend", ("plan", "backend"), True),
    ("the model's backend", ("run", "backend"), True),
    ("device", ("run", "device"), True),
    ("headstream version", ("run", "headstream"), True),
    ("torch version", ("run", "torch"), True),
    ("division into blocks", ("blocks",), False),
)
_WIDEST = 24


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """In words, what two manifests disagree on; the number of threads is the folder's to say."""
    told: set[tuple[str, ...]] = set()
    swept = ("plan", "swept")
    for words, path, short in _COMPARED:
        if swept in told and path[0] == "plan" and path[1] != "task":
            continue  # what one kind of plan states the other does not
        old, new = _at(there, path), _at(here, path)
        if old == new or any(path == known[: len(path)] for known in told):
            continue
        told.add(path)
        yield f"{words} {_told(old)} there, {_told(new)} here" if short else f"other {words}"


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _told(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else f"{text[:12]}..."
