"""One more pass over the keys of a layer, for everything that a pass can carry at once.

Entropy takes attention with the keys as values; a mean of values of the keys takes those values as
further columns. The fused kernel wants one width for queries, keys and values, so columns beyond
d_head make every product wider. Values that change at few places along the keys, such as the
segments of a prompt, need no column: between two changes they are constant, so their mean is

    sum over pieces g of exp(lse_g - lse) * phi_g

and reading the keys piece by piece (`shards`) costs what reading them at once does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headstream.circuits.measuring.rows import PerColumn, PerQuery
from headstream.circuits.measuring.shards import RowSummary
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.models.attend_blocks import row_entropy
from headstream.models.attend_flash import attend_flash, attend_past, why_not_fused
from headstream.models.attend_naive import widen
from headstream.models.errors import BackendError

# Largest error in nats that the entropy may owe to its identity, which subtracts two numbers of
# the size of lse: at most 3 eps |lse|. Above it the block loop accumulates the entropy itself.
ENTROPY_ERROR = {torch.float32: 1e-5, torch.float64: 1e-11}

# Largest relative error of an entry exp(s - lse), about eps |lse|. Above it a layer is read in
# float64: scores of 10^8 in float32 would leave nothing of it.
ENTRY_ERROR = 1e-3

# Pieces into which the keys may be cut: each is two calls, and a short one fills no block.
MOST_PIECES = 16


class Layer:
    """What the pass of one layer leaves behind.

    Args:
        q: queries, rotated where positions are rotary; the last of the positions of the keys.
        k: keys, likewise.
        lse: natural log-sum-exp of each row.
        scale: what q . k is multiplied by.
        batch: which positions are real tokens.

    Attributes:
        lse: with 0 for a row that may read nothing. Such rows are never counted, and -inf would
            only put NaN into sums and gradients.
    """

    def __init__(
        self,
        q: Float[Tensor, "batch query_pos head d_head"],
        k: Float[Tensor, "batch key_pos kv_head d_head"],
        lse: PerQuery,
        *,
        scale: float,
        batch: TokenBatch,
    ) -> None:
        self.q, self.k, self.scale, self.batch = q, k, scale, batch
        self.lse = lse.masked_fill(torch.isneginf(lse), 0.0)

    @cached_property
    def key_mask(self) -> Bool[Tensor, "batch key_pos"] | None:
        """Keys that may be read; None if all may."""
        return None if bool(self.batch.real.all()) else self.batch.real

    @property
    def wants_grad(self) -> bool:
        """Whether a gradient may be asked of what is read here."""
        return torch.is_grad_enabled() and (self.q.requires_grad or self.k.requires_grad)

    @cached_property
    def largest(self) -> float:
        """The largest |lse|."""
        return float(self.lse.detach().abs().amax()) if self.lse.numel() else 0.0


def check_finite(total: Tensor, layer: int) -> None:
    """Raise BackendError, naming the layer, if a sum over its log-sum-exp or pattern is not finite.

    NaN in a result means "not applicable", which this is not.
    """
    if not bool(torch.isfinite(total.detach())):
        raise BackendError(
            f"attention scores of layer {layer} are not finite: its queries or keys are, or their "
            "products overflow",
            hint="look for NaN, infinity or very large numbers in the weights and hooks",
        )


def precise(layer: Layer) -> Layer:
    """The layer; in float64, with its log-sum-exp formed again, where that takes `ENTRY_ERROR`.

    Raises:
        BackendError: if float64 would not do either.
    """
    if torch.finfo(layer.lse.dtype).eps * layer.largest <= ENTRY_ERROR:
        return layer
    if layer.lse.dtype == torch.float64:
        raise BackendError(
            f"scores as large as {layer.largest:.0e} leave nothing of exp(score - lse)",
            hint="use backend='naive'",
        )
    q, k, scale = layer.q.double(), layer.k.double(), layer.scale
    _, lse = attend_flash(
        q, k, k, scale=scale, key_mask=layer.key_mask, need_lse_grad=layer.wants_grad
    )
    return precise(Layer(q, k, lse, scale=scale, batch=layer.batch))


@dataclass(frozen=True)
class Carried:
    """What a pass brought along.

    Attributes:
        means: by name, sum_j A_ij phi_j.
        entropy: of each row in nats, if it was asked for. By the identity it may come out below 0
            by as much as its error.
    """

    means: Mapping[str, PerColumn]
    entropy: PerQuery | None


def carry(layer: Layer, values: Mapping[str, Tensor], *, entropy: bool = False) -> Carried:
    """The means of all `values` [batch, key_pos, column], and the entropy, in one pass if it can.

    Above `identity_holds` the entropy takes a pass of its own, in the block loop.
    """
    by_identity = entropy and identity_holds(layer)
    order, cuts, flat = list(values), [0], 0
    if sum(part.shape[2] for part in values.values()) > (0 if by_identity else layer.q.shape[3]):
        cuts, stepwise = _cuts(layer, values)
        order = [name for name in values if name not in stepwise] + stepwise
        flat = len(stepwise)
    means: Mapping[str, PerColumn] = {}
    found = None
    if order or by_identity:
        ends = [*cuts[1:], layer.k.shape[1]]
        given = [values[name] for name in order]
        wide, constant = given[: len(given) - flat], given[len(given) - flat :]
        shards = (
            _read(layer, slice(start, stop), wide, constant, by_identity)
            for start, stop in zip(cuts, ends, strict=True)
        )
        summary = reduce(RowSummary.merge, shards)
        parts = summary.means.split([part.shape[2] for part in given], -1)
        means = dict(zip(order, parts, strict=True))
        found = summary.entropy
    if entropy and not by_identity:
        found = row_entropy(layer.q, layer.k, scale=layer.scale, key_mask=layer.key_mask)
    return Carried(means, found if entropy else None)


def identity_holds(layer: Layer) -> bool:
    """Whether lse - scale * q . (A K) gives the entropy to within `ENTROPY_ERROR`."""
    dtype = layer.lse.dtype
    return 3 * torch.finfo(dtype).eps * layer.largest <= ENTROPY_ERROR[dtype]


def _cuts(layer: Layer, values: Mapping[str, Tensor]) -> tuple[list[int], list[str]]:
    """Where to cut the keys, and whose values are constant between the cuts."""
    # The pieces are merged by their lse, which carries no gradient in the fused kernel.
    if layer.wants_grad or why_not_fused(layer.q, layer.k, layer.k) is not None:
        return [0], []
    cuts, stepwise = {0}, []
    for name, part in values.items():
        changes = (part[:, 1:] != part[:, :-1]).any(-1).any(0)
        more = cuts | {int(place) + 1 for place in changes.nonzero()[:MOST_PIECES, 0]}
        if len(more) <= MOST_PIECES:
            cuts = more
            stepwise.append(name)
    return sorted(cuts), stepwise


def _read(
    layer: Layer,
    keys: slice,
    wide: Sequence[Tensor],
    constant: Sequence[Tensor],
    with_entropy: bool,
) -> RowSummary:
    """Attention to one shard of keys; `wide` values are columns, `constant` ones do not vary."""
    k = layer.k[:, keys]
    columns = [widen(k)] if with_entropy or not wide else []
    columns += [v[:, keys, None].expand(-1, -1, k.shape[2], -1) for v in wide]
    value = torch.cat(columns, -1) if len(columns) > 1 else columns[0]
    mask = None if layer.key_mask is None else layer.key_mask[:, keys]

    # Queries before the shard see nothing of it, those inside a part, those after it everything.
    count, past = layer.q.shape[1], layer.batch.past
    inside = max(0, keys.start - past)
    after = max(inside, min(count, keys.stop - past))
    unseen = layer.lse[..., :inside]
    lse = [torch.full_like(unseen, -torch.inf)]
    entropy = [torch.zeros_like(unseen)]
    width = sum(v.shape[2] for v in wide)
    means = [unseen.new_zeros(*unseen.shape, width)]
    for some, attend in ((slice(inside, after), attend_flash), (slice(after, count), attend_past)):
        if some.start == some.stop:
            continue
        q = layer.q[:, some]
        z, z_lse = attend(q, k, value, scale=layer.scale, key_mask=mask)
        if k.shape[1] == layer.k.shape[1]:
            # The same numbers, but the fused kernel's carry no gradient and the layer's do.
            z_lse = torch.where(torch.isneginf(z_lse), z_lse, layer.lse)
        lse.append(z_lse)
        means.append(z[..., z.shape[3] - width :].transpose(1, 2))
        expected = torch.zeros_like(z_lse)
        if with_entropy:
            expected = layer.scale * (widen(q) * z[..., : q.shape[3]]).sum(-1).transpose(1, 2)
        entropy.append(z_lse.masked_fill(torch.isneginf(z_lse), 0.0) - expected)
    whole = torch.cat(lse, -1)
    seen = torch.isfinite(whole)[..., None]
    fixed = [v[:, None, None, keys.start] * seen for v in constant]
    return RowSummary(whole, torch.cat(entropy, -1), torch.cat((torch.cat(means, 2), *fixed), -1))
