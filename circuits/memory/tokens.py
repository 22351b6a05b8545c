"""The keys and values of an MLP read in the vocabulary: properties of the weights, not of a run.

key    activation of the neuron when the stream is token t's vector alone, through ln2
value  value_i . (gain x W_U[:, o]): what one unit of activation adds to logit o, before the
       final norm divides by its scale
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from headstream.circuits.memory.keys_values import fire, keys_of, require_mlp
from headstream.circuits.memory.running_top import RunningTop, blocks
from headstream.circuits.qk_ov.token_vectors import token_vectors
from headstream.circuits.selection import indices
from headstream.models.arguments import check_count
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model
from headstream.models.norms import LayerNorm, NoNorm, make_norm

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@takes_model
def neuron_key_tokens(
    model: Decoder,
    layer: int,
    *,
    neurons: int | Sequence[int] | None = None,
    top: int = 10,
    lowest: bool = False,
    embedding: str = "plain",
) -> xr.Dataset:
    """The tokens that fire each neuron most, by the weights alone.

    The stream is taken to hold one token's vector and nothing else: what attention and earlier
    MLPs add, and positions, are left out. The further from the embedding, the less it says;
    `neuron_key_contexts` asks runs instead.

    Args:
        model: the decoder.
        layer: which MLP.
        neurons: which; None means all.
        top: tokens a neuron.
        lowest: the tokens with the lowest (most negative) activation instead. A gated neuron that
            fires negatively writes the opposite of its value.
        embedding: what stands for a token: "plain", W_E, or "effective", W_E plus what layer 0's
            MLP makes of it (for later layers).
    Returns:
        Dataset over (neuron, rank): `activation`, the highest first, and `token`; and `match`
        (branch, neuron, rank), what each key gave: x . key + offset, before the activation.
    Raises:
        ConfigError: if the model has no MLP, or for an unknown or meaningless embedding.
        ShapeError: for a layer or neuron that does not exist, `top` outside [1, d_vocab], or
            weights that are not finite.
    Source:
        Geva et al. 2021 read keys by the training prefixes that fire them; reading them by the
        embedding is of the logit lens's kind. A block of tokens is formed at a time.
    """
    require_mlp(model, layer)
    chosen = _neurons(model, neurons)
    count = check_top(top, model.config.d_vocab, "d_vocab")
    read = keys_of(model, layer)
    keys, offsets = read.keys[:, chosen], read.offsets[:, chosen]
    vectors = token_vectors(model, layer, embedding)
    # A bare norm: gain and shift are in the keys, and hooks of the model's own are not called.
    norm = make_norm(model.config).double().to(vectors.device)
    found = RunningTop(count, lowest=lowest)

    def matches(rows: Tensor, some: slice) -> Float[Tensor, "branch n neuron"]:
        x: Tensor = norm(rows.double()[None])[0]
        return x @ keys[:, some].mT + offsets[:, None, some]

    with torch.no_grad():
        for part in blocks(len(vectors), keys[..., 0].numel()):
            places = torch.arange(part.start, part.stop, device=vectors.device)
            seen = matches(vectors[part], slice(None))
            found.add(fire(seen, model.config.activation).T, places)
        values, tokens = found.result()
        own = [matches(vectors[ids], slice(i, i + 1))[..., 0] for i, ids in enumerate(tokens)]
    dims = ("neuron", "rank")
    branches = ["gate", "in"] if model.blocks[layer].mlp.gated else ["in"]
    return xr.Dataset(
        {
            "activation": (dims, values.cpu().numpy()),
            "token": (dims, tokens.cpu().numpy()),
            "match": (("branch", *dims), torch.stack(own, 1).cpu().numpy()),
        },
        coords={"neuron": chosen, "rank": np.arange(count), "branch": branches},
        attrs={"layer": layer, "embedding": embedding, "order": "lowest" if lowest else "highest"},
    )


@takes_model
def neuron_value_tokens(
    model: Decoder,
    layer: int,
    *,
    neurons: int | Sequence[int] | None = None,
    top: int = 10,
) -> xr.Dataset:
    """The tokens whose logits each neuron's value raises most, and lowers most.

    Direct effects only, of a positive activation; a negative one turns them round. The final
    norm's gain (and LayerNorm's centring) is in; its scale differs from position to position and
    is not: divide by `ln_final.hook_scale` and times the activation it is nats.

    Args:
        model: the decoder.
        layer: which MLP.
        neurons: which; None means all.
        top: tokens a neuron, in either direction.
    Returns:
        Dataset over (direction, neuron, rank), directions "raises" and "lowers": `effect`, the
        largest (lowest) first, and `token`; and `mean` (neuron), the mean effect over the
        vocabulary, which moves all logits alike and no probability.
    Raises:
        ConfigError: if the model has no MLP.
        ShapeError: for a layer or neuron that does not exist, `top` outside [1, d_vocab], or
            weights that are not finite.
    Source:
        Geva et al. 2021; Geva et al. 2022 (values promote tokens). A block of the vocabulary is
        formed at a time.
    """
    require_mlp(model, layer)
    chosen = _neurons(model, neurons)
    count = check_top(top, model.config.d_vocab, "d_vocab")
    values = model.blocks[layer].mlp.W_out.detach()[chosen].double()
    norm, unembed = model.ln_final, model.W_U.detach()
    if isinstance(norm, LayerNorm):
        values = values - values.mean(-1, keepdim=True)
    if not isinstance(norm, NoNorm):
        values = values * norm.w.detach().double()
    raised, lowered = RunningTop(count), RunningTop(count, lowest=True)
    total = values.new_zeros(len(chosen))
    for part in blocks(unembed.shape[1], len(chosen)):
        effects = values @ unembed[:, part].double()
        places = torch.arange(part.start, part.stop, device=effects.device)
        raised.add(effects, places)
        lowered.add(effects, places)
        total += effects.sum(1)
    up, down = raised.result(), lowered.result()
    dims = ("direction", "neuron", "rank")
    return xr.Dataset(
        {
            "effect": (dims, torch.stack((up[0], down[0])).cpu().numpy()),
            "token": (dims, torch.stack((up[1], down[1])).cpu().numpy()),
            "mean": (("neuron",), (total / unembed.shape[1]).cpu().numpy()),
        },
        coords={"direction": ["raises", "lowers"], "neuron": chosen, "rank": np.arange(count)},
        attrs={"layer": layer, "unit": "nats x final norm's scale / activation"},
    )


def check_top(top: int, most: int, what: str) -> int:
    """`top` as a whole number in [1, most].

    Raises:
        ShapeError: if it is not.
    """
    count = check_count("top", top)
    if count > most:
        raise ShapeError(f"top must lie in [1, {most}] = [1, {what}], got {count}")
    return count


def _neurons(model: Decoder, given: int | Sequence[int] | None) -> list[int]:
    return list(indices(given, "neuron", model.config.d_mlp or 0))
