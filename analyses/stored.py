"""Results as JSON: writing one whole, reading it back, and refusing what is damaged or unknown.

Numbers are written as the shortest float32. Reading knows of each kind of result which class it is
and what reports need of it; nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from headstream.analyses.evidence import Claim, Evidence
from headstream.models.errors import ResultError, nearest

if TYPE_CHECKING:
    from headstream.analyses.result import Result

SCHEMA = "headstream.result/1"

# Which class reads which kind; modules named here import without torch.
_KINDS = {
    "patching": "headstream.analyses.patching.result:PatchingResult",
    "heads": "headstream.analyses.kinds:HeadsResult",
    "decomposition": "headstream.analyses.kinds:DecompositionResult",
    "audit": "headstream.analyses.kinds:AuditResult",
    "paths": "headstream.analyses.patching.paths.result:PathResult",
    "ablation": "headstream.analyses.patching.cuts.results:AblationResult",
    "redundant_set": "headstream.analyses.patching.cuts.results:RedundancyResult",
    "faithfulness": "headstream.analyses.patching.cuts.results:FaithfulnessResult",
    "circuits": "headstream.analyses.kinds:CircuitsResult",
    "sinks": "headstream.analyses.kinds:SinksResult",
    "induction": "headstream.analyses.kinds:InductionResult",
}


# What reports read of the details of each kind, and of what JSON type it is.
_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "patching": {
        "site": str,
        "positions": str,
        "direction": str,
        "metric": dict,
        "gap": dict,
        "family": int,
        "self_patch_max": (int, float),
        "self_patch_bound": (int, float),
        "normalized_refused": (str, type(None)),
    },
    "paths": {
        "direction": str,
        "freeze_mlps": bool,
        "metric": dict,
        "gap": dict,
        "family": int,
        "self_patch_max": (int, float),
        "self_patch_bound": (int, float),
        "normalized_refused": (str, type(None)),
    },
    "ablation": {"values": str, "how": str, "metric": dict, "worse": int, "cuts": dict, "n": int},
    "redundant_set": {"set": list, "metric": dict, "worse": int, "joint": dict, "n": int},
    "faithfulness": {
        "circuit": list,
        "choices": dict,
        "values": str,
        "faithfulness": dict,
        "left": dict,
        "refused": (str, type(None)),
        "n_random": int,
        "metric": dict,
    },
    "heads": {"n": int},
    "decomposition": {"norm": str, "largest_error": (int, float)},
    "audit": {"rows": list},
    "circuits": {
        "n": int,
        "cards": list,
        "pairs": list,
        "composition": dict,
        "copying_random": list,
        "first_chance": (int, float),
        "caveats": list,
    },
    "sinks": {
        "chance": (int, float),
        "n": int,
        "eps": (int, float),
        "T": int,
        "rate": (int, float, type(None)),
        "margin": (int, float),
    },
    "induction": {
        "n": int,
        "distances": list,
        "block": int,
        "gapped": dict,
        "scan": dict,
        "loss": dict,
        "joint": (dict, type(None)),
    },
}
# And of the arrays.
_ARRAYS = {
    "patching": (
        *("effects", "mean", "low", "high", "normalized", "normalized_low", "normalized_high"),
        *("p_value", "unrelated", "causal"),
    ),
    "paths": (
        *("effects", "mean", "low", "high", "normalized", "normalized_low", "normalized_high"),
        *("p_value", "unrelated", "causal", "total"),
    ),
    "ablation": ("effects", "mean", "low", "high", "control", "p_value", "causal"),
    "redundant_set": ("joint", "alone_mean", "recovered", "member"),
    "faithfulness": ("full", "empty", "circuit", "without", "random_faithfulness", "random_left"),
    "heads": ("label",),
    "decomposition": ("mean", "total"),
    "circuits": (
        *("copying", "first", "behaviour", "behaviour_low", "behaviour_high", "behaviour_chance"),
        *("qk_rank", "ov_rank", "distance", "distance_excess"),
    ),
    "sinks": ("sink_mass", "sink_mass_low", "effect_causal"),
    "induction": (
        *("induction", "position_control", "content_control", "chance", "label", "gapped"),
        *("gapped_low", "gapped_high", "gapped_control", "fixed"),
        *("fixed_low", "fixed_high", "fixed_distance", "copying", "alone", "alone_low"),
        *("alone_high", "alone_p", "restored", "restored_low", "restored_high"),
    ),
}


def load_result(path: str | os.PathLike[str]) -> Result:
    """Read a result that `Result.save` wrote.

    Raises:
        ResultError: if the file is missing, is not JSON, or is of another schema or kind.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"cannot read a result from '{path}': {error}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"'{path}' is not a saved result: {error}") from None
    return result_from_json(value, source=str(path))


