"""Small made-up results for the tests of reports: no torch, no model, every number chosen here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from headstream.analyses.evidence import Claim, Evidence, measured, proven, unknown
from headstream.analyses.kinds import (
    AuditResult,
    CircuitsResult,
    DecompositionResult,
    HeadsResult,
    SinksResult,
)
from headstream.analyses.patching.cuts.results import (
    AblationResult,
    FaithfulnessResult,
    RedundancyResult,
)
from headstream.analyses.patching.paths.result import PathResult, path_claims
from headstream.analyses.patching.result import PatchingResult, ranked_cells
from headstream.analyses.patching.words import sentence
from headstream.analyses.result import Provenance, Result

TOKENS = ["<bos>", " When", " Mary", " and", " John", " went"]
SCORES = [
    "previous_token",
    "duplicate_token",
    "current_token",
    "induction",
    "induction_control",
    "sink",
    "copying",
]


def provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "model": "toy-2l",
        "weights_sha256": "ab" * 32,
        "config": {"n_layers": 2, "n_heads": 4, "d_model": 32, "d_head": 8, "d_mlp": None}
        | {"d_vocab": 50, "n_ctx": 64, "positions": "shortformer", "norm": "layernorm"},
        "backend": "naive",
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "versions": {"python": "3.11.2", "headstream": "0.1.0", "torch": "2.13.0"},
        "card": {"task": "repeat a block of tokens", "loss": 0.021, "recipe": {"steps": 3000}},
    }
    return Provenance(**(values | changes))


def prompt(
    tokens: Sequence[str] = TOKENS, *, changed: int = 4, new: str = " Tom"
) -> dict[str, Any]:
    clean = list(range(len(tokens)))
    corrupted = [99 if index == changed else token for index, token in enumerate(clean)]
    return {
        "clean": clean,
        "corrupted": corrupted,
        "clean_tokens": list(tokens),
        "corrupted_tokens": [new if i == changed else token for i, token in enumerate(tokens)],
        "answer": 2,
        "wrong": 4,
        "answer_token": tokens[2],
        "wrong_token": tokens[4],
        "answer_pos": len(tokens) - 1,
        "roles": {"source": 2, "query": len(tokens) - 1},
        "mask": None,
    }


def patching(
    *,
    site: str = "z",
    positions: str = "all",
    direction: str = "denoise",
    n: int = 12,
    mean: np.ndarray | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    causal: Sequence[tuple[int, ...]] = ((0, 1), (1, 2)),
    dtype: Any = np.float64,
    prompts: Sequence[Mapping[str, Any]] | None = None,
    metric: Mapping[str, str] | None = None,
    refused: str | None = None,
    **origin: Any,
) -> PatchingResult:
    """A patching result over layer x head, or over the `coords` given."""
    sign = 1.0 if direction == "denoise" else -1.0
    if mean is None:
        mean = sign * np.array([[0.02, 2.5, 0.0, -0.04], [-1.25, 0.1, 4.25, 0.03]])
    coords = coords or {"layer": [0, 1], "head": [0, 1, 2, 3]}
    dims = tuple(coords)
    rng = np.random.default_rng(0)
    noise = 0.05 * rng.standard_normal((*mean.shape, n))
    effects = mean[..., None] * (1 + noise - noise.mean(axis=-1, keepdims=True))
    is_causal = np.zeros(mean.shape, dtype=bool)
    for index in causal:
        is_causal[index] = n >= 6
    p_value = np.where(np.abs(mean) > 1, 0.0002, 0.61)
    p_value = np.where((mean == 0) | ~np.isfinite(mean) | (n < 6), np.nan, p_value)
    gap = 5.0
    shares = np.full(mean.shape, np.nan) if refused else sign * mean / gap
    data = xr.Dataset(
        {
            "effects": ((*dims, "example"), effects.astype(dtype)),
            "clean": (("example",), 3.0 + 0.1 * rng.standard_normal(n)),
            "corrupted": (("example",), -2.0 + 0.1 * rng.standard_normal(n)),
            "mean": (dims, mean.astype(dtype)),
            "low": (dims, (mean - 0.1).astype(dtype)),
            "high": (dims, (mean + 0.1).astype(dtype)),
            "normalized": (dims, shares),
            "normalized_low": (dims, shares - 0.02),
            "normalized_high": (dims, shares + 0.02),
            "p_value": (dims, p_value),
            "q_value": (dims, p_value / 2),
            "unrelated": (dims, 0.1 * mean),
            "second": (dims, 0.5 * mean),
            "causal": (dims, is_causal),
        },
        coords={**coords, "example": np.arange(n)},
    )
    details: dict[str, Any] = {
        "site": site,
        "positions": positions,
        "direction": direction,
        "values": "pair",
        "engine": "hooks",
        "metric": metric
        or {
            "name": "logit difference",
            "formula": "logit[answer] - logit[wrong]",
            "unit": "nats",
            "noun": "the answer",
        },
        "second_metric": {"name": "log-probability", "formula": "", "unit": "nats", "noun": ""},
        "family": int(np.isfinite(p_value).sum()),
        "flips": 4096,
        "alpha": 0.05,
        "self_patch_max": 0.0,
        "self_patch_bound": 0.0,
        "random_site_95": 0.12,
        "gap": {"mean": gap, "low": 4.9, "high": 5.1, "floor": 0.5, "small": 0},
        "normalized_refused": refused,
        "prompts": list(prompts) if prompts is not None else [prompt() for _ in range(n)],
        "warnings": [],
    }
    claims = [
        proven(
            f"self_patch.{site}",
            f"patching a run with its own {site} changes nothing",
            error=0.0,
            bound=0.0,
        )
    ]
    for cell in ranked_cells(data):
        if cell.causal or abs(cell.mean) > 1:
            claims.append(
                Claim(
                    f"{site}.{cell.label}",
                    sentence(
                        details, cell.label, None if refused else float(np.sign(cell.normalized))
                    ),
                    Evidence.CAUSAL if cell.causal else Evidence.UNKNOWN,
                    value=cell.mean if refused else cell.normalized,
                    unit="nats" if refused else "of the gap",
                    interval=cell.interval if refused else cell.normalized_interval,
                    n=n,
                    reason="p = 0.0002" if cell.causal else "an unrelated prompt does as much",
                    where="patching",
                )
            )
    return PatchingResult(
        title=f"Causal patching of {site}",
        data=data,
        provenance=provenance(**origin),
        claims=tuple(claims),
        details=details,
    )


def by_position(tokens: Sequence[str] = TOKENS, **changes: Any) -> PatchingResult:
    """Patching of the stream at each position of one prompt length."""
    mean = np.linspace(-0.5, 2.0, 2 * len(tokens)).reshape(2, len(tokens))
    values: dict[str, Any] = {
        "site": "resid_pre",
        "positions": "each",
        "mean": mean,
        "coords": {"layer": [0, 1], "pos": list(range(len(tokens)))},
        "causal": [(1, len(tokens) - 1)],
        "prompts": [prompt(tokens)] * 12,
    }
    return patching(**(values | changes))


def heads(*, n_heads: int = 4, **origin: Any) -> HeadsResult:
    """A census of two layers: L0H1 looks one back, L1H2 is an induction head."""
    rng = np.random.default_rng(1)
    score = 0.04 + 0.02 * rng.random((len(SCORES), 2, n_heads))
    score[SCORES.index("previous_token"), 0, 1] = 0.97
    score[SCORES.index("induction"), 1, 2] = 0.94
    score[SCORES.index("copying"), 1, 2] = 0.71
    label = np.full((2, n_heads), "none", dtype="<U17")
    label[0, 1], label[1, 2] = "previous-token", "induction pattern"
    distances = [4, 8, 16, 24]
    by_distance = 0.03 * np.ones((4, 2, n_heads))
    by_distance[:, 1, 2] = [0.93, 0.95, 0.94, 0.92]
    data = xr.Dataset(
        {
            "value": (("score", "layer", "head"), score),
            "low": (("score", "layer", "head"), score - 0.01),
            "high": (("score", "layer", "head"), score + 0.01),
            "chance": (("score",), np.full(len(SCORES), 0.06)),
            "label": (("layer", "head"), label),
            "induction_by_distance": (("distance", "layer", "head"), by_distance),
            "control_by_distance": (("distance", "layer", "head"), 0.02 + 0 * by_distance),
        },
        coords={
            "score": SCORES,
            "layer": [0, 1],
            "head": list(range(n_heads)),
            "distance": distances,
        },
    )
    return HeadsResult(
        title="Head census",
        data=data,
        provenance=provenance(**origin),
        claims=(
            measured(
                "heads.L1H2",
                "L1H2 attends to the token after an earlier copy of the current one",
                value=0.94,
                unit="score",
                n=32,
                interval=(0.93, 0.95),
                reason="over four distances, control 0.02",
                where="heads",
            ),
            unknown(
                "heads.L1H0",
                "L1H0 has a function",
                reason="no score stands out; an ablation on other tasks would settle it",
                where="heads",
            ),
        ),
        details={
            "definitions": {name: f"What {name} measures." for name in SCORES},
            "n": 32,
            "length": 48,
            "distances": distances,
            "notes": ["of random heads 95% have a copying score between -0.2 and +0.2"],
        },
    )


def decomposition(*, n_parts: int = 6, **origin: Any) -> DecompositionResult:
    """Writes that sum to the measured difference exactly."""
    names = ["embed", *(f"L{i // 4}H{i % 4}" for i in range(n_parts - 2)), "bias"]
    rng = np.random.default_rng(2)
    mean = np.zeros(n_parts)
    mean[1 : min(n_parts, 4)] = [2.5, -0.75, 1.5][: min(n_parts, 4) - 1]
    attribution = mean[:, None] + 0.1 * rng.standard_normal((n_parts, 12))
    data = xr.Dataset(
        {
            "attribution": (("component", "example"), attribution),
            "mean": (("component",), attribution.mean(1)),
            "low": (("component",), attribution.mean(1) - 0.06),
            "high": (("component",), attribution.mean(1) + 0.06),
            "total": (("example",), attribution.sum(0)),
        },
        coords={"component": names, "example": np.arange(12)},
    )
    return DecompositionResult(
        title="Who writes the answer",
        data=data,
        provenance=provenance(**origin),
        claims=(),
        details={
            "norm": "final norm's scale held fixed at its value in the run",
            "largest_error": 2.4e-7,
            "bound": 1e-5,
            "of": "logit difference",
            "unit": "nats",
        },
    )


def audit(*, failing: bool = False, **origin: Any) -> AuditResult:
    """Two checks that apply, of which the second can fail, and one that does not."""
    error = 3e-2 if failing else 4.8e-7
    rows = [
        ("M1", "the heads' results and the bias sum to attn_out", 2e-7, True, True),
        ("B2", "the writes sum to the final stream", error, not failing, True),
        ("F1", "the MLP acts on each position alone", None, None, False),
    ]
    return AuditResult(
        title="Audit",
        data=xr.Dataset(),
        provenance=provenance(**origin),
        claims=tuple(
            proven(name, statement, error=value, bound=1e-5)
            for name, statement, value, _, applies in rows
            if applies and value is not None
        ),
        details={
            "rows": [
                {
                    "id": name,
                    "statement": statement,
                    "largest_error": value,
                    "bound": 1e-5,
                    "reason": "float32 rounding" if applies else "no MLP in this model",
                    "worst": "layer 1, position 4" if applies else None,
                    "passed": passed,
                    "applies": applies,
                }
                for name, statement, value, passed, applies in rows
            ]
        },
    )


def sinks(*, n_heads: int = 4, **origin: Any) -> SinksResult:
    """Two layers: L1H2 rests on the first token, which has no value, and needs to."""
    site = (2, n_heads)
    mass = np.full(site, 0.1)
    mass[1, 2] = 0.9
    drain = np.ones(site)
    drain[1, 2], drain[0, 0] = 0.0, np.nan
    effect = np.zeros((2, *site))
    effect[1, 1, 2] = 0.64
    p_value = np.where(effect != 0, 0.0002, np.nan)
    chance = 1 / np.arange(1, 9)
    chance[0] = np.nan
    by_position = np.broadcast_to(chance, (*site, 8)).copy()
    by_position[1, 2, 1:] = 0.9
    data: dict[str, Any] = {
        "sink_mass": (("layer", "head"), mass),
        "sink_mass_low": (("layer", "head"), mass - 0.01),
        "sink_mass_high": (("layer", "head"), mass + 0.01),
        "sink_rate": (("layer", "head"), (mass > 0.3).astype(float)),
        "value_drain": (("layer", "head"), drain),
        "written_drain": (("layer", "head"), drain),
        "peak": (("layer",), np.array([1.0, 2.5])),
        "mass_by_position": (("layer", "head", "position"), by_position),
        "chance_by_position": (("position",), chance),
    }
    for name, dims, at in (("effect", ("cut", "layer", "head"), ...), ("together", ("cut",), None)):
        mean = effect if at is ... else effect[:, 1, 2]
        p = p_value if at is ... else p_value[:, 1, 2]
        data |= {
            name: (dims, mean),
            f"{name}_low": (dims, mean - 0.02),
            f"{name}_high": (dims, mean + 0.02),
            f"{name}_p": (dims, p),
            f"{name}_control": (dims, 0.01 * mean),
            f"{name}_causal": (dims, mean > 0.5),
        }
    return SinksResult(
        title="Attention sinks",
        data=xr.Dataset(
            data,
            {
                "cut": ["dropped", "redistributed"],
                "layer": [0, 1],
                "head": list(range(n_heads)),
                "position": list(range(8)),
            },
        ),
        provenance=provenance(**origin),
        claims=(
            Claim(
                "sinks.L1H2.redistributed",
                "cutting L1H2 from the first token moves the loss",
                Evidence.CAUSAL,
                0.64,
                "nats",
                (0.62, 0.66),
                32,
                "p = 0.0002; cutting another key +0.006 nats",
                "sinks",
            ),
        ),
        details={
            "definitions": {"sink_mass": "mean attention to the first token"},
            "n": 32,
            "eps": 0.3,
            "T": 8,
            "rate": 12.5,
            "chance": 0.1,
            "margin": 0.3,
            "notes": ["the first token is BOS"],
        },
    )


def circuits(
    *, layers: int = 2, n_heads: int = 4, tokens: Sequence[str] = TOKENS, **origin: Any
) -> CircuitsResult:
    """L0H1 looks one back and L1H2 finds its own token there; L0H0 is idle."""
    site = (layers, n_heads)
    names = [f"L{layer}H{head}" for layer in range(layers) for head in range(n_heads)]
    finder = "L1H2" if layers > 1 else None
    copying, first = np.full(site, 0.05), np.full(site, 0.04)
    distance, excess, rank = np.full(site, np.nan), np.full(site, np.nan), np.full(site, 3.0)
    distance[0, 1], excess[0, 1] = 1, 9.5
    copying[0, 0], rank[0, 0] = np.nan, 0
    if finder is not None:
        copying[1, 2], first[1, 2] = 0.98, 0.96
    behaviour = np.where(np.isfinite(copying), copying - 0.4, np.nan)
    pairs = [
        [through, earlier, later, 0.1]
        for later in names[n_heads:]
        for earlier in names[1 : names.index(later) // n_heads * n_heads]
        for through in "QKV"
    ]
    if finder is not None:
        (found,) = [pair for pair in pairs if pair[:3] == ["K", "L0H1", finder]]
        found[3] = 0.3
    pairs.sort(key=lambda pair: -pair[3])
    compared, pairs = len(pairs), pairs[:500]
    best = [[tokens[i], tokens[i + 1], 2.5 / (i + 1)] for i in (0, 2, 4)]
    cards = [
        {
            "head": name,
            "matches": [[*pair[:2], 0.0] for pair in best] if name == "L0H0" else best,
            "moves": [[*pair[:2], 0.0] for pair in best] if name == "L0H0" else best[:1],
            "qk_distance": None,
            "scores_from": "content x content 93%, position x content 4% (query x key)",
            "partners": [pair for pair in pairs if name in pair[1:3] and pair[3] > 0.2],
            "through": [["L0H1", 0.97], ["L0H2", 0.05]] if name == finder else [],
        }
        for name in names
    ]
    at = ("layer", "head")
    return CircuitsResult(
        title="Circuits of the heads of toy-2l",
        data=xr.Dataset(
            {
                "copying": (at, copying),
                "first": (at, first),
                "behaviour": (at, behaviour),
                "behaviour_low": (at, behaviour - 0.02),
                "behaviour_high": (at, behaviour + 0.02),
                "behaviour_chance": (at, np.where(np.arange(n_heads) == 1, -0.91, -0.9) + 0 * rank),
                "qk_rank": (at, rank),
                "ov_rank": (at, rank),
                "distance": (at, distance),
                "distance_excess": (at, excess),
            },
            coords={"layer": list(range(layers)), "head": list(range(n_heads))},
        ),
        provenance=provenance(**origin),
        claims=()
        if finder is None
        else (
            measured(
                "circuits.L1H2.matching",
                "through what L0H1 writes, L1H2 looks for its own token",
                value=0.97,
                unit="share of tokens",
                n=50,
                reason="weights alone; chance 0.020",
                where="circuits",
            ),
            unknown(
                "circuits.used",
                "that the model uses these paths for the answer",
                reason="weights say what a head could do; patching the path would settle it",
                where="circuits",
            ),
        ),
        details={
            "n": 16,
            "positions": "shortformer",
            "d_head": 8,
            "copying_random": [-0.25, 0.2],
            "first_chance": 0.02,
            "compositions": "1 of 36 compositions are above 0.200",
            "composition": {
                "chance": 0.12 if pairs else None,
                "bar": 0.2 if pairs else None,
                "compared": compared,
                "out": int(bool(pairs)),
            },
            "pairs": pairs,
            "cards": cards,
            "caveats": [
                "QK: the division of 'blocks.0.ln1' is left out: it differs by position",
                "OV: the division of 'blocks.0.ln1' is left out: it differs by position",
                "QK: the division of 'blocks.1.ln1' is left out: it differs by position",
                "OV: only the direct path to the logits",
            ],
        },
    )


METRIC = {
    "name": "logit_difference",
    "formula": "logit(answer) - logit(wrong)",
    "unit": "nats",
    "noun": "the answer",
}


def paths(
    *,
    n: int = 12,
    direction: str = "denoise",
    roles: Sequence[str] = (),
    refused: str | None = None,
    freeze_mlps: bool = True,
    receivers: Sequence[str] | None = None,
    **origin: Any,
) -> PathResult:
    """L0H1 feeds the keys of L1H2; L0H2 would feed them too, were it not for the control."""
    sign = 1.0 if direction == "denoise" else -1.0
    senders = ["L0H0", "L0H1", "L0H2", "L1H2"]
    names = [f"L1H{head}.{channel}" for channel in "qkv" for head in range(3)] + ["logits"]
    names = names if receivers is None else list(receivers)
    mean = np.full((len(senders), len(names)), 0.02)
    known = {("L0H1", "L1H2.k"): 4.0, ("L0H2", "L1H2.k"): -0.75, ("L1H2", "logits"): 3.5}
    for (sender, receiver), value in known.items():
        if receiver in names:
            mean[senders.index(sender), names.index(receiver)] = value
    # A head of the last layer is read by the logits alone.
    mean[3, [name != "logits" for name in names]] = np.nan
    mean *= sign
    dims: tuple[str, ...] = ("sender", "receiver")
    coords: dict[str, Any] = {"sender": senders, "receiver": names}
    if roles:
        mean = mean[..., None] * np.linspace(1, 0.5, len(roles))
        dims, coords = (*dims, "role"), coords | {"role": list(roles)}
    rng = np.random.default_rng(0)
    noise = 0.05 * rng.standard_normal((*mean.shape, n))
    effects = mean[..., None] * (1 + noise - noise.mean(axis=-1, keepdims=True))
    p_value = np.where(np.abs(mean) > 0.3, 0.0002, 0.61)
    p_value = np.where(np.isfinite(mean) & (n >= 6), p_value, np.nan)
    gap = 5.0
    shares = np.full(mean.shape, np.nan) if refused else sign * mean / gap
    total = np.nansum(mean, axis=1)
    data = xr.Dataset(
        {
            "effects": ((*dims, "example"), effects),
            "clean": (("example",), 3.0 + 0.1 * rng.standard_normal(n)),
            "corrupted": (("example",), -2.0 + 0.1 * rng.standard_normal(n)),
            "mean": (dims, mean),
            "low": (dims, mean - 0.1),
            "high": (dims, mean + 0.1),
            "normalized": (dims, shares),
            "normalized_low": (dims, shares - 0.02),
            "normalized_high": (dims, shares + 0.02),
            "p_value": (dims, p_value),
            "q_value": (dims, p_value / 2),
            "unrelated": (dims, np.where(sign * mean < 0, mean, 0.1 * mean)),
            "second": (dims, 0.5 * mean),
            "causal": (dims, (sign * np.nan_to_num(mean) > 1) & (n >= 6)),
            "total_effects": (
                (*(dim for dim in dims if dim != "receiver"), "example"),
                np.repeat(total[..., None], n, axis=-1),
            ),
            "total": (tuple(dim for dim in dims if dim != "receiver"), total),
            "total_low": (tuple(dim for dim in dims if dim != "receiver"), total - 0.1),
            "total_high": (tuple(dim for dim in dims if dim != "receiver"), total + 0.1),
        },
        coords={**coords, "example": np.arange(n)},
    )
    details: dict[str, Any] = {
        "site": "path",
        "positions": "roles" if roles else "all",
        "direction": direction,
        "values": "pair",
        "engine": "suffix",
        "freeze_mlps": freeze_mlps,
        "metric": dict(METRIC),
        "second_metric": {"name": "log-probability", "formula": "", "unit": "nats", "noun": ""},
        "family": int(np.isfinite(p_value).sum()),
        "flips": 4096,
        "alpha": 0.05,
        "self_patch_max": 0.0,
        "self_patch_bound": 0.0,
        "random_site_95": 0.12,
        "gap": {"mean": gap, "low": 4.9, "high": 5.1, "floor": 0.5, "small": 0},
        "normalized_refused": refused,
        "prompts": [prompt() for _ in range(n)],
        "warnings": [],
    }
    return PathResult(
        title=f"Path patching, {direction}",
        data=data,
        provenance=provenance(**origin),
        claims=path_claims(data, details),
        details=details,
    )


def redundant(*, causal: bool = True, **origin: Any) -> RedundancyResult:
    """Two heads that stand in for each other, and a third that does not."""
    names, n = ["L1H0", "L1H2", "L1H3"], 12
    alone, recovered = np.array([-0.25, -0.5, 0.0]), np.array([0.62, 0.81, 0.04])
    wave = 1 + 0.05 * np.cos(np.arange(n))
    return RedundancyResult(
        title="A set of 3 heads of toy-2l, cut together and one by one",
        data=xr.Dataset(
            {
                "base": ("example", 5 * wave),
                "joint": ("example", -4 * wave),
                "alone": (("head", "example"), alone[:, None] * wave),
                "restored": (("head", "example"), -4 * (1 - recovered[:, None]) * wave),
                "alone_mean": ("head", alone),
                "alone_p": ("head", np.array([0.4, 0.2, np.nan])),
                "recovered": ("head", recovered),
                "recovered_low": ("head", recovered - 0.03),
                "recovered_high": ("head", recovered + 0.03),
                "member": ("head", (recovered > 0.2) & causal),
            },
            coords={"head": names, "example": np.arange(n)},
        ),
        provenance=provenance(**origin),
        claims=(
            proven("self_cut.z", "cut to their own values nothing moves", error=0.0, bound=3e-3),
            Claim(
                "set",
                f"the set {', '.join(names)} is needed for the answer",
                Evidence.CAUSAL if causal else Evidence.UNKNOWN,
                -4.0,
                "nats",
                (-4.1, -3.9),
                n,
                "p = 0.0002; values: zero" if causal else "p = 0.3 > 0.05; values: zero",
                "ablation",
            ),
            *(
                Claim(
                    f"set.{name}",
                    f"{name} can stand in for the rest of the set",
                    Evidence.CAUSAL if causal and share > 0.2 else Evidence.UNKNOWN,
                    share,
                    "of what the cut took",
                    (share - 0.03, share + 0.03),
                    n,
                    f"restoring it alone recovers {share:.0%}",
                    "ablation",
                )
                for name, share in zip(names, recovered.tolist())
            ),
        ),
        details={
            "set": names,
            "values": "zero",
            "values_in_words": "zero",
            "how": "full",
            "metric": dict(METRIC),
            "worse": -1,
            "joint": {"mean": -4.0, "low": -4.1, "high": -3.9}
            | {"p_value": 0.0002 if causal else 0.3, "control": -0.125, "causal": causal},
            "least": 0.2,
            "control": "the same cut does as much to the corrupted prompts",
            "family": 3,
            "self_cut_max": 0.0,
            "self_cut_bound": 3e-3,
            "n": n,
        },
    )


def faithful(*, refused: str | None = None, **origin: Any) -> FaithfulnessResult:
    """Two heads that are nearly all of the model."""
    circuit, n = ["L0H1", "L1H2"], 12
    parts: dict[str, dict[str, Any]] = {
        "faithfulness": {"value": 0.97, "low": 0.95, "high": 0.99, "random_mean": 0.1}
        | {"percentile": 1.0, "at_least": 0},
        "left": {"value": 0.01, "low": -0.01, "high": 0.03, "random_mean": 0.6}
        | {"percentile": 0.75, "at_least": 5},
    }
    if refused is not None:
        for part in parts.values():
            part |= {"value": None, "low": None, "high": None, "percentile": None}
    choices = {
        "unit": "attention heads (z before W_O)",
        "nodes or edges": "nodes",
        "values": "the mean over the uncut prompts, position by position",
        "positions": "all",
        "direction": "heads are cut in the run on the clean prompts",
        "circuit or complement": "all heads but the circuit for faithfulness",
    }
    return FaithfulnessResult(
        title="A circuit of 2 heads of toy-2l, and the rest",
        data=xr.Dataset(
            {
                **{
                    name: ("example", value + 0.1 * np.cos(np.arange(n)))
                    for name, value in (
                        ("full", 5),
                        ("empty", 0),
                        ("circuit", 4.85),
                        ("without", 0.05),
                    )
                },
                "random_faithfulness": ("random", np.linspace(0, 0.2, 20)),
                "random_left": ("random", np.linspace(0.2, 1, 20)),
            },
            coords={"example": np.arange(n), "random": np.arange(20)},
        ),
        provenance=provenance(**origin),
        claims=(
            proven("self_cut.z", "cut to their own values nothing moves", error=0.0, bound=3e-3),
            *(
                Claim(
                    id,
                    f"the circuit L0H1, L1H2 {words} the answer",
                    Evidence.CAUSAL,
                    parts[part]["value"],
                    unit,
                    None if refused else (parts[part]["low"], parts[part]["high"]),
                    n,
                    f"p = 0.0002; {'; '.join(f'{w}: {c}' for w, c in choices.items())}",
                    "ablation",
                )
                for id, words, part, unit in (
                    ("circuit.faithful", "carries", "faithfulness", "kept"),
                    ("circuit.complete", "is needed for", "left", "left without it"),
                )
            ),
        ),
        details={
            "circuit": circuit,
            "choices": choices,
            "values": "mean",
            **parts,
            "refused": refused,
            "metric": dict(METRIC),
            "n_random": 20,
            "all_sets": False,
            "self_cut_max": 0.0,
            "self_cut_bound": 3e-3,
            "n": n,
        },
    )


def ablation(*, cuts: int = 8, how: str = "full", **origin: Any) -> AblationResult:
    """Every head cut alone, and two of them together."""
    n = 12
    names = [*(f"L{i // 4}H{i % 4}" for i in range(cuts)), "pair"]
    mean = np.full(len(names), 0.01)
    mean[1], mean[-1] = -4.0, -4.5
    p = np.where(mean < -1, 0.0002, 0.8)
    return AblationResult(
        title="Heads of toy-2l cut",
        data=xr.Dataset(
            {
                "effects": (("cut", "example"), mean[:, None] * np.ones(n)),
                "base": ("example", np.full(n, 5.0)),
                "mean": ("cut", mean),
                "low": ("cut", mean - 0.1),
                "high": ("cut", mean + 0.1),
                "control": ("cut", 0.1 * mean),
                "p_value": ("cut", p),
                "q_value": ("cut", p),
                "size": ("cut", np.array([1] * cuts + [2])),
                "lost": ("cut", -mean / 5),
                "lost_low": ("cut", -mean / 5 - 0.02),
                "lost_high": ("cut", -mean / 5 + 0.02),
                "causal": ("cut", mean < -1),
            },
            coords={"cut": names, "example": np.arange(n)},
        ),
        provenance=provenance(**origin),
        claims=(
            Claim(
                "cut.L0H1",
                "L0H1 is needed for the answer",
                Evidence.CAUSAL,
                -4.0,
                "nats",
                (-4.1, -3.9),
                n,
                "p = 0.0002; values: zero",
                "ablation",
            ),
            Claim(
                "cut.pair",
                "pair (L0H1, L0H2) is needed for the answer",
                Evidence.UNKNOWN,
                -4.5,
                "nats",
                (-4.6, -4.4),
                n,
                "the corrupted prompts lose as much: -0.45 nats; values: zero",
                "ablation",
            ),
        ),
        details={
            "values": "zero",
            "values_in_words": "zero",
            "how": how,
            "metric": dict(METRIC),
            "worse": -1,
            "cuts": {name: [name] for name in names[:-1]} | {"pair": ["L0H1", "L0H2"]},
            "control": "the same cut does as much to the corrupted prompts",
            "family": len(names),
            "self_cut_max": 0.0,
            "self_cut_bound": 3e-3,
            "n": n,
        },
    )


def everything() -> list[Result]:
    """One of each kind, and two more maps."""
    return [
        audit(),
        heads(),
        patching(),
        patching(direction="noise"),
        by_position(),
        paths(),
        redundant(),
        faithful(),
        ablation(),
        decomposition(),
        sinks(),
        circuits(),
    ]
