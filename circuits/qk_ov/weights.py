"""A head as two low-rank maps: QK says where it reads, OV what it moves (Elhage et al. 2021).

    QK = W_Q W_K^T      score(query x, key y) = scale * x QK y^T
    OV = W_V W_O        write of a head that attends to y alone = y OV

Both are [d_model, d_model] of rank <= d_head and stay factored (TransformerLens' FactoredMatrix):
singular values and eigenvalues go through d_head-sized matrices, and the d_vocab x d_vocab form is
never built. Rows act from the left; the paper's column matrices are the transposes of these.

Query head h reads key/value head h // group_size. With rotary positions the score also depends on
how far back the key stands, and so does QK:

    QK(d) = W_Q R(-d) W_K^T     d = query position - key position,
    R(p) turns the pair (i, i + d_head/2) by p * rotary_base^(-2i/d_head)

What is left out, of every circuit here: biases (`left_out` gives their terms as values), vectors of
learned, sinusoidal or shortformer positions (the circuit is the content-content term; `score_terms`
gives the other three), the score's scale, and the normalisation before the head. Fold the norm's
gain first (`fold`): then x above is the normalised input, and what remains is its scale.
`circuit_caveats` says in words what of this applies to a given model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.FactoredMatrix import FactoredMatrix

from headstream.circuits.qk_ov.token_vectors import check_embedding, token_vectors
from headstream.circuits.selection import whole
from headstream.models.config import DecoderConfig
from headstream.models.errors import ConfigError, ShapeError, nearest
from headstream.models.given_model import takes_model
from headstream.models.positions import rotary_tables, rotate

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Space = Literal["vocab", "residual"]
# Tokens: at 2**31 an angle in float64 is still good to 1e-6 radians.
FARTHEST = 2**31


@takes_model
def qk_circuit(
    model: Decoder,
    layer: int,
    head: int,
    *,
    distance: int | None = None,
    space: str = "vocab",
    embedding: str = "plain",
) -> FactoredMatrix:
    """Where a head reads: the bilinear form of its scores, factored.

    With `space="residual"`, x QK(d) y^T times `model.config.scale` is the score of a query with
    normalised input x for a key with normalised input y, d tokens earlier, biases apart (`qk_bias`;
    shortformer vectors belong to x and y). With `space="vocab"` both sides are token embeddings:
    W_E QK W_E^T, entry (query token, key token), the norm left out.

    Args:
        model: the decoder.
        layer, head: which query head.
        distance: query position minus key position, in tokens; 0 is the same position. Required
            with rotary positions, refused with others (their QK does not depend on it). Negative
            distances are keys that a causal mask hides; the form exists and is given.
        space: "vocab" [d_vocab, d_vocab], or "residual" [d_model, d_model].
        embedding: what stands for a token in vocabulary space: "plain", W_E, or "effective", with
            layer 0's MLP (`effective_embedding`).
    Returns:
        Factors `.A` [., d_head] and `.B` [d_head, .], in the model's dtype, detached.
        `.eigenvalues` and `.svd()` go through d_head-sized matrices.
    Raises:
        ShapeError: if layer or head is out of range.
        ConfigError: if `distance` is missing or does not apply, `space` or `embedding` is unknown,
            or the effective embedding does not apply.
    Source:
        Elhage et al. 2021; rotary form from Su et al. 2021, R(m) q . R(n) k = q . R(n - m) k.
    """
    config = model.config
    layer, head = check_head(config, layer, head)
    check_space(space, embedding)
    distance = check_distance(config, distance)
    attn = model.blocks[layer].attn
    query = attn.W_Q[head].detach()
    key = attn.W_K[head // config.group_size].detach()
    if distance is not None:
        query = turn_rows(query, distance, config.rotary_base)
    if space == "vocab":
        tokens = token_vectors(model, layer, embedding)
        query, key = tokens @ query, tokens @ key
    return FactoredMatrix(query, key.mT)


@takes_model
def ov_circuit(
    model: Decoder, layer: int, head: int, *, space: str = "vocab", embedding: str = "plain"
) -> FactoredMatrix:
    """What a head moves: its linear map from the token it attends to, to its write, factored.

    With `space="residual"`, y OV is the write of a head that attends only to a key with normalised
    input y (b_V W_O, a constant, apart: `ov_bias`). With `space="vocab"` it is W_E OV W_U: entry
    (s, o) is the change of logit o when the head attends only to token s, norms left out.

    Args:
        model: the decoder.
        layer, head: which query head.
        space: "vocab" [d_vocab, d_vocab], or "residual" [d_model, d_model].
        embedding: what stands for the token attended to: "plain", W_E, or "effective", with layer
            0's MLP (`effective_embedding`).
    Returns:
        Factors `.A` [., d_head] and `.B` [d_head, .], in the model's dtype, detached.
    Raises:
        ShapeError: if layer or head is out of range.
        ConfigError: if `space` or `embedding` is unknown, or the effective embedding does not
            apply.
    Source:
        Elhage et al. 2021.
    """
    config = model.config
    layer, head = check_head(config, layer, head)
    check_space(space, embedding)
    attn = model.blocks[layer].attn
    value = attn.W_V[head // config.group_size].detach()
    out = attn.W_O[head].detach()
    if space == "vocab":
        value, out = token_vectors(model, layer, embedding) @ value, out @ model.W_U.detach()
    return FactoredMatrix(value, out)


def turn_rows(rows: Float[Tensor, "n d_head"], by: int, base: float) -> Float[Tensor, "n d_head"]:
    """Every row turned as a query `by` positions after position 0.

    Turning the query by +d is turning the key by -d: only the difference enters the product.
    """
    place = torch.tensor([[by]], device=rows.device)
    tables = rotary_tables(place, rows.shape[1], base, rows.dtype)
    turned: Tensor = rotate(rows[None, None], tables)
    return turned[0, 0]


def check_head(config: DecoderConfig, layer: Any, head: Any) -> tuple[int, int]:
    """Layer and head as ints, of any kind of whole number.

    Raises:
        ShapeError: unless the model has this head.
    """
    found = []
    for name, given, size in (("layer", layer, config.n_layers), ("head", head, config.n_heads)):
        number = whole(given)
        if number is None or not 0 <= number < size:
            raise ShapeError(
                f"{name} must be a whole number in [0, {size}) = [0, n_{name}s), got {given!r}"
            )
        found.append(number)
    return found[0], found[1]


def check_space(space: str, embedding: str) -> None:
    """Raise ConfigError for an unknown space or embedding, or an embedding that goes unused."""
    if space not in get_args(Space):
        raise ConfigError(
            f"space must be 'vocab' or 'residual', got {space!r}",
            hint=nearest(str(space), get_args(Space)),
        )
    check_embedding(embedding)
    if space == "residual" and embedding != "plain":
        raise ConfigError(
            f"embedding={embedding!r} was given, but with space='residual' no token is embedded",
            hint="leave embedding out, or use space='vocab'",
        )


def check_distance(config: DecoderConfig, distance: int | None) -> int | None:
    """`distance`, which rotary positions need and others refuse (ConfigError)."""
    if config.positions != "rotary":
        if distance is None:
            return None
        raise ConfigError(
            f"distance={distance!r} was given, but with positions='{config.positions}' the QK "
            "circuit does not depend on it",
            hint="leave distance out",
        )
    if distance is None:
        raise ConfigError(
            "with rotary positions the QK circuit depends on the distance, but distance is None",
            hint="give distance = query position - key position (0 is the same position)",
        )
    tokens = whole(distance)
    if tokens is None:
        raise ConfigError(f"distance must be a whole number of tokens, got {distance!r}")
    if abs(tokens) > FARTHEST:
        raise ConfigError(
            f"distance must lie in [-2**31, 2**31], got {distance!r}: farther, the angle of a pair "
            "is rounding"
        )
    return tokens
