"""`patch`: what happens to the answer when one activation takes its value from another run.

1. run clean and corrupted, and measure both
2. sweep the grid: the site's values from the pair (or zero, mean, resampled) into the other run
3. sweep it twice more as controls: with a run's own values, with an unrelated pair's
4. infer (`inference`), label (`conclusions`), and hand back a `PatchingResult`
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from headstream.analyses.patching import inference
from headstream.analyses.patching.conclusions import (
    causal_cells,
    claims_of,
    random_sites_95,
    warnings_of,
)
from headstream.analyses.patching.hooked_engine import (
    Donor,
    Run,
    mean_of_run,
    record,
    rows_of_run,
    sweep,
    zero_of_run,
)
from headstream.analyses.patching.labelled import describe_gap, labelled
from headstream.analyses.patching.metrics import Metric, evaluate, second_metric
from headstream.analyses.patching.result import PatchingResult
from headstream.analyses.patching.rows import check_seed
from headstream.analyses.patching.sites import Grid, plan
from headstream.analyses.patching.task import Task, pairs_as_values
from headstream.analyses.result import Provenance
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError, nearest
from headstream.models.vocabulary import check_tokens

Direction = Literal["denoise", "noise"]
Values = Literal["pair", "zero", "mean", "resample"]
Engine = Literal["hooks"]

# Batched products round differently; the bound on the self-patch where it need not be bitwise.
SELF_PATCH = 1e-4


def patch(
    model: Decoder,
    task: Task | Any,
    site: str,
    *,
    direction: str = "denoise",
    values: str = "pair",
    engine: str = "hooks",
    layers: Any = None,
    heads: Any = None,
    positions: Any = None,
    seed: Any = 0,
    n_flips: int = 5000,
    progress: bool = True,
    backend: str | None = None,
) -> PatchingResult:
    """Patch one kind of site, cell by cell, and say what that does to the answer.

    `effects` is metric(patched) - metric(the run patched into), per pair, in the metric's units,
    for both directions. `normalized` is the share of the clean-corrupted gap that was moved, as a
    ratio of means: (patched - corrupted) / gap for denoise, (clean - patched) / gap for noise.

    Args:
        model: the decoder.
        task: a `Task`: pairs of prompts, answers and metric.
        site: `resid_pre resid_mid resid_post attn_out mlp_out z q k v`.
        direction: `denoise` puts clean values into the corrupted run and shows what suffices to
            restore the answer; `noise` puts corrupted values into the clean run and shows what is
            needed. Neither mirrors the other: denoising misses the members of an AND, noising
            those of an OR. Where any wrong value breaks the answer, an unrelated prompt's may do so
            as much. Such a site gets no label, however large its effect (what breaks is not
            specific to the corruption), and the summary names it apart.
        values: `pair` takes them from the pair's other run; `mean` from the mean of that run over
            all pairs, position by position; `resample` from that run of another pair; `zero`.
            `resample` is the unrelated-prompt control itself, so it can carry no CAUSAL label.
        engine: `hooks`, one hooked forward pass a cell.
        layers, heads: restrict the grid. For k and v, `heads` are key/value heads.
        positions: `each` real position of a row counted from its first real token, `all` positions
            of a row at once, `roles` of the task, or a list of positions (negative ones count from
            each row's end). By default `each` for sites on the stream, `all` for heads. Positions
            that a row lacks are NaN for its pair, and every mean is over the pairs that have them.
        seed: in [0, 2**63), of sign flips, resamples and of which pairs are unrelated.
        n_flips: sign patterns; all of them if there are no more than this.
        progress: show a bar on stderr, if that is a terminal.
        backend: of every run; None is the model's own.
    Returns:
        Effects with their inference, controls and claims.
    Raises:
        TaskError: on an argument that does not fit, or if clean and corrupted give the same metric.
        TokenError, ShapeError: on tokens that do not fit the model.
    Source:
        Heimersheim & Nanda 2024 (arXiv 2404.15255); Zhang & Nanda 2023 (arXiv 2309.16042). We
        correct for the whole grid and average before dividing.
    """
    _check_option("direction", direction, get_args(Direction))
    _check_option("values", values, get_args(Values))
    _check_option("engine", engine, get_args(Engine))
    inference.check_flips(n_flips)
    check_seed(seed)
    if not isinstance(task, Task):
        raise TaskError(
            f"task must be a Task, got {type(task).__name__}",
            hint="build one with Task(clean, corrupted, answer, wrong), or Task.for_model(model)",
        )
    _check_fits(model, task)
    grid = plan(model.config, task, site, layers=layers, heads=heads, positions=positions)
    with torch.no_grad():
        return _patch(model, task, grid, direction, values, seed, n_flips, progress, backend)


def _patch(
    model: Decoder,
    task: Task,
    grid: Grid,
    direction: str,
    values: str,
    seed: int,
    n_flips: int,
    progress: bool,
    backend: str | None,
) -> PatchingResult:
    n = len(task)
    runs = {
        "clean": record(model, task, task.clean, grid, backend),
        "corrupted": record(model, task, task.corrupted, grid, backend),
    }
    into, source = ("corrupted", "clean") if direction == "denoise" else ("clean", "corrupted")
    tokens = task.corrupted if direction == "denoise" else task.clean
    metrics = (task.metric, second_metric(task.metric, task))

    def measure(logits: Tensor) -> np.ndarray:
        reference = runs["clean"].logits
        return np.stack([evaluate(metric, logits, task, reference) for metric in metrics])

    base = {name: measure(run.logits) for name, run in runs.items()}
    clean, corrupted = base["clean"][0], base["corrupted"][0]
    rounding = 4 * torch.finfo(model.dtype).eps * float(np.abs([clean, corrupted]).max())
    _check_gap(task, clean, corrupted, rounding)
    others = _unrelated_rows(task, grid, seed)

    with tqdm(
        total=3 * grid.size, desc=f"patch {grid.site.name}", disable=None if progress else True
    ) as bar:

        def effects_of(donor: Donor) -> np.ndarray:
            """[metric, site dims..., example]; NaN where a row was not patched."""
            rows = []
            for logits, patched in sweep(model, task, tokens, grid, donor, backend):
                moved = measure(logits) - base[into]
                rows.append(np.where(patched.numpy(), moved, np.nan))
                bar.update()
            return np.stack(rows, axis=1).reshape(len(metrics), *grid.shape, n)

        found = effects_of(_donor(values, runs[source], others))
        own = effects_of(rows_of_run(runs[into], torch.arange(n)))[0]
        unrelated = effects_of(rows_of_run(runs[source], others))[0]

    gap = clean - corrupted
    gap_details, refused = describe_gap(gap, task.metric.unit, seed=seed)
    exact = (backend or model.backend) == "naive"
    flips = inference.sign_flips(found[0], n_flips=n_flips, seed=seed, floor=rounding)
    details: dict[str, Any] = {
        "site": grid.site.name,
        "positions": grid.positions,
        "direction": direction,
        "values": values,
        "engine": "hooks",
        "metric": _described(task.metric),
        "second_metric": _described(metrics[1]),
        "family": int(flips.family.sum()),
        "flips": flips.flips,
        "flips_exact": flips.exact,
        "alpha": inference.ALPHA,
        "self_patch_max": float(np.nanmax(np.abs(own))),
        "self_patch_bound": 0.0 if exact else SELF_PATCH * float(np.abs(gap).mean()),
        "random_site_95": None,
        "gap": gap_details,
        "normalized_refused": refused,
        "sign_rule": "effects keep their sign; sites stand from most towards the other run "
        "to most against it",
        "prompts": pairs_as_values(task, model),
        "warnings": [],
    }
    sign = 1.0 if direction == "denoise" else -1.0
    data = labelled(
        grid.coords,
        found[0],
        second=found[1],
        unrelated=unrelated,
        clean=clean,
        corrupted=corrupted,
        flips=flips,
        sign=sign,
        refused=refused is not None,
        seed=seed,
    )
    data["causal"] = causal_cells(data, details)
    details["random_site_95"] = random_sites_95(data)
    details["warnings"] = warnings_of(data, details)
    if not np.any(np.nan_to_num(found[0])):
        warnings.warn(
            f"patch of {grid.site.name}: every effect is exactly zero; nothing that was patched "
            "reaches the answer",
            stacklevel=3,
        )
    return PatchingResult(
        title=f"Causal patching of {grid.site.name}, {'denoising' if sign > 0 else 'noising'}",
        data=data,
        provenance=Provenance.of(model, seed=seed, backend=backend),
        claims=claims_of(data, details),
        details=details,
    )


def _donor(values: str, source: Run, others: Tensor) -> Donor:
    donors: dict[str, Callable[[], Donor]] = {
        "pair": lambda: rows_of_run(source, torch.arange(len(others))),
        "zero": lambda: zero_of_run(source),
        "mean": lambda: mean_of_run(source),
        "resample": lambda: rows_of_run(source, others),
    }
    return donors[values]()


def _unrelated_rows(task: Task, grid: Grid, seed: int) -> Tensor:
    """Another pair for each pair: of equal length, unless places are named by role."""
    by_role = grid.positions == "roles"
    groups = torch.zeros(len(task), dtype=torch.int64) if by_role else task.lengths
    return torch.from_numpy(inference.partners(groups.numpy(), seed=seed))


def _described(metric: Metric) -> dict[str, str]:
    return {
        "name": metric.name,
        "formula": metric.formula,
        "unit": metric.unit,
        "noun": metric.noun,
    }


def _check_option(argument: str, value: object, options: Sequence[str]) -> None:
    if value in options:
        return
    if argument == "engine" and value == "suffix":
        raise TaskError("engine 'suffix' is not there yet", hint="use engine='hooks'")
    raise TaskError(
        f"{argument} must be one of {', '.join(map(repr, options))}, got {value!r}",
        hint=nearest(str(value), options),
    )


def _check_fits(model: Decoder, task: Task) -> None:
    d_vocab = model.config.d_vocab
    check_tokens(task.clean, d_vocab, argument="clean")
    check_tokens(task.corrupted, d_vocab, argument="corrupted")
    for name, tokens in (("answer", task.answer), ("wrong", task.wrong)):
        if tokens is not None:
            check_tokens(tokens, d_vocab, argument=name)
    same = (task.clean == task.corrupted) | (
        torch.zeros_like(task.clean, dtype=torch.bool)
        if task.attention_mask is None
        else ~task.attention_mask
    )
    identical = same.all(1)
    if bool(identical.any()):
        pair = int(identical.nonzero()[0])
        raise TaskError(
            f"corrupted is the clean prompt itself in pair {pair}: nothing to patch",
            hint="change what the answer depends on, or leave the pair out",
        )


def _check_gap(task: Task, clean: np.ndarray, corrupted: np.ndarray, rounding: float) -> None:
    if float(np.abs(clean - corrupted).max()) <= rounding:
        raise TaskError(
            f"clean and corrupted give the same {task.metric.name} in every pair "
            f"(mean {clean.mean():.4g}): there is no gap to patch",
            hint="corrupt what the answer depends on, or read another answer_pos",
        )
