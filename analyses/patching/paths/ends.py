"""The two ends of a path: what sends into the stream, and what receives from it.

    senders      embed, L0H1 (what a head writes), L0MLP
    receivers    L1H2.q L1H2.k L1H2.v (the input of one channel of a head), L1MLP, logits

Where query heads share keys and values, those have heads of their own: L1KV0.k. Words stand for
many: `heads`, `mlps`; `q`, `k`, `v`. A head's three inputs are `L1H2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError, nearest
from headstream.models.names import head_name

CHANNELS = ("q", "k", "v")
# Within a layer: attention reads, heads write, the MLP reads, the MLP writes.
_STEPS = {"q": 0, "k": 0, "v": 0, "head": 1, "mlp input": 2, "mlp": 3}


@dataclass(frozen=True)
class End:
    """One end of a path.

    Attributes:
        kind: `embed`, `head`, `mlp` (senders); `q`, `k`, `v`, `mlp input`, `logits` (receivers).
        layer: of the model; -1 for embed, the number of layers for logits.
        head: head, or key/value head for `k` and `v`; None where there is none.
        label: its name.
    """

    kind: str
    layer: int
    head: int | None
    label: str

    @property
    def step(self) -> int:
        """When in a pass it writes or reads."""
        return 4 * self.layer + _STEPS.get(self.kind, 0)

    def before(self, receiver: End) -> bool:
        """Whether what this sender writes is in the stream that the receiver reads."""
        return self.step < receiver.step


def all_senders(config: DecoderConfig) -> tuple[End, ...]:
    """The embedding, every head and every MLP, in the order of a pass."""
    found = [End("embed", -1, None, "embed")]
    for layer in range(config.n_layers):
        found += [End("head", layer, h, head_name(layer, h)) for h in range(config.n_heads)]
        if config.has_mlp:
            found.append(End("mlp", layer, None, f"L{layer}MLP"))
    return tuple(found)


def all_receivers(config: DecoderConfig) -> tuple[End, ...]:
    """Every channel of every head, every MLP, and the logits, in the order of a pass."""
    grouped = config.kv_heads != config.n_heads
    found = []
    for layer in range(config.n_layers):
        for channel in CHANNELS:
            own = channel == "q" or not grouped
            for head in range(config.n_heads if channel == "q" else config.kv_heads):
                name = head_name(layer, head) if own else f"L{layer}KV{head}"
                found.append(End(channel, layer, head, f"{name}.{channel}"))
        if config.has_mlp:
            found.append(End("mlp input", layer, None, f"L{layer}MLP"))
    found.append(End("logits", config.n_layers, None, "logits"))
    return tuple(found)


def ends_of(
    config: DecoderConfig, senders: Any, receivers: Any
) -> tuple[tuple[End, ...], tuple[End, ...]]:
    """What the arguments of `path_patch` name, each once and in the order of a pass.

    A sender that no receiver follows, or a receiver that no sender precedes, is left out where it
    came with the others (None, or a word for many), and an error where it was named.

    Raises:
        TaskError: naming the argument and what does not fit.
    """
    sending, named_senders = _chosen("senders", senders, all_senders(config), config)
    receiving, named_receivers = _chosen("receivers", receivers, all_receivers(config), config)
    for sender in sending:
        if sender in named_senders and not any(map(sender.before, receiving)):
            raise TaskError(
                f"sender {sender.label} writes after every receiver has read: {_listed(receiving)}",
                hint="a path leads from an earlier write to a later read; a head writes after its "
                "own inputs are read",
            )
    for receiver in receiving:
        if receiver in named_receivers and not any(s.before(receiver) for s in sending):
            raise TaskError(
                f"receiver {receiver.label} reads before any sender has written: "
                f"{_listed(sending)}",
                hint="a path leads from an earlier write to a later read",
            )
    sending = tuple(s for s in sending if any(map(s.before, receiving)))
    receiving = tuple(r for r in receiving if any(s.before(r) for s in sending))
    if not sending:
        raise TaskError("no sender comes before a receiver: there is no path to patch")
    return sending, receiving


def _chosen(
    argument: str, given: Any, known: tuple[End, ...], config: DecoderConfig
) -> tuple[tuple[End, ...], set[End]]:
    """The ends that were asked for, and those of them that were asked for by name."""
    if given is None:
        return known, set()
    listed = _as_list(argument, given)
    wanted: set[End] = set()
    named: set[End] = set()
    for item in listed:
        many, found = _matching(argument, item, known, config)
        wanted |= set(found)
        if not many:
            named |= set(found)
    return tuple(end for end in known if end in wanted), named


def _as_list(argument: str, given: Any) -> list[Any]:
    one = isinstance(given, str) or (isinstance(given, tuple) and _is_pair(given))
    listed = [given] if one else list(given) if isinstance(given, Iterable) else None
    if listed is None:
        raise TaskError(f"{argument} must be names such as 'L0H1', got {given!r}")
    if not listed:
        raise TaskError(f"{argument} is empty", hint="None means all")
    return listed


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, Sequence)
        and not isinstance(item, str)
        and len(item) == 2
        and all(isinstance(i, int) and not isinstance(i, bool) for i in item)
    )


def _matching(
    argument: str, item: Any, known: tuple[End, ...], config: DecoderConfig
) -> tuple[bool, list[End]]:
    """Whether the item is a word for many, and what it names."""
    name = head_name(*item) if _is_pair(item) else item
    if not isinstance(name, str):
        raise TaskError(f"{argument} must be names such as 'L0H1', got {item!r}")
    kinds = {"heads": "head", "mlps": "mlp" if argument == "senders" else "mlp input"}
    if argument == "receivers":
        kinds |= {channel: channel for channel in CHANNELS}
        del kinds["heads"]
    if name in kinds:
        found = [end for end in known if end.kind == kinds[name]]
        if not found:
            raise TaskError(f"{argument} names {name!r}, and this model is attention only")
        return True, found
    exact = [end for end in known if end.label == name]
    if exact:
        return False, exact
    grouped = config.kv_heads != config.n_heads
    stem, _, channel = name.partition(".")
    heads = {end.label: end for end in all_senders(config) if end.kind == "head"}
    if argument == "receivers" and stem in heads and channel in ("", *CHANNELS):
        head = heads[stem]
        assert head.head is not None
        if grouped:
            kv = f"L{head.layer}KV{head.head // config.group_size}"
            raise TaskError(
                f"receivers holds {name!r}, but {config.group_size} query heads share their keys "
                "and values",
                hint=f"the inputs of {stem} are {stem}.q, {kv}.k and {kv}.v",
            )
        return False, [end for end in known if end.label.partition(".")[0] == stem]
    labels = [*(end.label for end in known), *kinds]
    raise TaskError(
        f"{argument} names {name!r}, and the model has {labels[0]} .. {labels[-len(kinds) - 1]}",
        hint=nearest(name, labels),
    )


def _listed(ends: Sequence[End]) -> str:
    names = [end.label for end in ends]
    return ", ".join(names if len(names) <= 6 else [*names[:3], "..", names[-1]])
