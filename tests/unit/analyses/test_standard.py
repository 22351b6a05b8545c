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
        "induction",
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
    order += ["decomposition", "heads", "induction", "circuits", "sinks"]
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


def test_a_census_without_labels_names_nothing_to_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "heads", lambda model, seed: census([["none", "none"]] * 2))
    results = standard_study(toy(n_layers=2), task=pairs(), progress=False)
    why = "the census gives no head a label, so that it names none to cut"
    for name in ("redundant set", "circuit"):
        assert f"{name}: {why}" in results[0].details["left_out"]


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


def test_every_model_that_can_repeat_is_asked_which_heads_continue_repeats() -> None:
    for card in (None, {"purpose": "own"}):
        results = standard_study(toy(card), progress=False)
        (found,) = [result for result in results if result.kind == "induction"]
        assert found.details["joint"] is None, "no head follows content: nothing is cut"


def test_a_fixed_distance_in_a_model_without_a_card_is_found() -> None:
    """One head that looks nine tokens back and copies what stands there."""
    n_content, n_ctx = 24, 40
    width = n_content + n_ctx + n_content
    model = Decoder(
        DecoderConfig(
            n_layers=1,
            n_heads=2,
            d_model=width,
            d_head=n_ctx,
            d_vocab=n_content,
            n_ctx=n_ctx,
            positions="learned",
            norm="none",
            attn_scale=1.0,
        )
    )
    place, written = slice(n_content, n_content + n_ctx), slice(n_content + n_ctx, width)
    one_hot = torch.eye(n_content)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[:, :n_content] = one_hot
        model.pos_embed.W_pos[:, place] = torch.eye(n_ctx)
        attn = model.blocks[0].attn
        attn.W_Q[0, place] = 30 * torch.eye(n_ctx).roll(-9, 1).tril()
        attn.W_K[0, place] = torch.eye(n_ctx)
        attn.W_V[0, :n_content, :n_content] = one_hot
        attn.W_O[0, :n_content, written] = 10 * one_hot
        model.unembed.W_U[written] = one_hot
    results = standard_study(model, progress=False)
    said = [claim for result in results for claim in result.claims if "L0H0" in claim.statement]
    (claim,) = [claim for claim in said if "fixed distance" in claim.statement]
    assert claim.statement.startswith("L0H0 copies from a fixed distance of 10 tokens")
    (census,) = [result for result in results if result.kind == "heads"]
    assert not [claim for claim in census.claims if "L0H0" in claim.id], "said once"


def test_a_model_that_no_repeat_fits_says_so_on_the_page() -> None:
    sizes = dict(n_layers=1, n_heads=2, d_model=8, d_head=4, d_vocab=3, n_ctx=16)
    results = standard_study(Decoder(DecoderConfig(**sizes)), progress=False)  # type: ignore[arg-type]
    assert "induction" not in [result.kind for result in results]
    (why,) = [why for why in results[0].details["left_out"] if why.startswith("induction: ")]
    assert "3 content tokens are too few for a repeat" in why
    bullets = limits(Study.of("toy", results), []).blocks[0].items
    assert any("nduction: 3 content tokens" in text for lead, text in bullets)
