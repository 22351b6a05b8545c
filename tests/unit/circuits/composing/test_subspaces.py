"""Principal angles against angles drawn by hand, numpy's projectors, and chance."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from headstream.circuits.composing.subspaces import principal_cosines, subspace_overlap
from headstream.models.decoder import Decoder
from headstream.models.errors import ConfigError, ShapeError
from headstream.models.store import load

# Float64 singular values of 4 x 4 matrices.
EXACT = 1e-12
Build = Callable[..., Decoder]
AXES = ("earlier_layer", "earlier_head", "later_layer", "later_head")


def test_angles_drawn_by_hand(build: Build) -> None:
    """The earlier head writes e0, e1. The later one asks for e0 and a direction 60 degrees off
    e1, keys read the plane of e2 and e3, values read e1 alone."""
    model = build({"norm": "none", "d_model": 4, "d_head": 2, "n_heads": 1})
    e = torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        model.blocks[0].attn.W_O[0] = torch.stack([3 * e[0] + e[1], e[1]])
        later = model.blocks[1].attn
        later.W_Q[0] = torch.stack([e[0], 0.5 * e[1] + math.sqrt(0.75) * e[2]], 1)
        later.W_K[0] = torch.stack([e[2] + e[3], e[2] - e[3]], 1)
        later.W_V[0] = torch.stack([e[1], 2 * e[1]], 1)
    cosines = principal_cosines(model, (0, 0), (1, 0))
    assert cosines.sel(through="Q").values == pytest.approx([1.0, 0.5], abs=EXACT)
    assert cosines.sel(through="K").values == pytest.approx([0.0, 0.0], abs=EXACT)
    assert cosines.sel(through="V").values == pytest.approx([1.0, math.nan], abs=EXACT, nan_ok=True)
    found = subspace_overlap(model).sel(earlier_layer=0, later_layer=1, earlier_head=0)
    assert found["overlap"].values[:, 0] == pytest.approx([(1 + 0.25) / 2, 0.0, 1.0], abs=EXACT)
    assert found["chance"].values[:, 0] == pytest.approx([0.5, 0.5, 0.5], abs=EXACT)
    assert found["write_rank"].values.tolist() == [[2], [2]]
    assert found["read_rank"].values[:, 1, 0].tolist() == [2, 2, 1]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("norms", ["folded", "ignored"])
def test_cosines_against_scipy(build: Build, norm: str, norms: str) -> None:
    """Grouped heads, gains folded and the mean taken off by a dense projector."""
    model = build({"norm": norm, "n_kv_heads": 2, "n_layers": 3})
    project = torch.eye(16, dtype=torch.float64)
    gain = torch.ones(16)
    if norms == "folded" and norm == "layernorm":
        project = project - 1 / 16
    if norms == "folded" and norm != "none":
        gain = model.blocks[2].ln1.w.detach()  # type: ignore[union-attr]
    overlap = subspace_overlap(model, norms=norms)
    dims = 15 if norms == "folded" and norm == "layernorm" else 16
    for h1, h2 in [(0, 1), (3, 2)]:
        written = (model.blocks[1].attn.W_O[h1] @ project).T.detach().numpy()
        attn = model.blocks[2].attn
        weights = {"Q": attn.W_Q[h2], "K": attn.W_K[h2 // 2], "V": attn.W_V[h2 // 2]}
        cosines = principal_cosines(model, (1, h1), (2, h2), norms=norms)
        for through, weight in weights.items():
            read = (project @ (gain[:, None] * weight)).detach().numpy()
            angles = scipy.linalg.subspace_angles(written, read)[::-1]
            np.testing.assert_allclose(cosines.sel(through=through), np.cos(angles), atol=EXACT)
            place = dict(zip(AXES, (1, h1, 2, h2), strict=True))
            cell = overlap.sel(through=through, **place)
            assert float(cell["overlap"]) == pytest.approx((np.cos(angles) ** 2).mean(), abs=EXACT)
            assert float(cell["chance"]) == pytest.approx(4 / dims, abs=EXACT)


def test_random_heads_overlap_at_chance(build: Build) -> None:
    found = [
        subspace_overlap(build({"d_model": 64, "d_head": 16}, seed=seed)) for seed in range(10)
    ]
    values = np.concatenate([f["overlap"].values[~f["overlap"].isnull().values] for f in found])
    # One pair spreads by 0.02; 480 of them, some with a head in common, by under 0.002.
    assert values.mean() == pytest.approx(16 / 63, abs=0.006)


def test_heads_wider_than_the_stream_see_all_of_it(build: Build) -> None:
    found = subspace_overlap(build({"d_model": 6, "d_head": 10, "norm": "none"}))
    values = found["overlap"].sel(earlier_layer=0, later_layer=1).values
    assert values == pytest.approx(np.ones_like(values), abs=EXACT)
    assert float(found["chance"].max()) == 1.0
    assert set(found["write_rank"].values.flat) == {6}


def test_constructed_induction_by_hand() -> None:
    """L1H2's keys read 33 `before` channels and BOS, of which L0H1 writes the 33; its queries
    read `token`, its values `token` but BOS."""
    found = subspace_overlap(load("constructed-induction"))
    cell = found.sel(earlier_layer=0, earlier_head=1, later_layer=1, later_head=2)
    assert cell["overlap"].values == pytest.approx([0.0, 1.0, 0.0], abs=1e-7)
    assert cell["chance"].values == pytest.approx([33 / 147, 34 / 147, 33 / 147])
    assert found["write_rank"].values.tolist() == [[0, 33, 0, 0], [0, 0, 33, 0]]
    assert found["read_rank"].sel(layer=1, head=2).values.tolist() == [33, 34, 32]
    assert int(found["overlap"].notnull().sum()) == 3


def test_half_precision_has_a_rank(build: Build) -> None:
    found = subspace_overlap(build({}, dtype=torch.bfloat16))
    assert set(found["write_rank"].values.flat) == {4}


@pytest.mark.parametrize(
    ("earlier", "later", "words"),
    [
        ((0, 4), (1, 0), "there is no head 4: the model has 4, 0 to 3"),
        ((0, 0), (2, 0), "there is no layer 2: the model has 2, 0 to 1"),
        ((1, 0), (1, 1), "L1H0 does not come before L1H1: a head reads .* lower layer first"),
        (3, (1, 0), r"a head is a pair \(layer, head\), got 3"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_heads_that_make_no_pair(build: Build, earlier: Any, later: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        principal_cosines(build({}), earlier, later)


def test_other_errors(build: Build) -> None:
    model = build({})
    for function in (subspace_overlap, lambda m, **kw: principal_cosines(m, (0, 0), (1, 0), **kw)):
        with pytest.raises(ConfigError, match="norms must be 'folded' or 'ignored', got 'raw'"):
            function(model, norms="raw")
    with torch.no_grad():
        model.blocks[0].attn.W_O[0, 0, 0] = torch.inf
    with pytest.raises(ShapeError, match=r"must be finite, but blocks.0.attn.W_O holds NaN or inf"):
        subspace_overlap(model)
