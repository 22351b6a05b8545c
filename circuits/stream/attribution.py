"""What each write to the stream adds to a logit, with the final norm's scale frozen.

    logit[o] = sum over writes of (write / scale * w) . W_U[:, o]  +  b . W_U[:, o]  +  b_U[o]

LayerNorm first takes its mean off each write; that is taking the mean off what reads it instead,
which leaves one direction of the stream to read along. A head's share is then z . (W_O direction):
no write is formed, and of W_U only the columns of the tokens are read. Exact, given the scale of
the run (Elhage et al. 2021). `ResidualDecomposition.logit_attribution` is the way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from headstream.circuits.stream.held import HeldWeight
from headstream.circuits.stream.writes import WriteGroup
from headstream.models.errors import ConfigError, ShapeError, TokenError, nearest
from headstream.models.norms import LayerNorm, NoNorm

if TYPE_CHECKING:
    from headstream.models.config import DecoderConfig
    from headstream.models.decoder import Decoder

Array = npt.NDArray[np.floating]
TokenIds = int | Sequence[int] | Tensor

FROZEN = "final norm's scale held fixed at its value in the run"
OWN = "final norm's scale taken from each partial stream itself"
NO_NORM = "no final norm"
SUMS = ("component", "sublayer", "layer")


@dataclass(frozen=True, eq=False)
class Readout:
    """How the final stream is read in one run: norm with its scale frozen, then the unembedding.

    Attributes:
        unembed: W_U [d_model, d_vocab]; bias: b_U [d_vocab], or None.
        gain, shift: of the final norm, [d_model] float64; None where it has none.
        scale: what the norm divided by, [example, pos] float64; None without a norm.
        centred: whether the norm takes the mean off first (LayerNorm).
        eps: of the norm.
        treatment: the same, in words.
    """

    unembed: HeldWeight
    bias: HeldWeight | None
    gain: Float[Tensor, " d_model"] | None
    shift: Float[Tensor, " d_model"] | None
    scale: Float[Tensor, "example pos"] | None
    centred: bool
    eps: float
    treatment: str

    def reader(self, answer: TokenIds, wrong: TokenIds | None, n: int) -> Reader:
        """The direction in which the logit (difference) of `n` examples is read.

        Raises:
            TokenError: for a token that does not exist.
        """
        unembed = self.unembed.value
        right = row_ids("answer", answer, n, unembed.shape[1])
        directions, signs = [right], [1]
        if wrong is not None:
            directions.append(row_ids("wrong", wrong, n, unembed.shape[1]))
            signs.append(-1)
        direction = torch.zeros(n, unembed.shape[0], dtype=torch.float64, device=unembed.device)
        constants: dict[str, Tensor] = {}
        for ids, sign in zip(directions, signs, strict=True):
            direction = direction + sign * unembed[:, ids].T.double()
            if self.bias is not None:
                before = constants.get("b_U", 0.0)
                constants["b_U"] = before + sign * self.bias.value[ids].double()
        if self.shift is not None:
            constants = {"ln_final.b": direction @ self.shift} | constants
        if self.gain is not None:
            direction = direction * self.gain
        if self.centred:
            direction = direction - direction.mean(-1, keepdim=True)
        return Reader(direction, constants, "logit" if wrong is None else "logit difference")


@dataclass(frozen=True, eq=False)
class Reader:
    """A direction of the stream and what is added to its reading, each by example, float64.

    Attributes:
        direction: after gain and centring, to be divided by the norm's scale.
        constants: `ln_final.b` and `b_U`, where the model has them.
        of: "logit" or "logit difference".
    """

    direction: Float[Tensor, "example d_model"]
    constants: dict[str, Float[Tensor, " example"]]
    of: str


def readout_of(model: Decoder, scale: Tensor | None) -> Readout:
    """The readout of one run; `scale` is its `ln_final.hook_scale`, None without a norm."""
    norm = model.ln_final
    return Readout(
        unembed=HeldWeight(model.W_U, "unembed.W_U"),
        bias=HeldWeight(model.b_U, "unembed.b_U") if model.config.unembed_bias else None,
        gain=None if isinstance(norm, NoNorm) else norm.w.detach().clone().double(),
        shift=norm.b.detach().clone().double() if isinstance(norm, LayerNorm) else None,
        scale=None if scale is None else scale[..., 0].double(),
        centred=isinstance(norm, LayerNorm),
        eps=model.config.eps,
        treatment=treatment_of(model.config),
    )


def treatment_of(config: DecoderConfig) -> str:
    """What attribution does about the final norm, in words."""
    return NO_NORM if config.norm == "none" else FROZEN


def plain_array(tensor: Tensor) -> Array:
    """A copy that shares nothing with the model; half precision widened to float32."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return np.array(tensor.detach().to("cpu", wide).numpy())


def attribute(
    readout: Readout,
    groups: Sequence[WriteGroup],
    answer: TokenIds,
    wrong: TokenIds | None,
    pos: TokenIds | None,
    by: str,
) -> xr.DataArray:
    """Attribution of every write; see `ResidualDecomposition.logit_attribution`."""
    if by not in SUMS:
        raise ConfigError(f"by must be one of {SUMS}, got {by!r}", hint=nearest(str(by), SUMS))
    view = read_at(readout, groups, answer, wrong, pos)
    labels: list[str] = []
    parts: list[Tensor] = []
    for group in view.groups:
        values = view.of(group)
        if by == "component" or group.layer is None:
            labels += group.labels
            parts.append(values)
            continue
        label = f"L{group.layer}{group.module if by == 'sublayer' else ''}"
        total = values.sum(0, keepdim=True)
        if labels[-1] == label:
            parts[-1] = parts[-1] + total
        else:
            labels.append(label)
            parts.append(total)
    for label, constant in view.reader.constants.items():
        labels.append(label)
        parts.append(constant[None, :, None].expand(1, *parts[0].shape[1:]))
    return view.labelled(torch.cat(parts), labels, "attribution", readout.treatment)


