"""Interventions on who reads whom, on any backend and without the n x n matrix.

    cut_edges                     queries no longer read some keys
    freeze_attention              heads attend as they did in another run
    pattern_preserving_ablation   a head's output is gone, and every head still attends as before

Each is a block: the model is edited inside it and as it was after it, whatever happened. Blocks
nest in any order with each other and with hooks. An edit takes q, k and v as they leave all hooks,
and is done before hooks on scores, pattern and z see anything. Under `backend="auto"` no layer
turns naive. What the edits mean, and what `hook_lse` shows, is in `headstream.models.edits`.

Statistics of a cut pattern (`measure_attention` inside a block) need `backend="naive"`: those of
the flash backend are read from q, k and the log-sum-exp, which know nothing of the edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headstream.circuits.attention_run import AttentionRun, record_attention
from headstream.circuits.selection import indices
from headstream.models.edits import EdgeCut, FrozenPattern
from headstream.models.errors import ConfigError, HookError, ShapeError
from headstream.models.given_model import takes_model
from headstream.models.position_set import PositionSet

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@takes_model
@contextmanager
def cut_edges(
    model: Decoder,
    layer: int | Sequence[int] | None,
    *,
    keys: Any,
    queries: Any = None,
    heads: int | Sequence[int] | None = None,
    renormalise: bool = True,
) -> Iterator[Decoder]:
    """Inside the block, the queries of a layer no longer read the keys.

    With `renormalise` the scores of the cut edges are -inf, so the rest of a row takes over their
    weight; a query all of whose keys are cut has an empty row: output 0, log-sum-exp -inf. Without
    it the pattern is 0 there and unchanged elsewhere; rows then sum to less than 1. Only edges
    that exist are cut: a query never reads a later key.

    Positions are absolute: columns of the tokens, padding counted. With a key/value cache they
    count from its first token; positions still to come, and queries already done, are no mistake.

    Args:
        model: the decoder; it is edited, not copied.
        layer: a layer, or several; None means all.
        keys: positions that are not read: a list, a slice, or a boolean tensor [pos] or
            [batch, pos].
        queries: positions that do not read them, likewise; None means all.
        heads: query heads; None means all. Heads that share keys can be cut one by one.
        renormalise: see above.
    Yields:
        The model.
    Raises:
        ShapeError: for a layer or head that does not exist, or a set of positions that is empty;
            and from a pass, if positions lie outside its rows or no edge lies between them.
        ConfigError: if `renormalise` is no boolean.
        HookError: at the end of the block, if no pass met the cut, or none with an edge of it.
    Source:
        Attention knockout: Geva et al. 2023, "Dissecting Recall of Factual Associations"
        (renormalised). The flash form follows from attention over a subset of keys.
    Example:
        >>> import torch
        >>> from headstream.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=5, n_ctx=9)
        >>> model, tokens = Decoder(config), torch.tensor([[0, 1, 2, 3]])
        >>> with cut_edges(model, 0, keys=[0], queries=[3]):
        ...     cut = model(tokens)
        >>> ((cut - model(tokens)).abs().amax(-1) > 1e-4).tolist()
        [[False, False, False, True]]
    """
    if not isinstance(renormalise, bool):
        raise ConfigError(f"renormalise must be True or False, got {renormalise!r}")
    cut_keys = PositionSet(keys, "keys")
    cut_queries = None if queries is None else PositionSet(queries, "queries")
    chosen = indices(heads, "head", model.config.n_heads)
    cuts = {
        number: EdgeCut(cut_keys, cut_queries, chosen, renormalise, f"layer {number}")
        for number in indices(layer, "layer", model.config.n_layers)
    }
    with _edits(model, cuts):
        yield model
    for cut in cuts.values():
        if cut.passes and not cut.effective:
            raise HookError(
                f"the cut in {cut.where} removed no edge in {cut.passes} passes with kv_cache",
                hint="no query of the cut was run with a key of it before it",
            )


@takes_model
@contextmanager
def freeze_attention(
    model: Decoder,
    run_or_tokens: AttentionRun | Any,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
) -> Iterator[Decoder]:
    """Inside the block, heads attend as they did in another run; only their values are new.

    Equal to forcing that run's pattern on the naive backend. The pattern is a constant: gradients
    flow through values only.

    Args:
        model: the decoder; it is edited, not copied.
        run_or_tokens: an `AttentionRun`, of this model or of one with the same heads; or tokens,
            which are run now, as the model stands.
        layers, heads: what is frozen, each head in each layer; None means all (that the run holds).
        attention_mask: of tokens given here, as for the model.
    Yields:
        The model.
    Raises:
        ShapeError: for a layer or head that does not exist or that the run does not hold; and from
            a pass whose rows are not as many and as long as the run's.
        BackendError: from a pass with a key/value cache.
        HookError: as `record_attention`; and at the end of the block, if no pass met it.
    """
    chosen = indices(heads, "head", model.config.n_heads)
    n_layers = model.config.n_layers
    wanted = indices(layers, "layer", n_layers)
    if isinstance(run_or_tokens, AttentionRun):
        run = run_or_tokens
        if attention_mask is not None:
            raise ShapeError(
                "attention_mask belongs to tokens, and a recorded run was given",
                hint="give it to record_attention",
            )
    else:
        run = record_attention(model, run_or_tokens, layers=wanted, attention_mask=attention_mask)
    frozen = {}
    for layer in wanted if layers is not None else indices(run.queries, "layer", n_layers):
        if layer not in run.queries:
            raise ShapeError(
                f"the run holds no attention of layer {layer}, only of {sorted(run.queries)}",
                hint="record it too",
            )
        where, scale = f"layer {layer}", run.scales[layer]
        q, k = run.queries[layer], run.keys[layer]
        frozen[layer] = FrozenPattern(q, k, run.key_mask, scale, chosen, where)
    with _edits(model, frozen):
        yield model


@contextmanager
def _edits(model: Decoder, edits: Mapping[int, EdgeCut | FrozenPattern]) -> Iterator[None]:
    """The edits on their layers for the duration of a block; exactly these are taken off."""
    for layer, edit in edits.items():
        model.blocks[layer].attn.edits.append(edit)
    try:
        yield
    finally:
        for layer, edit in edits.items():
            there = model.blocks[layer].attn.edits
            there[:] = [other for other in there if other is not edit]
    for edit in edits.values():
        if not edit.passes:
            what = "cut" if isinstance(edit, EdgeCut) else "frozen pattern"
            raise HookError(
                f"the {what} in {edit.where} was never used",
                hint="no pass that reaches the layer was run inside the block",
            )
