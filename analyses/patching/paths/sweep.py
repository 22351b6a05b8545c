"""The fast engine of paths: the numbers of `hooks` at the cost of what changes.

The stream is a sum, so with everything between held, what reaches a receiver is

    its stream in the base run + (the sender's write in the other run - its write in the base run)

and with freeze_mlps=False also what each MLP between makes of that change. So pass 1 costs a sum
(and those MLPs), for all receivers of a block at once:

    1. carry     the change that each sender makes, up to the layer of the receivers
    2. receive   the changed q, k, v or neurons of a layer's receivers, from the first position
                 that differs; of the last layer only what is read
    3. spread    the layers after it, on the suffix only (`suffix.spread`)

Everything is in real positions, as in the suffix engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.measured import measure
from headstream.analyses.patching.paths.ends import End
from headstream.analyses.patching.paths.hooks import sender_hook, writes
from headstream.analyses.patching.paths.plan import PathBlock, PathPlan
from headstream.analyses.patching.paths.receivers import Receiver, received
from headstream.analyses.patching.sites import plan as plan_grid
from headstream.analyses.patching.suffix.band import BAND_ROWS, Band
from headstream.analyses.patching.suffix.layers import layers_of
from headstream.analyses.patching.suffix.spread import Spread
from headstream.analyses.patching.suffix.state import (
    positions_of,
    record_base,
    record_named,
    unembedded,
)
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError


class PathSweep:
    """An opened sweep over the paths of a plan.

    Args:
        model: the decoder, without hooks or edits.
    Attributes:
        base: by run (`clean`, `corrupted`), its metrics [metric, example].
    Raises:
        HookError: if hooks or edits are on the model, which this engine would not see.
    """

    def __init__(self, model: Decoder, plan: PathPlan) -> None:
        if model.hooks_active() or any(block.attn.edits for block in model.blocks):
            raise HookError(
                "engine 'suffix' computes a model as it is, and hooks or edits are on this one",
                hint="use engine='hooks', or take them off",
            )
        self._model, self._plan = model, plan
        task = plan.task
        device = model.device
        self._read = task.answer_pos.to(device)
        self._end = int(self._read.max()) + 1
        with torch.inference_mode():
            grid = plan_grid(model.config, task, "z")
            base, _ = record_base(model, task, plan.tokens(plan.into), grid, 0, plan.backend)
            logits = {plan.into: base.logits}
            self._writes: dict[str, dict[str, Tensor]] = {}
            for name in ("clean", "corrupted"):
                found = record_named(
                    model, task, plan.tokens(name), writes(model.config), plan.backend
                )
                logits.setdefault(name, found[0])
                self._writes[name] = found[1]
            layers = layers_of(model, 0, task.columns.shape[1], plan.backend)
        self._spread = Spread(layers, base)
        # What each MLP writes in the run that is patched, once it is asked for.
        self._mlps: dict[int, Tensor] = {}
        self._clean = logits["clean"].to("cpu", torch.float64)
        self.base = {name: self._measure(found[None])[:, 0] for name, found in logits.items()}

    @torch.inference_mode()
    def run(self, block: PathBlock) -> Float[np.ndarray, "metric cell example"]:
        """metric(patched) - metric(the run patched into); NaN where a row was not patched."""
        plan = self._plan
        ends = [plan.receivers[r] for r in block.receivers]
        units = torch.tensor([end.head or 0 for end in ends], device=self._read.device)
        receiver = Receiver(ends[0].kind, ends[0].layer, units)
        changes, patched = self._changes(block)
        logits = self._logits(receiver, self._carried(block, changes, ends[0]), block.kind)
        base = self.base[plan.into][:, None]
        moved: np.ndarray = self._measure(logits.flatten(0, 1)) - base
        moved[..., ~patched] = np.nan
        return moved

    def _changes(
        self, block: PathBlock
    ) -> tuple[list[Float[Tensor, "example pos d_model"]], Bool[np.ndarray, " example"]]:
        """What each sender's other write adds to the stream, and in which rows there is one."""
        plan = self._plan
        base, source = self._writes[plan.into], self._writes[plan.source]
        at = positions_of(plan.task, plan.places[block.place].columns)
        rows = plan.rows(block.kind)
        given = at[rows.clamp(min=0)]
        there = (at >= 0) & (given >= 0) & (rows >= 0)[:, None]
        row, slot = there.nonzero(as_tuple=True)
        to, out = (row, at[row, slot]), (rows[row], given[row, slot])
        changes = []
        for s in block.senders:
            sender = plan.senders[s]
            hook = sender_hook(sender)
            own, other = base[hook], (base if block.kind == "self" else source)[hook]
            if sender.head is not None:
                own, other = own[:, :, sender.head], other[:, :, sender.head]
            change = torch.zeros_like(own)
            change[to] = other[out] - own[to]
            if sender.head is not None:
                change = change @ self._model.blocks[sender.layer].attn.W_O[sender.head]
            changes.append(change[:, : self._end])
        return changes, there.any(1).numpy()

    def _carried(
        self, block: PathBlock, changes: list[Tensor], receiver: End
    ) -> Float[Tensor, "sender example pos d_model"]:
        """What has changed in the stream that the receivers read."""
        senders = [self._plan.senders[s] for s in block.senders]
        if self._plan.freeze_mlps or not self._model.config.has_mlp:
            return torch.stack(changes)
        carried = torch.zeros_like(torch.stack(changes))
        for layer in range(senders[0].layer, receiver.layer + 1):
            for i, sender in enumerate(senders):
                if sender.layer == layer and sender.kind != "mlp":
                    carried[i] += changes[i]
            # The MLP of the receivers' own layer writes after they have read.
            if 0 <= layer < receiver.layer:
                self._through_mlp(layer, carried)
            for i, sender in enumerate(senders):
                if sender.layer == layer and sender.kind == "mlp":
                    carried[i] += changes[i]
        return carried

    def _through_mlp(self, layer: int, carried: Tensor) -> None:
        """Add what the MLP makes of each change; where there is none it makes none."""
        block = self._spread.layer(layer)
        mid = self._spread.base.mid[layer]
        assert mid is not None
        mid = mid[:, : self._end]
        if layer not in self._mlps:
            self._mlps[layer] = block.written(torch.zeros_like(mid), block.neurons(mid))
        own = self._mlps[layer]
        for change in carried:
            rows = (change != 0).flatten(1).any(1).nonzero()[:, 0]
            if len(rows):
                new = block.neurons(mid[rows] + change[rows])
                change[rows] += block.written(torch.zeros_like(mid[rows]), new) - own[rows]

    def _logits(
        self, receiver: Receiver, carried: Float[Tensor, "sender example pos d_model"], kind: str
    ) -> Float[Tensor, "sender receiver example d_vocab"]:
        base = self._spread.base
        units = len(receiver.units)
        logits = base.logits.expand(len(carried), units, -1, -1).clone()
        differs = (carried != 0).any(-1)
        if self._reads_one(receiver):
            at = self._read.expand(len(carried), -1)[..., None]
            differs = torch.zeros_like(differs).scatter(2, at, differs.gather(2, at))
        if kind == "self":
            differs = torch.ones_like(differs)
        seen = torch.arange(self._end, device=self._read.device) <= self._read[:, None]
        differs &= seen
        for sender, pair, first in self._runs(differs, units):
            read = self._read[pair]
            band = Band(pair, first, read, int(first.min()), int(read.max()) + 1)
            change = carried[sender, pair][:, band.start : band.end]
            out, same = received(self._spread, receiver, change, band)
            new = unembedded(self._model, out.flatten(0, 1)).unflatten(0, out.shape[:2])
            if kind != "self":
                new = torch.where(same[..., None], base.logits[pair][:, None], new)
            logits[sender, :, pair] = new
        return logits

    def _reads_one(self, receiver: Receiver) -> bool:
        """Whether only what reaches the position that is read can matter."""
        last = self._model.config.n_layers - 1
        return receiver.kind == "logits" or (
            receiver.layer == last and receiver.kind in ("q", "mlp input")
        )

    def _runs(
        self, differs: Bool[Tensor, "sender example pos"], units: int
    ) -> Iterator[tuple[Int[Tensor, " run"], Int[Tensor, " run"], Int[Tensor, " run"]]]:
        """Sender, pair and first changed position of runs that go together."""
        sender, pair = differs.any(2).nonzero(as_tuple=True)
        first = differs[sender, pair].to(torch.uint8).argmax(1)
        order = torch.argsort(first, stable=True)
        start = 0
        while start < len(order):
            span = self._end - int(first[order[start]])
            part = order[start : start + max(1, BAND_ROWS // (span * units))]
            yield sender[part], pair[part], first[part]
            start += len(part)

    def _measure(self, logits: Tensor) -> np.ndarray:
        return measure(self._plan.metrics, logits, self._plan.task, self._clean)
