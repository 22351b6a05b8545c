"""Which vector stands for a token: its embedding, or what layer 0's MLP makes of it.

    plain       W_E                              what layer 0 reads
    effective   W_E + mlp_0(ln2_0(W_E))          what later layers read of a token, roughly

With an MLP in layer 0, and more so with tied embeddings, later heads read a token by what that MLP
writes about it, and W_E alone describes the token poorly. The effective embedding leaves out what
layer 0's attention adds and any position vector: it is a property of the weights, not of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from headstream.models.errors import ConfigError, nearest
from headstream.models.given_model import takes_model
from headstream.models.mlp import MLP
from headstream.models.norms import make_norm

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Embedding = Literal["plain", "effective"]
# Of hidden activations held at once.
_BYTES = 2**26


@takes_model
def effective_embedding(model: Decoder) -> Float[Tensor, "d_vocab d_model"]:
    """The embedding of every token plus what layer 0's MLP writes when it sees that alone.

    Computed from the weights, a block of tokens at a time; hooks on the model do not see it.

    Raises:
        ConfigError: if the model has no MLP.
    Source:
        The "effective embedding" of the literature on trained models (McDougall et al. 2023 use
        one that also passes layer 0's attention to the token itself; we leave attention out).
    """
    config = model.config
    if not config.has_mlp:
        raise ConfigError(
            "an effective embedding needs an MLP in layer 0, but d_mlp is None (attention only)",
            hint="use embedding='plain'",
        )
    block, rows = model.blocks[0], model.W_E.detach()
    # Bare modules with the same weights: the model's own would call whatever hooks are attached.
    norm = make_norm(config).to(rows)
    norm.load_state_dict(block.ln2.state_dict())
    mlp = MLP(config).to(rows)
    mlp.load_state_dict(block.mlp.state_dict())
    step = max(1, _BYTES // (8 * (config.d_mlp or 1)))
    with torch.no_grad():
        parts = [part + mlp(norm(part[None]))[0] for part in rows.split(step)]
    return torch.cat(parts)


def token_vectors(model: Decoder, layer: int, embedding: str) -> Float[Tensor, "d_vocab d_model"]:
    """What stands for each token on the read side of `layer`, detached.

    Raises:
        ConfigError: for an unknown kind, or the effective embedding where it means nothing: with
            no MLP, or in layer 0, whose heads read before the MLP writes.
    """
    check_embedding(embedding)
    if embedding == "plain":
        return model.W_E.detach()
    if layer == 0 and model.config.has_mlp:
        raise ConfigError(
            "embedding='effective' means nothing in layer 0: its heads read before its MLP writes",
            hint="use embedding='plain' there",
        )
    return effective_embedding(model)


def check_embedding(embedding: str) -> None:
    """Raise ConfigError unless there is an embedding of that kind."""
    if embedding not in get_args(Embedding):
        raise ConfigError(
            f"embedding must be 'plain' or 'effective', got {embedding!r}",
            hint=nearest(str(embedding), get_args(Embedding)),
        )


def normalised_tokens(
    model: Decoder, layer: int, vectors: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n d_model"]:
    """`vectors` through the norm that the heads of `layer` read through, in float64."""
    norm = make_norm(model.config).to(device=vectors.device, dtype=torch.float64)
    norm.load_state_dict(model.blocks[layer].ln1.state_dict())
    with torch.no_grad():
        return norm(vectors.double()[None])[0]
