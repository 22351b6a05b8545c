"""Attention of every head, measured while the model runs.

Each layer's q, k and log-sum-exp are taken as the layer computes them, every statistic is read
from them (`flash_rows`), and they are dropped before the next layer runs: nothing of size n x n is
formed, nothing is kept for other layers. Under the naive backend the same statistics follow from
the pattern by their definition; the two are tested against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from headstream.circuits.measuring.flash_rows import FlashRows
from headstream.circuits.measuring.measured_dataset import coordinate_names, labelled
from headstream.circuits.measuring.second_pass import Layer, check_finite, precise
from headstream.circuits.measuring.statistic import LinearStatistic, Statistic
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.arguments import check_backend, check_cache, check_mask
from headstream.models.errors import BackendError, ShapeError, TokenError
from headstream.models.given_model import takes_model
from headstream.models.hook_point import HookFunction
from headstream.models.kv_cache import KVCache
from headstream.models.vocabulary import check_tokens

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Done = Callable[[dict[str, Tensor]], None]
Hooks = list[tuple[str, HookFunction]]


@takes_model
def measure_attention(
    model: Decoder,
    tokens: Any,
    statistics: Statistic | Sequence[Statistic],
    *,
    backend: str = "flash",
    attention_mask: Tensor | None = None,
    per_position: bool = False,
    progress: bool = False,
    kv_cache: KVCache | None = None,
    past_tokens: Tensor | None = None,
) -> xr.Dataset:
    """Measure what every head attends to, at any length, without the n x n matrix.

    One forward pass, in O(positions) memory; each statistic says what it costs beyond that.

    Args:
        model: the decoder.
        tokens: as for the model.
        statistics: what to measure: `SinkMass()`, `Offset(1)`, `InductionMass()`, ...
        backend: "flash" (or "auto") for the streamed form, "naive" for the definition on the
            materialised pattern; the values are the same.
        attention_mask: [batch, pos], 1 on real tokens. Padding is no query and no key.
        per_position: also by query, instead of the mean over queries.
        progress: a bar on stderr that counts layers.
        kv_cache: earlier keys and values: the queries are the new tokens, and read all of them.
            The cache is extended, as by any pass.
        past_tokens: [batch, past], the tokens in the cache, for statistics that compare tokens.
    Returns:
        A variable a statistic, over layer, head, example (then pos with `per_position`, then the
        statistic's own axis). Beside each variable `x`: coordinate `chance_x`, what a head that
        attends uniformly scores on these very tokens, and `queries_x`, over how many queries it is
        a mean. NaN means not applicable; the variable's attribute `not_applicable` says why.
    Raises:
        ShapeError: for statistics of equal names, parameters that mean nothing, labels that do not
            fit, or a statistic that cannot be had by position.
        TokenError: if tokens are to be compared and those in the cache are not known.
        BackendError: for an unknown backend, or one that cannot see the edits of `cut_edges` and
            `freeze_attention` that are active; and for scores that are not finite.
    Example:
        >>> from headstream.models import Decoder, DecoderConfig
        >>> from headstream.circuits.measuring.masses import SinkMass
        >>> config = DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=5, n_ctx=9)
        >>> data = measure_attention(Decoder(config), torch.arange(4), [SinkMass()])
        >>> dict(data["sink_mass_1"].sizes), round(data["chance_sink_mass_1"].item(), 4)
        ({'layer': 1, 'head': 2, 'example': 1}, 0.3611)
    """
    with torch.no_grad():
        run = _Run(
            model, tokens, statistics, backend, attention_mask, per_position, kv_cache, past_tokens
        )
        return labelled(run.measure(progress), run.statistics, run.batch, per_position=per_position)


@takes_model
def attention_statistics(
    model: Decoder,
    tokens: Any,
    statistics: Statistic | Sequence[Statistic],
    *,
    backend: str = "flash",
    attention_mask: Tensor | None = None,
    per_position: bool = False,
    progress: bool = False,
    kv_cache: KVCache | None = None,
    past_tokens: Tensor | None = None,
) -> dict[str, Tensor]:
    """The same as plain tensors, which carry gradients where torch records them.

    To make a head sink less, differentiate its `SinkMass` with respect to the weights, or to an
    activation that `model.hooks` holds. Memory stays O(positions); the log-sum-exp then comes from
    the block loop, about three times slower than the fused kernel.

    Args, Raises: as `measure_attention`.
    Returns:
        By name: [layer, batch, head], then [pos] with `per_position`, then the statistic's own
        axis if it has one. NaN where there is no value.
    """
    run = _Run(
        model, tokens, statistics, backend, attention_mask, per_position, kv_cache, past_tokens
    )
    return run.measure(progress)


class _Run:
    """The arguments of a measurement, checked, and the pass itself."""

    def __init__(
        self,
        model: Decoder,
        tokens: Any,
        statistics: Statistic | Sequence[Statistic],
        backend: str,
        attention_mask: Tensor | None,
        per_position: bool,
        kv_cache: KVCache | None,
        past_tokens: Tensor | None,
    ) -> None:
        self.model = model
        self.naive = check_backend(backend) == "naive"
        if not self.naive and any(block.attn.edits for block in model.blocks):
            raise BackendError(
                f"backend={backend!r} reads attention from q, k and the log-sum-exp, which do not "
                "show edges that are cut or patterns that are held",
                hint="use backend='naive' inside cut_edges and freeze_attention",
            )
        self.statistics = _distinct(statistics)
        self.attention_mask = attention_mask
        self.per_position = per_position
        self.kv_cache = kv_cache
        if isinstance(tokens, (str, list, tuple)):
            tokens = model.to_tokens(tokens)
        self.tokens = check_tokens(tokens, model.config.d_vocab).to(model.device)
        self.batch = self._batch(past_tokens)
        for statistic in self.statistics:
            if statistic.needs_tokens and self.batch.tokens is None:
                raise TokenError(
                    f"{statistic.name!r} compares tokens, and a cache does not hold them",
                    hint="give the earlier ones as past_tokens",
                )
            statistic.check_batch(self.batch, per_position=per_position)

    def _batch(self, past_tokens: Tensor | None) -> TokenBatch:
        model, tokens, cache = self.model, self.tokens, self.kv_cache
        batch, length = tokens.shape
        mask = check_mask(self.attention_mask, batch, length, model.device)
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        check_cache(cache, config=model.config, batch=batch, dtype=model.dtype, device=model.device)
        past = 0 if cache is None else cache.length
        if past_tokens is not None and list(past_tokens.shape) != [batch, past]:
            raise ShapeError(
                f"past_tokens has shape {list(past_tokens.shape)}, expected [batch, past] = "
                f"{[batch, past]}, the tokens in the cache"
            )
        if cache is None or past == 0:
            return TokenBatch(real, tokens)
        known = None
        if past_tokens is not None:
            earlier = check_tokens(past_tokens, model.config.d_vocab).to(model.device)
            known = torch.cat((earlier, tokens), 1)
        return TokenBatch(torch.cat((cache.mask, real), 1), known, query_pos=length)

    def measure(self, progress: bool) -> dict[str, Tensor]:
        """Run the model and return each statistic by name, layers stacked."""
        layers: list[dict[str, Tensor]] = []
        n_layers = self.model.config.n_layers
        bar = tqdm(total=n_layers, desc="attention", disable=None if progress else True)

        def done(values: dict[str, Tensor]) -> None:
            layers.append(values)
            bar.update()

        # Nothing is asked of the logits; but a cache is extended by whole passes only.
        rest: dict[str, Any] = {"stop_at_layer": n_layers}
        if self.kv_cache is not None:
            rest = {"kv_cache": self.kv_cache, "return_type": None}
        with bar:
            self.model.run_with_hooks(
                self.tokens,
                fwd_hooks=self._pattern_hooks(done) if self.naive else self._row_hooks(done),
                backend="naive" if self.naive else "flash",
                attention_mask=self.attention_mask,
                **rest,
            )
        return {name: torch.stack([each[name] for each in layers]) for name in layers[0]}

    def _pattern_hooks(self, done: Done) -> Hooks:
        def read(pattern: Tensor, hook: Any) -> None:
            check_finite(pattern.sum(), hook.layer())
            values = {}
            for each in self.statistics:
                of_queries = each.from_pattern(pattern, self.batch)
                values[each.name] = each.reduced(of_queries, self.batch, self.per_position)
            done(values)

        return [("blocks.*.attn.hook_pattern", read)]

    def _row_hooks(self, done: Done) -> Hooks:
        """q and k are taken as they pass; once the layer's lse is there, its rows are read."""
        turned = "rot_" if self.model.config.positions == "rotary" else ""
        hooks: Hooks = []
        for layer, block in enumerate(self.model.blocks):
            taker = _Taker(self, layer, block.attn.scale, done)
            at = f"blocks.{layer}.attn.hook_"
            hooks += [
                (f"{at}{turned}q", taker.take_q),
                (f"{at}{turned}k", taker.take_k),
                (f"{at}lse", taker.read),
            ]
        return hooks


