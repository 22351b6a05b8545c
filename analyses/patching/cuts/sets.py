"""`redundant_set`: heads that stand in for each other, found by joint cut and single restoration.

whole      cut every head of the set together
alone      cut each one while the others work: a redundant head shows nothing here
restored   cut all but one: what that one gives back by itself
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from tqdm import tqdm

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.patching import inference
from headstream.analyses.patching.cuts.head_sets import heads_of, names_of
from headstream.analyses.patching.cuts.inputs import open_cuts
from headstream.analyses.patching.cuts.results import RedundancyResult
from headstream.analyses.patching.cuts.verdicts import Verdicts
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.given_model import takes_model

# A member is a head that, restored alone, recovers at least this share of what the cut took.
LEAST_RECOVERED = 0.2


@takes_model
def redundant_set(
    model: Decoder,
    task_or_tokens: Any,
    heads: Any,
    *,
    values: str = "zero",
    how: str = "full",
    attention_mask: Any = None,
    from_pos: Any = None,
    seed: Any = 0,
    n_flips: int = 5000,
    progress: bool = True,
    backend: str | None = None,
) -> RedundancyResult:
    """Cut a set of heads together, and ask which of them could do its work alone.

    Heads that stand in for each other are an OR: cut one by one they show nothing. The set is
    CAUSAL when cutting all of it moves the score by the one rule (see `ablate`; the family is the
    joint cut and the single ones). A member is CAUSAL when the set is and, with all of it cut,
    restoring that head alone recovers at least a fifth of what the cut took (ratio of means). A
    head of an AND recovers nothing so, and shows when it is cut alone.

    Args:
        heads: the set, `"L1H0"` or `(1, 0)`, two at least; `labelled_heads` takes candidates from a
            census. The set should be fixed before its effects are looked at.
        model, task_or_tokens, values, how, attention_mask, from_pos, seed, n_flips, progress,
            backend: as for `ablate`.
    Raises:
        TaskError, TokenError, ShapeError: naming the argument that does not fit.
    Example:
        >>> from headstream.analyses import Task
        >>> from headstream.models import load
        >>> model = load("constructed-or")
        >>> task = Task.for_model(model, n=16)
        >>> redundant_set(model, task, ["L0H0", "L0H1", "L0H2"], progress=False).members
        ['L0H0', 'L0H2']
    """
    chosen = heads_of(model.config, "heads", heads)
    if len(chosen) < 2:
        raise TaskError(
            f"a redundant set takes two heads or more, got {', '.join(names_of(chosen))}",
            hint="ablate cuts a single head",
        )
    opened = open_cuts(
        model,
        task_or_tokens,
        values=values,
        how=how,
        seed=seed,
        n_flips=n_flips,
        attention_mask=attention_mask,
        from_pos=from_pos,
        backend=backend,
    )
    sets = [chosen, *((head,) for head in chosen)]
    sets += [tuple(other for other in chosen if other != head) for head in chosen]
    bar = tqdm(sets, desc="cuts", disable=None if progress else True)
    effects = np.stack([opened.runs.effect(cut) for cut in bar])
    control = float(inference.mean_over_prompts(opened.control.effect(chosen)))
    count = len(chosen)
    joint, alone, restored = effects[0], effects[1 : count + 1], effects[count + 1 :]
    verdicts = Verdicts.of(model, opened)
    flips = inference.sign_flips(
        effects[: count + 1], n_flips=n_flips, seed=seed, floor=verdicts.floor
    )
    low, high = inference.mean_interval(joint, seed=seed)
    mean = float(inference.mean_over_prompts(joint))
    failed = verdicts.failed(mean, float(flips.p_value[0]), control, int(np.isfinite(joint).sum()))
    recovered, ends = _recovered(joint, restored, seed)
    base = opened.runs.base
    data = xr.Dataset(
        {
            "base": ("example", base),
            "joint": ("example", joint),
            "alone": (("head", "example"), alone),
            "restored": (("head", "example"), restored),
            "alone_mean": ("head", inference.mean_over_prompts(alone)),
            "alone_p": ("head", flips.p_value[1:]),
            "recovered": ("head", recovered),
            "recovered_low": ("head", ends[0]),
            "recovered_high": ("head", ends[1]),
            "member": ("head", (recovered >= LEAST_RECOVERED) & (not failed)),
        },
        coords={
            "head": np.array(names_of(chosen), dtype=np.str_),
            "example": np.arange(len(base)),
        },
    )
    details: dict[str, Any] = {
        "set": names_of(chosen),
        **verdicts.details(),
        "values_in_words": opened.values_in_words,
        "how": how,
        "worse": opened.worse,
        "joint": {
            "mean": mean,
            "low": float(low),
            "high": float(high),
            "p_value": float(flips.p_value[0]),
            "control": control,
            "causal": not failed,
        },
        "least": LEAST_RECOVERED,
        "control": opened.control_words,
        "family": int(flips.family.sum()),
        "examples": opened.examples,
        "failed": {"the set": failed} if failed else {},
    }
    return RedundancyResult(
        title=f"A set of {count} heads of {model.name}, cut together and one by one",
        data=data,
        provenance=Provenance.of(model, seed=seed, backend=backend),
        claims=(verdicts.held(), *_claims(data, details, failed)),
        details=details,
    )


def _recovered(
    joint: np.ndarray, restored: np.ndarray, seed: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Share of the joint effect that is gone when one head is restored, with its interval."""
    mean = float(inference.mean_over_prompts(joint))
    if mean == 0 or not np.isfinite(mean):
        nothing = np.full(len(restored), np.nan)
        return nothing, (nothing, nothing)
    back = joint - restored
    share = inference.mean_over_prompts(back) / mean + 0.0
    return share, inference.ratio_interval(back, joint, seed=seed)


