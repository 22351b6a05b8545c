"""What the causal mask guarantees: no future, and so a key/value cache (A9, A10)."""

from __future__ import annotations

from itertools import pairwise

import torch

from headstream.analyses.claims.ledger import Finding, NotApplicable, Subject, check
from headstream.models.hooks import capture
from headstream.models.kv_cache import KVCache


@check("A9", "nothing at a position depends on tokens after it")
def _no_future(subject: Subject) -> Finding:
    model, tokens = subject.model, subject.tokens
    length = tokens.shape[1]
    if length < 2:
        raise NotApplicable("n_ctx is 1: there is no future")
    cut = length // 2
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % model.config.d_vocab
    names = ["*.hook_resid_post", "*.hook_lse"]
    _, run = capture(model, tokens, names)
    _, other = capture(model, changed, names)
    findings = []
    for name, value in run.items():
        axis = 2 if name.endswith("lse") else 1
        before = value.narrow(axis, 0, cut)
        axes = "example head pos" if axis == 2 else "example pos channel"
        findings.append(Finding.between(other[name].narrow(axis, 0, cut), before, name, axes))
    return Finding.worst_of(findings)


@check("A10", "decoding with a key/value cache, one or several tokens at a time, changes nothing")
def _cache_is_valid(subject: Subject) -> Finding:
    model, tokens = subject.model, subject.tokens
    length = tokens.shape[1]
    if length < 4:
        raise NotApplicable(f"n_ctx is {length}: too short to decode in pieces")
    cache = KVCache(model, batch=tokens.shape[0])
    cuts = [0, length // 2, length // 2 + 1, length]
    pieces = [
        model(tokens[:, start:stop], attention_mask=subject.mask[:, start:stop], kv_cache=cache)
        for start, stop in pairwise(cuts)
    ]
    whole = model(tokens, attention_mask=subject.mask)
    return Finding.between(torch.cat(pieces, 1), whole, "logits", "example pos token")
