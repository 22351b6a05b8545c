"""The logit lens: what the model would say if it stopped at each layer.

    lens[l] = ln_final(resid_pre of layer l) W_U + b_U        the last row, `final`, is the output

Source: nostalgebraist 2020. The lens reads a stream that later layers were trained to change; what
it shows of an early layer is a view, not that layer's prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from headstream.models.arguments import check_count
from headstream.models.errors import ConfigError, ShapeError, nearest
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture
from headstream.models.norms import LayerNorm, NoNorm, RMSNorm, make_norm

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Scale = Literal["own", "frozen"]


@takes_model
def logit_lens(
    model: Decoder,
    tokens: Tensor,
    *,
    scale: str = "own",
    sublayers: bool = False,
    top: int | None = None,
    attention_mask: Tensor | None = None,
    backend: str | None = None,
) -> xr.DataArray | xr.Dataset:
    """Logits read off the stream before every layer, and at the end.

    Hooks and interventions act on the run, and of an edited run the lens shows the edited stream;
    hooks on `ln_final` itself are not called for the readings, and an edit there is not in them.

    Args:
        model: the decoder.
        tokens: int64 [example, pos], or [pos] as one row.
        scale: of the final norm. "own": each stream is normalised by its own statistics, as the
            model would if it stopped there. "frozen": all are divided by the scale of the last
            stream, which keeps the rows' differences linear in what each layer wrote.
        sublayers: also read between a layer's attention and its MLP, as "0_mid"; a model without
            MLPs has nothing between. After each single write: `accumulated_logits` of
            `decompose_residual`.
        top: keep only the `top` largest logits and their tokens.
        attention_mask: [example, pos], 1 on real tokens.
        backend: as for the model.
    Returns:
        Logits [layer, example, pos, d_vocab], with `layer` labelled "0_pre", "1_pre", ..,
        "final_post" as in TransformerLens, and attribute `scale`. With `top`: a Dataset with
        `logit` and `token` [layer, example, pos, rank], the largest first.
    Raises:
        ConfigError: if `scale` is not one of the two.
        ShapeError: if `top` is no whole number in [1, d_vocab].
    Example:
        >>> from headstream.models import Decoder, DecoderConfig
        >>> model = Decoder(
        ...     DecoderConfig(n_layers=1, n_heads=1, d_model=4, d_head=4, d_vocab=3, n_ctx=5)
        ... )
        >>> logit_lens(model, torch.tensor([[0, 1]])).sizes["layer"]
        2
    """
    if scale not in get_args(Scale):
        raise ConfigError(
            f"scale must be 'own' or 'frozen', got {scale!r}",
            hint=nearest(str(scale), get_args(Scale)),
        )
    config = model.config
    top = None if top is None else check_count("top", top)
    if top is not None and top > config.d_vocab:
        raise ShapeError(f"top must lie in [1, {config.d_vocab}] = [1, d_vocab], got {top}")
    stages = ("pre", "mid") if sublayers and config.has_mlp else ("pre",)
    streams = {
        f"{layer}_{stage}": f"blocks.{layer}.hook_resid_{stage}"
        for layer in range(config.n_layers)
        for stage in stages
    }
    streams["final_post"] = f"blocks.{config.n_layers - 1}.hook_resid_post"
    names = list(streams.values())
    if config.norm != "none":
        names.append("ln_final.hook_scale")
    with torch.no_grad():
        # Without the pass's own logits: the last row is the same.
        _, acts = capture(
            model,
            tokens,
            names,
            attention_mask=attention_mask,
            backend=backend,
            return_type=None,
        )
        frozen = acts.pop("ln_final.hook_scale", None) if scale == "frozen" else None
        rows, ids = [], []
        norm = _bare_norm(model)
        for name in streams.values():
            logits = _read(model, norm, acts[name], frozen)
            if top is not None:
                logits, kept = logits.topk(top, dim=-1)
                ids.append(_array(kept))
            rows.append(_array(logits))
    dims = ("layer", "example", "pos", "d_vocab" if top is None else "rank")
    values = np.stack(rows)
    coords = {
        "layer": list(streams),
        "example": np.arange(values.shape[1]),
        "pos": np.arange(values.shape[2]),
    }
    attrs = {"scale": scale if config.norm != "none" else "none"}
    if top is None:
        return xr.DataArray(values, dims=dims, coords=coords, name="logit", attrs=attrs)
    return xr.Dataset(
        {"logit": (dims, values), "token": (dims, np.stack(ids))}, coords=coords, attrs=attrs
    )


def _bare_norm(model: Decoder) -> LayerNorm | RMSNorm | NoNorm:
    """The final norm with no hook on it."""
    norm = make_norm(model.config).to(device=model.device, dtype=model.dtype)
    norm.load_state_dict(model.ln_final.state_dict())
    return norm


def _read(
    model: Decoder,
    norm: LayerNorm | RMSNorm | NoNorm,
    stream: Float[Tensor, "example pos d_model"],
    frozen: Float[Tensor, "example pos 1"] | None,
) -> Float[Tensor, "example pos d_vocab"]:
    """The final norm, by its own statistics or a given scale, then the unembedding."""
    if frozen is None:
        normalized = norm(stream)
    else:
        wide = stream.to(frozen.dtype)
        if isinstance(norm, LayerNorm):
            wide = wide - wide.mean(-1, keepdim=True)
        normalized = (wide / frozen).to(stream.dtype)
        if not isinstance(norm, NoNorm):
            normalized = normalized * norm.w
        if isinstance(norm, LayerNorm):
            normalized = normalized + norm.b
    logits: Tensor = normalized @ model.W_U + model.b_U
    return logits


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Half precision widened to float32: numpy has no bfloat16."""
    if tensor.is_floating_point():
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor.detach().cpu().numpy()
