"""The first token as heads see it: how small its value is, how large its stream, what it is for.

`SinkMass` and its kin measure how much is read of it; this module measures what that reading
brings, and which edges to cut (`interventions.cut_edges`) to take it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from headstream.circuits.interventions import cut_edges
from headstream.models.hooks import capture
from headstream.models.loss import check_finite_loss

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

Array = npt.NDArray[np.floating]
_AT_ONCE = 2**13  # tokens in one pass


class Cut(NamedTuple):
    """Edges from some keys to some queries, row by row."""

    keys: Bool[Tensor, "batch pos"]
    queries: Bool[Tensor, "batch pos"]


class FirstToken(NamedTuple):
    """Norms of the first real token over the mean of the others, NaN where these are zero.

    Attributes:
        value: [layer, head, example], of v: the value drain ratio.
        written: [layer, head, example], of v W_O, which is what reaches the stream.
        stream: [layer, example], of the residual stream after each layer: the peak ratio.
    """

    value: Array
    written: Array
    stream: Array


def first_token_norms(
    model: Decoder, tokens: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
) -> FirstToken:
    """Compare the first real token with the others, in values, writes and stream.

    Source: value drain and residual peak as Guo et al. 2024 (arXiv 2410.13835); the norm of v W_O
    beside that of v is ours, since a value in a direction that W_O ignores brings nothing.
    """
    config = model.config
    parts = []
    for some in _pieces(tokens):
        with torch.no_grad():
            _, acts = capture(
                model,
                tokens[some],
                ["blocks.*.attn.hook_v", "blocks.*.hook_resid_post"],
                attention_mask=real[some],
            )
        value, written, stream = [], [], []
        for layer in range(config.n_layers):
            v = acts[f"blocks.{layer}.attn.hook_v"].double()
            v = v.repeat_interleave(config.group_size, 2)
            w_o = model.blocks[layer].attn.W_O.detach().double()
            gram = w_o @ w_o.mT
            value.append(_ratio(v.norm(dim=-1), real[some]))
            squares = torch.einsum("bphd,hde,bphe->bph", v, gram, v)
            written.append(_ratio(squares.clamp(min=0).sqrt(), real[some]))
            residual = acts[f"blocks.{layer}.hook_resid_post"].double().norm(dim=-1)
            stream.append(_ratio(residual[..., None], real[some])[0])
        parts.append([torch.stack(each) for each in (value, written, stream)])
    return FirstToken(*(torch.cat(each, -1).cpu().numpy() for each in zip(*parts, strict=True)))


def cut_first(real: Bool[Tensor, "batch pos"]) -> list[Cut]:
    """Every edge from a later query to the first real token; its own stays."""
    rank = real.long().cumsum(1) - 1
    return [Cut(real & (rank == 0), real & (rank > 0))]


def cut_another(real: Bool[Tensor, "batch pos"], generator: Generator) -> list[Cut]:
    """As many edges to keys that are not the first: one a query, from the third token on.

    Queries number 2^j to 2^(j+1) - 1 of a row share one key, drawn from the tokens between the
    first and query 2^j, so that it stands before them all.
    """
    rank = real.long().cumsum(1) - 1
    cuts = []
    low = 2
    while low <= int(rank.max()):
        queries = real & (rank >= low) & (rank < 2 * low)
        chosen = torch.randint(1, low, (len(real), 1), generator=generator).to(real.device)
        keys = real & (rank == chosen) & queries.any(1, keepdim=True)
        cuts.append(Cut(keys, queries))
        low *= 2
    return cuts


def losses(
    model: Decoder,
    tokens: Int[Tensor, "batch pos"],
    real: Bool[Tensor, "batch pos"],
    cuts: Sequence[Cut] = (),
    *,
    layer: int | None = None,
    head: int | None = None,
    renormalise: bool = True,
) -> Float[Array, " batch"]:
    """Mean next-token loss of each sequence in nats, with edges cut in a head (None: in all).

    Raises:
        ShapeError: if the loss of a real target is not finite.
    """
    found = []
    for some in _pieces(tokens):
        with ExitStack() as stack, torch.no_grad():
            for cut in cuts:
                queries = cut.queries[some]
                if bool(queries.any()):
                    edit = cut_edges(
                        model,
                        layer,
                        keys=cut.keys[some],
                        queries=queries,
                        heads=head,
                        renormalise=renormalise,
                    )
                    stack.enter_context(edit)
            each = model(tokens[some], attention_mask=real[some], return_type="loss_per_token")
        # NaN stands where there is no target, and would hide a loss that overflows.
        targets = real[some, 1:] & (real[some].cumsum(1)[:, :-1] > 0)
        check_finite_loss(each[targets].cpu().numpy(), model.dtype)
        found.append(each.double().nanmean(1).cpu().numpy())
    return np.concatenate(found)


def _pieces(tokens: Tensor) -> list[slice]:
    step = max(1, _AT_ONCE // tokens.shape[1])
    return [slice(start, start + step) for start in range(0, len(tokens), step)]


def _ratio(
    norms: Float[Tensor, "batch pos head"], real: Bool[Tensor, "batch pos"]
) -> Float[Tensor, "head batch"]:
    """The first real token's norm over the mean of the other real ones."""
    rank = real.long().cumsum(1) - 1
    first = (real & (rank == 0))[..., None]
    later = (real & (rank > 0))[..., None]
    others = (norms * later).sum(1) / later.sum(1)
    ratio = (norms * first).sum(1) / others
    return torch.where(others > 0, ratio, torch.nan).mT
