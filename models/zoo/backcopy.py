"""Bigram-Backcopy: a chain of tokens in which a trigger copies the token before it.

    <bos> x1 x2 ...      x1 from the chain's start; after a trigger comes the token that stood
                         before it, after any other token one drawn from its row of bigrams

So no two triggers are adjacent, every trigger stands between two equal tokens, and BOS is never
copied. The true distribution of every next token is known: the loss of a model above the best
possible one is exactly the mean divergence from it.

Source: Guo et al. 2024 (arXiv 2410.13835), in the small: rows are drawn from Dirichlet(0.3), and
0.08 is added to the trigger columns, so that triggers are frequent (theirs are the most frequent
characters of a text).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError
from headstream.models.hooks import capture, edited
from headstream.models.names import head_name
from headstream.models.zoo.recipe import Drawn
from headstream.models.zoo.sequences import BOS

N_CONTENT = 32
TRIGGERS = (1, 2, 3)
_CONCENTRATION = 0.3
_ADDED_TO_TRIGGERS = 0.08
_TABLE_SEED = 0
_EVALUATED = 512
_TASK_LENGTH = 32


class BackcopySequences(NamedTuple):
    """Sequences, and what the rule says of them.

    Attributes:
        tokens: the sequences; column 0 is BOS.
        truth: distribution of the token after each position, given all before it.
        trigger: whether a trigger stands at the position (so that the next token is a copy).
    """

    tokens: Int[Tensor, "batch pos"]
    truth: Float[Tensor, "batch pos d_vocab"]
    trigger: Bool[Tensor, "batch pos"]


@cache
def bigram_table() -> Float[Tensor, "d_vocab d_vocab"]:
    """Row x: distribution of the token after x, float64. BOS's row is how a sequence starts.

    It starts as the chain would be without triggers: from the bigrams' stationary distribution,
    triggers left out. The rows of triggers are of use to no one, and are there for that.
    """
    drawn = np.random.default_rng(_TABLE_SEED).dirichlet([_CONCENTRATION] * N_CONTENT, N_CONTENT)
    rows = torch.zeros(N_CONTENT + 1, N_CONTENT + 1, dtype=torch.float64)
    rows[1:, 1:] = torch.from_numpy(drawn)
    triggers = list(TRIGGERS)
    rows[1:, triggers] += _ADDED_TO_TRIGGERS
    rows[1:] /= rows[1:].sum(-1, keepdim=True)
    start = torch.full((N_CONTENT + 1,), 1 / N_CONTENT, dtype=torch.float64)
    for _ in range(200):
        start = start @ rows
    start[triggers] = 0.0
    rows[BOS] = start / start.sum()
    return rows


def backcopy_sequences(batch: int, length: int, *, generator: Generator) -> BackcopySequences:
    """Sequences by the rule above.

    Args:
        batch, length: rows, and tokens a row counting BOS.
        generator: source of all randomness.
    Raises:
        TaskError: if there is no row or no token after BOS.
    """
    if batch < 1 or length < 2:
        raise TaskError(f"batch must be >= 1 and length >= 2, got {batch} and {length}")
    table = bigram_table()
    upto = table.cumsum(-1)
    upto[:, -1] = 1.0
    is_trigger = torch.zeros(len(table), dtype=torch.bool)
    is_trigger[list(TRIGGERS)] = True
    chance = torch.rand(batch, length, generator=generator, dtype=torch.float64)
    columns = [torch.full((batch,), BOS)]
    for at in range(1, length):
        drawn = (upto[columns[-1]] <= chance[:, at : at + 1]).sum(-1)
        if at > 1:
            drawn = torch.where(is_trigger[columns[-1]], columns[-2], drawn)
        columns.append(drawn)
    tokens = torch.stack(columns, 1)
    trigger = is_trigger[tokens]
    truth = table[tokens]
    before = tokens.roll(1, 1)
    truth[trigger] = torch.nn.functional.one_hot(before[trigger], len(table)).double()
    return BackcopySequences(tokens, truth, trigger)


@dataclass(frozen=True)
class Backcopy:
    """Bigram-Backcopy as training data; every token counts."""

    def draw(self, batch: int, length: int, generator: Generator) -> Drawn:
        """Sequences; all but BOS count."""
        tokens = backcopy_sequences(batch, length, generator=generator).tokens
        return Drawn(tokens, tokens != BOS)

    def described(self) -> dict[str, Any]:
        """The table's numbers."""
        return {
            "bigrams": f"Dirichlet({_CONCENTRATION}), seed {_TABLE_SEED}",
            "added_to_triggers": _ADDED_TO_TRIGGERS,
        }

    def words(self) -> list[str]:
        """BOS, triggers `T01 ..`, other tokens `t04 ..`."""
        return [
            "<bos>",
            *(f"{'T' if t in TRIGGERS else 't'}{t:02}" for t in range(1, N_CONTENT + 1)),
        ]

    def facts(self, model: Decoder, seed: int) -> dict[str, Any]:
        """Excess loss, masses and value sizes of each head, and losses with it silent."""
        length = model.config.n_train or model.config.n_ctx
        made = backcopy_sequences(_EVALUATED, length, generator=Generator().manual_seed(seed))
        loss = excess(model, made)
        heads = [
            (at, h) for at in range(model.config.n_layers) for h in range(model.config.n_heads)
        ]
        measured: dict[str, dict[str, Any]] = {}
        for layer, head in heads:
            with edited(model, {f"blocks.{layer}.attn.hook_z": _silenced(head)}):
                without = excess(model, made)
            rise = {place: round(without[place] - loss[place], 4) for place in loss}
            masses = active_dormant(model, made, layer, head)
            measured[head_name(layer, head)] = masses | {"rise_without_it": rise}
        entropy = -torch.special.xlogy(made.truth, made.truth).sum(-1)[:, :-1]
        elsewhere = ~made.trigger[:, :-1]
        best = float(entropy[elsewhere].mean())
        return {
            "task": {"kind": "backcopy", "length": _TASK_LENGTH},
            "loss": {
                "at_triggers": round(loss["at_triggers"], 5),
                "best_possible_at_triggers": 0.0,
                "elsewhere": round(best + loss["elsewhere"], 4),
                "best_possible_elsewhere": round(best, 4),
                "excess_elsewhere": round(loss["elsewhere"], 5),
                "what": "cross-entropy with the true next-token distribution",
                "unit": "nats",
                "sequences": _EVALUATED,
            },
            "circuit": {
                "active-dormant": [
                    name
                    for name, found in measured.items()
                    if found["bos_mass_at_non_triggers"] > 0.5
                    and found["previous_token_mass_at_triggers"] > 0.5
                ]
            },
            "measured": measured,
            "vocabulary": (
                f"<bos>, {len(TRIGGERS)} triggers T.. and {N_CONTENT - len(TRIGGERS)} other "
                "tokens t.. without meaning"
            ),
        }


