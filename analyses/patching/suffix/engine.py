"""The fast engine: the numbers of `hooked_engine` at the cost of what changes.

A patch at layer l, position p moves nothing before layer l and nothing left of p, and the metric
reads one position of each row. So

    1. record     the run patched into, every layer of it (`state`), and the giving run
    2. bands      of a block's cells: pairs at places near each other, all heads of each together
    3. enter      the site's change, to the stream after its layer (`entry`)
    4. spread     the layers after it, on the suffix only (`spread`)
    5. read       logits at the answer position; rows that no patch reaches keep the unpatched ones

Cells that are sets of sites run layer by layer on their suffix (`sets`). What a block gives
depends on model, plan and block alone; `sweep_plan` says how blocks are made and put together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.analyses.patching.measured import measure
from headstream.analyses.patching.site_sets import SetGrid
from headstream.analyses.patching.sites import Grid, Site
from headstream.analyses.patching.suffix.band import BAND_ROWS, Band
from headstream.analyses.patching.suffix.entry import STAYS, enter_key_or_value, enter_rows, entered
from headstream.analyses.patching.suffix.layers import layers_of
from headstream.analyses.patching.suffix.sets import run_set
from headstream.analyses.patching.suffix.spread import Spread
from headstream.analyses.patching.suffix.state import (
    positions_of,
    record_base,
    record_donor,
    unembedded,
)
from headstream.analyses.patching.suffix.values import Values
from headstream.analyses.patching.sweep_plan import Block, SweepPlan
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError

# How much further than the shortest suffix of a band its longest may reach, as a part of it.
BAND_WASTE = 0.2
# What a run costs of which only one row is run, as a part of a row for each key of it.
SHORT_SHARE = 8


class SuffixSweep:
    """A sweep by the suffix engine.

    Args:
        model: the decoder, without hooks or edits.
        plan: what to compute.
    Attributes:
        base: by run (`clean`, `corrupted`), its metrics `[metric, example]`.
    Raises:
        TaskError, TokenError, ShapeError: on a plan that does not fit the model.
        HookError: if hooks or edits are on the model, which this engine would not see.
    """

    def __init__(self, model: Decoder, plan: SweepPlan) -> None:
        _refuse_hooks(model)
        self._model, self._plan = model, plan
        self._grid = plan.grid(model.config)
        task, into, source = plan.task, plan.into, plan.source
        first = self._first_layer()
        device = model.device
        self._lengths = task.lengths.to(device)
        self._read = task.answer_pos.to(device)
        with torch.inference_mode():
            base, own = record_base(model, task, plan.tokens(into), self._grid, first, plan.backend)
            logits, given = record_donor(model, task, plan.tokens(source), self._grid, plan.backend)
            layers = layers_of(model, first, task.columns.shape[1], plan.backend)
        self._spread = Spread(layers, base)
        self._own, self._given = own, given
        self._logits = {into: base.logits, source: logits}
        self._clean = self._logits["clean"].to("cpu", torch.float64)
        self.base = {
            name: self._measure(self._logits[name][None])[:, 0] for name in ("clean", "corrupted")
        }

    @torch.inference_mode()
    def run(self, block: Block) -> Float[np.ndarray, "metric cell example"]:
        """Effects of the block's cells; NaN where a row was not patched."""
        if isinstance(self._grid, SetGrid):
            logits, patched = self._run_sets(self._grid, block)
        else:
            logits, patched = self._run_grid(self._grid, block)
        moved: np.ndarray = self._measure(logits) - self.base[self._plan.into][:, None]
        moved[:, ~patched.cpu().numpy()] = np.nan
        return moved

    def _run_grid(self, grid: Grid, block: Block) -> tuple[Tensor, Tensor]:
        """Logits [cell, example, d_vocab], and which rows were patched [cell, example]."""
        base = self._spread.base
        n, d_vocab = base.logits.shape
        units, places = len(block.units), len(block.places)
        logits = base.logits.expand(units, places, n, d_vocab).clone()
        values = self._values(block.kind)
        if grid.positions == "all":
            patched = values.present_rows().any(1)[:, None]
            self._run_rows(grid, block, values, logits)
        else:
            patched = self._run_places(grid, block, values, logits)
        cells = patched.T.expand(units, places, n).flatten(0, 1)
        return logits.flatten(0, 1), cells

    def _run_places(
        self, grid: Grid, block: Block, values: Values, logits: Tensor
    ) -> Bool[Tensor, "example place"]:
        """Patch places of one position each; `logits` [unit, place, example, d_vocab] are set."""
        layer = grid.layers[block.layer]
        chosen = [grid.places[place] for place in block.places]
        task = self._plan.task
        at = positions_of(task, torch.cat([place.columns for place in chosen], 1))
        at = at.to(self._read.device)
        keys = None
        if chosen[0].keys is not None:
            columns = [place.keys for place in chosen if place.keys is not None]
            keys = positions_of(task, torch.cat(columns, 1)).to(at.device)
        present = values.present(at)
        reached = present & (at <= self._read[:, None])
        if grid.site.name in STAYS and layer == self._model.config.n_layers - 1:
            reached &= at == self._read[:, None]
        pair, place = reached.nonzero(as_tuple=True)
        order = torch.argsort(at[pair, place], stable=True)
        self._run_pairs(grid, block, values, at, keys, (pair[order], place[order]), logits)
        return present

    def _run_pairs(
        self,
        grid: Grid,
        block: Block,
        values: Values,
        at: Int[Tensor, "example place"],
        keys: Tensor | None,
        pairs: tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]],
        logits: Float[Tensor, "unit place example d_vocab"],
    ) -> None:
        """Patch (example, place) pairs, sorted by position, in every unit of the block."""
        if not len(pairs[0]):
            return
        units, site, layer = self._units(grid, block), grid.site, grid.layers[block.layer]
        stays, index = site.name in STAYS, layer
        streams, all_same, kept = [], [], []
        for pair, place in zip(*(part.split(max(1, BAND_ROWS // len(units))) for part in pairs)):
            band = self._band(pair, at[pair, place])
            new, old, same = self._at_places(grid, layer, values, at, keys, pair, place, band)
            new, same = new[:, units], same[:, units]
            if stays:
                old = None if old is None else old[:, units]
                index, new = entered(self._spread, site, layer, new, old, units, band)
            # What a patch leaves as it was has no effect; the control must run it all the same.
            changed = torch.ones_like(same) if block.kind == "self" else ~same
            streams.append(new)
            all_same.append(~changed)
            kept.append(changed.any(1))
        keep = torch.cat(kept)
        stream, same = torch.cat(streams)[keep], torch.cat(all_same)[keep]
        pair, place = (part[keep] for part in pairs)
        if not len(pair):
            return
        final = stays and index == self._model.config.n_layers
        if not final:
            stream = self._run_bands(site, index, stream, units, pair, at[pair, place])
        found = self._read_out(stream, final=final)
        found[same] = self._spread.base.logits[pair][:, None].expand_as(found)[same]
        unit = torch.arange(len(units), device=at.device)
        logits[unit[None], place[:, None], pair[:, None]] = found

    def _run_bands(
        self,
        site: Site,
        index: int,
        values: Float[Tensor, "pair unit width"],
        units: Int[Tensor, " unit"],
        pair: Int[Tensor, " pair"],
        at: Int[Tensor, " pair"],
    ) -> Float[Tensor, "pair unit d_model"]:
        """The stream after the last attention where it is read, band by band."""
        by_key = site.name in ("k", "v")
        out = values.new_empty(*values.shape[:2], self._model.config.d_model)
        short = not by_key and index == self._model.config.n_layers - 1
        new = None if by_key else self._spread.changed(index, values, self._band(pair, at))
        for which in self._near(pair, at, len(units), short):
            band = self._band(pair[which], at[which])
            for part in _parts(len(units), len(band.at) * (1 if short else band.end - band.start)):
                if new is None:
                    given = values[which, part]
                    found = enter_key_or_value(self._spread, site, index, given, units[part], band)
                else:
                    found = self._spread.mid_from_place(index, new.part(which, part), band)
                out[which, part] = found
        return out

    def _read_out(
        self, stream: Float[Tensor, "pair unit d_model"], *, final: bool
    ) -> Float[Tensor, "pair unit d_vocab"]:
        """Logits of the last stream, or of the one before the last MLP."""
        rows = stream.flatten(0, 1)
        found = []
        last = self._spread.layer(self._model.config.n_layers - 1)
        for part in rows.split(BAND_ROWS):
            read = part if final else last.after(part[:, None])[:, 0]
            found.append(unembedded(self._model, read))
        logits: Tensor = torch.cat(found).unflatten(0, stream.shape[:2])
        return logits

    def _at_places(
        self,
        grid: Grid,
        layer: int,
        values: Values,
        at: Tensor,
        keys: Tensor | None,
        pair: Tensor,
        place: Tensor,
        band: Band,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """New and old values [pair, unit, width], and where they are the same to the bit."""
        site = grid.site
        if site.name != "pattern":
            new = values.at_places(site, layer, at, pair, place)
            old = self._values("self").at_places(site, layer, at, pair, place)
            return new, old, (new == old).all(-1)
        base, group = self._spread.base, self._model.config.group_size
        v = base.v[layer]
        assert v is not None
        same = self._same_pattern(values, layer, at, pair, place)
        if keys is None:
            rows = values.pattern_rows(layer, at, pair, place)
            later = torch.arange(rows.shape[2], device=at.device) > band.at[:, None]
            rows = rows.masked_fill(later[:, None], 0.0).unflatten(1, (v.shape[2], group))
            new = torch.einsum("pkxj,pjkd->pkxd", rows, band.of(v)).flatten(1, 2)
            return new, None, same
        z = band.at_place(base.z[layer])
        # One edge: its old weight out, the new one in.
        key = keys[pair, place]
        own = self._values("self")
        change = values.edges(layer, at, keys, pair, place) - own.weights(layer, pair, band.at, key)
        return z + change[..., None] * v[pair, key].repeat_interleave(group, 1), None, same

    def _same_pattern(
        self, values: Values, layer: int, at: Tensor, pair: Tensor, place: Tensor
    ) -> Bool[Tensor, "pair head"]:
        """Where a row's query and the keys that it reads are those of the unpatched run."""
        base, group = self._spread.base, self._model.config.group_size
        none = torch.zeros(
            len(pair), self._model.config.n_heads, dtype=torch.bool, device=at.device
        )
        if values.kind != "rows":
            return none
        q, k, _ = values._attention(layer)
        given = values.rows[pair]
        moved = at[given, place] != at[pair, place]
        own_q, own_k = base.q[layer], base.k[layer]
        assert own_q is not None
        assert own_k is not None
        query = (q[given, at[given, place]] == own_q[pair, at[pair, place]]).all(-1)
        later = torch.arange(k.shape[1], device=at.device) > at[pair, place][:, None]
        key = ((k[given] == own_k[pair]).all(-1) | later[:, :, None]).all(1)
        return query & key.repeat_interleave(group, 1) & ~moved[:, None]

    def _run_rows(self, grid: Grid, block: Block, values: Values, logits: Tensor) -> None:
        """Patch whole rows; `logits` [unit, 1, example, d_vocab] are set."""
        site, layer = grid.site, grid.layers[block.layer]
        units = self._units(grid, block)
        present = values.present_rows().to(self._read.device)
        new, same = self._whole_rows(grid, layer, values, present)
        reached = present.any(1)
        end = int(self._read.max()) + 1
        pairs = reached.nonzero()[:, 0]
        if not len(pairs):
            return
        for unit in _parts(len(units), end):
            each = max(1, BAND_ROWS // (end * len(units[unit])))
            for pair in pairs.split(each):
                band = self._band(pair, torch.zeros_like(pair))
                chosen = new[pair][:, : band.end, units[unit]].transpose(1, 2)
                old = self._own.get(site.hook.format(layer=layer)) if site.one_wide else None
                out = enter_rows(self._spread, site, layer, chosen, old, units[unit], band)
                final = site.name != "resid_pre" and self._spread.layer(layer).is_last
                found = self._read_out(out, final=final)
                if block.kind != "self":
                    unchanged = same[pair][:, units[unit]]
                    kept = self._spread.base.logits[pair][:, None].expand_as(found)
                    found[unchanged] = kept[unchanged]
                index = torch.arange(len(units), device=pair.device)[unit]
                logits[index[:, None], 0, pair[None]] = found.transpose(0, 1)

    def _whole_rows(
        self, grid: Grid, layer: int, values: Values, present: Tensor
    ) -> tuple[Float[Tensor, "example pos unit width"], Bool[Tensor, "example unit"]]:
        """What each unit has in whole rows (for q, k, v, pattern: the z of its heads)."""
        site, base = grid.site, self._spread.base
        config = self._model.config
        v = base.v[layer]
        assert v is not None
        if site.name == "pattern":
            z = base.z[layer]
            assert z is not None
            on = values.pattern_on(layer, v)
            new = torch.where(present[..., None, None], on, z)
            return new, torch.zeros(len(new), new.shape[2], dtype=torch.bool, device=new.device)
        old = self._own[site.hook.format(layer=layer)]
        old = old[..., None] if site.one_wide else old if site.heads else old[:, :, None]
        given = values.at_rows(site, layer)
        new = torch.where(present[..., None, None], given, old)
        seen = torch.arange(new.shape[1], device=new.device) <= self._read[:, None]
        same = ((new == old).all(-1) | ~seen[..., None]).all(1)
        if site.name in ("q", "k", "v"):
            q, k = base.q[layer], base.k[layer]
            assert q is not None
            assert k is not None
            block = self._spread.layer(layer)
            if site.name == "v":
                v = new
            else:
                turned = block.turned(new, torch.arange(new.shape[1], device=new.device))
                q, k = (turned, k) if site.name == "q" else (q, turned)
            new = block.attend(q, k, v)
            if site.name != "q":
                new = new.unflatten(2, (config.kv_heads, -1)).flatten(3)
        return new, same

    def _run_sets(self, grid: SetGrid, block: Block) -> tuple[Tensor, Tensor]:
        values = self._values(block.kind)
        found = [
            run_set(
                self._model,
                self._spread,
                grid.members[cell],
                values,
                self._plan.task,
                rows=BAND_ROWS,
            )
            for cell in block.cells
        ]
        return torch.stack([logits for logits, _ in found]), torch.stack([p for _, p in found])

    def _near(
        self, pair: Int[Tensor, " pair"], at: Int[Tensor, " pair"], units: int, short: bool
    ) -> Iterator[slice]:
        """Bands of pairs at close positions, sorted by them, of not too many rows.

        `short`: of what is left only the row that is read is run, so that positions need not be
        close.
        """
        ends = (self._read[pair] + 1).tolist()
        starts = at.tolist()
        first, end = 0, 0
        for this, (start, reads) in enumerate(zip(starts, ends)):
            span = max(end, reads) - starts[first]
            late = not short and start - starts[first] > BAND_WASTE * span
            rows = (this + 1 - first) * units * (-(-span // SHORT_SHARE) if short else span)
            if this > first and (late or rows > BAND_ROWS):
                yield slice(first, this)
                first, end = this, 0
            end = max(end, reads)
        if starts:
            yield slice(first, len(starts))

    def _band(self, pair: Tensor, at: Tensor) -> Band:
        read = self._read[pair]
        return Band(pair, at, read, int(at.min()), int(read.max()) + 1)

    def _units(self, grid: Grid, block: Block) -> Int[Tensor, " unit"]:
        heads = [0] if grid.heads is None else [grid.heads[unit] for unit in block.units]
        return torch.tensor(heads, device=self._read.device)

    def _values(self, kind: str) -> Values:
        plan, n = self._plan, len(self._plan.task)
        own = torch.arange(n)
        name = "self" if kind == "self" else "resample" if kind == "unrelated" else plan.values
        rows = plan.others if name == "resample" else own
        return Values(
            "zero" if name == "zero" else "mean" if name == "mean" else "rows",
            rows.to(self._read.device),
            self._own if name == "self" else self._given,
            self._lengths,
            self._model.config,
        )

    def _measure(self, logits: Tensor) -> np.ndarray:
        return measure(self._plan.metrics, logits, self._plan.task, self._clean)

    def _first_layer(self) -> int:
        if isinstance(self._grid, SetGrid):
            return min(edit.layer for cell in self._grid.members for edit in cell)
        return min(self._grid.layers)


def _parts(units: int, rows: int) -> Iterator[slice]:
    """Units in pieces of about `BAND_ROWS` positions, each unit running `rows` of them."""
    step = max(1, BAND_ROWS // rows)
    for start in range(0, units, step):
        yield slice(start, min(start + step, units))


def _refuse_hooks(model: Decoder) -> None:
    """Raise HookError if the model carries what the engine, which runs its own sums, cannot see."""
    if model.hooks_active() or any(block.attn.edits for block in model.blocks):
        raise HookError(
            "engine 'suffix' computes a model as it is, and hooks or edits are on this one",
            hint="use engine='hooks', or take them off",
        )
