"""Which heads stand out? The census of `circuits.heads` as a result with its claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headstream.analyses.evidence import Claim, measured, unknown
from headstream.analyses.kinds import HeadsResult
from headstream.analyses.result import Provenance
from headstream.circuits.heads import HeadCensus, score_heads
from headstream.circuits.long_census import score_long_heads
from headstream.models.decoder import Decoder
from headstream.models.given_model import takes_model
from headstream.models.names import head_name

# Whether heads with the pattern of induction do what it looks like: the induction study says.
OPEN_QUESTION = "heads.I1"
# What a label is measured by, and how the claim says it.
_SENTENCES = {
    "previous-token": ("previous_token", "attends to the token before"),
    "duplicate-token": ("duplicate_token", "attends to earlier copies of the same token"),
    "current-token": ("current_token", "attends to its own token"),
    "induction pattern": (
        "induction",
        "attends to the token after an earlier copy, wherever it stands",
    ),
    "sink": ("sink", "rests on the first token of random tokens"),
}


@takes_model
def heads(model: Decoder, *, seed: int = 0, **options: Any) -> HeadsResult:
    """Score every head of `model` and say what stands out from chance.

    Args:
        seed: of the random sequences.
        options: as for `circuits.heads.score_heads`.
    """
    return heads_result(model, score_heads(model, seed=seed, **options), seed=seed)


@takes_model
def long_heads(
    model: Decoder,
    *,
    length: int,
    n: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> HeadsResult:
    """The census on sequences of `length` tokens, in memory that grows as `length` does.

    Args, Raises: as for `circuits.long_census.score_long_heads`.
    """
    census = score_long_heads(model, length=length, n=n, seed=seed, progress=progress)
    result = heads_result(model, census, seed=seed)
    return replace(result, title=f"Head census of {model.name} at {length} tokens")


def heads_result(model: Decoder, census: HeadCensus, *, seed: int) -> HeadsResult:
    """A census with a MEASURED claim for each head that has a label, and what stays UNKNOWN."""
    data = census.data
    claims: list[Claim] = []
    n = int(census.details["n"])
    for layer in data["layer"].values.tolist():
        for head in data["head"].values.tolist():
            label = str(data["label"].sel(layer=layer, head=head).item())
            if label == "none":
                continue
            score, sentence = _SENTENCES[label]
            at = {"score": score, "layer": layer, "head": head}
            chance = float(data["chance"].sel(score=score))
            claims.append(
                measured(
                    f"heads.{head_name(layer, head)}",
                    f"{head_name(layer, head)} {sentence}",
                    value=float(data["value"].sel(at)),
                    unit="attention mass",
                    n=n,
                    interval=(float(data["low"].sel(at)), float(data["high"].sel(at))),
                    reason=f"chance level {chance:.3f}; nothing was intervened on",
                    where="heads",
                )
            )
    if any(str(label) == "induction pattern" for label in data["label"].values.ravel()):
        claims.append(
            unknown(
                OPEN_QUESTION,
                "that the induction pattern is what copies the answer",
                reason="a pattern is not an effect: the patching rows say which heads move the "
                "answer; cutting all such heads together would settle it",
                where="heads",
            )
        )
    return HeadsResult(
        title=f"Head census of {model.name}",
        data=data,
        provenance=Provenance.of(model, seed=seed),
        claims=tuple(claims),
        details=census.details,
    )
