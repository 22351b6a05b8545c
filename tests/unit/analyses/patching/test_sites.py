"""The grid that a sweep runs through, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headstream.analyses.patching.sites import SITES, plan
from headstream.analyses.patching.task import Task
from headstream.models.config import DecoderConfig
from headstream.models.errors import TaskError
from headstream.models.names import hook_table

CONFIG = DecoderConfig(
    n_layers=3, n_heads=4, n_kv_heads=2, d_model=8, d_head=4, d_vocab=9, n_ctx=8, d_mlp=16
)
ATTENTION_ONLY = DecoderConfig(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=9, n_ctx=8)
# Rows of 2 and 4 real tokens, the first one padded on the left.
TASK = Task(
    [[0, 0, 1, 2], [1, 2, 3, 4]],
    [[0, 0, 5, 2], [5, 2, 3, 4]],
    answer=1,
    wrong=5,
    attention_mask=[[0, 0, 1, 1], [1, 1, 1, 1]],
    roles={"changed": 0, "last": -1},
)


@pytest.mark.parametrize("name", sorted(SITES))
def test_every_site_has_a_hook_with_the_axes_it_says(name: str) -> None:
    site = SITES[name]
    spec = hook_table(CONFIG)[site.hook.format(layer=0)]
    width = {
        "pattern": ("batch", "head", "query_pos", "key_pos"),
        "mlp_post": ("batch", "pos", "d_mlp"),
    }
    expected = width.get(
        name,
        ("batch", "pos", site.heads, "d_head") if site.heads else ("batch", "pos", "d_model"),
    )
    assert spec.axes == expected
    assert spec.writable


@pytest.mark.parametrize(
    ("site", "positions", "dims", "shape"),
    [
        ("resid_pre", None, ("layer", "pos"), (3, 4)),
        ("resid_mid", "all", ("layer",), (3,)),
        ("mlp_out", "roles", ("layer", "role"), (3, 2)),
        ("z", None, ("layer", "head"), (3, 4)),
        ("z", "each", ("layer", "head", "pos"), (3, 4, 4)),
        ("q", "roles", ("layer", "head", "role"), (3, 4, 2)),
        ("k", None, ("layer", "kv_head"), (3, 2)),
        ("v", [1, -1], ("layer", "kv_head", "pos"), (3, 2, 2)),
    ],
)
def test_axes(site: str, positions: Any, dims: tuple[str, ...], shape: tuple[int, ...]) -> None:
    grid = plan(CONFIG, TASK, site, positions=positions)
    assert tuple(grid.coords) == dims
    assert grid.shape == shape


def test_restricted() -> None:
    grid = plan(CONFIG, TASK, "z", layers=[2, 0], heads=range(1, 3))
    assert grid.coords["layer"].tolist() == [2, 0]
    assert grid.coords["head"].tolist() == [1, 2]
    assert grid.hooks == ["blocks.2.attn.hook_z", "blocks.0.attn.hook_z"]
    assert grid.size == 4


def test_places_are_columns_of_real_tokens() -> None:
    def columns(positions: Any) -> list[Any]:
        grid = plan(CONFIG, TASK, "resid_pre", positions=positions)
        return [(place.name, place.columns.tolist()) for place in grid.places]

    assert columns("all") == [(None, [[2, 3, -1, -1], [0, 1, 2, 3]])]
    assert columns([0, 2, -1, -3]) == [
        (0, [[2], [0]]),
        (2, [[-1], [2]]),
        (-1, [[3], [3]]),
        (-3, [[-1], [1]]),
    ]
    assert columns("each")[1] == (1, [[3], [1]])
    assert columns("roles") == [("changed", [[2], [0]]), ("last", [[3], [3]])]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"site": "resid"}, "site must be one of resid_pre, .*, got 'resid'; nearest is 'resid_"),
        ({"layers": [3]}, "layers holds 3, but layer runs from 0 to 2"),
        ({"layers": [-1]}, "layers holds -1"),
        ({"layers": []}, "layers is empty"),
        ({"layers": 1}, "layers must be a list of whole numbers, got 1"),
        ({"layers": "01"}, "layers must be a list of whole numbers, got '01'"),
        ({"layers": [True]}, "layers must be a list of whole numbers"),
        ({"heads": [1, 1]}, r"heads names one twice: \[1, 1\]"),
        ({"heads": [4]}, "heads holds 4, but head runs from 0 to 3"),
        (
            {"site": "k", "heads": [3]},
            "heads holds 3, but site 'k' has key/value heads 0 to 1; query head 3 reads key/value "
            "head 1, which 2 query heads share",
        ),
        ({"site": "v", "heads": [4]}, "heads holds 4, but kv_head runs from 0 to 1"),
        (
            {"site": "attn_out", "heads": [0]},
            r"heads=\[0\] was given, but site 'attn_out' has no head axis",
        ),
        ({"positions": "al"}, "positions must be 'all', .* got 'al'; nearest is 'all'"),
        ({"positions": [4]}, "positions holds 4, but the longest prompt has 4 real tokens"),
        ({"positions": [-5]}, "positions holds -5"),
        ({"positions": 2.5}, "positions must be a list of whole numbers, got 2.5"),
    ],
)
def test_refusals(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        plan(CONFIG, TASK, **{"site": "z", **arguments})


@pytest.mark.parametrize("site", ["resid_mid", "mlp_out"])
def test_sites_of_an_mlp_need_one(site: str) -> None:
    with pytest.raises(TaskError, match=f"site '{site}' needs an MLP, and this model is attention"):
        plan(ATTENTION_ONLY, TASK, site)


def test_roles_need_roles() -> None:
    task = Task([[1, 2]], [[3, 2]], 1, 3)
    with pytest.raises(TaskError, match="positions='roles' needs roles, and the task names none"):
        plan(CONFIG, task, "z", positions="roles")
