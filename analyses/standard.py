"""The standard study behind `headstream report MODEL`: what a newcomer should see first.

Audit of the identities; for a model with a task, patching of every head in both directions, of
heads and stream by role, paths from head to head and to the answer, and direct logit attribution;
then the head census, which heads continue repeats and which only seem to, each head taken apart,
and what rests on the first token. The census says, before any effect is looked at, which heads are
cut as a set and which circuit is set beside random ones. A section that the model is too small for
is left out, and the first result says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tqdm import tqdm

from headstream.analyses.claims.ledger import audit
from headstream.analyses.kinds import HeadsResult
from headstream.analyses.patching.cuts.faithfulness import faithfulness
from headstream.analyses.patching.cuts.head_sets import Head, labelled_heads
from headstream.analyses.patching.cuts.sets import redundant_set
from headstream.analyses.patching.patch import patch
from headstream.analyses.patching.paths.ends import ends_of
from headstream.analyses.patching.paths.path_patch import path_patch
from headstream.analyses.patching.rows import check_seed
from headstream.analyses.patching.task import Task
from headstream.analyses.result import Result
from headstream.analyses.studies.circuits import circuits
from headstream.analyses.studies.heads import OPEN_QUESTION, heads
from headstream.analyses.studies.induction import induction
from headstream.analyses.studies.sinks import sinks
from headstream.analyses.studies.writes import direct_writes
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError, TaskError, TokenError
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

_PATCHING = "patching"
# Paths that a report sweeps: their effects on every pair are in its page.
_MOST_PATHS = 600
# Of larger models fewer random sets are drawn: each costs two runs of all pairs.
_SMALL = 64
# The parts of the circuit that the induction tasks are about, as the census calls them.
_INDUCTION, _PREVIOUS = "induction pattern", "previous-token"
# Results of a study in the order of the report's sections.
_ORDER = (
    *("audit", "patching", "paths", "redundant_set", "faithfulness", "decomposition", "heads"),
    *("induction", "circuits", "sinks"),
)


@takes_model
def standard_study(
    model: Decoder,
    *,
    task: Task | None = None,
    n: int = 64,
    seed: int = 0,
    progress: bool = True,
    command: str | None = None,
) -> list[Result]:
    """Run the standard study on `model`.

    Args:
        task: your own pairs to patch, and an error in patching them is raised; None takes the zoo
            task that the model's card names, and a model without one gets the sections that need
            no task. What could not run then stands in the first result's `details["left_out"]`.
        n: prompt pairs, when the task is drawn here.
        seed: of everything that is drawn.
        progress: a bar on stderr.
        command: the command line that asked for it, for the report's provenance.
    Returns:
        Results in the order of the report's sections.
    """
    check_seed(seed)
    own = task is not None
    if task is None and (model.card or {}).get("task"):
        task = Task.for_model(model, n=n, seed=seed)
    steps: list[tuple[str, Callable[[], Result]]] = [("audit", lambda: audit(model, seed=seed))]
    if task is not None:
        steps += [(_PATCHING, step) for step in _patching(model, task, seed)]
        steps.append(("decomposition", lambda: direct_writes(model, task, seed=seed)))
    steps.append(("census", lambda: heads(model, seed=seed)))
    steps.append(("circuits", lambda: circuits(model, seed=seed)))
    steps.append(("sinks", lambda: sinks(model, seed=seed)))
    results: list[Result] = []
    left_out: list[str] = [] if task is not None else [_no_task(model)]
    # Of every model: what copies from a fixed distance has no pattern that the census would see.
    steps.append(("induction", lambda: induction(model, seed=seed)))
    if task is not None:
        senders, receivers, why = _path_ends(model.config)
        left_out += why
        if receivers:
            swept = partial(path_patch, model, task, senders, receivers)
            steps.append(("paths", partial(swept, seed=seed, progress=False)))
        steps.append(("redundant set", lambda: _together(model, task, _census(results), seed)))
        steps.append(("circuit", lambda: _circuit(model, task, _census(results), seed)))
    for name, step in tqdm(steps, desc="standard study", disable=None if progress else True):
        try:
            results.append(step())
        except (ShapeError, TaskError, TokenError) as error:
            if own and name == _PATCHING:
                raise
            # A model too small for one section still gets the others, and the report says which.
            left_out.append(f"{name}: {error}")
    # Several sweeps that fail for one reason are one thing left out.
    left_out = list(dict.fromkeys(left_out))
    results = _settled(results)
    results.sort(key=lambda result: _ORDER.index(result.kind))
    return [
        _finished(result, left_out if i == 0 else [], command) for i, result in enumerate(results)
    ]


def _patching(model: Decoder, task: Task, seed: int) -> Sequence[Callable[[], Result]]:
    plans: list[tuple[str, str, str]] = [("z", "all", "denoise"), ("z", "all", "noise")]
    if task.roles:
        streams = ["resid_pre", "attn_out", *(["mlp_out"] if model.config.has_mlp else [])]
        plans += [("z", "roles", "denoise"), *((site, "roles", "denoise") for site in streams)]
    return [
        partial(
            patch,
            model,
            task,
            site,
            positions=positions,
            direction=direction,
            seed=seed,
            progress=False,
        )
        for site, positions, direction in plans
    ]


def _path_ends(config: DecoderConfig) -> tuple[list[str], list[str], list[str]]:
    """Senders and receivers of the paths of this study, and what is left out of them and why.

    Heads of the last layer are read by the logits alone, so that their total effect, which the
    sweep over heads has, is their direct one.
    """
    heads, last = config.n_heads, config.n_layers - 1
    senders = [head_name(layer, head) for layer in range(last) for head in range(heads)]
    if not senders:
        return [], [], ["paths: heads of a single layer hand nothing to each other"]
    for receivers in (["q", "k", "v", "logits"], ["logits"]):
        sending, receiving = ends_of(config, senders, receivers)
        count = sum(sender.before(receiver) for sender in sending for receiver in receiving)
        if receivers[0] == "q":
            every = count
        if count <= _MOST_PATHS:
            break
    else:
        receivers = []
    if every <= _MOST_PATHS:
        return senders, receivers, []
    swept = "only those straight to the answer were swept" if receivers else "none was swept"
    return (
        senders,
        receivers,
        [
            f"paths: {swept}; with those from head to head there are {every:,}, and a report takes "
            f"{_MOST_PATHS}; path_patch takes the senders and receivers that you name"
        ],
    )


def _census(results: Sequence[Result]) -> HeadsResult:
    for result in results:
        if isinstance(result, HeadsResult):
            return result
    raise TaskError("there is no census to take the heads from")


def _together(model: Decoder, task: Task, census: HeadsResult, seed: int) -> Result:
    """Heads that the census calls alike, cut together: single cuts miss what they share."""
    chosen = _labelled(census, _INDUCTION)
    return redundant_set(model, task, chosen, values="mean", seed=seed, progress=False)


def _circuit(model: Decoder, task: Task, census: HeadsResult, seed: int) -> Result:
    """The heads that the story of induction names, beside other sets of as many heads."""
    chosen: list[Head] = [
        head for label in (_PREVIOUS, _INDUCTION) for head in _labelled(census, label)
    ]
    config = model.config
    n_random = 100 if config.n_layers * config.n_heads <= _SMALL else 20
    return faithfulness(
        model, task, chosen, values="mean", n_random=n_random, seed=seed, progress=False
    )


def _labelled(census: HeadsResult, label: str) -> list[Head]:
    """Heads that the census calls this; where it calls none anything, that is said plainly."""
    if bool((census.data["label"] == "none").all()):
        raise TaskError("the census gives no head a label, so that it names none to cut")
    return labelled_heads(census, label)


def _settled(results: Sequence[Result]) -> list[Result]:
    """Without what the census says of a head, or leaves open, where the induction study says more.

    Its scores stay in the census; a pattern is no second finding beside what a cut has shown.
    """
    studies = [result for result in results if result.kind == "induction"]
    if not studies:
        return list(results)
    said = {claim.id.replace("induction.", "heads.", 1) for r in studies for claim in r.claims}
    said.add(OPEN_QUESTION)
    return [
        replace(result, claims=tuple(c for c in result.claims if c.id not in said))
        for result in results
    ]


def _no_task(model: Decoder) -> str:
    return (
        f"no patching was run: model {model.name!r} has no card that names a task; "
        "give pairs with --pairs FILE.jsonl"
    )


def _finished(result: Result, left_out: list[str], command: str | None) -> Result:
    """The first result carries what the whole study leaves out."""
    details = dict(result.details)
    if left_out:
        details["left_out"] = left_out
    return replace(result, details=details, provenance=replace(result.provenance, command=command))
