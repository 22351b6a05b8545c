"""Does a head rest on the first token, what does it get there, and what moves without it?

    measured   mass on the first token, sink rate, value drain, residual peak
    cut        every edge from later queries to the first token, head by head and in all heads:
               "dropped" (its weight is lost) or "redistributed" (the rest of the row takes it)
    control    one edge a query to another earlier key instead

The unit is the sequence; an effect is the change of its mean next-token loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Generator, Tensor
from tqdm import tqdm

from headstream.analyses.evidence import Claim, Evidence, measured, unknown
from headstream.analyses.kinds import SinksResult
from headstream.analyses.patching.inference import (
    ALPHA,
    MIN_PAIRS,
    failed_conditions,
    mean_interval,
    sign_flips,
)
from headstream.analyses.patching.task import Task
from headstream.analyses.result import Provenance
from headstream.circuits.first_token import cut_another, cut_first, first_token_norms, losses
from headstream.circuits.labels import LABEL_MARGIN
from headstream.circuits.measuring.masses import SinkMass, SinkRate
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.qk_ov.copying import require_finite
from headstream.models.arguments import check_count, check_mask, check_seed
from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model
from headstream.models.names import head_name
from headstream.models.vocabulary import check_tokens

Array = npt.NDArray[np.floating]

CUTS = {"dropped": False, "redistributed": True}
EPS, T = 0.3, 64
DEFAULT_LENGTH = 64
DEFINITIONS = {
    "sink_mass": "mean attention to the first token, over later queries (not the sink rate)",
    "sink_rate": "share of sequences in which the importance of the first token, the mean of its "
    "column over the first T queries, its own included, is above eps (Gu et al. 2024)",
    "value_drain": "norm of the first token's value over the mean norm of the others",
    "written_drain": "the same for what the value writes to the stream, v W_O",
    "peak": "norm of the stream at the first token over the mean of the others, after each layer",
    "effect": "change of the mean next-token loss of a sequence when no later query reads the "
    "first token; dropped: the weight is lost, redistributed: the rest of the row takes it over",
    "control": "the same when each query from the third on loses one random earlier key that is "
    "not the first token",
}


class _Inputs(NamedTuple):
    tokens: Tensor
    real: Tensor
    words: str


@takes_model
def sinks(
    model: Decoder,
    *,
    tokens: Any = None,
    n: int = 32,
    length: int | None = None,
    seed: int = 0,
    attention_mask: Tensor | None = None,
    eps: float = EPS,
    progress: bool = False,
) -> SinksResult:
    """Measure every head's attention sink, and what the loss does when it is cut.

    About 4 * n_layers * n_heads forward passes over the tokens; nothing of size n x n.

    Args:
        model: the decoder.
        tokens: [example, pos]; None takes the clean prompts of the task that the card names, each
            followed by its answer, or else (and whenever `length` is given) random tokens.
        n, length: sequences, and tokens of each, when they are drawn here.
        seed: of everything that is drawn.
        attention_mask: [example, pos], for tokens given here; the first token is a row's first
            real one.
        eps: threshold of the sink rate.
        progress: a bar on stderr that counts cuts.
    Returns:
        `SinksResult`; CAUSAL is said by the one rule, the maximum being over heads and both cuts.
    Raises:
        ShapeError: if a sequence has fewer than three real tokens, `n`, `length`, `seed` or `eps`
            are out of range, `length` is given beside tokens, or a weight is NaN or infinite, or
            so large that the loss is.
        TokenError: for tokens outside the vocabulary.
    """
    check_seed(seed)
    require_finite(model)
    inputs = _inputs(model, tokens, attention_mask, n, length, seed)
    real = inputs.real
    n = len(real)
    data, details = _measured(model, inputs, eps)
    base = losses(model, inputs.tokens, real)
    floor = 32 * float(torch.finfo(model.dtype).eps) * (1.0 + float(np.abs(base).max()))
    sink, other = cut_first(real), cut_another(real, Generator().manual_seed(seed))
    layers, heads = range(model.config.n_layers), range(model.config.n_heads)
    total = 2 * len(CUTS) * (len(layers) * len(heads) + 1)

    with tqdm(total=total, desc="cuts", disable=None if progress else True) as bar:

        def effects(cut: str, layer: int | None, head: int | None) -> Array:
            found = []
            for edges in (sink, other):
                after = losses(
                    model,
                    inputs.tokens,
                    real,
                    edges,
                    layer=layer,
                    head=head,
                    renormalise=CUTS[cut],
                )
                found.append(after - base)
                bar.update()
            return np.stack(found)

        # [cut, layer, head, (sink, control), example]
        alone = np.array(
            [[[effects(c, layer, h) for h in heads] for layer in layers] for c in CUTS]
        )
        together = np.array([effects(cut, None, None) for cut in CUTS])
    data |= _tested("effect", ("cut", "layer", "head"), alone, seed, floor)
    data |= _tested("together", ("cut",), together, seed, floor)
    coords = {
        "cut": list(CUTS),
        "layer": list(layers),
        "head": list(heads),
        "position": np.arange(data["mass_by_position"][1].shape[-1]),
        "example": np.arange(n),
    }
    details |= {
        "loss": float(base.mean()),
        "floor": floor,
        "alpha": ALPHA,
        "unit": "nats",
        "seed": seed,
    }
    result = SinksResult(
        title=f"Attention sinks of {model.name}",
        data=xr.Dataset(data, coords),
        provenance=Provenance.of(model, seed=seed),
        details=details,
    )
    return replace(result, claims=tuple(_claims(result)))


def _inputs(
    model: Decoder,
    tokens: Any,
    attention_mask: Tensor | None,
    n: int,
    length: int | None,
    seed: int,
) -> _Inputs:
    config = model.config
    if tokens is not None:
        if length is not None:
            raise ShapeError(f"length={length!r} belongs to drawn sequences, and tokens were given")
        if isinstance(tokens, (str, list, tuple)):
            tokens = model.to_tokens(tokens)
        given = check_tokens(tokens, config.d_vocab).to(model.device)
        mask = check_mask(attention_mask, given.shape[0], given.shape[1], model.device)
        real = torch.ones_like(given, dtype=torch.bool) if mask is None else mask
        found = _Inputs(given, real, "the tokens given")
    else:
        if attention_mask is not None:
            raise ShapeError("attention_mask belongs to tokens, and none were given")
        n = check_count("n", n, of="sequences")
        found = _drawn(model, n, length, seed)
    fewest = int(found.real.sum(1).min())
    if fewest < 3:
        raise ShapeError(
            f"a sequence has {fewest} real tokens, and a sink and its control take at least 3"
        )
    return found


def _drawn(model: Decoder, n: int, length: int | None, seed: int) -> _Inputs:
    config = model.config
    if length is None and (model.card or {}).get("task"):
        task = Task.for_model(model, n=n, seed=seed)
        if task.attention_mask is None and task.clean.shape[1] < config.n_ctx:
            whole = torch.cat([task.clean, task.answer[:, None]], 1).to(model.device)
            words = "clean prompts of the model's task, each followed by its answer"
            return _Inputs(whole, torch.ones_like(whole, dtype=torch.bool), words)
        clean = task.clean.to(model.device)
        mask = check_mask(task.attention_mask, len(clean), clean.shape[1], model.device)
        real = torch.ones_like(clean, dtype=torch.bool) if mask is None else mask
        return _Inputs(clean, real, "clean prompts of the model's task")
    if length is None:
        length = min(DEFAULT_LENGTH, config.n_ctx)
    length = check_count("length", length, of="tokens")
    if not 3 <= length <= config.n_ctx:
        raise ShapeError(
            f"length={length} is out of range: at least 3 tokens, at most the "
            f"n_ctx={config.n_ctx} of {model.name!r}"
        )
    special = {config.bos_token_id, config.pad_token_id}
    content = torch.tensor([token for token in range(config.d_vocab) if token not in special])
    index = torch.randint(len(content), (n, length), generator=Generator().manual_seed(seed))
    drawn = content[index]
    if config.bos_token_id is not None:
        drawn[:, 0] = config.bos_token_id
    drawn = drawn.to(model.device)
    return _Inputs(drawn, torch.ones_like(drawn, dtype=torch.bool), "random tokens")


def _measured(model: Decoder, inputs: _Inputs, eps: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is observed: arrays, and how they were had."""
    tokens, real = inputs.tokens, inputs.real
    span = min(T, int(real.sum(1).min()))
    mass, rate = SinkMass(1), SinkRate(eps, span)
    found = measure_attention(model, tokens, [mass, rate], attention_mask=real)
    by_query = measure_attention(model, tokens, SinkMass(1), attention_mask=real, per_position=True)
    # By the number of the token in its row, whatever padding stands before it.
    order = (~real).int().argsort(dim=1, stable=True).cpu().numpy()
    queries = by_query[mass.name].transpose("layer", "head", "example", "pos").values
    ranked = np.take_along_axis(queries, order[None, None], -1)
    levels = by_query[f"chance_{mass.name}"].transpose("example", "pos").values
    chance = np.take_along_axis(levels, order, -1)
    per_example = found[mass.name].transpose("layer", "head", "example").values.astype(np.float64)
    low, high = mean_interval(per_example)
    norms = first_token_norms(model, tokens, real)
    rates = found[rate.name].mean("example").transpose("layer", "head").values.astype(np.float64)
    site = ("layer", "head")
    # Over few tokens the first has a large share of every column: uniform attention is "a sink".
    told = not bool((found[f"chance_{rate.name}"] > 0).any())
    if not told:
        rates = np.full_like(rates, np.nan)
    arrays = {
        "sink_mass": (site, per_example.mean(-1)),
        "sink_mass_low": (site, low),
        "sink_mass_high": (site, high),
        "sink_rate": (site, rates),
        "value_drain": (site, _mean(norms.value)),
        "written_drain": (site, _mean(norms.written)),
        "peak": (("layer",), _mean(norms.stream)),
        "mass_by_position": ((*site, "position"), _mean(np.moveaxis(ranked, 2, -1))),
        "chance_by_position": (("position",), _mean(chance.T)),
    }
    bos = model.config.bos_token_id
    starts = tokens[real & (real.long().cumsum(1) == 1)]
    has_bos = bos is not None and bool((starts == bos).all())
    notes = [f"{inputs.words}, n = {len(real)}, {int(real.sum(1).max())} tokens at most"]
    notes.append(
        "the first token is BOS"
        if has_bos
        else "no BOS stands first: what is measured is whatever token comes first"
    )
    if not told:
        notes.append(
            f"the sink rate does not apply: over {span} tokens uniform attention itself is above "
            f"eps = {eps:g}"
        )
    elif span < T:
        notes.append(f"the sink rate is over T = {span} tokens, not the usual {T}")
    details = {
        "definitions": DEFINITIONS,
        "n": len(real),
        "eps": eps,
        "T": span,
        "rate": 100 * float(rates.mean()) if told else None,
        "chance": float(found[f"chance_{mass.name}"].mean()),
        "margin": LABEL_MARGIN,
        "has_bos": has_bos,
        "inputs": inputs.words,
        "notes": notes,
    }
    return arrays, details


