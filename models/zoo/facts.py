"""What a card says about the circuit of a trained model: patterns, and losses with heads silent.

This is what the recipe checks itself by, kept apart from `circuits` and `analyses`, which stand
above the zoo and are tried on its models. Scores are means of the pattern on held-out training
sequences; silencing sets a head's z to zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from headstream.models.decoder import Decoder
from headstream.models.hooks import capture, edited
from headstream.models.names import head_name
from headstream.models.zoo.sequences import RepeatedBlocks, repeated_blocks

Head = tuple[int, int]

# A head is named in the card's circuit from this score on.
NAMED_FROM = 0.5
# Heads are idle if cutting them, one by one and all together, moves the loss by less (nats).
IDLE_BELOW = 0.001
_USUAL_ON = 64


def losses(
    model: Decoder, made: RepeatedBlocks, **forward: Any
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean loss in nats on tokens that a repeat predicts (best possible 0), and on fresh ones."""
    per_token = model(made.tokens, return_type="loss_per_token", **forward)
    return per_token[made.predictable[:, 1:]].mean(), per_token[made.fresh[:, 1:]].mean()


def loss_without(model: Decoder, made: RepeatedBlocks, heads: Iterable[Head]) -> float:
    """Mean loss in nats on repeats when z of these heads is zero."""
    silent = torch.zeros(model.config.n_layers, model.config.n_heads, dtype=torch.bool)
    for layer, head in heads:
        silent[layer, head] = True

    def silence(layer: int) -> Any:
        return lambda z: z.masked_fill(silent[layer][:, None].to(z.device), 0.0)

    edits = {
        f"blocks.{layer}.attn.hook_z": silence(layer) for layer in range(model.config.n_layers)
    }
    with torch.no_grad(), edited(model, edits):
        return float(losses(model, made)[0])


def head_scores(
    model: Decoder, made: RepeatedBlocks
) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]]:
    """Previous-token and induction score of every head.

    Previous-token: mean attention from position i to i - 1, over i >= 1. Induction: attention from
    the query before a predictable token to all tokens that follow an earlier copy of the query's,
    mean over those queries (`science.md`: sum over a query's targets, then mean over queries).
    """
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.config.n_layers)]
    with torch.no_grad():
        _, acts = capture(model, made.tokens, names)
    tokens = made.tokens
    follows = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    follows[:, :, 1:] = tokens[:, :, None] == tokens[:, None, :-1]  # [batch, query, key]
    follows = follows.tril()
    asks = torch.zeros_like(made.predictable)
    asks[:, :-1] = made.predictable[:, 1:]
    previous, induction = [], []
    for name in names:
        pattern = acts[name]
        previous.append(pattern.diagonal(-1, 2, 3).mean((0, 2)))
        mass = (pattern * follows[:, None]).sum(-1)  # [batch, head, query]
        induction.append(mass.transpose(1, 2)[asks].mean(0))
    return torch.stack(previous), torch.stack(induction)


def usual_scores(
    model: Decoder, block: int, n_content: int, generator: Generator
) -> Float[Tensor, "layer head"]:
    """The test that a fixed distance passes: on `<bos> block block`, attention `block - 1` back.

    Mean over the queries of the second block.
    """
    made = repeated_blocks(
        _USUAL_ON, 2 * block + 1, n_content, generator=generator, block=(block, block)
    )
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.config.n_layers)]
    with torch.no_grad():
        _, acts = capture(model, made.tokens, names)
    # The diagonal's first two entries belong to queries of the first block's end.
    return torch.stack(
        [acts[name].diagonal(1 - block, 2, 3)[..., 2:].mean((0, 2)) for name in names]
    )


def find_circuit(
    model: Decoder, made: RepeatedBlocks, elsewhere: Sequence[RepeatedBlocks] = ()
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Names of the heads by what they attend to, and the numbers behind the names.

    Args:
        elsewhere: repeats at other distances. A head that scores on `made` and not on each of
            these copies from a fixed distance.
    Returns:
        Heads of the kinds "previous-token", "induction" and "fixed-distance", as far as there are
        any, and the rest. The rest is "idle" if silencing any one of it, and all of it, moves the
        loss on repeats by less than `IDLE_BELOW`: alone does not do, since heads can stand in for
        one another. Otherwise it is "other". And a dict of scores by head, loss on repeats with
        each head silent, and with all heads of a kind silent.
    """
    heads = [
        (at, head) for at in range(model.config.n_layers) for head in range(model.config.n_heads)
    ]
    previous, induction = head_scores(model, made)
    kinds: dict[str, list[Head]] = {
        "previous-token": [h for h in heads if float(previous[h]) > NAMED_FROM],
        "induction": [h for h in heads if float(induction[h]) > NAMED_FROM],
    }
    if elsewhere:
        least = torch.stack([head_scores(model, other)[1] for other in elsewhere]).amin(0)
        fixed = [h for h in kinds["induction"] if float(least[h]) <= NAMED_FROM]
        if fixed:
            kinds["induction"] = [h for h in kinds["induction"] if h not in fixed]
            kinds["fixed-distance"] = fixed
    named = {head for members in kinds.values() for head in members}
    rest = [head for head in heads if head not in named]
    without = {head: loss_without(model, made, [head]) for head in heads}
    if rest:
        intact = loss_without(model, made, [])
        cut = [*(without[head] for head in rest), loss_without(model, made, rest)]
        kinds["idle" if max(abs(loss - intact) for loss in cut) < IDLE_BELOW else "other"] = rest
    kinds = {kind: members for kind, members in kinds.items() if members}
    names = {kind: [head_name(*head) for head in members] for kind, members in kinds.items()}
    measured = {
        "previous_token_score": _by_head(heads, previous),
        "induction_score": _by_head(heads, induction),
        "loss_on_repeats_without": {
            head_name(*head): round(loss, 4) for head, loss in without.items()
        }
        | {
            f"all {kind}": round(loss_without(model, made, members), 4)
            for kind, members in kinds.items()
        },
        "idle_below": IDLE_BELOW,
    }
    return names, measured


def _by_head(heads: list[Head], scores: Float[Tensor, "layer head"]) -> dict[str, float]:
    return {head_name(*head): round(float(scores[head]), 3) for head in heads}
