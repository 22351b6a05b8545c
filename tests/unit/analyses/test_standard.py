"""What the standard study does when a section cannot be run."""

from __future__ import annotations

import pytest
import torch
import xarray as xr

from headstream.analyses import standard
from headstream.analyses.kinds import HeadsResult
from headstream.analyses.patching.task import Task
from headstream.analyses.result import Provenance
from headstream.analyses.standard import standard_study
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import TaskError, TokenError
from headstream.reports.closing import limits
from headstream.reports.study import Study


def census(labels: list[list[str]]) -> HeadsResult:
    layers, heads = len(labels), len(labels[0])
    return HeadsResult(
        title="Head census",
        data=xr.Dataset(
            {"label": (("layer", "head"), labels)},
            {"layer": list(range(layers)), "head": list(range(heads))},
        ),
        provenance=Provenance.of(toy(), seed=0),
        claims=(),
        details={"n": 4},
    )


def toy(card: dict[str, object] | None = None, n_layers: int = 1) -> Decoder:
    sizes = dict(n_layers=n_layers, n_heads=2, d_model=8, d_head=4, d_vocab=20, n_ctx=16)
    model = Decoder(DecoderConfig(**sizes))  # type: ignore[arg-type]
    model.card = card
    return model


def pairs(identical: int | None = None, last: int = 6) -> Task:
    clean = torch.randint(1, 5, (8, 5), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, 1] = last
    if identical is not None:
        corrupted[identical] = clean[identical]
    return Task(clean, corrupted, answer=7, wrong=8)


def test_an_error_in_the_users_own_pairs_is_raised() -> None:
    words = "corrupted is the clean prompt itself in pair 3: nothing to patch"
    with pytest.raises(TaskError, match=words):
        standard_study(toy(), task=pairs(identical=3), progress=False)
    with pytest.raises(TokenError, match="corrupted"):
        standard_study(toy(), task=pairs(last=20), progress=False)


def test_what_the_models_own_task_cannot_do_is_left_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Task, "for_model", lambda model, n, seed: pairs(last=20))
    results = standard_study(toy({"task": "induction"}), n=8, progress=False)
    assert [result.kind for result in results] == [
        "audit",
        "decomposition",
        "heads",
        "circuits",
        "sinks",
    ]
    first, *others = results
    patching = [why for why in first.details["left_out"] if why.startswith("patching: ")]
    assert len(patching) == 1, "two sweeps, one reason"
    assert not any(result.details.get("left_out") for result in others)
    bullets = limits(Study.of("toy", results), []).blocks[0].items
    said = [text for lead, text in bullets if lead == "Left out."]
    assert len(said) == len(first.details["left_out"])
    assert sum("atching: " in text for text in said) == 1
    assert not any("audit" in text for lead, text in bullets if text.startswith("Said of"))


def test_a_seed_that_is_none() -> None:
    with pytest.raises(TaskError, match="seed must be a whole number"):
        standard_study(toy(), seed=-1, progress=False)


def test_paths_lead_from_head_to_head_and_the_census_names_the_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = [["previous-token", "none"], ["induction pattern", "induction pattern"]]
    monkeypatch.setattr(standard, "heads", lambda model, seed: census(labels))
    results = standard_study(toy(n_layers=2), task=pairs(), progress=False)
    order = ["paths", "redundant_set", "faithfulness"]
    order += ["decomposition", "heads", "circuits", "sinks"]
    kinds = [result.kind for result in results if result.kind in order]
    assert kinds == order, "in the order of the page"
    found = {result.kind: result for result in results}
    swept = found["paths"].data
    assert swept["sender"].values.tolist() == ["L0H0", "L0H1"]
    assert swept["receiver"].values.tolist() == [
        *(f"L1H{head}.{channel}" for channel in "qkv" for head in range(2)),
        "logits",
    ]
    assert bool(swept["mean"].notnull().all()), "no bytes for paths that there are not"
    assert found["redundant_set"].details["set"] == ["L1H0", "L1H1"]
    assert found["faithfulness"].details["circuit"] == ["L0H0", "L1H0", "L1H1"]
    assert found["faithfulness"].details["values"] == "mean"
    left_out = results[0].details.get("left_out") or []
    assert not [why for why in left_out if why.startswith(("paths", "redundant", "circuit"))]


def test_sets_that_the_census_does_not_name_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [["previous-token", "none"], ["induction pattern", "none"]]
    monkeypatch.setattr(standard, "heads", lambda model, seed: census(labels))
    results = standard_study(toy(n_layers=2), task=pairs(), progress=False)
    (why,) = [why for why in results[0].details["left_out"] if why.startswith("redundant")]
    assert why.startswith("redundant set: a redundant set takes two heads or more, got L1H0")
    assert "faithfulness" in [result.kind for result in results]


@pytest.mark.parametrize(
    ("most", "receivers", "said"),
    [
        (14, ["q", "k", "v", "logits"], None),
        (6, ["logits"], "only those straight to the answer were swept"),
        (1, [], "none was swept"),
    ],
)
def test_more_paths_than_a_page_holds(
    monkeypatch: pytest.MonkeyPatch, most: int, receivers: list[str], said: str | None
) -> None:
    monkeypatch.setattr(standard, "_MOST_PATHS", most)
    senders, swept, left_out = standard._path_ends(toy(n_layers=2).config)
    assert (senders, swept) == (["L0H0", "L0H1"], receivers)
    assert left_out == (
        []
        if said is None
        else [
            f"paths: {said}; with those from head to head there are 14, and a report takes {most}; "
            "path_patch takes the senders and receivers that you name"
        ]
    )


def test_one_layer_has_no_path_from_head_to_head() -> None:
    results = standard_study(toy(), task=pairs(), progress=False)
    assert (
        "paths: heads of a single layer hand nothing to each other"
        in (results[0].details["left_out"])
    )