def _claims(data: xr.Dataset, details: Mapping[str, Any], failed: list[str]) -> tuple[Claim, ...]:
    joint, unit = details["joint"], details["metric"]["unit"]
    noun, names = details["metric"]["noun"], ", ".join(details["set"])
    n = int(np.isfinite(data["joint"].values).sum())
    through = ", every head attending as before" if details["how"] == "pattern_preserving" else ""
    needed = "is needed for" if details["worse"] * joint["mean"] > 0 else "works against"
    whole = "; ".join(failed) or (
        f"p = {joint['p_value']:.2g} (sign-flip, maximum over {details['family']} cuts); "
        f"{joint['mean']:+z.2f} {unit}, control {joint['control']:+z.2f}"
    )
    together = Claim(
        "set",
        f"the set {names} {needed} {noun}{through}",
        Evidence.UNKNOWN if failed else Evidence.CAUSAL,
        value=joint["mean"],
        unit=unit,
        interval=(joint["low"], joint["high"]),
        n=n,
        reason=f"{whole}; values: {details['values_in_words']}",
        where="ablation",
    )
    members = [_member(data, i, details, n, bool(failed)) for i in range(data.sizes["head"])]
    return (together, *members)


def _member(data: xr.Dataset, i: int, details: Mapping[str, Any], n: int, unproven: bool) -> Claim:
    name, share = str(data["head"].values[i]), float(data["recovered"].values[i])
    alone, unit = float(data["alone_mean"].values[i]), details["metric"]["unit"]
    member = bool(data["member"].values[i])
    percent = f"{100 * details['least']:.0f}%"
    if unproven:
        reason = "the set as a whole has no label; what settles that settles this"
    elif not np.isfinite(share):
        reason = "the cut took nothing, so there is nothing to recover"
    else:
        reason = (
            f"with all of the set cut, restoring it alone recovers {100 * share:z.0f}% of what the "
            f"cut took, {'at least' if member else 'less than'} {percent}; cut alone it moves "
            f"{alone:+z.2f} {unit}"
        )
    ends = (float(data["recovered_low"].values[i]), float(data["recovered_high"].values[i]))
    return Claim(
        f"set.{name}",
        f"{name} can stand in for the rest of the set",
        Evidence.CAUSAL if member else Evidence.UNKNOWN,
        value=share if np.isfinite(share) else None,
        unit="of what the cut took",
        interval=ends,
        n=n,
        reason=reason,
        where="ablation",
    )
