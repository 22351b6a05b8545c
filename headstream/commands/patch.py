"""headstream patch: sites and paths patched, heads cut; long sweeps over many processes."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstream.cli import Model, Options, Output, cli, common
from headstream.commands.choices import Grouped, Names, Numbers, Positions, option
from headstream.commands.cuts import Cuts
from headstream.commands.shared import (
    answer_and_write,
    load_model,
    read_pairs,
    refuse_n_with_pairs,
    require_room,
    require_writable,
)
from headstream.commands.sweeps import Sweep
from headstream.console import complain, printable

if TYPE_CHECKING:
    from headstream.analyses.patching.task import Task
    from headstream.analyses.result import Result

# What the analyses know by these names; a test compares them, since importing them loads torch.
SITES = (
    *("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"),
    *("z", "q", "k", "v", "pattern", "mlp_post"),
)
METRICS = ("logit_difference", "log_prob", "prob", "kl", "loss")
DIRECTIONS = ("denoise", "noise")
VALUES = ("pair", "zero", "mean", "resample")
ENGINES = ("suffix", "hooks")
HOW = ("full", "pattern_preserving")
_WHAT, _SITES = "What is measured", "Sites"
_PATHS, _CUTS, _LONG, _OUT = "Paths", "Cuts", "Long sweeps", "Output"
# Which question each option belongs to; those that are not here belong to all.
_BELONGS = {
    "site": ("sites",),
    "layers": ("sites",),
    "heads": ("sites",),
    "positions": ("sites", "paths"),
    "direction": ("sites", "paths"),
    "engine": ("sites", "paths"),
    "workers": ("sites", "paths"),
    "resume": ("sites", "paths"),
    "values": ("sites", "cut", "redundant", "circuit"),
    "freeze_mlps": ("paths",),
    "how": ("cut", "redundant"),
}


@cli.command(cls=Grouped)
@click.argument("model", type=Model())
@option(
    _WHAT,
    "--pairs",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE.jsonl",
    help='Your own pairs: lines of {"clean", "corrupted", "answer", "wrong"}; else the zoo task.',
)
@option(
    _WHAT,
    "-n",
    "n",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Prompt pairs of a zoo task; of --pairs all are used.",
)
@option(_WHAT, "--metric", type=click.Choice(METRICS), help="What a patch or a cut is measured by.")
@option(
    _SITES,
    "--site",
    type=click.Choice(SITES),
    default="z",
    show_default=True,
    help="The kind of activation that is patched.",
)
@option(
    _SITES,
    "--positions",
    type=Positions(),
    metavar="WHERE",
    help="all, each, roles, edges (of the pattern), or numbers; else each for the stream, all for "
    "heads and paths.",
)
@option(
    _SITES,
    "--direction",
    type=click.Choice(DIRECTIONS),
    default="denoise",
    show_default=True,
    help="denoise: clean values into the corrupted run; noise: the reverse. Of paths too.",
)
@option(
    _SITES,
    "--values",
    type=click.Choice(VALUES),
    help="What is put in: from the pair's other run (sites), zero (cuts), the mean (a circuit), "
    "unless told.",
)
@option(_SITES, "--layers", type=Numbers(), metavar="0,2,5-7", help="Only these.")
@option(_SITES, "--heads", type=Numbers(), metavar="0,2,5-7", help="Only these (or neurons).")
@option(
    _PATHS,
    "--paths",
    is_flag=True,
    help="Patch paths: what a sender passes to one receiver alone. All of them, unless told:",
)
@option(
    _PATHS,
    "--from",
    "senders",
    type=Names(),
    metavar="L0H1,...",
    help="Senders: embed, L0H1, L0MLP, heads, mlps.",
)
@option(
    _PATHS,
    "--to",
    "receivers",
    type=Names(),
    metavar="L1H2.k,...",
    help="Receivers: L1H2.q .k .v (L1KV0.k if shared), L1H2 (all three), q, k, v, L1MLP, mlps, "
    "logits.",
)
@option(
    _PATHS,
    "--freeze-mlps/--no-freeze-mlps",
    default=True,
    show_default=True,
    help="Whether MLPs between the two are held, or a path leads through them too.",
)
@option(
    _CUTS,
    "--cut",
    type=Names(),
    multiple=True,
    metavar="L0H1,L1H2",
    help="Ablate these heads, each alone and all together; may be given several times. heads: "
    "every head alone.",
)
@option(
    _CUTS,
    "--redundant",
    type=Names(),
    metavar="L1H0,L1H2",
    help="Which of these heads could stand in for the others: all cut, one restored.",
)
@option(
    _CUTS,
    "--circuit",
    type=Names(),
    metavar="L0H1,L1H2",
    help="Faithfulness and completeness of these heads, beside random sets of their size.",
)
@option(
    _CUTS,
    "--how",
    type=click.Choice(HOW),
    help="Whether all that follows a cut reacts (full, the default), or every head attends as "
    "before.",
)
@option(
    _LONG,
    "--engine",
    type=click.Choice(ENGINES),
    default="suffix",
    show_default=True,
    help="suffix recomputes what a patch changes; hooks is the definition.",
)
@option(_LONG, "--dry-run", is_flag=True, help="Say what it would cost, and stop.")
@option(_LONG, "--workers", type=click.IntRange(min=1), help="Processes, of one thread each.")
@option(
    _LONG,
    "--resume",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Keep finished blocks there; the same command goes on from them.",
)
@option(
    _OUT, "-o", "--output", type=Output(), metavar="FILE", help="Save the result: .json, or .html."
)
@option(_OUT, "--force", is_flag=True, help="Replace FILE if it exists.")
@common
@click.pass_context
def patch(
    context: click.Context,
    /,
    options: Options,
    model: str,
    pairs: str | None,
    n: int,
    metric: str | None,
    output: str | None,
    force: bool,
    dry_run: bool,
    **asked: Any,
) -> int:
    """Change MODEL inside, and say what that does to the answer.

    \b
    headstream patch MODEL                          heads: their output from the other run
    headstream patch MODEL --site resid_pre         the stream, by layer and position
    headstream patch MODEL --paths                  every path from a sender to a receiver
    headstream patch MODEL --from L0H1 --to L1H2.k  one path
    headstream patch MODEL --cut heads              every head cut (ablated), one by one
    headstream patch MODEL --cut L0H1,L1H2          two heads cut, alone and together
    headstream patch MODEL --redundant L0H0,L0H2    heads that stand in for one another
    headstream patch MODEL --circuit L0H1,L1H2      how much of the model these heads are
    """
    question = _question(context, asked)
    refuse_n_with_pairs(context, "n", pairs)
    if output is not None:
        if Path(output).suffix not in (".json", ".html"):
            raise click.UsageError(f"'{output}' must end in .json or .html")
        require_writable(Path(output), force)
    if asked["resume"] is not None:
        if not asked["resume"]:
            raise click.UsageError("the folder of --resume is empty: name one")
        require_room(Path(asked["resume"]))
    study = _study(question, asked)
    from headstream.analyses.patching.task import Task

    loaded = load_model(model)
    if pairs is not None:
        task = read_pairs(pairs, loaded, options, metric)
    else:
        task = Task.for_model(loaded, n, options.seed)
        if metric is not None:
            task = _measured_by(task, metric)
    if dry_run:
        study.cost(options, loaded, task)
        return 0
    try:
        result = study.run(options, loaded, task)
    except KeyboardInterrupt as stopped:
        kept = "; ".join(getattr(stopped, "__notes__", ["nothing was finished"]))
        complain(f"stopped; {kept}", "", "Interrupted", as_json=options.as_json)
        return 130
    command = _command(options, model, pairs, n, metric, question, asked)
    result = replace(result, provenance=replace(result.provenance, command=command))
    told = [result.summary(), *_why_not(study.why_not(result))]
    lines = [*study.table(result), *(textwrap.fill(printable(text), 80) for text in told)]
    answer_and_write(
        options,
        result.to_json(),
        "\n".join(lines),
        output,
        lambda: _write(result, str(output)),
    )
    return 0


def _why_not(failed: dict[str, str]) -> list[str]:
    """A line a reason, before it what it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"why not CAUSAL, {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _question(context: click.Context, asked: dict[str, Any]) -> str:
    """Which of the four is asked; what belongs to another is refused."""
    # Each by the option that asks it, as given.
    found: dict[str, str] = {}
    for name in ("receivers", "senders", "paths"):
        if asked[name]:
            found["paths"] = _FLAGS.get(name, f"--{name}")
    found |= {name: f"--{name}" for name in ("cut", "redundant", "circuit") if asked[name]}
    if len(found) > 1:
        first, second, *_ = found.values()
        raise click.UsageError(f"{first} and {second} ask two things; give one of them")
    question, asks = next(iter(found.items()), ("sites", ""))
    for name, questions in _BELONGS.items():
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and question not in questions:
            flag = _FLAGS.get(name, f"--{name}")
            if question == "sites":
                raise click.UsageError(f"{flag} needs {_either(questions)}")
            raise click.UsageError(
                f"{flag} does not go with {asks}; "
                + ("leave it out" if "sites" in questions else f"it needs {_either(questions)}")
            )
    if question != "sites" and question != "circuit" and asked["values"] == "pair":
        raise click.UsageError(
            f"--values pair does not go with {asks}; give zero, mean or resample"
        )
    return question


