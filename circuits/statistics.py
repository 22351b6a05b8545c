"""What is measured on an attention pattern: pure functions, one score an example and a head.

A statistic is a set of target keys for every query, and its score is

    score = mean over the queries that have a target of (sum over their targets of pattern[q, k])

so a query that may split its mass over several targets still scores 1, and a query with nothing
to find is not counted. Each score lies in [0, 1]; `chance_level` is the same number, exactly, for
a head that spreads its mass evenly over the keys a query may see. An example in which no query
has a target has no score: NaN, "not applicable", never 0; `mean_over_examples` skips it.

Every function honours `attention_mask` [batch, pos] (1 a real token, 0 padding): padding asks no
question and is no target, and "previous" and "first" mean the previous and the first real token,
so a padded row scores what it scores without its padding. BOS is a token like any other and a
legal key: its mass stays in the row's sum; each docstring says where it is a target.

Sources disagree on these measures (how targets are averaged, which rows count): each docstring
names its source and where we differ, and `detect_head_score` converts to TransformerLens' measure.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headstream.models.errors import ShapeError

Targets = Bool[Tensor, "batch query_pos key_pos"]


def previous_token_score(
    pattern: Tensor, attention_mask: Tensor | None = None
) -> Float[Tensor, "batch head"]:
    """Attention to the token just before: mean over queries q >= 1 of pattern[q, q - 1].

    BOS is a target (of the query after it) and asks nothing itself.

    Args:
        pattern: [batch, head, query_pos, key_pos], after the softmax.
        attention_mask: [batch, pos], 1 or True on real tokens; None if all are.
    Raises:
        ShapeError: if the pattern is not square or the mask does not fit it.
    Source:
        Olsson et al. 2022, who average over natural text; we take whatever tokens are given.
    Example:
        >>> pattern = torch.tensor([[[[1.0, 0.0], [0.9, 0.1]]]])
        >>> previous_token_score(pattern)
        tensor([[0.9000]])
    """
    real = _checked(pattern, attention_mask)
    return target_mass(pattern, previous_token_targets(real))


def current_token_score(
    pattern: Tensor, attention_mask: Tensor | None = None
) -> Float[Tensor, "batch head"]:
    """Attention to the query's own token: mean over queries q >= 1 of pattern[q, q].

    The first token sees only itself and would add 1 for any head, so it is not counted: neither
    is BOS, when it is there. Arguments and errors as in `previous_token_score`.
    """
    real = _checked(pattern, attention_mask)
    return target_mass(pattern, current_token_targets(real))


def duplicate_token_score(
    pattern: Tensor, tokens: Tensor, attention_mask: Tensor | None = None
) -> Float[Tensor, "batch head"]:
    """Attention to earlier copies of the query's token, the query itself left out.

    Mean over queries with an earlier copy of the summed mass on all its copies. BOS is a target
    only of a second BOS.

    Args:
        pattern: [batch, head, query_pos, key_pos], after the softmax.
        tokens: int64 [batch, pos].
        attention_mask: [batch, pos], 1 or True on real tokens; None if all are.
    Returns:
        NaN for an example in which no token recurs.
    Raises:
        ShapeError: if the pattern is not square, or tokens or mask do not fit it.
    Source:
        Wang et al. 2022 (duplicate token heads).
    """
    real = _checked(pattern, attention_mask, tokens)
    return target_mass(pattern, duplicate_token_targets(tokens, real))


def prefix_matching_score(
    pattern: Tensor, tokens: Tensor, attention_mask: Tensor | None = None
) -> Float[Tensor, "batch head"]:
    """Attention to what came after earlier copies of the query's token: the induction pattern.

    Key j is a target of query i iff j <= i and the token before j equals the token at i. The
    score is the mean over queries with a target of the summed mass on all their targets, so an
    ideal head scores 1 however often a block recurs. BOS at the start has no token before it and
    is never a target: a head that rests on BOS scores exactly 0.

    Args:
        pattern: [batch, head, query_pos, key_pos], after the softmax.
        tokens: int64 [batch, pos]. Draw blocks without replacement, else a query has targets
            that no repeat put there.
        attention_mask: [batch, pos], 1 or True on real tokens; None if all are.
    Returns:
        NaN for an example in which no token recurs. A high score is a pattern, not a mechanism:
        a head that looks back a fixed distance reaches it too (`score_heads` has the control).
    Raises:
        ShapeError: if the pattern is not square, or tokens or mask do not fit it.
    Source:
        Olsson et al. 2022, "In-context Learning and Induction Heads" (prefix matching), whose text
        averages over single entries: that cannot pass 0.5 on four repeats. We sum a query's
        targets first. The target is the token after the earlier copy, not before it.
    Example:
        >>> tokens = torch.tensor([[7, 8, 7]])
        >>> pattern = torch.tensor([[[[1.0, 0, 0], [1, 0, 0], [0.2, 0.7, 0.1]]]])
        >>> prefix_matching_score(pattern, tokens)
        tensor([[0.7000]])
    """
    real = _checked(pattern, attention_mask, tokens)
    return target_mass(pattern, prefix_matching_targets(tokens, real))


def sink_mass(
    pattern: Tensor, attention_mask: Tensor | None = None, *, first: int = 1
) -> Float[Tensor, "batch head"]:
    """Attention to the first real tokens: mean over later queries of the mass on them.

    Args:
        pattern: [batch, head, query_pos, key_pos], after the softmax.
        attention_mask: [batch, pos], 1 or True on real tokens; None if all are. Under left
            padding the sink is the first real token, wherever it stands (`first_real_token`).
        first: how many tokens make the sink. Queries among them are not counted: the first
            token can only see itself. BOS, where there is one, is the first of them.
    Returns:
        NaN for an example with no token after the sink (all padding, say).
    Raises:
        ShapeError: if the pattern is not square, the mask does not fit it, or first < 1.
    Source:
        Gu et al. 2024 count, a key, every row that sees it, its own included, and threshold the
        result; this is the plain mean of mass over queries at or after `first`.
    """
    if first < 1:
        raise ShapeError(f"first must be a whole number >= 1, got {first}")
    real = _checked(pattern, attention_mask)
    return target_mass(pattern, sink_targets(real, first=first))


def first_real_token(real: Bool[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
    """Index of the first real token of each row; -1 for a row of padding."""
    return torch.where(real.any(-1), real.long().argmax(-1), -1)


def previous_token_targets(real: Bool[Tensor, "batch pos"]) -> Targets:
    """The real token before each real query."""
    keys = torch.arange(real.shape[1], device=real.device)
    return _asks(real) & (keys == _previous_real(real)[:, :, None])


def current_token_targets(real: Bool[Tensor, "batch pos"]) -> Targets:
    """Each real query itself, but for the first, which has no choice."""
    own = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    return _asks(real) & own & (_previous_real(real) >= 0)[:, :, None]


def duplicate_token_targets(
    tokens: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
) -> Targets:
    """Earlier copies of each query's token."""
    same = tokens[:, :, None] == tokens[:, None, :]
    return (same & _asks(real)).tril(-1)