def _tested(
    name: str, dims: tuple[str, ...], both: Array, seed: int, floor: float
) -> dict[str, Any]:
    """Mean, interval, p and control of effects [dims..., (sink, control), example]."""
    effects, control = both[..., 0, :], both[..., 1, :]
    low, high = mean_interval(effects, seed=seed)
    tested = sign_flips(effects, seed=seed, floor=floor)
    mean, other = effects.mean(-1), control.mean(-1)
    n = effects.shape[-1]
    causal = np.zeros(mean.shape, dtype=bool)
    for at in np.ndindex(mean.shape):
        causal[at] = not _failed(float(mean[at]), float(tested.p_value[at]), float(other[at]), n)
    return {
        f"{name}s" if name == "effect" else f"{name}_effects": ((*dims, "example"), effects),
        name: (dims, mean),
        f"{name}_low": (dims, low),
        f"{name}_high": (dims, high),
        f"{name}_p": (dims, tested.p_value),
        f"{name}_control": (dims, other),
        f"{name}_causal": (dims, causal),
    }


def _failed(mean: float, p_value: float, control: float, n: int) -> list[str]:
    """The conditions of CAUSAL that a cut fails, in words."""
    if n >= MIN_PAIRS and not np.isfinite(p_value):
        return ["its effects are zero to rounding"]
    return failed_conditions(
        mean=float(mean),
        p_value=float(p_value),
        unrelated=float(control),
        n=n,
        unit="nats",
        examples="sequences",
        control="cutting another key does as much",
    )


