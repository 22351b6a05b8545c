"""What the factored circuits of a head leave out: the biases as values, the rest in words.

With q = x W_Q + b_Q and k = y W_K + b_K, turned by R where positions are rotary, a score has four
terms, of which QK is the first:

    score / scale = x QK y^T  +  x W_Q R b_K^T  +  b_Q R W_K^T y^T  +  b_Q R b_K^T
                    circuit      query_side        key_side            constant

`query_side` and `constant` are the same for every key of a row, so the softmax does not see them;
`key_side` makes a key attractive to all queries alike. A value bias adds the constant b_V W_O to
the write of every query that reads at least one key, since the pattern of such a query sums to 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import xarray as xr
from torch import Tensor

from headstream.circuits.qk_ov.token_vectors import token_vectors
from headstream.circuits.qk_ov.weights import check_distance, check_head, check_space, turn_rows
from headstream.models.errors import ConfigError, nearest
from headstream.models.given_model import takes_model

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Circuit = Literal["qk", "ov"]


@takes_model
def qk_bias(
    model: Decoder,
    layer: int,
    head: int,
    *,
    distance: int | None = None,
    space: str = "vocab",
    embedding: str = "plain",
) -> xr.Dataset:
    """The terms of a head's score that its biases add, beside `qk_circuit` with these arguments.

    In vocabulary space, scale * (circuit[a, b] + query_side[a] + key_side[b] + constant) is the
    score of a query on token a for a key on token b. In residual space `query_side` and `key_side`
    are vectors: their inner products with the normalised inputs x and y are the terms.

    Args:
        model, layer, head, distance, space, embedding: as for `qk_circuit`.
    Returns:
        `query_side` (query), `key_side` (key) and `constant`, float64, without the scale. Zero in
        a model without attention biases.
    Raises:
        ShapeError, ConfigError: as `qk_circuit`.
    Source:
        Elhage et al. 2021 drop biases; the expansion is theirs with them kept.
    """
    config = model.config
    layer, head = check_head(config, layer, head)
    check_space(space, embedding)
    distance = check_distance(config, distance)
    attn, group = model.blocks[layer].attn, head // config.group_size
    query, key = attn.W_Q[head].detach(), attn.W_K[group].detach()
    b_query, b_key = _row(attn.b_Q, head, query), _row(attn.b_K, group, key)
    if distance is not None:
        query = turn_rows(query, distance, config.rotary_base)
        b_query = turn_rows(b_query[None], distance, config.rotary_base)[0]
    query, key, b_query, b_key = (t.double() for t in (query, key, b_query, b_key))
    query_side, key_side = query @ b_key, key @ b_query
    if space == "vocab":
        tokens = token_vectors(model, layer, embedding).double()
        query_side, key_side = tokens @ query_side, tokens @ key_side
    return xr.Dataset(
        {
            "query_side": (("query",), query_side.cpu().numpy()),
            "key_side": (("key",), key_side.cpu().numpy()),
            "constant": float(b_query @ b_key),
        },
        attrs={"space": space, "unit": "score / scale"},
    )


@takes_model
def ov_bias(model: Decoder, layer: int, head: int, *, space: str = "vocab") -> xr.DataArray:
    """The constant that a head writes through its value bias: b_V W_O, or b_V W_O W_U.

    Args:
        model, layer, head, space: as for `ov_circuit`.
    Returns:
        (output), float64: logits in vocabulary space, channels in residual space. Zero in a model
        without attention biases. A query that may read no key (left padding) does not get it.
    Raises:
        ShapeError, ConfigError: as `ov_circuit`.
    """
    config = model.config
    layer, head = check_head(config, layer, head)
    check_space(space, "plain")
    attn = model.blocks[layer].attn
    out = attn.W_O[head].detach()
    write = _row(attn.b_V, head // config.group_size, out.mT).double() @ out.double()
    if space == "vocab":
        write = write @ model.W_U.detach().double()
    return xr.DataArray(write.cpu().numpy(), dims=("output",), attrs={"space": space})


@takes_model
def circuit_caveats(
    model: Decoder, layer: int, *, circuit: str = "qk", space: str = "vocab"
) -> tuple[str, ...]:
    """What stands between a circuit of this layer and what its heads do in a run, in words.

    Args:
        model, layer: where the circuit is.
        circuit: "qk" or "ov".
        space: "vocab" or "residual", as for the circuit.
    Returns:
        One sentence an omission that applies to this model; none of them where the circuit times
        the scale is the score (or the circuit's row the change of the logits) exactly.
    Raises:
        ShapeError, ConfigError: for a layer, circuit or space that does not exist.
    """
    config = model.config
    layer, _ = check_head(config, layer, 0)
    check_space(space, "plain")
    if circuit not in get_args(Circuit):
        raise ConfigError(
            f"circuit must be 'qk' or 'ov', got {circuit!r}",
            hint=nearest(str(circuit), get_args(Circuit)),
        )
    said = []
    if config.attn_bias:
        said.append(
            "b_Q and b_K add terms of one side alone: qk_bias"
            if circuit == "qk"
            else "b_V adds a constant write: ov_bias"
        )
    if space == "residual":
        return tuple(said)
    if circuit == "qk" and config.positions in ("learned", "sinusoidal", "shortformer"):
        said.append("position vectors are left out: score_terms gives their three terms")
    if circuit == "ov" and config.positions in ("learned", "sinusoidal"):
        said.append("what the head moves of a position vector is left out")
    if layer > 0:
        said.append("a token's embedding stands for all that earlier layers wrote about it")
    said += _norm_caveats(model, f"blocks.{layer}.ln1")
    if circuit == "ov":
        said += _norm_caveats(model, "ln_final")
        if config.has_mlp or layer < config.n_layers - 1:
            said.append(
                "only the direct path to the logits: later readers of the write are left out"
            )
    return tuple(said)


def _norm_caveats(model: Decoder, name: str) -> list[str]:
    config = model.config
    if config.norm == "none":
        return []
    norm = model.get_submodule(name)
    said = []
    plain = bool((norm.w == 1).all()) and not bool(getattr(norm, "b", norm.w.new_zeros(1)).any())
    if not plain:
        what = "gain and shift" if config.norm == "layernorm" else "gain"
        verb, pronoun = ("are", "them") if config.norm == "layernorm" else ("is", "it")
        fixed = config.positions == "shortformer" and name != "ln_final"
        cure = (
            "no folding beside shortformer positions" if fixed else f"fold(model) puts {pronoun} in"
        )
        said.append(f"the {what} of '{name}' {verb} left out: {cure}")
    said.append(
        f"the centring and division of '{name}' are left out: they differ by position"
        if config.norm == "layernorm"
        else f"the division of '{name}' is left out: it differs by position"
    )
    return said


def _row(bias: Tensor | None, index: int, like: Tensor) -> Tensor:
    """One head's bias [d_head], zeros where the model has none."""
    return like.new_zeros(like.shape[-1]) if bias is None else bias[index].detach()
