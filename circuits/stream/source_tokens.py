"""A head's output as a sum over the tokens it came from, or over groups of them.

    z_i W_O M = sum over j of A_ij (v_j W_O M)       M: what reads the write, of any width
    group g   = attention with values (v_j W_O M) where j is in g, and 0 elsewhere

so a split over a few groups is attention with other values: one pass of the flash backend, no n x n
matrix. A split over every token is as large as the pattern of the head, and that is formed; for
one query only its row is. Weights are taken again from the run's q and k in float64, and the sum
over sources is held to the run's z.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.models.attend_flash import attend_flash
from headstream.models.attend_naive import masked_scores, pattern_of, row_lse
from headstream.models.config import DecoderConfig
from headstream.models.errors import ExactnessError, ShapeError


@dataclass(frozen=True, eq=False)
class Sources:
    """Which source each key belongs to.

    Attributes:
        names: positions, or the labels of the groups in the order of their first key.
        number: index into `names`, [example, pos]; None if every position is its own.
    """

    names: list[Any]
    number: Int[Tensor, "example pos"] | None

    def columns(self, dtype: torch.dtype) -> Float[Tensor, "example pos source"]:
        """One column a group, 1 at its keys."""
        assert self.number is not None
        index = torch.arange(len(self.names), device=self.number.device)
        return (self.number[..., None] == index).to(dtype)


def sources_of(groups: Any, shape: tuple[int, int], device: torch.device) -> Sources:
    """Every position by itself, or by the labels of `groups`.

    Raises:
        ShapeError: unless there is one label a position, a string or a whole number.
    """
    if groups is None:
        return Sources(list(range(shape[1])), None)
    array = np.asarray(groups.cpu() if isinstance(groups, Tensor) else groups)
    if array.shape not in (shape, shape[1:]) or array.dtype.kind not in "Uiu":
        raise ShapeError(
            f"groups are {array.dtype} of shape {list(array.shape)}, expected strings or whole "
            f"numbers [pos] or [example, pos] = {list(shape)}",
            hint="give every position a label, padding included",
        )
    flat = np.broadcast_to(array, shape).ravel().tolist()
    names = list(dict.fromkeys(flat))
    index = {name: i for i, name in enumerate(names)}
    number = torch.tensor([index[name] for name in flat], device=device).reshape(shape)
    return Sources(names, number)


@dataclass(frozen=True, eq=False)
class LayerRun:
    """What one layer attended with in a run.

    Attributes:
        q, k: as they entered the scores; v: values; z: what came out.
        scale: of the scores.
        key_mask: keys that may be read; None if all.
        b_V: [kv_head, d_head], to be left out of the values; None leaves them whole.
        visible: queries that may read any key.
        where: for errors.
    """

    q: Float[Tensor, "example pos head d_head"]
    k: Float[Tensor, "example pos kv_head d_head"]
    v: Float[Tensor, "example pos kv_head d_head"]
    z: Float[Tensor, "example pos head d_head"]
    scale: float
    key_mask: Bool[Tensor, "example pos"] | None
    b_V: Float[Tensor, "kv_head d_head"] | None
    visible: Bool[Tensor, "example pos"]
    where: str

    def of(self, heads: Sequence[int]) -> LayerRun:
        """The run of these query heads alone, each with its own keys and values."""
        group = self.q.shape[2] // self.k.shape[2]
        query = torch.tensor(heads, device=self.q.device)
        key = query // group
        bias = None if self.b_V is None else self.b_V[key]
        return LayerRun(
            self.q[:, :, query],
            self.k[:, :, key],
            self.v[:, :, key],
            self.z[:, :, query],
            self.scale,
            self.key_mask,
            bias,
            self.visible,
            self.where,
        )

    def split(
        self, sources: Sources, matrix: Float[Tensor, "rows head d_head width"]
    ) -> Float[Tensor, "source example pos head width"]:
        """Every query's output by source, through a matrix a head (for all examples or one each).

        Of a run that `of` made. Float64.

        Raises:
            ExactnessError: if the sum over sources is not the run's output.
        """
        values = self._through(self._values(), matrix)
        q, k = self.q.double(), self.k.double()
        if sources.number is None:
            scores = masked_scores(q, k, scale=self.scale, key_mask=self.key_mask)
            pattern = pattern_of(scores, row_lse(scores))
            found = torch.einsum("ehij,ejhw->jeihw", pattern, values)
        else:
            columns = sources.columns(torch.float64)[:, :, None, :, None] * values[..., None, :]
            out, _ = attend_flash(
                q, k, columns.flatten(3), scale=self.scale, key_mask=self.key_mask
            )
            found = out.unflatten(3, columns.shape[3:]).permute(3, 0, 1, 2, 4)
        self._check(found.sum(0), self._through(self._whole(), matrix), matrix)
        return found

    def split_at(
        self,
        sources: Sources,
        matrix: Float[Tensor, "rows head d_head width"],
        place: npt.NDArray[np.int64],
    ) -> Float[Tensor, "source example head width"]:
        """The same for one query an example: a row of weights instead of the pattern."""
        rows, at = torch.arange(len(place)), torch.tensor(place)
        values = self._through(self._values(), matrix)
        q, k = self.q[rows, at].double(), self.k.double()
        scores = self.scale * torch.einsum("ehk,ejhk->ehj", q, k)
        allowed = torch.arange(k.shape[1]) <= at[:, None]
        allowed = allowed.to(q.device)
        if self.key_mask is not None:
            allowed = allowed & self.key_mask
        scores = scores.masked_fill(~allowed[:, None], -torch.inf)[:, :, None]
        weights = pattern_of(scores, row_lse(scores))[:, :, 0]
        found = torch.einsum("ehj,ejhw->jehw", weights, values)
        if sources.number is not None:
            found = torch.einsum("jehw,ejs->sehw", found, sources.columns(torch.float64))
        whole = self._through(self._whole(), matrix)[rows, at]
        self._check(found.sum(0), whole, matrix)
        return found

    def _values(self) -> Tensor:
        value = self.v.double()
        return value if self.b_V is None else value - self.b_V.double()

    def _whole(self) -> Tensor:
        whole = self.z.double()
        if self.b_V is None:
            return whole
        return whole - self.visible[..., None, None] * self.b_V.double()

    @staticmethod
    def _through(x: Tensor, matrix: Tensor) -> Tensor:
        return torch.einsum("ephk,ehkw->ephw", x, matrix)

    def _check(self, total: Tensor, whole: Tensor, matrix: Tensor) -> None:
        """Rounding of the run: of its scores, of n weights and products, of z in its dtype."""
        wide = torch.promote_types(self.v.dtype, torch.float32)
        narrow, exact = torch.finfo(self.v.dtype).eps, torch.finfo(wide).eps
        n, width = self.k.shape[1], self.k.shape[3]
        # z holds b_V whether or not it is split off, and is rounded with it.
        moduli = self._values().abs()
        if self.b_V is not None:
            moduli = moduli + self.b_V.double().abs()
        size = self._through(moduli, matrix.abs()).max()
        product = (
            abs(self.scale)
            * self.q.double().norm(dim=-1).max()
            * self.k.double().norm(dim=-1).max()
        )
        relative = narrow + exact * (math.sqrt(n) + math.sqrt(width) * float(product))
        bound = 4 * float(size) * relative
        error = float((total - whole).abs().max())
        # Infinite weights make the bound infinite, and everything is under it.
        if not (math.isfinite(bound) and error <= bound):
            raise ExactnessError(
                f"the sources of {self.where} do not sum to its output: largest error "
                f"{error:.1e}; the bound is {bound:.1e}"
            )


def layer_run(
    config: DecoderConfig,
    acts: Mapping[str, Tensor],
    layer: int,
    *,
    scale: float,
    b_V: Tensor | None,
    key_mask: Tensor | None,
    visible: Bool[Tensor, "example pos"],
) -> LayerRun:
    """The run of a layer from activations named by `attended_with`."""
    q, k, v, z = (acts[name] for name in attended_with(config, layer))
    bias = None if b_V is None else b_V.detach()
    return LayerRun(q, k, v, z, scale, key_mask, bias, visible, f"layer {layer}")


def attended_with(config: DecoderConfig, layer: int) -> list[str]:
    """Hook names of a layer's q and k as they enter the scores, v and z."""
    stem = f"blocks.{layer}.attn.hook_"
    turned = "rot_" if config.positions == "rotary" else ""
    return [f"{stem}{turned}q", f"{stem}{turned}k", f"{stem}v", f"{stem}z"]