def _claims(result: SinksResult) -> list[Claim]:
    """Resting heads are MEASURED; a cut that moves the loss is CAUSAL, else UNKNOWN and why."""
    claims: list[Claim] = []
    data, details, resting = result.data, result.details, result.resting
    n = int(details["n"])
    inputs = str(details["inputs"])
    # The census rests on other tokens: one head may have a claim of either.
    of = "the task's prompts" if inputs.startswith("clean prompts") else inputs
    alone = data["sink_mass"].size == 1
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            cell = data.sel(layer=layer, head=head)
            name = head_name(layer, head)
            rests = (layer, head) in resting
            if rests:
                drain = float(cell["value_drain"])
                claims.append(
                    measured(
                        f"sinks.{name}",
                        f"{name} rests on the first token of {of}",
                        value=float(cell["sink_mass"]),
                        unit="attention mass",
                        n=n,
                        interval=(float(cell["sink_mass_low"]), float(cell["sink_mass_high"])),
                        reason=f"chance {details['chance']:.3f}; "
                        + (
                            f"value of the first token {drain:.2f} times the others'"
                            if np.isfinite(drain)
                            else "its values are zero"
                        ),
                        where="sinks",
                    )
                )
            if rests or alone or bool(cell["effect_causal"].any()):
                claims += _cut_claims(cell, "effect", name, n)
    if not alone:
        claims += _cut_claims(data, "together", "all heads", n)
    return claims


