"""What every result owes: labelled arrays, its claims, its provenance, one file on disk.

A result is a frozen value. It prints as a line a reader can use, turns into a data frame, saves to
one JSON file and loads back equal; reports are a function of that JSON alone. Nothing here imports
torch: a saved result is read, printed and rendered without the model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import xarray as xr

from headstream.analyses.evidence import Claim
from headstream.analyses.stored import (
    SCHEMA,
    array_from_json,
    array_to_json,
    check_parts,
    claim_from_json,
    claim_to_json,
    dump_json,
    plain,
    write_whole,
)

if TYPE_CHECKING:
    import pandas as pd

    from headstream.models.decoder import Decoder


@dataclass(frozen=True)
class Provenance:
    """Where a number comes from: enough to run it again.

    Attributes:
        model: the name it was loaded by.
        weights_sha256: hash over the sorted (name, dtype, shape, bytes) of its weights.
        config: the decoder's configuration, as `DecoderConfig.to_json` writes it.
        card: the model's card, if it has one.
        backend, dtype, device, seed: how it was run.
        versions: of Python and of the packages that compute.
        command: the command line that was typed, if any.
    """

    model: str
    weights_sha256: str
    config: Mapping[str, Any]
    backend: str
    dtype: str
    device: str
    seed: int | None
    versions: Mapping[str, str]
    card: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None

    @classmethod
    def of(cls, model: Decoder, *, seed: int | None, backend: str | None = None) -> Provenance:
        """Provenance of a run of `model`."""
        return cls(
            model=model.name,
            weights_sha256=model.weights_sha256(),
            config=json.loads(model.config.to_json()),
            backend=backend or model.backend,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            seed=seed,
            versions={"python": platform.python_version()}
            | {
                name: metadata.version(name)
                for name in ("headstream", "torch", "transformer-lens", "numpy", "scipy")
            },
            card=dict(model.card or {}),
        )


@dataclass(frozen=True, eq=False)
class Result:
    """Base of all results.

    Attributes:
        title: what was asked, as a heading.
        data: labelled arrays, float64 while computing; stored as shortest float32.
        provenance: where it comes from.
        claims: what follows, each with its evidence.
        details: everything else that the reader needs, as plain JSON values.
    """

    kind: ClassVar[str] = ""

    title: str
    data: xr.Dataset
    provenance: Provenance
    claims: tuple[Claim, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """The finding as one sentence, with its interval and number of examples."""
        return self.title

    def to_frame(self) -> pd.DataFrame:
        """The labelled arrays as a pandas data frame, one row a cell."""
        return self.data.to_dataframe().reset_index()

    def __repr__(self) -> str:
        return f"<{self.kind}: {self.summary()}>"

    def to_json(self) -> dict[str, Any]:
        """The whole result as plain JSON values; `from_json` reads it back."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "title": self.title,
            "provenance": dataclasses.asdict(self.provenance),
            "claims": [claim_to_json(claim) for claim in self.claims],
            "details": plain(self.details),
            "coords": {str(name): array_to_json(self.data[name]) for name in self.data.coords},
            "data": {str(name): array_to_json(self.data[name]) for name in self.data.data_vars},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        """Build the result that `to_json` wrote.

        Raises:
            KeyError, TypeError: if a part is missing or of another type.
        """
        check_parts(value)
        return cls(
            title=value["title"],
            data=xr.Dataset(
                {name: array_from_json(item) for name, item in value["data"].items()},
                coords={name: array_from_json(item) for name, item in value["coords"].items()},
            ),
            provenance=Provenance(**value["provenance"]),
            claims=tuple(claim_from_json(item) for item in value["claims"]),
            details=value["details"],
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to `path` as one JSON file: whole, or not at all."""
        return write_whole(path, dump_json(self.to_json()))