def prefix_matching_targets(
    tokens: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
) -> Targets:
    """Keys at or before the query whose preceding token equals the query's token."""
    previous = _previous_real(real)
    preceding = tokens.gather(1, previous.clamp(min=0))
    same = tokens[:, :, None] == preceding[:, None, :]
    return (same & (previous >= 0)[:, None, :] & _asks(real)).tril()


def sink_targets(real: Bool[Tensor, "batch pos"], *, first: int = 1) -> Targets:
    """The first `first` real tokens, for every real query after them."""
    rank = real.long().cumsum(-1)
    return _asks(real) & (rank <= first)[:, None, :] & (rank > first)[:, :, None]


def target_mass(
    pattern: Float[Tensor, "batch head query_pos key_pos"], targets: Targets
) -> Float[Tensor, "batch head"]:
    """Mean over the queries that have a target of the mass on their targets; NaN if none has."""
    mass = torch.einsum("bhqk,bqk->bh", pattern, targets.to(pattern.dtype))
    return mass / targets.any(-1).sum(-1)[:, None]


def chance_level(
    targets: Targets, real: Bool[Tensor, "batch pos"] | None = None
) -> Float[Tensor, " batch"]:
    """`target_mass` of uniform causal attention on the same tokens, exactly.

    A query that sees n keys gives each 1/n, so chance is the mean over queries with a target of
    (their number of targets) / n.
    """
    if real is None:
        real = targets.new_ones(targets.shape[:2])
    visible = real.cumsum(-1).clamp(min=1).to(torch.float64)
    share = targets.sum(-1) / visible
    return share.sum(-1) / targets.any(-1).sum(-1)


def mean_over_examples(scores: Float[Tensor, "batch ..."]) -> Float[Tensor, ...]:
    """Mean over the examples that have a score; NaN where none has."""
    return scores.nanmean(0)


def detect_head_score(
    pattern: Float[Tensor, "batch head query_pos key_pos"], targets: Targets
) -> Float[Tensor, "batch head"]:
    """Our score as TransformerLens' `detect_head` (error measure "mul") would state it.

    That measure is the mass on the targets over the mass of the whole pattern, so rows with
    nothing to find count against the head: an ideal induction head scores 0.743 on 4 x 25 tokens
    and 0.495 on 2 x 50. It is ours times (queries with a target) / (total mass), and the total
    mass is the number of rows. Its targets for "previous_token_head", "duplicate_token_head" and
    "induction_head" are those of the functions here.

    Source:
        TransformerLens 4.3, head_detector.py.
    """
    asking = targets.any(-1).sum(-1)[:, None]
    score: Tensor = target_mass(pattern, targets) * asking / pattern.sum((-2, -1))
    return score


def _asks(real: Bool[Tensor, "batch pos"]) -> Targets:
    """Pairs of a real query and a real key at or before it."""
    return (real[:, :, None] & real[:, None, :]).tril()


def _previous_real(real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Index of the last real token before each position; -1 where there is none."""
    places = torch.arange(real.shape[1], device=real.device)
    latest = torch.where(real, places, -1).cummax(-1).values
    return torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], dim=1)


def _checked(
    pattern: Tensor, attention_mask: Tensor | None, tokens: Tensor | None = None
) -> Bool[Tensor, "batch pos"]:
    """Real tokens as booleans, once pattern, mask and tokens are known to fit each other."""
    if pattern.ndim != 4 or pattern.shape[-1] != pattern.shape[-2]:
        raise ShapeError(
            f"pattern has shape {list(pattern.shape)}, expected a square "
            "[batch, head, query_pos, key_pos]"
        )
    expected = [pattern.shape[0], pattern.shape[-1]]
    for name, given in (("tokens", tokens), ("attention_mask", attention_mask)):
        if given is not None and list(given.shape) != expected:
            raise ShapeError(
                f"{name} has shape {list(given.shape)}, expected [batch, pos] = {expected} "
                "to fit the pattern"
            )
    if attention_mask is None:
        return torch.ones(expected, dtype=torch.bool, device=pattern.device)
    return attention_mask.bool()
