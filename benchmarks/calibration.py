"""Whether patching's labels and intervals keep their promises, on models whose circuit is known.

    python benchmarks/calibration.py               everything, about a quarter of an hour
    python benchmarks/calibration.py null power    some parts: null, signs, shapes, coverage,
                                                   power, gates
    THREADS=1 python ...                           two by default

    null      reports on pairs of which clean and corrupted are swapped by a fair coin, answers
              kept: how many contain any CAUSAL head. Swapping a pair turns its effects into those
              of the other direction, so both are computed once, for 4,096 pairs in reports of n;
              the unrelated values with both runs of the other pair. Held against `patch` itself
    signs     the test alone, without the control that can only take labels away, where other things
              are replaced: signs of the effects by a coin, the null for which sign-flipping is
              exact, and pairs swapped by a coin
    shapes    how often the 95% intervals hold the mean of effects drawn from a distribution
    coverage  how often the 95% intervals hold the mean of the 4,096 pairs they are drawn from
    power     which heads `patch` labels, over fresh pairs, and which `redundant_set` adds
    gates     what denoising and noising say of the heads of an AND and of an OR

No clock, so a busy machine does not disturb it. Exits 1 if a bar is missed.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from bench_patching import cpu_name
from scipy import stats

from headstream.analyses.patching import inference
from headstream.analyses.patching.conclusions import causal_cells
from headstream.analyses.patching.cuts.sets import redundant_set
from headstream.analyses.patching.engines import open_sweep
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.sweep_plan import SweepPlan, blocks
from headstream.analyses.patching.sweeps.sweep import run_sweep
from headstream.analyses.patching.task import Task
from headstream.models.decoder import Decoder
from headstream.models.names import head_name
from headstream.models.store import load

REPORTS = 500
CHECKED = 5  # reports held against `patch`
POOL = 4096
# Simulated means of a coverage, at 64 prompts and below; its standard error is 0.005 and 0.011.
MEANS, FEWER = 2000, 500
SEEDS = 40
MODELS = ("constructed-induction", "induction-2l")
CORRUPTIONS = ("earlier_query", "answer", "last")


class Row(NamedTuple):
    """One row; `met` is None where there is no bar."""

    what: str
    bar: str
    measured: str
    met: bool | None = None


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(int(os.environ.get("THREADS", "2")))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy"))
    print(f"{cpu_name()}. Python {platform.python_version()}, {versions}\n")
    print("| what | bar | measured |\n|---|---|---|")
    missed = 0
    for name in names or PARTS:
        for row in PARTS[name]():
            verdict = {True: ": met", False: ": **missed**", None: ""}[row.met]
            print(f"| {row.what} | {row.bar} | {row.measured}{verdict} |", flush=True)
            missed += row.met is False
    return int(missed > 0)


def swapped(task: Task, coins: np.ndarray) -> Task:
    """The task with clean and corrupted of some pairs swapped, answers kept."""
    coin = torch.from_numpy(coins)[:, None]
    return Task(
        torch.where(coin, task.corrupted, task.clean),
        torch.where(coin, task.clean, task.corrupted),
        task.answer,
        task.wrong,
    )


def coins_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng([seed, n]).integers(0, 2, size=n).astype(bool)


def share(hits: int, of: int, at_most: float | None = None) -> tuple[str, bool | None]:
    """A share with its exact 95% interval; met if no test at 5% finds it above `at_most`."""
    low, high = stats.binomtest(hits, of).proportion_ci(method="exact")
    words = f"{hits} of {of}, {hits / of:.1%} [{low:.1%}, {high:.1%}]"
    if at_most is None:
        return words, None
    return words, stats.binomtest(hits, of, at_most, alternative="greater").pvalue > 0.05


def labelled_heads(result: Any) -> list[str]:
    return [head_name(*map(int, index)) for index in zip(*result.data["causal"].values.nonzero())]


class Swappable:
    """A pool of pairs in reports of n, each pair either way round.

    Attributes:
        effects: [way, head, pair], denoising.
        unrelated: [way, way of the other pair, head, pair].
        others: [pair], the pair whose values are the unrelated ones: of the same report.
        floor: what an effect is uncertain by, as `patch` has it.
    """

    def __init__(self, model: Decoder, task: Task, n: int) -> None:
        self.model, self.task, self.n = model, task, n
        self.others = inference.partners(np.arange(len(task)) // n)
        runs = (task.clean, task.corrupted)
        effects, unrelated, floor = {}, {}, 0.0
        for way, other in np.ndindex(2, 2):
            # Denoising takes the other pair's clean run, as it lies, into this one's corrupted run.
            turned = Task(runs[other], runs[1 - way], task.answer, task.wrong)
            plan = _Reports(turned, "z", second=False)
            plan.reports_of(n)
            sweep = open_sweep(model, plan)
            kinds = ("effects", "self", "unrelated") if way == other else ("unrelated",)
            found = {
                kind: np.full((plan.grid(model.config).size, len(task)), np.nan) for kind in kinds
            }
            for block in blocks(plan, model.config):
                if block.kind in kinds:
                    found[block.kind][list(block.cells)] = sweep.run(block)[0]
            unrelated[way, other] = found["unrelated"]
            if way == other:
                effects[way] = found["effects"]
                largest = max(float(np.abs(base).max()) for base in sweep.base.values())
                rounding = 4 * torch.finfo(model.dtype).eps * largest
                floor = max(floor, rounding, float(np.abs(found["self"]).max()))
        self.effects = np.stack([effects[0], effects[1]])
        self.unrelated = np.stack(
            [np.stack([unrelated[way, other] for other in (0, 1)]) for way in (0, 1)]
        )
        self.floor = floor

    def report(self, number: int, coins: np.ndarray, seed: int) -> xr.Dataset:
        """Mean, unrelated, p_value and causal of report `number`, its pairs swapped by `coins`."""
        pairs = np.arange(self.n * number, self.n * (number + 1))
        way, others = coins.astype(int), self.others[pairs]
        effects = self.effects[way, :, pairs].T
        unrelated = self.unrelated[way, way[others - pairs[0]], :, pairs].T
        flipped = inference.sign_flips(effects, seed=seed, floor=self.floor)
        data = xr.Dataset(
            {
                "effects": (("cell", "example"), effects),
                "mean": ("cell", effects.mean(1)),
                "p_value": ("cell", flipped.p_value),
                "unrelated": ("cell", unrelated.mean(1)),
            }
        )
        details = {"metric": {"unit": "nats"}, "self_patch_max": 0.0, "self_patch_bound": 0.0}
        data["causal"] = causal_cells(data, details)
        return data

    def against_patch(self, name: str) -> Row:
        """Report 0 and what `patch` finds with the same pairs swapped."""
        first = slice(self.n)
        task = self.task
        assert task.wrong is not None
        pairs = Task(
            task.clean[first], task.corrupted[first], task.answer[first], task.wrong[first]
        )
        worst, labels, labelled = 0.0, 0, 0
        for seed in range(CHECKED):
            coins = coins_of(seed, self.n)
            real = patch(self.model, swapped(pairs, coins), "z", progress=False).data
            mine = self.report(0, coins, 0)
            for array in ("effects", "mean", "unrelated", "p_value"):
                ours = mine[array].values
                theirs = real[array].values.reshape(ours.shape)
                assert (np.isnan(ours) == np.isnan(theirs)).all()
                worst = max(worst, float(np.nanmax(np.abs(ours - theirs))))
            same = real["causal"].values.ravel() == mine["causal"].values
            labels, labelled = labels + same.size, labelled + int(same.sum())
        return Row(
            f"{name}, n = {self.n}: effects, controls and p against `patch` of the swapped task, "
            f"{CHECKED} times",
            "<= 1e-4, equal labels",
            f"{worst:.1e}, {labelled} of {labels}",
            worst <= 1e-4 and labelled == labels,
        )


class _Reports(SweepPlan):
    """A plan whose unrelated pairs are found within each report of n."""

    def reports_of(self, n: int) -> None:
        object.__setattr__(self, "_n", n)

    @property
    def others(self) -> torch.Tensor:
        return torch.from_numpy(inference.partners(np.arange(len(self.task)) // self._n))


def null() -> Iterator[Row]:
    for name in MODELS:
        model = load(name)
        task = Task.for_model(model, n=POOL, seed=0)
        for n in (32, 64):
            pool = Swappable(model, task, n)
            yield pool.against_patch(name)
            found, tested = 0, 0
            for seed in range(REPORTS):
                data = pool.report(seed % (POOL // n), coins_of(seed, n), seed)
                found += bool(data["causal"].any())
                tested += bool((data["p_value"] <= inference.ALPHA).any())
            words, met = share(found, REPORTS, inference.ALPHA)
            yield Row(
                f"{name}, n = {n}, pairs swapped by a coin: reports with any CAUSAL head",
                "<= 5% plus sampling error",
                f"{words}; {tested} by the test alone",
                met,
            )


class Pool(NamedTuple):
    """Effects of every head [head, pair], both directions, and the gap [pair]."""

    denoise: np.ndarray
    noise: np.ndarray
    gap: np.ndarray


def pool_of(model: Decoder, corruption: str, n: int = POOL, seed: int = 10_000) -> Pool:
    """`n` pairs; in a task that is swapped everywhere, denoising is noising of this one."""
    task = Task.for_model(model, n=n, seed=seed, corruption=corruption)
    ways = {}
    for direction in ("denoise", "noise"):
        plan = SweepPlan(task, "z", direction=direction, second=False)
        ways[direction] = run_sweep(model, plan, progress=False)
    base = ways["denoise"].base
    return Pool(
        *(ways[direction].passes["effects"][0] for direction in ("denoise", "noise")),
        base["clean"][0] - base["corrupted"][0],
    )


def signs() -> Iterator[Row]:
    for name in MODELS:
        model = load(name)
        for corruption in CORRUPTIONS:
            pool = pool_of(model, corruption)
            for n in (64, 256):
                rng = np.random.default_rng([7, n])
                by_swap, by_sign = 0, 0
                for seed in range(REPORTS):
                    pairs = rng.choice(POOL, size=n, replace=False)
                    coins = coins_of(seed, n)
                    effects = np.where(coins, pool.noise[:, pairs], pool.denoise[:, pairs])
                    by_swap += passes(effects, seed)
                    by_sign += passes(pool.denoise[:, pairs] * (1 - 2.0 * coins), seed)
                what = f"{name}, `{corruption}` replaced, n = {n}, the test alone"
                words, met = share(by_sign, REPORTS, inference.ALPHA)
                yield Row(f"{what}: signs by a coin", "<= 5% plus sampling error", words, met)
                yield Row(f"{what}: pairs swapped", "", share(by_swap, REPORTS)[0])
            each = zip(heads_of(model), pool.denoise.mean(1), pool.noise.mean(1))
            yield Row(
                f"{name}, `{corruption}` replaced: mean effect denoising, noising (nats)",
                "",
                ", ".join(f"{h} {d:+.1f}, {x:+.1f}" for h, d, x in each if max(d, -x) >= 0.5),
            )


def passes(effects: np.ndarray, seed: int) -> bool:
    floor = 1e-5  # nats; the rounding of float32 logits of tens, as `patch` has it
    flipped = inference.sign_flips(effects, n_flips=999, seed=seed, floor=floor)
    return bool(np.nanmin(flipped.p_value, initial=1.0) <= inference.ALPHA)


def coverage() -> Iterator[Row]:
    # Written by hand, constructed-induction has equal effects in all pairs: nothing to cover.
    name = "induction-2l"
    model = load(name)
    for corruption in CORRUPTIONS:
        pool = pool_of(model, corruption)
        effects = pool.denoise
        heads = heads_of(model)
        mean = effects.mean(1)
        notable = np.abs(mean) >= 0.05 * abs(pool.gap.mean())
        tails = stats.kurtosis(effects, axis=1)
        for n in (64, 32, 16, 8) if corruption == CORRUPTIONS[0] else (64,):
            times = MEANS if n == 64 else FEWER
            hits = np.zeros((2, len(heads)), dtype=int)
            rng = np.random.default_rng([8, n])
            for seed in range(times):
                pairs = rng.integers(0, POOL, size=n)
                drawn, gap = effects[:, pairs], pool.gap[pairs]
                intervals = (
                    inference.mean_interval(drawn, seed=seed),
                    inference.ratio_interval(drawn, gap, seed=seed),
                )
                for kind, ((low, high), true) in enumerate(
                    zip(intervals, (mean, mean / pool.gap.mean()))
                ):
                    hits[kind] += (low <= true) & (true <= high)
            # Outside only if by more than two standard errors.
            slack = 2 * (0.94 * 0.06 / times) ** 0.5
            for words, covered in zip(("mean effect", "share of the gap"), hits / times):
                what = f"{name}, `{corruption}` replaced, n = {n}: coverage of the {words}"
                inside = (covered >= 0.92 - slack) & (covered <= 0.97 + slack)
                yield Row(
                    f"{what}, heads that move 5% of the gap",
                    "92 to 97%, each" if n == 64 else "",
                    each_of(heads, covered, notable),
                    bool(inside[notable].all()) if n == 64 else None,
                )
                if n == 64:
                    yield Row(
                        f"{what}, the others (excess kurtosis)",
                        "",
                        each_of(heads, covered, ~notable, [f" ({tail:.0f})" for tail in tails]),
                    )


def each_of(heads: list[str], covered: np.ndarray, which: np.ndarray, after: Any = None) -> str:
    after = after or [""] * len(heads)
    return ", ".join(
        f"{head} {part:.1%}{words}"
        for head, part, kept, words in zip(heads, covered, which, after)
        if kept
    )


def heads_of(model: Decoder) -> list[str]:
    return [head_name(*at) for at in np.ndindex(model.config.n_layers, model.config.n_heads)]


def known_heads(model: Decoder) -> dict[str, str]:
    """Head -> its part in the circuit, from the card."""
    assert model.card is not None
    parts = ("previous-token", "induction")
    return {head: part for part in parts for head in model.card["circuit"][part]}


def power() -> Iterator[Row]:
    for name in MODELS:
        model = load(name)
        circuit = known_heads(model)
        together = [head for head, part in circuit.items() if part == "induction"]
        alone, found = dict.fromkeys(circuit, 0), dict.fromkeys(circuit, 0)
        false: list[str] = []
        for seed in range(SEEDS):
            task = Task.for_model(model, n=32, seed=20_000 + seed)
            labelled = set(labelled_heads(patch(model, task, "z", seed=seed, progress=False)))
            members = set()
            if len(together) > 1:
                members = set(
                    redundant_set(model, task, together, seed=seed, progress=False).members
                )
            for head in circuit:
                alone[head] += head in labelled
                found[head] += head in labelled | members
            false += sorted(labelled - circuit.keys())
        what = f"{name}, n = 32, {SEEDS} seeds: known heads"
        if len(together) > 1:
            yield Row(f"{what} that denoising one by one labels", "", in_parts(circuit, alone))
            what += f" found so or as members of the set {' '.join(together)} (`redundant_set`)"
        else:
            what += " that denoising labels"
        met = min(found.values()) == SEEDS
        yield Row(what, "every one, every time", in_parts(circuit, found), met)
        words = f"{len(false)} in {SEEDS} reports"
        yield Row(f"{name}, n = 32, denoising: other heads labelled", "none", words, not false)


def in_parts(circuit: dict[str, str], hits: dict[str, int]) -> str:
    return ", ".join(f"{head} ({circuit[head]}) {hits[head] / SEEDS:.0%}" for head in circuit)


def gates() -> Iterator[Row]:
    expected = {
        ("and", "denoise"): [],
        ("and", "noise"): ["L0H0", "L0H2"],
        ("or", "denoise"): ["L0H0", "L0H2"],
        ("or", "noise"): [],
    }
    for (gate, direction), heads in expected.items():
        model = load(f"constructed-{gate}")
        right, seen = 0, set()
        for seed in range(SEEDS):
            task = Task.for_model(model, n=32, seed=seed)
            with warnings.catch_warnings():
                # That no single head does anything is here the right answer.
                warnings.filterwarnings("ignore", message=".*every effect is exactly zero")
                result = patch(model, task, "z", direction=direction, seed=seed, progress=False)
            found = labelled_heads(result)
            right += found == heads
            seen |= set(found)
        yield Row(
            f"constructed-{gate}, {direction}: heads found, {SEEDS} seeds of 32 pairs",
            ", ".join(heads) or "none",
            f"{', '.join(sorted(seen)) or 'none'} ({right} of {SEEDS})",
            right == SEEDS,
        )


def shapes() -> Iterator[Row]:
    """Of effects of a known mean: even ones, skewed ones, and ones of which few carry the mean."""
    rng = np.random.default_rng(0)
    for name, draw, mean in (
        ("normal", lambda size: rng.normal(1.0, 1.0, size), 1.0),
        ("exponential", lambda size: rng.exponential(1.0, size), 1.0),
        ("lognormal", lambda size: rng.lognormal(0.0, 1.0, size), np.exp(0.5)),
    ):
        found = []
        for n in (6, 8, 16, 32, 64):
            low, high = inference.mean_interval(draw((MEANS, n)))
            found.append(f"{np.mean((low <= mean) & (mean <= high)):.3f} at {n}")
        yield Row(f"coverage of the mean of {name} effects", "", ", ".join(found))


PARTS = {
    "null": null,
    "signs": signs,
    "shapes": shapes,
    "coverage": coverage,
    "power": power,
    "gates": gates,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