class _Taker:
    """Hooks of one layer: what passes is taken, read once the layer's lse is there, and dropped."""

    def __init__(self, run: _Run, layer: int, scale: float, done: Done) -> None:
        self.run, self.layer, self.scale, self.done = run, layer, scale, done

    def take_q(self, q: Tensor, hook: Any) -> None:
        self.q = q

    def take_k(self, k: Tensor, hook: Any) -> None:
        cache = self.run.kv_cache
        self.k = k if cache is None else torch.cat((cache.keys[self.layer], k), 1)

    def read(self, lse: Tensor, hook: Any) -> None:
        layer = Layer(self.q, self.k, lse, scale=self.scale, batch=self.run.batch)
        del self.q, self.k
        check_finite(layer.lse.sum(), self.layer)
        layer = precise(layer)
        values = {
            each.name: each.key_values(layer.batch, layer.lse.dtype)
            for each in self.run.statistics
            if isinstance(each, LinearStatistic)
        }
        rows = FlashRows(
            layer, values, entropy=any(each.needs_entropy for each in self.run.statistics)
        )
        found = {each.name: each.of(rows, self.run.per_position) for each in self.run.statistics}
        self.done({name: value.to(lse.dtype) for name, value in found.items()})


def _distinct(statistics: Statistic | Sequence[Statistic]) -> list[Statistic]:
    """A list of statistics of different names."""
    several = isinstance(statistics, Iterable) and not isinstance(statistics, (str, Statistic))
    given: list[Any] = list(cast(Iterable[Any], statistics)) if several else [statistics]
    if not given:
        raise ShapeError("no statistics were given", hint="give some, such as SinkMass()")
    for each in given:
        if not isinstance(each, Statistic):
            raise ShapeError(
                f"a statistic is expected, got {each!r}",
                hint=f"make one: {each.__name__}()"
                if isinstance(each, type)
                else "make one, such as Offset(1)",
            )
    names = [each.name for each in given]
    for name in names:
        if names.count(name) > 1:
            raise ShapeError(f"two statistics are named {name!r}", hint="name one: ..., name='...'")
        if not isinstance(name, str) or name in coordinate_names(given):
            raise ShapeError(
                f"a statistic cannot be named {name!r}"
                + (": the result has a coordinate of that name" if isinstance(name, str) else ""),
                hint="give another name='...'",
            )
    return given
