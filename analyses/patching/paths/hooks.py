"""Path patching as it is defined, with hooks: two forward passes a path.

    1. run the base prompt with the sender's write from the other run, every other head (and, with
       freeze_mlps, every other MLP) held at what it wrote in the base run; keep what reaches the
       receiver
    2. run the base prompt with that one input of the receiver replaced, everything after it anew

Any faster engine must give these numbers. Where the receiver is the logits, pass 1 is all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.paths.ends import End
from headstream.analyses.patching.places import Place
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.hooks import capture, edited


def writes(config: DecoderConfig) -> list[str]:
    """The hooks of everything that writes to the stream, but positions."""
    names = ["hook_embed"]
    for layer in range(config.n_layers):
        names.append(f"blocks.{layer}.attn.hook_z")
        if config.has_mlp:
            names.append(f"blocks.{layer}.hook_mlp_out")
    return names


def sender_hook(sender: End) -> str:
    """Where a sender's write is replaced."""
    return {
        "embed": "hook_embed",
        "head": f"blocks.{sender.layer}.attn.hook_z",
        "mlp": f"blocks.{sender.layer}.hook_mlp_out",
    }[sender.kind]


def receiver_hook(receiver: End) -> str:
    """Where a receiver's input is read and replaced; the MLP's by what its neurons make of it."""
    if receiver.kind == "mlp input":
        return f"blocks.{receiver.layer}.mlp.hook_post"
    return f"blocks.{receiver.layer}.attn.hook_{receiver.kind}"


def record_writes(
    model: Decoder, task: Task, tokens: Int[Tensor, "example pos"], backend: str | None
) -> tuple[Float[Tensor, "example d_vocab"], dict[str, Tensor]]:
    """Logits at the answer of an unpatched run, and everything that was written in it."""
    logits, kept = capture(
        model,
        tokens.to(model.device),
        writes(model.config),
        attention_mask=task.attention_mask,
        backend=backend,
    )
    return _at_answer(logits, task), kept


def hooked_path(
    model: Decoder,
    task: Task,
    tokens: Int[Tensor, "example pos"],
    sender: End,
    receiver: End,
    *,
    base: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    rows: Int[Tensor, " example"],
    place: Place,
    freeze_mlps: bool,
    backend: str | None,
) -> tuple[Float[Tensor, "example d_vocab"], Bool[Tensor, " example"]]:
    """Logits at the answer with one path patched, and in which rows it was.

    Args:
        tokens: of the base run.
        base, source: what is written in the base run and in the giving one, by hook.
        rows: which row of the giving run row i receives from; -1 gives nothing.
        place: where in the row the sender's write is replaced.
    """
    hook = sender_hook(sender)
    sent, patched = _sent(base[hook], source[hook], sender.head, place, rows)
    held = {
        name: value
        for name, value in base.items()
        if freeze_mlps or not name.endswith("hook_mlp_out")
    } | {hook: sent}
    run = partial(
        capture, model, tokens.to(model.device), attention_mask=task.attention_mask, backend=backend
    )
    with edited(model, {name: _always(value) for name, value in held.items()}):
        if receiver.kind == "logits":
            return _at_answer(run("hook_embed")[0], task), patched
        reached = run(receiver_hook(receiver))[1][receiver_hook(receiver)]

    def replace(activation: Tensor) -> Tensor:
        if receiver.head is None:
            return reached
        changed = activation.clone()
        changed[:, :, receiver.head] = reached[:, :, receiver.head]
        return changed

    with edited(model, {receiver_hook(receiver): replace}):
        return _at_answer(run("hook_embed")[0], task), patched


def _always(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: value


def _sent(
    own: Float[Tensor, "example pos *unit"],
    given: Float[Tensor, "example pos *unit"],
    head: int | None,
    place: Place,
    rows: Int[Tensor, " example"],
) -> tuple[Tensor, Bool[Tensor, " example"]]:
    """The base run's writes with the sender's from `given` at the place."""
    to, donor = place.columns, place.columns[rows.clamp(min=0)]
    there = (to >= 0) & (donor >= 0) & (rows >= 0)[:, None]
    row, slot = there.nonzero(as_tuple=True)
    into, out = (row, to[row, slot]), (rows[row], donor[row, slot])
    sent = own.clone()
    if head is None:
        sent[into] = given[out]
    else:
        sent[(*into, head)] = given[(*out, head)]
    return sent, there.any(1)


def _at_answer(logits: Tensor, task: Task) -> Float[Tensor, "example d_vocab"]:
    at = task.answer_columns
    return logits[torch.arange(len(at)), at].detach().to("cpu", torch.float64)
