"""What `headstream patch` does with a sweep, over sites or over paths: run it, or say its cost."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headstream.commands.shared import number, signed
from headstream.console import answer, printable
from headstream.console import table as columns

if TYPE_CHECKING:
    from headstream.analyses.patching.result import PatchingResult
    from headstream.analyses.patching.sweeps.cost import SweepCost
    from headstream.analyses.patching.sweeps.plans import Plan
    from headstream.analyses.patching.task import Task
    from headstream.cli import Options
    from headstream.models.decoder import Decoder

# Rows of the table that is printed; the result holds all.
_ROWS = 12


@dataclass(frozen=True)
class Sweep:
    """A sweep as the command line asks for it.

    Attributes:
        paths: whether it is over paths, or over sites.
        arguments: of `patch` or `path_patch`, by their names; None where the library decides.
        workers, resume: as given.
    """

    paths: bool
    arguments: dict[str, Any]
    workers: int | None
    resume: str | None

    @property
    def engine(self) -> str:
        return str(self.arguments["engine"])

    def run(self, options: Options, model: Decoder, task: Task) -> PatchingResult:
        """Raises KeyboardInterrupt, with a note of what is kept, where it is stopped."""
        from headstream.analyses.patching.patch import patch
        from headstream.analyses.patching.paths.path_patch import path_patch
        from headstream.analyses.patching.sweeps.workers import local_pool

        run: Any = path_patch if self.paths else patch
        with nullcontext() if self.workers is None else local_pool(self.workers) as pool:
            result: PatchingResult = run(
                model,
                task,
                **self._given(),
                seed=options.seed,
                executor=pool,
                resume=self.resume,
                progress=options.progress,
            )
        return result

    def cost(self, options: Options, model: Decoder, task: Task) -> None:
        """Print what it would cost."""
        from headstream.analyses.patching.patch import planned
        from headstream.analyses.patching.paths.path_patch import planned_paths
        from headstream.analyses.patching.sweeps.cost import sweep_cost
        from headstream.analyses.patching.sweeps.sweep import finished_blocks

        make: Any = planned_paths if self.paths else planned
        plan: Plan = make(model, task, **self._given(), seed=options.seed)
        engine, workers = self.engine, self.workers
        done = 0
        if self.resume is not None:
            done = finished_blocks(self.resume, model, plan, engine, workers)
        cost = sweep_cost(model, plan, engine, threads=None if workers is None else 1)
        left = cost.block_seconds * (cost.blocks - done) / (workers or 1)
        value = asdict(cost) | {
            "forward_equivalents": cost.forward_equivalents,
            "workers": workers,
            "finished": done,
            "seconds_left": left,
        }
        text = "\n".join(self._cost_lines(cost, len(task), done, left))
        answer(value, text, as_json=options.as_json)

    def table(self, result: Any) -> list[str]:
        """The cells of the largest effects, from most towards the other run to most against it."""
        from headstream.analyses.patching.paths.result import ranked_paths
        from headstream.analyses.patching.result import ranked_cells

        paths = self.paths
        cells = ranked_paths(result.data) if paths else ranked_cells(result.data)
        shown = sorted(cells, key=lambda cell: -abs(cell.mean))[:_ROWS]
        if paths:
            # Most paths of a model pass nothing on.
            shown = [cell for cell in shown if cell.mean != 0] or shown[:1]
        rows = [
            [
                cell.label,
                signed(cell.mean),
                signed(cell.interval[0]),
                signed(cell.interval[1]),
                number(cell.normalized),
                f"{cell.p_value:.4f}" if cell.p_value == cell.p_value else "-",
                signed(cell.unrelated),
                "CAUSAL" if cell.causal else "",
            ]
            for cell in cells
            if cell in shown
        ]
        unit = result.details["metric"]["unit"]
        place = "path" if paths else "site"
        header = [place, unit, "low", "high", "of gap", "p", "unrelated", ""]
        hidden = len(cells) - len(rows)
        smaller = "smaller effects or none" if paths else "smaller effects"
        rest = [f"{hidden:,} more have {smaller}"] if hidden else []
        return [columns(header, rows), *rest]

    def why_not(self, result: Any) -> dict[str, str]:
        """What the largest effect lacks to be CAUSAL; nothing if it is."""
        tested = [claim for claim in result.claims if claim.evidence in ("CAUSAL", "UNKNOWN")]
        largest = max(tested, key=lambda claim: abs(claim.value or 0.0), default=None)
        if largest is None or largest.evidence == "CAUSAL":
            return {}
        return {largest.id.split(".", 1)[1]: largest.reason}

    def _given(self) -> dict[str, Any]:
        """What the library's defaults do not decide."""
        return {name: value for name, value in self.arguments.items() if value is not None}

    def _cost_lines(self, cost: SweepCost, pairs: int, done: int, left: float) -> list[str]:
        cells = "paths" if self.paths else f"of {self.arguments['site']}"
        passes = "the effects and their controls"
        if self.paths:
            passes = "the effects, their controls, and the total effects of the senders"
        workers = self.workers
        kept = f", {done:,} finished in '{self.resume}'" if self.resume else ""
        rows = [
            ("cells", f"{cost.cells:,} {cells}, {pairs} pairs of prompts"),
            ("passes", f"{cost.passes}: {passes}"),
            ("blocks", f"{cost.blocks:,}{kept}"),
            ("forwards", f"{cost.forwards:,} passes of all pairs, were every cell run whole"),
            (
                "costs",
                f"as much as {cost.forward_equivalents:,.0f} passes with engine {self.engine}",
            ),
            (
                "time",
                f"about {duration(left)}"
                + ("" if workers is None else f" on {workers} workers, beside their start")
                + f" ({cost.block_seconds:.2g} s a block, mean of {cost.tried} tried)",
            ),
        ]
        if cost.peak_bytes is not None:
            memory = f"about {cost.peak_bytes / 1e6:,.0f} MB a process"
            processes = "" if workers is None else f", {workers + 1} processes"
            rows.append(("memory", memory + processes))
        return cost_table(rows)


def cost_table(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{name:<10}{printable(words)}" for name, words in rows]


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} minutes" if seconds < 7200 else f"{seconds / 3600:.3g} hours"
