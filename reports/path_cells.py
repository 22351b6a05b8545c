"""The paths of one result by their labels, and what their ends are called on a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headstream.analyses.evidence import Claim
from headstream.analyses.patching.paths.result import path_label, ranked_paths
from headstream.analyses.patching.result import Cell as Path
from headstream.reports.study import Item

LOGITS = "logits"
CHANNELS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class Paths:
    """The paths of one result by their labels, and the two ends in the order of the model.

    Attributes:
        cells: path by label, the largest effect first.
        senders: with their place, if the result tells places apart: `L0H1@query`.
        receivers: their names; `receiver` has that of each label.
        claims: by label, of what is claimed.
        alpha: level of the test.
    """

    cells: Mapping[str, Path]
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    receiver: Mapping[str, str]
    claims: Mapping[str, Claim]
    alpha: float

    @classmethod
    def of(cls, item: Item) -> Paths:
        """What a result of kind `paths` holds."""
        data = item.result.data
        names = [str(name) for name in data["sender"].values.tolist()]
        places = [dim for dim in ("role", "pos") if dim in data["mean"].dims]
        senders = tuple(
            _sender(path_label({"sender": name, "receiver": "", **dict(zip(places, [place]))}))
            for name in names
            for place in (data[places[0]].values.tolist() if places else [None])
        )
        receivers = tuple(str(name) for name in data["receiver"].values.tolist())
        cells = {path.label: path for path in ranked_paths(data)}
        return cls(
            cells=cells,
            senders=senders,
            receivers=receivers,
            receiver={label: label.partition("->")[2] for label in cells},
            claims={
                claim.id.removeprefix("path."): claim
                for claim in item.result.claims
                if claim.id.startswith("path.")
            },
            alpha=float(item.details.get("alpha", 0.05)),
        )

    def at(self, sender: str, receiver: str) -> Path | None:
        """The path between two ends; None where the sender does not come first."""
        return self.cells.get(f"{sender}->{receiver}")

    def struck(self, path: Path) -> bool:
        """Whether it was tested and cannot be told from no effect."""
        return math.isfinite(path.p_value) and path.p_value > self.alpha


def _sender(label: str) -> str:
    return label.removesuffix("->")


def into(receiver: str) -> str:
    """In words, what the receiver is."""
    if receiver == LOGITS:
        return "straight to the answer"
    name, channel = _parts(receiver)
    return f"into the {channel} of {name}" if channel else f"into {name}"


def row_label(receiver: str) -> str:
    """`L1H2 keys`."""
    return " ".join(filter(None, _parts(receiver)))


def _parts(receiver: str) -> tuple[str, str]:
    """The receiver's name, and the channel of a head in words; "" for what has none."""
    name, _, channel = receiver.rpartition(".")
    return (name, CHANNELS[channel]) if channel in CHANNELS else (receiver, "")


def arrows(text: str) -> str:
    """`text` with real arrows, for prose and tables; ids keep `->`."""
    return text.replace("->", " → ")
