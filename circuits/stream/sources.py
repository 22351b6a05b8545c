"""Head by source token: what a head wrote, or added to a logit, token by token it attended to.

    write of head h at query i from source j          A_ij v_j W_O
    its share of a logit (norm's scale frozen)        A_ij (v_j W_O . u) / scale_i
    its share of a later head's q, k or v             A_ij (v_j W_O) through that head's norm and W

The sum over sources is the head's write, its direct attribution, its share; or this raises. Sources
may be grouped by label (instruction, data, ...), and the sum over a group is that of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.selection import heads_by_layer, indices
from headstream.circuits.stream.attribution import TokenIds, readout_of, row_positions
from headstream.circuits.stream.decomposition import require_room
from headstream.circuits.stream.shares import ShareReader
from headstream.circuits.stream.source_tokens import LayerRun, attended_with, layer_run, sources_of
from headstream.circuits.stream.writes import has_visible_key
from headstream.circuits.undisturbed import undisturbed
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@takes_model
def source_writes(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    head: int,
    *,
    groups: Any = None,
    split_value_bias: bool = False,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> xr.DataArray:
    """What a head writes to the stream, by the token it came from.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        layer, head: which query head.
        groups: a label a position, [pos] or [example, pos], strings or whole numbers: positions
            of one label are one source. None keeps every position apart.
        split_value_bias: leave b_V's share out, which comes from no token: the row `L0bV` of
            `decompose_residual`.
        attention_mask: [example, pos], 1 on real tokens.
        backend: of the run.
    Returns:
        [source, example, pos, d_model] float64, `pos` being the query's. The sum over sources is
        the head's write in `decompose_residual`.
    Raises:
        ShapeError: for a layer or head that does not exist, groups that do not fit, or over 8 GiB.
        ExactnessError: if the sum is not the head's write.
        HookError: if the run is edited.
    Note:
        Grouped, no n x n matrix is formed; each position apart, the head's pattern is.
    """
    (layer,) = indices([layer], "layer", model.config.n_layers)
    (head,) = indices([head], "head", model.config.n_heads)
    with torch.no_grad():
        acts = _run(model, tokens, [layer], [], attention_mask, backend, layer + 1)
        run = _layer(model, acts, layer, attention_mask, split_value_bias).of([head])
        n, size = run.q.shape[:2]
        sources = sources_of(groups, (n, size), run.q.device)
        count = len(sources.names)
        require_room(8 * count * n * size * model.config.d_model, f"writes of {count} sources")
        out = model.blocks[layer].attn.W_O[head].detach().double()
        values = run.split(sources, out[None, None])[:, :, :, 0]
    return _labelled(values, ("source", "example", "pos", "d_model"), source=sources.names)


@takes_model
def source_attribution(
    model: Decoder,
    tokens: Tensor,
    answer: TokenIds,
    wrong: TokenIds | None = None,
    *,
    pos: TokenIds | None = -1,
    groups: Any = None,
    split_value_bias: bool = False,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> xr.DataArray:
    """What each source token adds to a logit (difference) through each head, in nats.

    The final norm's scale is held at its value in the run, as in `logit_attribution`; the sum over
    sources is the head's attribution there. The token's effect through later heads is no part of
    it, nor is what it did to attention.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        answer, wrong: tokens whose logit (difference) is taken, as in `logit_attribution`.
        pos: position that predicts, or one for each example; None takes every position.
        groups, split_value_bias, attention_mask, backend: as in `source_writes`.
    Returns:
        [layer, head, source, example] float64, with `pos=None` [.., example, pos].
    Raises:
        TokenError, ShapeError: for a token or position that does not exist, groups that do not
            fit, or over 8 GiB.
        ExactnessError: if a sum over sources is not the head's attribution.
        HookError: if the run is edited.
    Note:
        Never n x n, but for `pos=None` without groups, where the result is. With `pos=None` and
        groups it is attention with one value column a group.
    """
    config = model.config
    layers = range(config.n_layers)
    extra = ["ln_final.hook_scale"] if config.norm != "none" else []
    with torch.no_grad():
        acts = _run(model, tokens, layers, extra, attention_mask, backend, None)
        n, size = acts[attended_with(config, 0)[0]].shape[:2]
        readout = readout_of(model, acts.get("ln_final.hook_scale"))
        reader = readout.reader(answer, wrong, n)
        place = None if pos is None else row_positions(pos, n, size)
        sources = sources_of(groups, (n, size), reader.direction.device)
        rows = config.n_layers * config.n_heads * len(sources.names)
        require_room(8 * rows * n * (size if place is None else 1), f"{rows} attributions")
        heads = range(config.n_heads)
        parts = []
        for layer in layers:
            run = _layer(model, acts, layer, attention_mask, split_value_bias).of(heads)
            out = model.blocks[layer].attn.W_O.detach().double()
            along = torch.einsum("hkd,ed->ehk", out, reader.direction)[..., None]
            if place is None:
                found = run.split(sources, along)[..., 0].permute(3, 0, 1, 2)
                scale = readout.scale
            else:
                found = run.split_at(sources, along, place)[..., 0].permute(2, 0, 1)
                scale = None if readout.scale is None else readout.scale[range(n), place]
            parts.append(found if scale is None else found / scale)
    dims = ("layer", "head", "source", "example", *(("pos",) if place is None else ()))
    array = _labelled(torch.stack(parts), dims, source=sources.names)
    if place is not None:
        array = array.assign_coords(pos=("example", place))
    attrs = {"unit": "nats", "of": reader.of, "norm": readout.treatment}
    return array.rename("attribution").assign_attrs(attrs)


@takes_model
def source_reads(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    head: int,
    *,
    through: tuple[int, int],
    groups: Any = None,
    split_value_bias: bool = False,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> xr.Dataset:
    """What a head's q, k and v take from an earlier head, by the token that one fetched it from.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        layer, head: the head that reads.
        through: the earlier (layer, head) whose write is read.
        groups, split_value_bias, attention_mask, backend: as in `source_writes`.
    Returns:
        `q`, `k`, `v` [source, example, pos, d_head] float64, before rotation, the norm's scale
        frozen. The sum over sources is the earlier head's row in `residual_reads`.
    Raises:
        ShapeError: for heads that do not exist or do not come earlier, groups that do not fit, or
            over 8 GiB.
        ExactnessError: if the sum is not the earlier head's share.
        HookError: if the run is edited.
    """
    config = model.config
    (layer,) = indices([layer], "layer", config.n_layers)
    (head,) = indices([head], "head", config.n_heads)
    ((first, (earlier,)),) = heads_by_layer(model, [through]).items()
    if first >= layer:
        raise ShapeError(
            f"{head_name(layer, head)} reads nothing of {head_name(first, earlier)}, which does "
            "not come before it",
            hint=f"give a head of a layer before {layer}",
        )
    stream = f"blocks.{layer}.hook_resid_pre"
    scale = [f"blocks.{layer}.ln1.hook_scale"] if config.norm != "none" else []
    with torch.no_grad():
        extra = [stream, *scale]
        acts = _run(model, tokens, [first], extra, attention_mask, backend, layer + 1)
        run = _layer(model, acts, first, attention_mask, split_value_bias).of([earlier])
        n, size = run.q.shape[:2]
        sources = sources_of(groups, (n, size), run.q.device)
        count = len(sources.names)
        require_room(3 * 8 * count * n * size * config.d_head, f"reads of {count} sources")
        reader = ShareReader(model, layer, (), acts[stream], acts)
        out = model.blocks[first].attn.W_O[earlier].detach().double()
        found = {}
        for letter in "qkv":
            own = head if letter == "q" else head // config.group_size
            matrix = out @ reader.matrix(letter, own)
            found[letter] = run.split(sources, matrix[None, None])[:, :, :, 0] / reader.scale
    dims = ("source", "example", "pos", "d_head")
    return xr.Dataset(
        {name: _labelled(values, dims, source=sources.names) for name, values in found.items()},
        attrs={"reader": head_name(layer, head), "through": head_name(first, earlier)},
    )


def _run(
    model: Decoder,
    tokens: Tensor,
    layers: Sequence[int],
    extra: Sequence[str],
    attention_mask: Tensor | None,
    backend: str | None,
    stop_at_layer: int | None,
) -> dict[str, Tensor]:
    """What these layers attended with, and other activations by name."""
    names = [name for layer in layers for name in attended_with(model.config, layer)]
    with undisturbed(model, "split a head by its sources"):
        _, acts = capture(
            model,
            tokens,
            [*names, *extra],
            attention_mask=attention_mask,
            backend=backend,
            stop_at_layer=stop_at_layer,
            return_type="logits" if stop_at_layer is not None else None,
        )
    return acts


def _layer(
    model: Decoder,
    acts: dict[str, Tensor],
    layer: int,
    attention_mask: Tensor | None,
    split_value_bias: bool,
) -> LayerRun:
    attn = model.blocks[layer].attn
    q = acts[attended_with(model.config, layer)[0]]
    key_mask = None
    if attention_mask is not None:
        key_mask = attention_mask.to(q.device).bool().expand(q.shape[:2])
    return layer_run(
        model.config,
        acts,
        layer,
        scale=attn.scale,
        b_V=attn.b_V if split_value_bias else None,
        key_mask=key_mask,
        visible=has_visible_key(q[..., 0], attention_mask),
    )


def _labelled(values: Tensor, dims: Sequence[str], *, source: Sequence[Any]) -> xr.DataArray:
    coords: dict[str, object] = {
        name: np.arange(size)
        for name, size in zip(dims, values.shape, strict=True)
        if name not in ("d_model", "d_head")
    }
    return xr.DataArray(
        values.cpu().numpy(), dims=tuple(dims), coords=coords | {"source": list(source)}
    )
