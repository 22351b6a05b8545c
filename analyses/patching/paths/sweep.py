"""All paths in one planned sweep: the numbers of `hooks` at the cost of what changes.

The stream is a sum, so with everything between held, what reaches a receiver is

    its stream in the base run + (the sender's write in the other run - its write in the base run)

and with freeze_mlps=False also what each MLP between makes of that change. So pass 1 costs a sum
(and those MLPs), for many senders at once and all receivers of a layer:

    1. carry     the change that each sender makes, layer by layer through the stream
    2. receive   the changed q, k, v or neurons of a layer's receivers, from the first position
                 that differs; of the last layer only what is read
    3. spread    the layers after it, on the suffix only (`suffix.spread`)

Everything is in real positions, as in the suffix engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.measured import measure
from headstream.analyses.patching.paths.hooks import sender_hook, writes
from headstream.analyses.patching.paths.plan import Pass, PathPlan
from headstream.analyses.patching.paths.receivers import Receiver, received
from headstream.analyses.patching.places import Place
from headstream.analyses.patching.sites import plan as plan_grid
from headstream.analyses.patching.suffix.layers import layers_of
from headstream.analyses.patching.suffix.spread import Band, Spread
from headstream.analyses.patching.suffix.state import (
    positions_of,
    record_base,
    record_named,
    unembedded,
)
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError

# Positions that are run together, as in the suffix engine.
BAND_ROWS = 2048
# Entries of the changes that are carried together: 64 MB in float32.
CHANGE_ENTRIES = 2**24
# Logits that are held together: 128 MB.
LOGIT_ENTRIES = 2**25


class PathSweep:
    """A sweep over all paths of a plan.

    Args:
        model: the decoder, without hooks or edits.
        advance: told how many more paths are done.
    Attributes:
        base: by run (`clean`, `corrupted`), its metrics [metric, example].
    Raises:
        HookError: if hooks or edits are on the model, which this engine would not see.
    """

    def __init__(
        self, model: Decoder, plan: PathPlan, advance: Callable[[int], object] | None = None
    ) -> None:
        if model.hooks_active() or any(block.attn.edits for block in model.blocks):
            raise HookError(
                "engine 'suffix' computes a model as it is, and hooks or edits are on this one",
                hint="use engine='hooks', or take them off",
            )
        self._model, self._plan, self._advance = model, plan, advance
        task = plan.task
        device = model.device
        self._read = task.answer_pos.to(device)
        self._end = int(self._read.max()) + 1
        with torch.no_grad():
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
        self._clean = logits["clean"].to("cpu", torch.float64)
        self.base = {name: self._measure(found[None])[:, 0] for name, found in logits.items()}

    @torch.no_grad()
    def run(self, kind: Pass) -> Float[np.ndarray, "metric sender receiver place example"]:
        plan = self._plan
        found = np.full(plan.shape, np.nan)
        n, d_model = len(plan.task), self._model.config.d_model
        each = max(1, CHANGE_ENTRIES // (n * self._end * d_model))
        places = plan.places[:1] if kind == "self" else plan.places
        for p, place in enumerate(places):
            for senders in self._parts(kind, each):
                changes, patched = self._changes(senders, place, kind)
                for receiver, change in self._carried(senders, changes, kind):
                    last = max(i for i, s in enumerate(senders) if self._sends(s, receiver)) + 1
                    moved = self._moved(receiver, change[:last], kind)
                    moved[..., ~patched] = np.nan
                    for i, s in enumerate(senders[:last]):
                        if kind != "self" or s == plan.first_senders[receiver.indices[0]]:
                            found[:, s, receiver.indices, p] = moved[:, i]
                    if self._advance is not None:
                        self._advance(last * len(receiver.indices))
        return found

    def _parts(self, kind: str, each: int) -> Iterator[list[int]]:
        """Senders that are carried together; what is sent to itself, any one stands for all."""
        senders = range(len(self._plan.senders))
        if kind == "self":
            yield from ([s] for s in sorted(set(self._plan.first_senders.values())))
            return
        for start in range(0, len(senders), each):
            yield list(senders[start : start + each])

    def _sends(self, sender: int, receiver: Receiver) -> bool:
        return self._plan.senders[sender].before(self._plan.receivers[receiver.indices[0]])

    def _changes(
        self, senders: Sequence[int], place: Place, kind: str
    ) -> tuple[list[Float[Tensor, "example pos d_model"]], Bool[np.ndarray, " example"]]:
        """What each sender's other write adds to the stream, and in which rows there is one."""
        plan = self._plan
        base, source = self._writes[plan.into], self._writes[plan.source]
        at = positions_of(plan.task, place.columns)
        rows = plan.rows(kind)
        given = at[rows.clamp(min=0)]
        there = (at >= 0) & (given >= 0) & (rows >= 0)[:, None]
        row, slot = there.nonzero(as_tuple=True)
        to, out = (row, at[row, slot]), (rows[row], given[row, slot])
        changes = []
        for s in senders:
            sender = plan.senders[s]
            hook = sender_hook(sender)
            own, other = base[hook], (base if kind == "self" else source)[hook]
            if sender.head is not None:
                own, other = own[:, :, sender.head], other[:, :, sender.head]
            change = torch.zeros_like(own)
            change[to] = other[out] - own[to]
            if sender.head is not None:
                change = change @ self._model.blocks[sender.layer].attn.W_O[sender.head]
            changes.append(change[:, : self._end])
        return changes, there.any(1).numpy()

    def _carried(
        self, senders: Sequence[int], changes: list[Tensor], kind: str
    ) -> Iterator[tuple[Receiver, Float[Tensor, "sender example pos d_model"]]]:
        """Each group of receivers, and what has changed in the stream that it reads."""
        plan, model = self._plan, self._model
        carried = torch.zeros(len(senders), *changes[0].shape, dtype=model.dtype).to(model.device)

        def send(layer: int, sent: str) -> None:
            for i, s in enumerate(senders):
                if (plan.senders[s].kind, plan.senders[s].layer) == (sent, layer):
                    carried[i] += changes[i]

        send(-1, "embed")
        for layer in range(model.config.n_layers):
            for channel in "qkv":
                yield from self._groups(senders, layer, channel, carried)
            send(layer, "head")
            if model.config.has_mlp:
                yield from self._groups(senders, layer, "mlp input", carried)
                if not plan.freeze_mlps:
                    self._through_mlp(layer, carried)
                send(layer, "mlp")
        yield from self._groups(senders, model.config.n_layers, "logits", carried)

    def _groups(
        self, senders: Sequence[int], layer: int, kind: str, carried: Tensor
    ) -> Iterator[tuple[Receiver, Tensor]]:
        """The receivers of one kind in a layer, as many as their logits allow at once."""
        plan = self._plan
        indices = [
            index
            for index, end in enumerate(plan.receivers)
            if (end.kind, end.layer) == (kind, layer)
            and any(plan.senders[s].before(end) for s in senders)
        ]
        each = max(1, LOGIT_ENTRIES // (len(plan.task) * self._model.config.d_vocab))
        for start in range(0, len(indices), each):
            part = indices[start : start + each]
            heads = [plan.receivers[index].head or 0 for index in part]
            units = torch.tensor(heads, device=self._read.device)
            yield Receiver(kind, layer, part, units), carried

    def _through_mlp(self, layer: int, carried: Tensor) -> None:
        """Add what the MLP makes of each change; where there is none it makes none."""
        block = self._spread.layer(layer)
        mid = self._spread.base.mid[layer]
        assert mid is not None
        mid = mid[:, : self._end]
        own = block.written(torch.zeros_like(mid), block.neurons(mid))
        for change in carried:
            rows = (change != 0).flatten(1).any(1).nonzero()[:, 0]
            if len(rows):
                new = block.neurons(mid[rows] + change[rows])
                change[rows] += block.written(torch.zeros_like(mid[rows]), new) - own[rows]

    def _moved(
        self, receiver: Receiver, carried: Tensor, kind: str
    ) -> Float[np.ndarray, "metric sender receiver example"]:
        """Effects of what the senders carry to one group of receivers."""
        n, d_vocab = self._spread.base.logits.shape
        units = len(receiver.indices)
        each = max(1, LOGIT_ENTRIES // (units * n * d_vocab))
        parts = [self._logits(receiver, part, kind) for part in carried.split(each)]
        base = self.base[self._plan.into][:, None]
        found = [self._measure(logits.flatten(0, 1)) - base for logits in parts]
        return np.concatenate(found, 1).reshape(len(base), -1, units, n)

    def _logits(
        self, receiver: Receiver, carried: Float[Tensor, "sender example pos d_model"], kind: str
    ) -> Float[Tensor, "sender receiver example d_vocab"]:
        base = self._spread.base
        logits = base.logits.expand(len(carried), len(receiver.indices), -1, -1).clone()
        differs = (carried != 0).any(-1)
        if self._reads_one(receiver):
            at = self._read.expand(len(carried), -1)[..., None]
            differs = torch.zeros_like(differs).scatter(2, at, differs.gather(2, at))
        if kind == "self":
            differs = torch.ones_like(differs)
        seen = torch.arange(self._end, device=self._read.device) <= self._read[:, None]
        differs &= seen
        for sender, pair, first in self._runs(differs, len(receiver.indices)):
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
