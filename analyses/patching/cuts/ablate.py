"""`ablate`: cut heads and sets of heads, and say what that does to every prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from tqdm import tqdm

from headstream.analyses.evidence import Claim, Evidence
from headstream.analyses.patching import inference
from headstream.analyses.patching.cuts.head_sets import Head, all_heads, heads_of, names_of, sets_of
from headstream.analyses.patching.cuts.inputs import Opened, open_cuts
from headstream.analyses.patching.cuts.results import AblationResult
from headstream.analyses.patching.cuts.verdicts import Verdicts
from headstream.analyses.patching.labelled import describe_gap
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

# Cuts without the label that are still named, the largest effects first.
_NOTABLE = 3
# Below this part of the largest effect a cut without the label is not worth a sentence.
_NOTABLE_PART = 0.05


@takes_model
def ablate(
    model: Decoder,
    task_or_tokens: Any,
    heads: Any = None,
    sets: Any = None,
    *,
    values: str = "zero",
    how: str = "full",
    attention_mask: Any = None,
    from_pos: Any = None,
    seed: Any = 0,
    n_flips: int = 5000,
    progress: bool = True,
    backend: str | None = None,
) -> AblationResult:
    """Cut heads one by one, and sets of them together.

    Effects are score(cut) - score(uncut) of each prompt: of a task's clean prompts, in its metric,
    or of rows of tokens, in their mean next-token loss (nats). A cut is CAUSAL by the one rule of
    `patch`, the maximum being over all cuts of the call and the control being the same cut where it
    should not matter: on the corrupted prompts, or on the same tokens in random order. Heads that
    stand in for each other show only in sets: see `redundant_set`.

    Args:
        model: the decoder.
        task_or_tokens: a `Task`, or int64 tokens [example, pos] (or lists of ids).
        heads: each cut alone, `"L0H1"` or `(0, 1)`; None is all.
        sets: `{name: heads}`, each cut together.
        values: what a cut head's z becomes. `zero`; `mean` over the uncut prompts, position by
            position; `resample`: that of another prompt of equal length.
        how: `full`: all that follows reacts. `pattern_preserving`: every head attends as in the
            uncut run, so that what is cut acts through values alone.
        attention_mask, from_pos: of tokens: which are real, and the first position whose token
            counts as a target (by default 1, all of them).
        seed: in [0, 2**63), of sign flips, resamples and the control.
        n_flips: sign patterns; all of them if there are no more than this.
        progress: a bar on stderr, if that is a terminal.
        backend: of every run; None is the model's own.
    Raises:
        TaskError, TokenError, ShapeError: naming the argument that does not fit.
        HookError: with `pattern_preserving`, if attention is edited or hooked already.
    Source:
        Olsson et al. 2022 (full and pattern-preserving); Chan et al. 2022 (resampling). b_O is kept
        where a head is cut: it is no head's.
    Example:
        >>> from headstream.analyses import Task
        >>> from headstream.models import load
        >>> model = load("constructed-or")
        >>> both = {"both": ["L0H0", "L0H2"]}
        >>> found = ablate(model, Task.for_model(model, n=16), sets=both, progress=False)
        >>> found.data["causal"].sel(cut="both").item()
        True
    """
    single = all_heads(model.config) if heads is None else heads_of(model.config, "heads", heads)
    cuts: dict[str, tuple[Head, ...]] = {head_name(*head): (head,) for head in single}
    if sets is not None:
        cuts |= sets_of(model.config, sets)
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
    effects, control = [], []
    for cut in tqdm(cuts.values(), desc="cuts", disable=None if progress else True):
        effects.append(opened.runs.effect(cut))
        control.append(opened.control.effect(cut))
    verdicts = Verdicts.of(model, opened)
    found, unmoved = np.stack(effects), np.stack(control)
    flips = inference.sign_flips(found, n_flips=n_flips, seed=seed, floor=verdicts.floor)
    mean = inference.mean_over_prompts(found)
    low, high = inference.mean_interval(found, seed=seed)
    base = opened.runs.base
    data = xr.Dataset(
        {
            "effects": (("cut", "example"), found),
            "base": (("example",), base),
            "mean": ("cut", mean),
            "low": ("cut", low),
            "high": ("cut", high),
            "control": ("cut", inference.mean_over_prompts(unmoved)),
            "p_value": ("cut", flips.p_value),
            "q_value": ("cut", inference.q_values(flips.cell_p)),
            "size": ("cut", np.array([len(cut) for cut in cuts.values()])),
            **_lost(opened, found, mean, seed),
        },
        coords={"cut": np.array(list(cuts), dtype=np.str_), "example": np.arange(len(base))},
    )
    details: dict[str, Any] = {
        **verdicts.details(),
        "values_in_words": opened.values_in_words,
        "how": how,
        "worse": opened.worse,
        "cuts": {name: names_of(cut) for name, cut in cuts.items()},
        "control": opened.control_words,
        "family": int(flips.family.sum()),
        "flips": flips.flips,
        "examples": opened.examples,
    }
    counts = np.isfinite(found).sum(1)
    failed = [
        verdicts.failed(
            float(mean[i]), float(flips.p_value[i]), float(data["control"].values[i]), int(count)
        )
        for i, count in enumerate(counts)
    ]
    details["failed"] = {name: words for name, words in zip(cuts, failed) if words}
    data["causal"] = ("cut", np.array([not words for words in failed]))
    return AblationResult(
        title=f"Heads of {model.name} cut",
        data=data,
        provenance=Provenance.of(model, seed=seed, backend=backend),
        claims=(verdicts.held(), *_claims(data, details, failed)),
        details=details,
    )


def _lost(opened: Opened, effects: np.ndarray, mean: np.ndarray, seed: int) -> dict[str, Any]:
    """Share of the clean-corrupted gap that a cut loses; nothing for tokens."""
    if opened.gap is None:
        return {}
    _, refused = describe_gap(opened.gap, opened.metric.unit, seed=seed)
    if refused is not None:
        nothing = np.full(mean.shape, np.nan)
        return dict.fromkeys(("lost", "lost_low", "lost_high"), ("cut", nothing))
    gaps = inference.mean_over_prompts(np.where(np.isfinite(effects), opened.gap, np.nan))
    low, high = inference.ratio_interval(-effects, opened.gap, seed=seed)
    return {
        "lost": ("cut", -mean / gaps + 0.0),
        "lost_low": ("cut", low),
        "lost_high": ("cut", high),
    }


def _claims(
    data: xr.Dataset, details: dict[str, Any], failed: list[list[str]]
) -> tuple[Claim, ...]:
    """Of the cuts with the label, and the largest few without, most harm first."""
    mean = data["mean"].values
    largest = float(np.nanmax(np.abs(mean), initial=0.0))
    harm = np.argsort(-details["worse"] * mean, kind="stable").tolist()
    left = [
        i
        for i in sorted(harm, key=lambda i: -abs(mean[i]))
        if failed[i] and abs(mean[i]) > _NOTABLE_PART * largest
    ][:_NOTABLE]
    return tuple(_claim(data, i, details, failed[i]) for i in harm if not failed[i] or i in left)


def _claim(data: xr.Dataset, i: int, details: dict[str, Any], failed: list[str]) -> Claim:
    name, noun = str(data["cut"].values[i]), details["metric"]["noun"]
    mean, unit = float(data["mean"].values[i]), details["metric"]["unit"]
    needed = "is needed for" if details["worse"] * mean > 0 else "works against"
    through = ", every head attending as before" if details["how"] == "pattern_preserving" else ""
    heads = details["cuts"][name]
    who = name if len(heads) == 1 else f"{name} ({', '.join(heads)})"
    reason = "; ".join(failed) or (
        f"p = {float(data['p_value'].values[i]):.2g} (sign-flip, maximum over {details['family']} "
        f"cuts); {mean:+z.2f} {unit}, control {float(data['control'].values[i]):+z.2f}"
    )
    return Claim(
        f"cut.{name}",
        f"{who} {needed} {noun}{through}",
        Evidence.UNKNOWN if failed else Evidence.CAUSAL,
        value=mean,
        unit=unit,
        interval=(float(data["low"].values[i]), float(data["high"].values[i])),
        n=int(np.isfinite(data["effects"].values[i]).sum()),
        reason=f"{reason}; values: {details['values_in_words']}",
        where="ablation",
    )
