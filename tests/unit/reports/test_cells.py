"""Every kind of site axis that a sweep makes has a map: neurons, edges, sets among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headstream.analyses import At, Task, patch
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.reports.cells import Cells
from headstream.reports.study import Item
from headstream.reports.write import render_report

SETS = {"both": [At("z", 0, 1), At("z", 1, 0)], "stream": [At("resid_pre", 1)]}
SITES: list[tuple[Any, dict[str, Any], tuple[str, ...], tuple[str, ...], str]] = [
    ("pattern", {"positions": [(3, 1), (2, 2)]}, ("L0H0", "L0H1", "L1H0", "L1H1"),
     ("3<-1", "2<-2"), "L1H0@3<-1"),
    ("pattern", {}, ("L0", "L1"), ("H0", "H1"), "L1H0"),
    ("mlp_post", {"heads": [0, 5]}, ("L0", "L1"), ("N0", "N5"), "L1N0"),
    (SETS, {}, ("both", "stream"), ("",), "stream"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Decoder:
    shape: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 8, "d_head": 4}
    return Decoder(DecoderConfig(**shape, d_mlp=8, d_vocab=9, n_ctx=4))


@pytest.mark.parametrize(("site", "options", "rows", "columns", "name"), SITES)
def test_axes(
    model: Decoder,
    site: Any,
    options: dict[str, Any],
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    name: str,
) -> None:
    task = Task([[1, 2, 3, 4], [2, 3, 4, 5]], [[1, 6, 3, 4], [2, 7, 4, 5]], 1, 2)
    result = patch(model, task, site, **options, n_flips=4, progress=False)
    cells = Cells.of(Item(result, "patching-1"))
    assert cells.rows.labels == rows
    assert cells.columns.labels == columns
    at = len(rows) // 2
    assert cells.names[at][0] == name
    assert cells.mean[at, 0] == result.mean.values.reshape(len(rows), -1)[at, 0]
    assert np.isfinite(cells.mean).all()
    page = render_report([result])
    assert 'class="broken"' not in page
    assert "Map of effects" in page