def result_from_json(value: Any, *, source: str = "the value") -> Result:
    """The result of whatever kind `value` says it is.

    Raises:
        ResultError: if the schema is not ours, is newer, or the kind or a field is unknown.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, str) or not schema.startswith("headstream.result/"):
        raise ResultError(f"{source} is not a headstream result: schema is {schema!r}")
    if schema != SCHEMA:
        raise ResultError(
            f"{source} has schema {schema!r}, this version reads {SCHEMA!r}",
            hint="read it with the version of headstream that wrote it",
        )
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ResultError(f"{source} is of unknown kind {kind!r}", hint=nearest(str(kind), _KINDS))
    module, name = _KINDS[kind].split(":")
    reader: Callable[[Any], Result] = getattr(importlib.import_module(module), name).from_json
    try:
        return reader(value)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ResultError(f"{source} is a damaged {kind} result: {error!r}") from None


def dump_json(value: Any) -> str:
    """JSON text with no spaces and no NaN, keys in the order given: same value, same bytes."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` beside `path` and move it into place, so that no half file is ever seen."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ResultError(
            f"cannot write '{path}': folder '{path.parent}' does not exist", hint="create it first"
        )
    if path.is_dir():
        raise ResultError(f"cannot write '{path}': it is a folder", hint="name a file in it")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def shortest(value: float) -> float | None:
    """The float32 nearest to `value` in its shortest decimal form; None for NaN and infinities.

    The number under the cursor, in the table and in the file then agree to the last digit.
    """
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) else None


def check_parts(value: Mapping[str, Any]) -> None:
    """Whether a result's JSON holds what every result and its kind must hold.

    Raises:
        KeyError, TypeError: if a part is missing or of another type.
    """
    details = value["details"]
    _require_type("title", value["title"], str)
    _require_type("claims", value["claims"], list)
    for part in ("details", "coords", "data", "provenance"):
        _require_type(part, value[part], dict)
    for name, kind in _NEEDED.get(value["kind"], {}).items():
        _require_type(f"details.{name}", details[name], kind)
    for name in _ARRAYS.get(value["kind"], ()):
        if name not in value["data"]:
            raise KeyError(f"data.{name}")
    provenance = value["provenance"]
    for name in ("model", "weights_sha256", "backend", "dtype", "device"):
        _require_type(f"provenance.{name}", provenance[name], str)
    for name in ("config", "versions"):
        _require_type(f"provenance.{name}", provenance[name], dict)


def _require_type(name: str, part: Any, kind: Any) -> None:
    if not isinstance(part, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        words = " or ".join(one.__name__ for one in kinds)
        raise TypeError(f"{name} must be a JSON {words}, got {type(part).__name__}")


def claim_to_json(claim: Claim) -> dict[str, Any]:
    """A claim as plain JSON values."""
    value = dataclasses.asdict(claim)
    value["evidence"] = str(claim.evidence)
    if claim.value is not None:
        value["value"] = shortest(claim.value)
    if claim.interval is not None:
        value["interval"] = [shortest(end) for end in claim.interval]
    return value


def claim_from_json(value: Mapping[str, Any]) -> Claim:
    """The claim that `claim_to_json` wrote."""
    fields = dict(value)
    fields["evidence"] = Evidence(fields["evidence"])
    if fields["interval"] is not None:
        fields["interval"] = tuple(fields["interval"])
    return Claim(**fields)


def array_to_json(array: xr.DataArray) -> dict[str, Any]:
    """A labelled array as its dims, shape, type and flat values; None where there is no number."""
    values = np.asarray(array.values)
    kind = values.dtype.kind
    flat: list[Any]
    if kind == "f":
        flat = [shortest(value) for value in values.ravel().tolist()]
    elif kind in "iub":
        flat = values.ravel().tolist()
    else:
        flat = [str(value) for value in values.ravel().tolist()]
    return {
        "dims": [str(dim) for dim in array.dims],
        "shape": list(values.shape),
        "type": {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(kind, "str"),
        "attrs": plain(array.attrs),
        "values": flat,
    }


def array_from_json(value: Mapping[str, Any]) -> xr.Variable:
    """The array that `array_to_json` wrote."""
    dtype = {"float": np.float64, "int": np.int64, "bool": np.bool_, "str": np.str_}[value["type"]]
    flat = [np.nan if item is None else item for item in value["values"]]
    array = np.array(flat, dtype=dtype).reshape(value["shape"])
    return xr.Variable(tuple(value["dims"]), array, attrs=value["attrs"])


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tuples as lists, numpy numbers as Python's, floats shortest."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return shortest(float(value))
    if value is None or isinstance(value, str):
        return value
    raise ResultError(f"a result cannot hold a {type(value).__name__}: {value!r}")
