"""Who writes the answer? Direct logit attribution over a task's clean prompts."""

from __future__ import annotations

import numpy as np
import xarray as xr

from headstream.analyses.evidence import measured, unknown
from headstream.analyses.kinds import DecompositionResult
from headstream.analyses.patching.inference import mean_interval
from headstream.analyses.patching.task import Task
from headstream.analyses.result import Provenance
from headstream.circuits.stream.residual import decompose_residual
from headstream.models.decoder import Decoder
from headstream.models.given_model import takes_model

# Components with the largest means that get a claim of their own.
_CLAIMED = 3


@takes_model
def direct_writes(model: Decoder, task: Task, *, seed: int = 0) -> DecompositionResult:
    """Split the answer's logit (difference) on the clean prompts over what wrote it.

    The parts are direct effects: what each write adds to the answer through the unembedding, the
    final norm's scale held fixed. They sum to the measured value, or this raises.

    Args:
        seed: of the bootstrap over prompts.
    Raises:
        ExactnessError: if the writes do not sum to the stream.
    """
    run = decompose_residual(model, task.clean, attention_mask=task.attention_mask)
    attribution = run.logit_attribution(task.answer, task.wrong, pos=task.answer_columns)
    values = attribution.values
    ends = np.stack([mean_interval(row, seed=seed) for row in values])
    total = values.sum(0)
    size = np.abs(values.mean(1))
    # Rounding writes nothing: a component far below the total gets no claim.
    order = np.argsort(-size)[: min(_CLAIMED, int((size > 1e-3 * size.max()).sum()))]
    components = attribution["component"].values.tolist()
    of = str(attribution.attrs["of"])
    n = values.shape[1]
    claims = [
        measured(
            f"writes.{components[i]}",
            f"{components[i]} writes {'towards' if values[i].mean() > 0 else 'against'} the "
            "answer directly",
            value=float(values[i].mean()),
            unit="nats",
            n=n,
            interval=(float(ends[i, 0]), float(ends[i, 1])),
            reason=f"direct logit attribution of {total.mean():+.2f} nats in all; {run.norm}",
            where="decomposition",
        )
        for i in order.tolist()
    ]
    claims.append(
        unknown(
            "writes.indirect",
            "what each component does through later heads",
            reason="attribution sees direct writes only; the patching rows intervene",
            where="decomposition",
        )
    )
    data = xr.Dataset(
        {
            "attribution": attribution.drop_vars("pos", errors="ignore"),
            "mean": ("component", values.mean(1)),
            "low": ("component", ends[:, 0]),
            "high": ("component", ends[:, 1]),
            "total": ("example", total),
        }
    )
    return DecompositionResult(
        title=f"Who writes the answer's {of} in {model.name}",
        data=data,
        provenance=Provenance.of(model, seed=seed),
        claims=tuple(claims),
        details={
            "of": of,
            "norm": run.norm,
            "largest_error": run.largest_error,
            "bound": run.bound,
            "unit": "nats",
        },
    )