def _cut_claims(cell: xr.Dataset, variable: str, name: str, n: int) -> list[Claim]:
    claims = []
    for cut in CUTS:
        at = cell.sel(cut=cut)
        mean, low, high, p, control = (
            float(at[f"{variable}{end}"]) for end in ("", "_low", "_high", "_p", "_control")
        )
        weight = "its weight dropped" if cut == "dropped" else "its weight redistributed"
        id = f"sinks.{name.replace(' ', '_')}.{cut}"
        failed = _failed(mean, p, control, n)
        does = "moves" if failed else "raises" if mean > 0 else "lowers"
        statement = f"cutting {name} from the first token, {weight}, {does} the loss"
        if failed:
            claims.append(unknown(id, statement, reason="; ".join(failed), where="sinks"))
            continue
        claims.append(
            Claim(
                id,
                statement,
                Evidence.CAUSAL,
                mean,
                "nats",
                (low, high),
                n,
                f"p = {p:.2g} with the maximum over "
                + ("heads and cuts" if variable == "effect" else "cuts")
                + f"; cutting another key {control:+.3f} nats",
                "sinks",
            )
        )
    return claims


def _mean(values: Array) -> Array:
    """Mean over the last axis of what is there; NaN where nothing is."""
    present = np.isfinite(values)
    count = present.sum(-1)
    total = np.where(present, values, 0.0).sum(-1)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan), dtype=np.float64)
