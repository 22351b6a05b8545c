"""Does a head match what precedes its keys? The trace of its QK circuit through earlier heads.

A key that an earlier previous-token head wrote to carries the token before it. What a later head's
queries make of that is the K-composition term

    W = sum over earlier heads h1 of w(h1) W_E QK OV_{h1}^T W_E^T      [query token, key's token]

with w(h1) how much h1 attends to the token before. A head that looks for its own token there has a
large positive diagonal, and so a large trace: the sum of W's eigenvalues (Olsson et al. 2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headstream.circuits.composing.composition import PAIR
from headstream.circuits.composing.frozen_run import checked_rows
from headstream.circuits.measuring.masses import Offset
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.qk_ov.copying import require_finite
from headstream.circuits.qk_ov.head_factors import check_norms, ov_factors, qk_factors, treatment
from headstream.circuits.qk_ov.weights import qk_circuit
from headstream.circuits.undisturbed import undisturbed
from headstream.models.errors import ShapeError
from headstream.models.given_model import takes_model

if TYPE_CHECKING:
    from headstream.models.decoder import Decoder


@takes_model
def prefix_matching_trace(
    model: Decoder,
    tokens: Any,
    *,
    distance: int | None = None,
    norms: str = "folded",
    attention_mask: Tensor | None = None,
) -> xr.Dataset:
    """The trace of every head's QK circuit through the previous-token attention of earlier heads.

    Args:
        model: the decoder.
        tokens: sample text, as for the model: on it earlier heads' attention to the token before
            is measured.
        distance: query position minus key position in the later head, in tokens; required with
            rotary positions, refused with others.
        norms: "folded" or "ignored", as in `composition_scores`.
        attention_mask: as for the model.
    Returns:
        Dataset with `trace` (layer, head), NaN in layer 0; `part` (earlier_layer, earlier_head,
        later_layer, later_head), each earlier head's term, NaN where it is not earlier; and
        `previous_token` (layer, head), the weights w, mean over queries and examples.
    Raises:
        ConfigError: if `distance` is missing or does not apply, or `norms` is unknown.
        ShapeError: if a weight is NaN or infinite, or no token has one before it.
        HookError: if something edits the run.
    Source:
        Olsson et al. 2022, "In-context Learning and Induction Heads". It has no unit and no upper
        end (theirs run from about -500 to 1250): compare heads of one model. The score's factor
        1/sqrt(d_head), biases, and the norms' scales are left out.
    """
    check_norms(norms)
    require_finite(model)
    config = model.config
    qk_circuit(model, 0, 0, distance=distance, space="residual")  # is the distance in order?
    rows = checked_rows(model, tokens)
    with undisturbed(model, "measure attention to the token before"):
        measured = measure_attention(model, rows, Offset(1), attention_mask=attention_mask)
    by_example = measured["offset_1"].dropna("example", how="all")
    if not by_example.sizes["example"]:
        raise ShapeError(
            "no token has a real one before it, so attention to it has no mean",
            hint="give tokens of two or more",
        )
    weight = by_example.mean("example").transpose("layer", "head").values
    embedding = model.W_E.detach().double()
    gram = embedding.T @ embedding
    part = np.full(2 * (config.n_layers, config.n_heads), np.nan)
    moved: list[tuple[Tensor, Tensor]] = []
    for layer in range(config.n_layers):
        value, out = ov_factors(model, layer, norms=norms)
        if moved:
            query, key = qk_factors(model, layer, distance=distance, norms=norms)
            asked = gram @ query
            for earlier, (carried, written) in enumerate(moved):
                # tr(W_Q W_K^T W_O^T W_V^T W_E^T W_E), through [d_head, d_head] on either side.
                tokens_met = torch.einsum("adi,bdj->abij", carried, asked)
                stream_met = torch.einsum("aid,bdj->abij", written, key)
                trace = (tokens_met * stream_met).sum((-2, -1)).cpu().numpy()
                part[earlier, :, layer] = weight[earlier][:, None] * trace
        moved.append((value, out))
    trace = np.nansum(part, axis=(0, 1))
    trace[0] = np.nan
    heads, layers = list(range(config.n_heads)), list(range(config.n_layers))
    return xr.Dataset(
        {
            "trace": (("layer", "head"), trace),
            "part": (PAIR, part),
            "previous_token": (("layer", "head"), weight),
        },
        coords={
            "layer": layers,
            "head": heads,
            **{axis: layers if axis.endswith("layer") else heads for axis in PAIR},
        },
        attrs={
            "norms": treatment(model, norms),
            "distance": "does not apply" if distance is None else distance,
        },
    )
