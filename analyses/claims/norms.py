"""Norms forget the size of what they read (N2)."""

from __future__ import annotations

from headstream.analyses.claims.ledger import Finding, NotApplicable, Subject, check
from headstream.models.hooks import capture


@check("N2", "each norm forgets the size of its input: f(c x) = f(x), but for what eps adds")
def _scale_invariant(subject: Subject) -> Finding:
    model = subject.model
    config = model.config
    if config.norm == "none":
        raise NotApplicable("this model has no norm")
    _, run = capture(model, subject.tokens, "*.hook_resid_*")
    readers = [(f"blocks.{n}.hook_resid_pre", b.ln1) for n, b in enumerate(model.blocks)]
    if config.has_mlp:
        readers += [(f"blocks.{n}.hook_resid_mid", b.ln2) for n, b in enumerate(model.blocks)]
    readers.append((f"blocks.{config.n_layers - 1}.hook_resid_post", model.ln_final))
    findings, largest = [], 0.0
    for name, norm in readers:
        x = run[name]
        centred = x - x.mean(-1, keepdim=True) if config.norm == "layernorm" else x
        square = centred.square().mean(-1, keepdim=True)
        shift = norm.b if config.norm == "layernorm" else 0.0
        plain = norm(x)
        for c in (0.5, 3.0, 100.0):
            # f(c x) = c x / sqrt(c^2 m + eps) = x / sqrt(m + eps / c^2)
            ratio = ((square + config.eps) / (square + config.eps / c**2)).sqrt()
            expected = (plain - shift) * ratio + shift
            scaled = norm(c * x)
            where = f"the norm after {name}, c = {c:g}"
            findings.append(Finding.between(scaled, expected, where, "example pos channel"))
            largest = max(largest, float((ratio - 1).abs().max()))
    worst = Finding.worst_of(findings)
    return Finding(worst.error, f"{worst.worst} (eps moves it by up to {largest:.0e})")
