"""Composition scores and virtual OV circuits against TransformerLens on the same weights.

Its `composition_scores` (the function behind `TransformerBridge.all_composition_scores`) goes
through singular value decompositions of `FactoredMatrix`; ours through QR. Bound: 1e-10 in float64.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformer_lens.FactoredMatrix import FactoredMatrix
from transformer_lens.utilities import composition_scores as their_scores

from headstream.circuits.composing.composition import composition_scores
from headstream.circuits.composing.virtual_heads import virtual_ov
from headstream.models.decoder import Decoder
from headstream.models.positions import rotary_tables, rotate

EXACT = 1e-10


def circuits(model: Decoder, distance: int | None = None) -> dict[str, FactoredMatrix]:
    """OV, and what a later head reads through Q, K and V, [layer, head] as leading axes."""
    group = model.config.group_size
    key, value = (w.detach().repeat_interleave(group, 1) for w in (model.W_K, model.W_V))
    query = model.W_Q.detach()
    if distance is not None:
        flat = query.flatten(0, 2)[None, None].transpose(1, 2)  # [1, pos, 1, d_head]
        place = torch.full(flat.shape[:2], distance)
        tables = rotary_tables(place, query.shape[-1], model.config.rotary_base, query.dtype)
        query = rotate(flat, tables).reshape(query.shape)
    ov = FactoredMatrix(value, model.W_O.detach())
    qk = FactoredMatrix(query, key.mT)
    return {"Q": qk, "K": qk.T, "V": ov}


@pytest.mark.parametrize(
    "fields",
    [
        {"n_layers": 3, "attn_bias": True},
        {"n_kv_heads": 2, "norm": "none"},
        {"n_kv_heads": 2, "positions": "rotary", "norm": "rmsnorm", "d_mlp": 8},
    ],
    ids=str,
)
def test_weights_as_they_are(build: Any, fields: dict[str, Any]) -> None:
    model = build(fields)
    distance = 5 if fields.get("positions") == "rotary" else None
    ours = composition_scores(model, distance=distance, norms="ignored")["score"]
    right = circuits(model, distance)
    layers = np.arange(model.config.n_layers)
    for through, reader in right.items():
        theirs = their_scores(right["V"], reader, broadcast_dims=True).numpy()
        # They put 0 where the first head is not earlier; here that is no score.
        earlier = (layers[:, None] < layers)[:, None, :, None] & np.ones_like(theirs, dtype=bool)
        expected = np.where(earlier, theirs, np.nan)
        np.testing.assert_allclose(ours.sel(through=through), expected, rtol=0, atol=EXACT)


def test_virtual_ov_is_their_product_of_factored_matrices(build: Any) -> None:
    model = build({"n_layers": 3, "n_kv_heads": 2})
    ov = circuits(model)["V"]
    heads = [(0, 3), (1, 0), (2, 2)]
    theirs = ov[0, 3] @ ov[1, 0] @ ov[2, 2]
    ours = virtual_ov(model, heads, norms="ignored")
    torch.testing.assert_close(ours.AB, theirs.AB, rtol=0, atol=EXACT)
    torch.testing.assert_close(ours.norm(), theirs.norm(), rtol=0, atol=EXACT)
    # Eigenvalues as sets: sums of powers, which no order of a list can disturb.
    for power in (1, 2, 3):
        both = [(m.eigenvalues**power).sum().real for m in (ours, theirs)]
        torch.testing.assert_close(*both, rtol=0, atol=EXACT)
