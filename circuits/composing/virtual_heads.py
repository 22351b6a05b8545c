"""Heads that act through one another: what the first moved, the next moves on.

    pattern  A^{h2} A^{h1}        its rows sum to 1: where the content comes from
    OV       OV_{h1} OV_{h2}      what becomes of it, rank <= d_head

With patterns held, two heads in successive layers act like one more head with these (Elhage et
al. 2021: virtual attention heads). They change nothing that the two heads do not already do; they
say where the second head's output came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor
from transformer_lens.FactoredMatrix import FactoredMatrix

from headstream.circuits.composing.frozen_run import freeze_run
from headstream.circuits.qk_ov.head_factors import check_norms, ov_factors, reading_norm
from headstream.circuits.selection import head_pair, heads_by_layer
from headstream.models.errors import ConfigError, ShapeError, nearest
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Space = Literal["vocab", "residual"]


@dataclass(frozen=True, eq=False, repr=False)
class VirtualHead:
    """Heads in successive layers as one.

    Attributes:
        name: "L0H1 -> L1H2".
        heads: pairs (layer, head), the earliest first.
        pattern: [batch, query_pos, key_pos] float64, the product of their patterns. A row sums to
            1; a query that may read no key has a zero row.
        weights: the same with each norm's scale in the run divided out on the way. The virtual
            head writes `weights @ x @ ov` for the stream x before its first head, shifts and
            biases apart; without norms it is the pattern.
        ov: [d_model, d_model] on the stream, norm gains folded in; float64 factors.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    pattern: Float[Tensor, "batch query_pos key_pos"]
    weights: Float[Tensor, "batch query_pos key_pos"]
    ov: FactoredMatrix

    def __repr__(self) -> str:
        batch, size, _ = self.pattern.shape
        return f"<virtual head {self.name}: {batch} x {size} positions, rank <= {self.ov.mdim}>"


@takes_model
def virtual_head(
    model: Decoder,
    tokens: Any,
    heads: Sequence[Sequence[int]],
    *,
    attention_mask: Tensor | None = None,
) -> VirtualHead:
    """The virtual head that `heads` form on these tokens.

    Args:
        model: the decoder; MLPs are left out, as any path through heads alone does.
        tokens: as for the model.
        heads: two or more pairs (layer, head) in rising layers.
        attention_mask: as for the model.
    Raises:
        ShapeError: for heads that do not exist, or not in rising layers; and as `freeze_run`.
        HookError: if something edits the run.
    Source:
        Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    Example:
        >>> import torch
        >>> from headstream.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(n_layers=2, n_heads=1, d_model=8, d_head=4, d_vocab=5, n_ctx=9)
        >>> virtual_head(Decoder(config), torch.arange(4), [(0, 0), (1, 0)])
        <virtual head L0H0 -> L1H0: 1 x 4 positions, rank <= 4>
    """
    chain = _chain(model, heads)
    run = freeze_run(
        model,
        tokens,
        "form a virtual head",
        attention_mask=attention_mask,
        layers=chain[-1][0] + 1,
    )
    pattern: Tensor | None = None
    weights: Tensor | None = None
    for layer, head in chain:
        own = run.patterns[layer][:, head].double()
        scaled = own / run.scales[layer][:, None]
        pattern = own if pattern is None else own @ pattern
        weights = scaled if weights is None else scaled @ weights
    assert pattern is not None
    assert weights is not None
    return VirtualHead(
        name=" -> ".join(head_name(*pair) for pair in chain),
        heads=chain,
        pattern=pattern,
        weights=weights,
        ov=virtual_ov(model, chain),
    )


@takes_model
def virtual_ov(
    model: Decoder,
    heads: Sequence[Sequence[int]],
    *,
    space: str = "residual",
    norms: str = "folded",
) -> FactoredMatrix:
    """The OV product of heads in rising layers, OV_{h1} OV_{h2} .., never formed.

    Args:
        model: the decoder.
        heads: one or more pairs (layer, head) in rising layers.
        space: "residual" [d_model, d_model], or "vocab" [d_vocab, d_vocab]: W_E .. W_U, whose
            entry (s, o) is what attending through all of them to token s adds to logit o.
        norms: "folded" or "ignored", as in `composition_scores`; the final norm's gain goes into
            W_U. Scales are left out.
    Returns:
        Float64 factors `.A` [., d_head] and `.B` [d_head, .].
    Raises:
        ShapeError: for heads that do not exist, or not in rising layers.
        ConfigError: if `space` or `norms` is unknown.
    """
    check_norms(norms)
    if space not in get_args(Space):
        raise ConfigError(
            f"space must be 'vocab' or 'residual', got {space!r}",
            hint=nearest(str(space), get_args(Space)),
        )
    chain = _chain(model, heads, least=1)
    layer, head = chain[0]
    value, out = ov_factors(model, layer, norms=norms)
    left, right = value[head], out[head]
    for layer, head in chain[1:]:
        value, out = ov_factors(model, layer, norms=norms)
        right = right @ value[head] @ out[head]
    if space == "vocab":
        unembed = model.W_U.detach().double()
        if norms == "folded":
            unembed = reading_norm(model, model.ln_final).fold(unembed)
        left, right = model.W_E.detach().double() @ left, right @ unembed
    return FactoredMatrix(left, right)


def _chain(
    model: Decoder, heads: Sequence[Sequence[int]], *, least: int = 2
) -> tuple[tuple[int, int], ...]:
    pairs = list(heads) if isinstance(heads, Iterable) else heads
    heads_by_layer(model, pairs)  # do they exist?
    if len(pairs) < least:
        raise ShapeError(
            f"a virtual head needs at least two heads, got {pairs}",
            hint="ov_circuit is the circuit of one",
        )
    chain = tuple((int(layer), int(head)) for layer, head in map(head_pair, pairs))
    if any(first[0] >= second[0] for first, second in pairwise(chain)):
        names = ", ".join(head_name(*pair) for pair in chain)
        raise ShapeError(
            f"heads must stand in rising layers, got {names}",
            hint="a head reads what earlier layers wrote",
        )
    return chain
