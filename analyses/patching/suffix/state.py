"""What the suffix engine keeps of an unpatched run, in real positions.

Prompts are first moved to the left, without their padding and the holes of their mask: position r
of a row is its r-th real token, and its id is r, as the model counts. No real token reads a masked
one, so nothing is lost, and from here on there is no mask: a query reads the keys up to its own,
and what stands behind the end of a row is read by nothing in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstream.analyses.patching.site_sets import SetGrid
from headstream.analyses.patching.sites import Grid
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.hooks import capture

# Pairs are recorded in chunks of at most this many tokens.
CHUNK_TOKENS = 2**16


def compact(task: Task, tokens: Int[Tensor, "example pos"]) -> Int[Tensor, "example longest"]:
    """The real tokens of each row, in order; zeros behind its end."""
    found = tokens.gather(1, task.columns.clamp(min=0))
    return found.masked_fill(task.columns < 0, 0)


def positions_of(task: Task, columns: Int[Tensor, "example slot"]) -> Int[Tensor, "example slot"]:
    """The real position at each column; -1 stays -1."""
    width = task.clean.shape[1]
    position = torch.full((len(task), width + 1), -1)
    index = torch.arange(task.columns.shape[1]).expand_as(task.columns)
    # Places that a row lacks are written to a column of their own, which -1 then reads.
    position.scatter_(1, task.columns.masked_fill(task.columns < 0, width), index)
    position[:, width] = -1
    return position.gather(1, columns.masked_fill(columns < 0, width))


@dataclass(frozen=True)
class BaseRun:
    """An unpatched run, layer by layer; what no patch of the sweep reaches is left out (None).

    Attributes:
        resid: `resid_pre` of each layer, then the last `resid_post`: [example, pos, d_model].
        mid: the stream between attention and MLP; the layer's output where there is no MLP.
        q, k, v: [example, pos, head or kv_head, d_head]; q and k rotated where positions are.
        z: [example, pos, head, d_head].
        lse: [example, head, pos].
        logits: at the answer position, in the model's dtype.
    """

    resid: list[Tensor | None]
    mid: list[Tensor | None]
    q: list[Tensor | None]
    k: list[Tensor | None]
    v: list[Tensor | None]
    z: list[Tensor | None]
    lse: list[Tensor | None]
    logits: Float[Tensor, "example d_vocab"]


def attention_names(config: DecoderConfig, layer: int) -> dict[str, str]:
    """The hooks of queries and keys as they meet, and of values."""
    turned = "rot_" if config.positions == "rotary" else ""
    stem = f"blocks.{layer}.attn.hook_"
    return {"q": f"{stem}{turned}q", "k": f"{stem}{turned}k", "v": f"{stem}v"}


def record_base(
    model: Decoder,
    task: Task,
    tokens: Tensor,
    grid: Grid | SetGrid,
    first: int,
    backend: str | None,
) -> tuple[BaseRun, dict[str, Tensor]]:
    """Run `tokens` and keep what sweeps from layer `first` on start from, and what it may give."""
    config = model.config
    names: dict[tuple[str, int], str] = {}
    for layer in range(first, config.n_layers):
        stem = f"blocks.{layer}."
        names["resid", layer] = stem + "hook_resid_pre"
        if config.has_mlp:
            names["mid", layer] = stem + "hook_resid_mid"
        for what, name in attention_names(config, layer).items():
            names[what, layer] = name
        names["z", layer] = stem + "attn.hook_z"
        names["lse", layer] = stem + "attn.hook_lse"
    names["resid", config.n_layers] = f"blocks.{config.n_layers - 1}.hook_resid_post"
    given = donor_names(config, grid)
    logits, kept = record_named(model, task, tokens, [*names.values(), *given], backend)

    def by_layer(what: str, count: int) -> list[Tensor | None]:
        return [kept.get(names.get((what, layer), "")) for layer in range(count)]

    resid = by_layer("resid", config.n_layers + 1)
    mid = by_layer("mid", config.n_layers) if config.has_mlp else resid[1:]
    q, k, v, z, lse = (by_layer(what, config.n_layers) for what in ("q", "k", "v", "z", "lse"))
    return BaseRun(resid, mid, q, k, v, z, lse, logits), kept


def record_donor(
    model: Decoder, task: Task, tokens: Tensor, grid: Grid | SetGrid, backend: str | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and what a run gives by hook."""
    return record_named(model, task, tokens, donor_names(model.config, grid), backend)


def donor_names(config: DecoderConfig, grid: Grid | SetGrid) -> list[str]:
    """The hooks that a grid takes values from; for a pattern, its queries, keys and lse."""
    names = []
    for hook in grid.hooks:
        if hook.endswith("hook_pattern"):
            layer = int(hook.split(".")[1])
            attention = attention_names(config, layer)
            names += [attention["q"], attention["k"], f"blocks.{layer}.attn.hook_lse"]
        else:
            names.append(hook)
    return list(dict.fromkeys(names))


def record_named(
    model: Decoder, task: Task, tokens: Tensor, names: list[str], backend: str | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at the answer position, and the named activations, in real positions."""
    rows = compact(task, tokens)
    last = f"blocks.{model.config.n_layers - 1}.hook_resid_post"
    wanted = list(dict.fromkeys([*names, last]))
    step = max(1, CHUNK_TOKENS // rows.shape[1])
    kept = []
    for start in range(0, len(rows), step):
        part = rows[start : start + step].to(model.device)
        kept.append(capture(model, part, wanted, backend=backend, return_type=None)[1])
    activations = {name: torch.cat([found[name] for found in kept]) for name in wanted}
    at = task.answer_pos.to(model.device)
    read = activations[last][torch.arange(len(at), device=at.device), at]
    return unembedded(model, read), activations


def unembedded(model: Decoder, resid: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_vocab"]:
    """Logits of some rows of the last stream."""
    normalised: Tensor = model.ln_final(resid[:, None])[:, 0]
    bias = model.unembed.b_U
    return normalised @ model.W_U if bias is None else torch.addmm(bias, normalised, model.W_U)