def accumulate(
    readout: Readout,
    groups: Sequence[WriteGroup],
    answer: TokenIds,
    wrong: TokenIds | None,
    pos: TokenIds | None,
    scale: str,
) -> xr.DataArray:
    """The logit after each write; see `ResidualDecomposition.accumulated_logits`."""
    if scale not in ("own", "frozen"):
        raise ConfigError(
            f"scale must be 'own' or 'frozen', got {scale!r}",
            hint=nearest(str(scale), ("own", "frozen")),
        )
    view = read_at(readout, groups, answer, wrong, pos)
    labels = [label for group in view.groups for label in group.labels]
    if scale == "frozen" or readout.scale is None:
        values = torch.cat([view.of(group) for group in view.groups]).cumsum(0)
        treatment = readout.treatment
    else:
        values, treatment = _read_partial_streams(readout, view), OWN
    for constant in view.reader.constants.values():
        values = values + constant[:, None]
    return view.labelled(values, labels, "logit", treatment)


def _read_partial_streams(readout: Readout, view: View) -> Float[Tensor, "component example pos"]:
    """Each partial sum read as if it were the stream, a few writes at a time."""
    stream: Tensor | None = None
    parts = []
    for group in view.groups:
        for start in range(0, len(group.labels), 64):
            partial = group.form(slice(start, start + 64)).double().cumsum(0)
            if stream is not None:
                partial = partial + stream
            stream = partial[-1]
            spread = partial
            if readout.centred:
                spread = partial - partial.mean(-1, keepdim=True)
            own = (spread.square().mean(-1) + readout.eps).sqrt()
            parts.append(torch.einsum("cepd,ed->cep", partial, view.reader.direction) / own)
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class View:
    """The writes at the positions that were asked for, and what reads them.

    Attributes:
        groups: writes, at one position an example or at all.
        scale: [example, pos] of the same positions, or None.
        place: the one position of each example; None means all.
    """

    groups: Sequence[WriteGroup]
    reader: Reader
    scale: Float[Tensor, "example pos"] | None
    place: npt.NDArray[np.int64] | None

    def of(self, group: WriteGroup) -> Float[Tensor, "component example pos"]:
        """What each write of the group adds, the scale frozen."""
        values = group.read(self.reader.direction[..., None])[..., 0]
        return values if self.scale is None else values / self.scale

    def labelled(
        self, values: Tensor, labels: Sequence[str], name: str, treatment: str
    ) -> xr.DataArray:
        """[component, example], or [component, example, pos] for all positions."""
        n, size = values.shape[1:]
        coords: dict[str, object] = {"component": list(labels), "example": np.arange(n)}
        array = values.cpu().numpy()
        dims: tuple[str, ...] = ("component", "example", "pos")
        if self.place is None:
            coords["pos"] = np.arange(size)
        else:
            coords["pos"] = ("example", self.place)
            array, dims = array[..., 0], dims[:2]
        attrs = {"unit": "nats", "of": self.reader.of, "norm": treatment}
        return xr.DataArray(array, dims=dims, coords=coords, name=name, attrs=attrs)


def read_at(
    readout: Readout,
    groups: Sequence[WriteGroup],
    answer: TokenIds,
    wrong: TokenIds | None,
    pos: TokenIds | None,
) -> View:
    """The writes at `pos` (None: everywhere) beside the direction that reads them.

    Raises:
        TokenError, ShapeError: for a token or a position that does not exist.
    """
    n, size = groups[0].form().shape[1:3]
    reader = readout.reader(answer, wrong, n)
    if pos is None:
        return View(groups, reader, readout.scale, None)
    place = row_positions(pos, n, size)
    device = reader.direction.device
    rows, columns = torch.arange(n, device=device), torch.tensor(place, device=device)
    scale = None if readout.scale is None else readout.scale[rows, columns][:, None]
    return View([group.at(rows, columns) for group in groups], reader, scale, place)


def row_ids(name: str, given: TokenIds, n: int, d_vocab: int) -> Int[Tensor, " example"]:
    """A token for each of `n` examples."""
    ids = _rows(name, given, n, TokenError)
    if (ids < 0).any() or (ids >= d_vocab).any():
        raise TokenError(f"{name} must lie in [0, {d_vocab}), got {ids.tolist()}")
    return torch.tensor(ids)


def row_positions(given: TokenIds, n: int, size: int, name: str = "pos") -> npt.NDArray[np.int64]:
    """A position for each of `n` examples; negative ones count from the end."""
    place = _rows(name, given, n, ShapeError)
    if (place < -size).any() or (place >= size).any():
        raise ShapeError(f"{name} must lie in [{-size}, {size}), got {place.tolist()}")
    return place % size


def _rows(
    name: str,
    given: TokenIds,
    n: int,
    error: type[ShapeError] | type[TokenError],
) -> npt.NDArray[np.int64]:
    """`given` as one whole number a row."""
    array = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
    if array.dtype.kind not in "iu" or array.shape not in ((), (n,)):
        raise error(
            f"{name} must be one whole number, or one for each of {n} examples, got "
            f"{array.dtype} of shape {list(array.shape)}"
        )
    return np.broadcast_to(array.astype(np.int64), (n,))