def _either(questions: tuple[str, ...]) -> str:
    return " or ".join(f"--{name}" for name in questions)


def _study(question: str, asked: dict[str, Any]) -> Sweep | Cuts:
    if question not in ("sites", "paths"):
        return Cuts(**{name: asked[name] for name in _ASKED[question]})
    arguments = {name: asked[name] for name in _ASKED[question]}
    if question == "sites":
        arguments["values"] = asked["values"] or "pair"
    return Sweep(question == "paths", arguments, asked["workers"], asked["resume"])


# What decides the numbers of each question, in the order that it is told in.
_ASKED: dict[str, tuple[str, ...]] = {
    "sites": ("site", "positions", "direction", "values", "layers", "heads", "engine"),
    "paths": ("senders", "receivers", "freeze_mlps", "positions", "direction", "engine"),
    **dict.fromkeys(
        ("cut", "redundant", "circuit"), ("cut", "redundant", "circuit", "values", "how")
    ),
}
_FLAGS = {
    "senders": "--from",
    "receivers": "--to",
    "freeze_mlps": "--freeze-mlps/--no-freeze-mlps",
}


def _measured_by(task: Task, metric: str) -> Task:
    from headstream.analyses.patching.task import Task

    return Task(
        task.clean,
        task.corrupted,
        task.answer,
        task.wrong,
        metric=metric,
        attention_mask=task.attention_mask,
        answer_pos=task.answer_pos,
        roles=task.roles,
    )


def _write(result: Result, output: str) -> str:
    if output.endswith(".json"):
        path = result.save(output)
        page = Path(output).with_suffix(".html")
        return f"{path}; next: headstream report {shlex.quote(output)} -o {shlex.quote(str(page))}"
    from headstream.reports.write import write_report

    return str(write_report([result], output))


def _command(
    options: Options,
    model: str,
    pairs: str | None,
    n: int,
    metric: str | None,
    question: str,
    asked: dict[str, Any],
) -> str:
    """What decides the numbers, as one would type it."""
    words = ["headstream", "patch", model, "--seed", str(options.seed)]
    words += ["-n", str(n)] if pairs is None else ["--pairs", Path(pairs).name]
    words += [] if metric is None else ["--metric", metric]
    words += ["--paths"] if question == "paths" else []
    for name in _ASKED[question]:
        flag, value = _FLAGS.get(name, f"--{name}"), asked[name]
        if name == "freeze_mlps":
            words.append("--freeze-mlps" if value else "--no-freeze-mlps")
        elif name == "cut":
            words += [word for heads in value for word in (flag, ",".join(heads))]
        elif value is not None:
            words += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)