def excess(model: Decoder, made: BackcopySequences) -> dict[str, float]:
    """The model's loss above the best possible one; see `excess_of`."""
    with torch.no_grad():
        return excess_of(model(made.tokens), made)


def excess_of(
    logits: Float[Tensor, "batch pos d_vocab"], made: BackcopySequences
) -> dict[str, float]:
    """Loss above the best possible one, in nats: mean KL(truth || softmax), by place.

    `at_triggers` the truth is one token, and this is the loss itself; `elsewhere` it is a row of
    the table, and this is the loss less the row's entropy. The last position, whose next token is
    not there, is left out.
    """
    log_probs = logits[:, :-1].double().log_softmax(-1)
    truth = made.truth[:, :-1]
    lost = (torch.special.xlogy(truth, truth) - truth * log_probs).sum(-1)
    trigger = made.trigger[:, :-1]
    return {"at_triggers": float(lost[trigger].mean()), "elsewhere": float(lost[~trigger].mean())}


def active_dormant(
    model: Decoder, made: BackcopySequences, layer: int, head: int
) -> dict[str, float]:
    """Where a head looks from triggers and from other tokens, and how little BOS's value is.

    Returns:
        Mean mass on BOS of queries that are neither a trigger nor BOS, mean mass on the previous
        token of triggers, and the norm of BOS's value over the mean norm of the others'.
    """
    names = [f"blocks.{layer}.attn.hook_pattern", f"blocks.{layer}.attn.hook_v"]
    with torch.no_grad():
        _, acts = capture(model, made.tokens, names)
    pattern = acts[names[0]][:, head, 1:]  # [batch, query 1.., key]
    sizes = acts[names[1]][:, :, head // model.config.group_size].norm(dim=-1)
    trigger = made.trigger[:, 1:]
    previous = pattern.diagonal(0, 1, 2)  # row r is query r + 1, whose previous key is r
    return {
        "bos_mass_at_non_triggers": round(float(pattern[..., 0][~trigger].mean()), 4),
        "previous_token_mass_at_triggers": round(float(previous[trigger].mean()), 4),
        "value_ratio": round(float(sizes[:, 0].mean() / sizes[:, 1:].mean()), 4),
    }


def _silenced(head: int) -> Any:
    def silence(z: Tensor) -> Tensor:
        out = z.clone()
        out[:, :, head] = 0.0
        return out

    return silence
