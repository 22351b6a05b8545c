"""Whether a head raises the tokens it attends to, measured on random sequences.

Each sequence holds different random tokens. What a head moves from key j is v_j W_O, without the
part of v_j that all keys share; through the direct path (final norm's centring and gain, W_U) it
changes the logit of every token t:

    raise_j(t) = relu( logit change of t - mean change over the vocabulary )
    r_j        = raise_j(token j) / ( raise_j(token j) + sum over the sample's t of raise_j(t) )
    score      = 4 r - 1,   r = mean over queries i of ( sum_j A_ij r_j / sum_j A_ij )

r_j is 1/2, and the score 1, when of the sample's tokens only the one attended to is raised; the
score is -1 when it is not raised at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from headstream.circuits.labels import percentile_interval
from headstream.circuits.qk_ov.copying import require_finite
from headstream.circuits.undisturbed import undisturbed
from headstream.models.arguments import check_count, check_seed
from headstream.models.errors import ShapeError, TokenError
from headstream.models.given_model import takes_model
from headstream.models.hooks import capture

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder

_LEAST = 4  # tokens of a sample
_BATCH = 32  # sequences run at once


@takes_model
def behavioural_copying_score(
    model: Decoder, *, n: int = 64, length: int = 25, seed: int = 0
) -> xr.Dataset:
    """How much the logits of attended tokens rise, of all tokens in the sample.

    Our pick where the source leaves room: the ratio is taken for each source token and weighted by
    the pattern, so that a head that attends to many tokens and copies each is still a copier. BOS
    is read but is no source and no token of the sample. A source that raises no token of the
    sample has no ratio and no weight; a query whose sources all lack one is not counted. b_V and
    the norm's shift through W_V are left out: what they write is the same whatever is attended to,
    and `fold` may move it into b_O. The final norm's scale and the weight A_ij cancel in the ratio.

    Args:
        model: the decoder.
        n: random sequences, at least 2.
        length: tokens of each, BOS apart; shortened to what vocabulary and context hold.
        seed: of the sequences and of the interval; the global random state is left alone.
    Returns:
        Dataset with `value` (layer, head, example) in [-1, 1], NaN where nothing is raised;
        `mean`, `low`, `high` (layer, head), the mean over examples and its 95% percentile
        bootstrap interval, NaN for a head without a value in every example; `chance` (layer, head),
        the same mean when "the token attended to" is any other token of the sample in turn: what
        the head scores without regard to its source, near -0.85 for 25 tokens and not 0.
    Raises:
        TokenError, ShapeError: if the vocabulary or the context hold fewer than 4 tokens, `n`,
            `length` or `seed` is out of range, or a weight is NaN or infinite.
        HookError: if something edits the runs.
    Source:
        Olsson et al. 2022, appendix (25 random tokens once, mean logit subtracted, ReLU, ratio
        rescaled from [0, 1/2] to [-1, 1]). `copying_score` is the same question asked of the
        weights; the two agree in order on small attention-only models.
    """
    config = model.config
    n, seed = check_count("n", n, least=2, of="sequences"), check_seed(seed)
    length = check_count("length", length, least=_LEAST, of="tokens")
    require_finite(model)
    generator = torch.Generator().manual_seed(seed)
    sample = _draw(config, n, length, generator).to(model.device)
    with undisturbed(model, "measure copying"):
        parts = [_ratios(model, some) for some in sample.split(_BATCH)]
    own, other = (torch.cat([part[which] for part in parts], -1) for which in (0, 1))
    value = (4 * own - 1).cpu().numpy()
    site = ("layer", "head")
    low, high = percentile_interval(np.moveaxis(value, -1, 0), seed=seed)
    return xr.Dataset(
        {
            "value": ((*site, "example"), value),
            "mean": (site, value.mean(-1)),
            "low": (site, low),
            "high": (site, high),
            "chance": (site, (4 * other - 1).mean(-1).cpu().numpy()),
        },
        coords={
            "layer": range(config.n_layers),
            "head": range(config.n_heads),
            "example": range(n),
        },
        attrs={"length": sample.shape[1], "n": n, "seed": seed},
    )


def _draw(
    config: DecoderConfig, n: int, length: int, generator: torch.Generator
) -> Int[Tensor, "n length"]:
    """Random content tokens, no two alike in a row."""
    special = {config.bos_token_id, config.pad_token_id}
    content = [token for token in range(config.d_vocab) if token not in special]
    room = config.n_ctx - (config.bos_token_id is not None)
    if len(content) < _LEAST:
        raise TokenError(
            f"{len(content)} content tokens are too few for a sample: the smallest takes {_LEAST} "
            f"(d_vocab={config.d_vocab}, without BOS and padding)"
        )
    if room < _LEAST:
        raise ShapeError(
            f"n_ctx={config.n_ctx} is too short for a sample: the smallest takes {_LEAST} positions"
        )
    length = min(length, len(content), room)
    order = torch.stack([torch.randperm(len(content), generator=generator) for _ in range(n)])
    return torch.tensor(content)[order[:, :length]]


def _ratios(
    model: Decoder, sample: Int[Tensor, "batch length"]
) -> tuple[Float[Tensor, "layer head batch"], Float[Tensor, "layer head batch"]]:
    """r of each example, for the token attended to and for the sample's other tokens in turn."""
    config = model.config
    bos = config.bos_token_id
    skip = int(bos is not None)
    tokens = sample if bos is None else torch.cat((torch.full_like(sample[:, :1], bos), sample), 1)
    heads = range(config.n_heads)
    layers = [f"blocks.{layer}.attn." for layer in range(config.n_layers)]
    with torch.no_grad():
        _, acts = capture(
            model,
            tokens,
            [stem + hook for stem in layers for hook in ("hook_pattern", "hook_v")],
            backend="naive",
        )
        unembed = _directions(model, sample)
        own, other = [], []
        for layer, stem in enumerate(layers):
            attn = model.blocks[layer].attn
            values = acts[stem + "hook_v"][:, skip:].double()
            values = values - _common_value(model, layer)
            pattern = acts[stem + "hook_pattern"][:, :, skip:, skip:].double()
            pairs = []
            for head in heads:
                write = values[:, :, head // config.group_size] @ attn.W_O[head].double()
                pairs.append(_weigh(torch.einsum("bjd,btd->bjt", write, unembed), pattern[:, head]))
            own.append(torch.stack([pair[0] for pair in pairs]))
            other.append(torch.stack([pair[1] for pair in pairs]))
    return torch.stack(own), torch.stack(other)


def _common_value(model: Decoder, layer: int) -> Float[Tensor, "kv_head d_head"]:
    """What all values of a layer share: b_V, and the norm's shift through W_V."""
    attn = model.blocks[layer].attn
    common = attn.W_V.new_zeros(attn.W_V.shape[::2]).double()
    if attn.b_V is not None:
        common = common + attn.b_V.double()
    shift = getattr(model.blocks[layer].ln1, "b", None)
    if shift is not None:
        common = common + torch.einsum("d,hdk->hk", shift.double(), attn.W_V.double())
    return common


def _weigh(
    change: Float[Tensor, "batch source token"], pattern: Float[Tensor, "batch query source"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """The pattern's mean of the ratios, over the source's own token and over the others."""
    raised = change.relu()
    total = raised.sum(-1, keepdim=True)
    known = total[..., 0] > 0
    ratio = (raised / (raised + total)).nan_to_num()
    own = ratio.diagonal(dim1=1, dim2=2)
    other = (ratio.sum(-1) - own) / (ratio.shape[-1] - 1)
    weight = pattern * known[:, None]
    mass = weight.sum(-1)
    counted = mass > 0
    weight = weight / mass.where(counted, 1.0)[..., None]
    n_counted = counted.sum(-1).double()  # none: 0/0 is NaN, "nothing to measure"
    means = [
        torch.einsum("bij,bj->bi", weight, value).sum(-1) / n_counted for value in (own, other)
    ]
    return means[0], means[1]


def _directions(
    model: Decoder, sample: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length d_model"]:
    """What in the stream raises each token above the vocabulary's mean, the norm's scale apart."""
    norm = model.config.norm
    unembed = model.W_U.detach()
    directions = unembed.T[sample].double() - unembed.mean(1, dtype=torch.float64)
    if norm != "none":
        directions = directions * cast(Tensor, model.ln_final.w).detach().double()
    if norm == "layernorm":
        # Centring a write is centring what reads it.
        directions = directions - directions.mean(-1, keepdim=True)
    return directions
