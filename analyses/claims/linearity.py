"""Where reading stops being linear: the norm's scale, and the share that paths explain (B3, B4)."""

from __future__ import annotations

from functools import partial

from jaxtyping import Float
from torch import Tensor

from headstream.analyses.claims.ledger import NotApplicable, Observation, Subject, measurement
from headstream.analyses.patching.inference import mean_interval, ratio_interval
from headstream.circuits.interventions import freeze_attention
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.hooks import capture, edited


@measurement(
    "B3", "with the scale free, deleting a write moves a logit by its attribution and a remainder"
)
def _remainder(subject: Subject) -> Observation:
    model = subject.model
    if model.config.norm == "none":
        raise NotApplicable("this model has no norm: nothing is left over")
    tokens = subject.sample
    answers = model(tokens)[:, -1].argmax(-1)
    parts = decompose_residual(model, tokens)
    attribution = model.W_E.new_tensor(parts.logit_attribution(answers).values)
    stream, writes = (
        model.W_E.new_tensor(part.values[..., -1, :]) for part in (parts.stream, parts.writes)
    )

    def read(streams: Float[Tensor, "component example d_model"]) -> Tensor:
        logits: Tensor = (model.ln_final(streams) * model.W_U[:, answers].T).sum(-1)
        return logits

    effects = read(stream[None]) - read(stream - writes)
    linear = attribution[: len(effects)]
    remainder = ((effects - linear).square().sum(0) / linear.square().sum(0)).sqrt()
    by_sequence = remainder.cpu().numpy()
    by_sequence = by_sequence[by_sequence == by_sequence]
    if not len(by_sequence):
        raise NotApplicable("no write has an attribution")
    low, high = mean_interval(by_sequence[None], seed=subject.seed)
    return Observation(
        value=float(by_sequence.mean()),
        unit="of the attribution",
        interval=(float(low[0]), float(high[0])),
        n=len(by_sequence),
        on=f"{subject.sampled}; root mean square over the writes at the last token, of effect less "
        "attribution on the logit that the model puts first",
    )


@measurement("B4", "the share of the logits' variance that fixed linear paths explain")
def _linear_paths(subject: Subject) -> Observation:
    model, config = subject.model, subject.model.config
    tokens = subject.sample
    names = ["*.hook_mlp_out"] if config.has_mlp else []
    names += ["*.hook_scale"] if config.norm != "none" else []
    logits, means = capture(model, tokens, names or "hook_embed")
    means = {name: value.mean((0, 1)) for name, value in means.items()} if names else {}
    edits = {name: partial(_constant, mean=mean) for name, mean in means.items()}
    with freeze_attention(model, tokens), edited(model, edits):
        linear = model(tokens)
    # A logit that all tokens gain says nothing, and what all positions share is no variance.
    logits, linear = (x - x.mean(-1, keepdim=True) for x in (logits, linear))
    missed = (logits - linear).square().sum((1, 2)).cpu().numpy()
    varied = (logits - logits.mean((0, 1))).square().sum((1, 2)).cpu().numpy()
    if not varied.sum() > 0:
        raise NotApplicable("the logits are the same everywhere: there is nothing to explain")
    low, high = ratio_interval(missed[None], varied, seed=subject.seed)
    held = ["patterns held"]
    held += ["each norm's scale at its mean"] if config.norm != "none" else []
    held += ["each MLP's output at its mean"] if config.has_mlp else []
    kind = "model with MLPs" if config.has_mlp else "attention-only model"
    return Observation(
        value=1 - float(missed.sum() / varied.sum()),
        unit="of the variance",
        interval=(1 - float(high[0]), 1 - float(low[0])),
        n=len(tokens),
        on=f"this {kind}, {subject.sampled}; {', '.join(held)}",
    )


def _constant(value: Tensor, *, mean: Tensor) -> Tensor:
    return mean.expand_as(value).clone()
