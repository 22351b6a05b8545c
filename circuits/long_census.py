"""The census of heads at one length, however long, without the n x n matrix.

    control      <bos> random tokens                                     "length" tokens in all
    repeated     the same, its last block replaced by an earlier one     one a distance

The block is the last `BLOCK` tokens; in the repeated sequence it is what stood `distance` tokens
before. So a pair differs in its last block only, and every distance shares one control. Up to the
size of the vocabulary tokens are drawn without replacement. A longer sequence must use tokens more
than once: they are drawn independently, each block token then has further copies by chance, and
attention to all copies counts (`notes` says so).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Generator, Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from headstream.circuits.heads import Array, HeadCensus, assemble_census
from headstream.circuits.measuring.flash_rows import FlashRows
from headstream.circuits.measuring.masses import Offset, SinkMass
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.measuring.rows import Rows
from headstream.circuits.measuring.second_pass import Layer
from headstream.circuits.measuring.statistic import Counted, Pattern, Statistic, Values
from headstream.circuits.measuring.token_batch import TokenBatch
from headstream.circuits.qk_ov.copying import copying_score, require_finite
from headstream.circuits.repeats import N_DISTANCES
from headstream.circuits.statistics import duplicate_token_targets, prefix_matching_targets
from headstream.models.arguments import check_count, check_seed
from headstream.models.attend_blocks import blocks_of
from headstream.models.attend_naive import widen
from headstream.models.errors import ShapeError, TokenError
from headstream.models.given_model import takes_model

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder

BLOCK = 64  # tokens of the repeated block, where they fit three times
TOKENS = 2**15  # of all sequences of one kind together, when the caller names no n
FEWEST, MOST = 4, 64  # sequences, likewise
_AT_ONCE = 2**12  # tokens in one pass
_PRODUCTS = 2**22  # scores held at once


@dataclass(eq=False)
class BlockCopies(Statistic):
    """Attention of the last block to where its tokens stood before, in a given text.

    Mean over the block's queries of the mass on earlier copies of their token, or on the tokens
    after these (`following`). The copies are those in `repeated`, whatever text is read: on the
    text itself it is `DuplicateMass` or `InductionMass` of its last block, on a control the same
    positions with other content. Chance: mean over the queries of (copies) / n_i.

    Args:
        repeated: int64 [batch, pos], without padding.
        block: how many of the last tokens.
        following: whether to look one after each copy.
    """

    repeated: Int[Tensor, "batch pos"]
    block: int
    following: bool
    cost: ClassVar[str] = "block * n * d_head products a head"

    def counted(self, batch: TokenBatch) -> Counted:
        return batch.asks & (batch.query_rank >= self.repeated.shape[1] - self.block)

    def from_pattern(self, pattern: Pattern, batch: TokenBatch) -> Values:
        targets = prefix_matching_targets if self.following else duplicate_token_targets
        return (pattern * targets(self.repeated, batch.real)[:, None]).sum(-1)

    def from_rows(self, rows: Rows) -> Values:
        if isinstance(rows, FlashRows):
            return self._of_layer(rows.layer)
        elsewhere = copy.copy(rows)
        elsewhere.batch = TokenBatch(rows.batch.real, self.repeated)
        return elsewhere.copy_mass(following=self.following)

    def _of_layer(self, layer: Layer) -> Values:
        """Scores of the block's queries alone, some keys at a time; queries before it get 0."""
        n, heads = layer.q.shape[1:3]
        first = n - self.block
        text = self.repeated.to(layer.q.device)
        held = pad(text[:, :-1], (1, 0), value=-1) if self.following else text
        own = torch.arange(first + self.following, n + self.following, device=text.device)
        q = widen(layer.q[:, first:]).unflatten(2, (layer.k.shape[2], -1))
        lse = layer.lse[..., first:]
        mass = torch.zeros_like(lse)
        for keys in blocks_of(n, max(1, _PRODUCTS // (len(text) * heads * self.block))):
            at = torch.arange(keys.start, keys.stop, device=text.device)
            sought = (text[:, first:, None] == held[:, None, keys]) & (at < own[:, None])
            dots = torch.einsum("bqkgd,bnkd->bkgqn", q, widen(layer.k[:, keys])).flatten(1, 2)
            logs = (layer.scale * dots - lse[..., None]).masked_fill(~sought[:, None], -torch.inf)
            mass = mass + logs.exp().sum(-1)
        return pad(mass, (first, 0))


@dataclass(frozen=True)
class LongPlan:
    """Which repeats fit a length: see the module; `distances` ascend."""

    length: int
    block: int
    distances: tuple[int, ...]
    content: tuple[int, ...]
    bos: int | None
    notes: tuple[str, ...]

    @property
    def has_copies_by_chance(self) -> bool:
        return self.length - (self.bos is not None) > len(self.content)


def plan_long(model: Decoder, length: int) -> LongPlan:
    """Block and distances for sequences of exactly `length` tokens, BOS included.

    Raises:
        ShapeError: if the model cannot hold that many, or they are too few for a repeat.
        TokenError: if there are too few content tokens.
    """
    config = model.config
    special = {config.bos_token_id, config.pad_token_id}
    content = tuple(token for token in range(config.d_vocab) if token not in special)
    has_bos = config.bos_token_id is not None
    fewest = 4 + has_bos
    least = f"the smallest takes {fewest} tokens{', BOS among them' if has_bos else ''}"
    if config.n_ctx < fewest:
        raise ShapeError(f"n_ctx={config.n_ctx} is too short for a repeat: {least}")
    whole = hasattr(length, "__index__") and not isinstance(length, bool)
    if not whole or operator.index(length) < fewest:
        raise ShapeError(f"length={length!r} is too short for a repeat: {least}")
    length = operator.index(length)
    if length > config.n_ctx:
        raise ShapeError(
            f"length={length} is more than the n_ctx={config.n_ctx} positions of {model.name!r}",
            hint=f"ask for {fewest} to {config.n_ctx}",
        )
    if len(content) < 4:
        raise TokenError(
            f"{len(content)} content tokens are too few for a repeat and its control: the "
            f"smallest takes 4 (d_vocab={config.d_vocab}, without BOS and padding)"
        )
    room = length - has_bos
    block = max(2, min(BLOCK, room // 3))
    steps = torch.linspace(block, room - block, N_DISTANCES).round().int().tolist()
    distances = tuple(sorted(set(steps)))
    notes = [
        f"{length} tokens a sequence; the last {block} repeat those "
        f"{', '.join(map(str, distances))} tokens before",
        f"{room} tokens are drawn from {len(content)}, so each occurs about "
        f"{room / len(content):.1f} times: attention to all its copies counts"
        if room > len(content)
        else "no other token occurs twice",
    ]
    if config.n_train is not None and length > config.n_train:
        notes.append(f"the model was trained on {config.n_train} positions, fewer than these")
    return LongPlan(length, block, distances, content, config.bos_token_id, tuple(notes))


def draw_long(plan: LongPlan, n: int, generator: Generator) -> Int[Tensor, "batch pos"]:
    """`n` control sequences: without a repeat, but for copies by chance."""
    room = plan.length - (plan.bos is not None)
    size = len(plan.content)
    if plan.has_copies_by_chance:
        index = torch.randint(size, (n, room), generator=generator)
    else:
        orders = [torch.randperm(size, generator=generator)[:room] for _ in range(n)]
        index = torch.stack(orders)
    tokens = torch.tensor(plan.content)[index]
    if plan.bos is None:
        return tokens
    return torch.cat([torch.full_like(tokens[:, :1], plan.bos), tokens], 1)


def repeat_block(
    control: Int[Tensor, "batch pos"], block: int, distance: int
) -> Int[Tensor, "batch pos"]:
    """The control with its last `block` tokens replaced by those `distance` before."""
    repeated = control.clone()
    repeated[:, -block:] = control[:, -block - distance : -distance]
    return repeated


@takes_model
def score_long_heads(
    model: Decoder,
    *,
    length: int,
    n: int | None = None,
    seed: int = 0,
    backend: str = "flash",
    progress: bool = False,
) -> HeadCensus:
    """Score every head on random repeats of `length` tokens, in O(length) memory.

    Scores, controls and labels are those of `score_heads`; sequences are described above.

    Args:
        model: the decoder.
        length: tokens of a sequence, BOS included; up to `n_ctx`.
        n: sequences of each kind, at least 2; None takes about 32,768 tokens, 4 to 64 sequences.
        seed: of the sequences and intervals.
        backend: "naive" forms the patterns, for comparison.
        progress: a bar on stderr that counts passes.
    Raises:
        ShapeError: if `length`, `n` or `seed` is out of range, or a weight is NaN or infinite.
        TokenError: if there are too few content tokens.
    """
    plan = plan_long(model, length)
    n = min(MOST, max(FEWEST, TOKENS // plan.length)) if n is None else n
    n, seed = check_count("n", n, least=2, of="sequences"), check_seed(seed)
    # Before the runs: a NaN weight makes patterns that no score is defined on.
    require_finite(model)
    controls = draw_long(plan, n, torch.Generator().manual_seed(seed))
    starts = range(0, n, max(1, _AT_ONCE // plan.length))
    total = len(starts) * (1 + len(plan.distances))
    parts, chances = [], []
    with tqdm(total=total, desc="census", disable=None if progress else True) as bar:
        for start in starts:
            some = controls[start : start + starts.step]
            values, chance = _score(model, plan, some, backend, bar)
            parts.append(values)
            chances.append(chance)
    # [distance, sequence, layer, head]
    scores = {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}
    weights = [part["sink"].shape[1] for part in parts]
    chance = {
        name: float(np.average([each[name] for each in chances], weights=weights))
        for name in chances[0]
    }
    copying = copying_score(model, top=(), seed=seed)
    data = assemble_census(scores, chance, copying, plan.distances, seed)
    return HeadCensus(data, n, plan.block, plan.distances, seed, plan.notes)


def _score(
    model: Decoder,
    plan: LongPlan,
    control: Int[Tensor, "batch pos"],
    backend: str,
    bar: tqdm[Any],
) -> tuple[Mapping[str, Array], Mapping[str, float]]:
    """Scores [distance, sequence, layer, head] of a few sequences, and chance levels."""
    texts = [repeat_block(control, plan.block, distance) for distance in plan.distances]

    def copies(text: Tensor, name: str) -> list[Statistic]:
        return [
            BlockCopies(text, plan.block, True, name=f"induction{name}"),
            BlockCopies(text, plan.block, False, name=f"duplicate{name}"),
        ]

    def run(tokens: Tensor, statistics: list[Statistic]) -> Mapping[str, tuple[Array, float]]:
        data = measure_attention(model, tokens, statistics, backend=backend)
        bar.update()
        return {
            each.name: (
                data[each.name].transpose("example", "layer", "head").values.astype(np.float64),
                float(data[f"chance_{each.name}"].mean()),
            )
            for each in statistics
        }

    on_control = [statistic for i, text in enumerate(texts) for statistic in copies(text, f"_{i}")]
    plain: list[Statistic] = [
        Offset(1, name="previous_token"),
        Offset(0, name="current_token"),
        SinkMass(1, name="sink"),
    ]
    of_control = run(control, plain + on_control)
    of_texts = [run(text, copies(text, "")) for text in texts]
    found = {each.name: [of_control[each.name]] * len(texts) for each in plain}
    found["induction"] = [each["induction"] for each in of_texts]
    found["duplicate_token"] = [each["duplicate"] for each in of_texts]
    found["induction_control"] = [of_control[f"induction_{i}"] for i in range(len(texts))]
    found["duplicate_control"] = [of_control[f"duplicate_{i}"] for i in range(len(texts))]
    return (
        {name: np.stack([values for values, _ in each]) for name, each in found.items()},
        {name: float(np.mean([level for _, level in each])) for name, each in found.items()},
    )
