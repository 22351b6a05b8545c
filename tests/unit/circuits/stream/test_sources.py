"""Head by source token: the definition by the pattern, sums over sources, groups."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstream.circuits.stream import source_tokens
from headstream.circuits.stream.reads import residual_reads
from headstream.circuits.stream.residual import decompose_residual
from headstream.circuits.stream.sources import source_attribution, source_reads, source_writes
from headstream.models.decoder import Decoder
from headstream.models.errors import ExactnessError, HookError, ShapeError, TokenError
from headstream.models.hooks import capture
from headstream.models.zoo.constructed import constructed_induction

MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1]])
GROUPS = ["rules", "rules", "data", "data", "rules", "data"]
BY_ROW = np.array([[0, 1, 1, 3, 3, 0], [3] * 6, [1, 1, 0, 0, 0, 3]])
KINDS: dict[str, dict[str, Any]] = {
    "A": {"d_mlp": 10, "attn_bias": True, "mlp_bias": True, "unembed_bias": True},
    "grouped, rotary": {
        "d_mlp": 10,
        "norm": "rmsnorm",
        "positions": "rotary",
        "n_kv_heads": 2,
        "attn_bias": True,
    },
    "no norm": {"norm": "none", "positions": "shortformer"},
}
KIND = pytest.mark.parametrize("kind", KINDS)
MASKED = pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])


@KIND
@MASKED
def test_writes_are_the_pattern_times_the_values(
    build: Any, tokens: Tensor, kind: str, mask: Tensor | None
) -> None:
    model = build(KINDS[kind])
    names = ["blocks.1.attn.hook_pattern", "blocks.1.attn.hook_v"]
    _, acts = capture(model, tokens, names, attention_mask=mask, backend="naive")
    pattern, v = (acts[name] for name in names)
    with torch.no_grad():
        moved = v[:, :, 2 // model.config.group_size] @ model.blocks[1].attn.W_O[2]
        expected = torch.einsum("eij,ejd->jeid", pattern[:, 2], moved)
    found = source_writes(model, tokens, 1, 2, attention_mask=mask)
    assert found.dims == ("source", "example", "pos", "d_model")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)
    whole = decompose_residual(model, tokens, attention_mask=mask).writes.sel(component="L1H2")
    np.testing.assert_allclose(found.sum("source"), whole, rtol=0, atol=1e-11)


@KIND
@MASKED
@pytest.mark.parametrize("groups", [GROUPS, BY_ROW], ids=["words", "rows"])
def test_a_group_is_the_sum_of_its_tokens(
    build: Any, tokens: Tensor, kind: str, mask: Tensor | None, groups: Any
) -> None:
    model = build(KINDS[kind])
    each = source_writes(model, tokens, 1, 1, attention_mask=mask).values
    found = source_writes(model, tokens, 1, 1, groups=groups, attention_mask=mask)
    assert found["source"].values.tolist() == (["rules", "data"] if groups is GROUPS else [0, 1, 3])
    labels = np.broadcast_to(groups, (3, 6))
    for name in found["source"].values:
        member = (labels == name).T[:, :, None, None]
        total = np.where(member, each, 0).sum(0)
        np.testing.assert_allclose(found.sel(source=name), total, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["each", "grouped"])
def test_grouped_sources_form_no_square(
    model_r: Decoder, tokens: Tensor, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a split over every token forms the pattern, as it says; a single query never does."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the pattern was formed")

    monkeypatch.setattr(source_tokens, "masked_scores", refuse)
    source_attribution(model_r, tokens, 1, groups=groups)
    if groups is None:
        with pytest.raises(AssertionError, match="the pattern was formed"):
            source_writes(model_r, tokens, 0, 1)
    else:
        source_writes(model_r, tokens, 0, 1, groups=groups)
        source_attribution(model_r, tokens, 1, groups=groups, pos=None)


@KIND
@MASKED
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["each", "grouped"])
@pytest.mark.parametrize("split", [False, True])
def test_attributions_sum_to_the_heads(
    build: Any, tokens: Tensor, kind: str, mask: Tensor | None, groups: Any, split: bool
) -> None:
    model = build(KINDS[kind])
    options: dict[str, Any] = {"attention_mask": mask, "split_value_bias": split}
    run = decompose_residual(model, tokens, **options)
    heads = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    found = source_attribution(
        model, tokens, [1, 2, 3], 5, pos=[5, 4, -1], groups=groups, **options
    )
    whole = run.logit_attribution([1, 2, 3], 5, pos=[5, 4, -1]).sel(component=heads)
    assert found.dims == ("layer", "head", "source", "example")
    assert found.attrs == whole.attrs
    assert found["pos"].values.tolist() == [5, 4, 5]
    total = found.sum("source").values.reshape(8, 3)
    np.testing.assert_allclose(total, whole, rtol=0, atol=1e-11)
    everywhere = source_attribution(model, tokens, [1, 2, 3], 5, pos=None, groups=groups, **options)
    whole = run.logit_attribution([1, 2, 3], 5, pos=None).sel(component=heads)
    total = everywhere.sum("source").values.reshape(8, 3, 6)
    np.testing.assert_allclose(total, whole, rtol=0, atol=1e-11)
    rows = everywhere.values[..., np.arange(3), [5, 4, 5]]
    np.testing.assert_allclose(rows, found, rtol=0, atol=1e-11)


@KIND
def test_an_attribution_is_the_write_read_along_the_logit(
    build: Any, tokens: Tensor, kind: str
) -> None:
    """By hand from the write: centred, over the final scale, gain, W_U column."""
    model = build(KINDS[kind])
    write = source_writes(model, tokens, 1, 3).values[:, :, 4]
    if model.config.norm == "layernorm":
        write = write - write.mean(-1, keepdims=True)
    if model.config.norm != "none":
        _, acts = capture(model, tokens, "ln_final.hook_scale")
        write = write / acts["ln_final.hook_scale"][:, 4].numpy()
        write = write * model.ln_final.w.detach().numpy()
    expected = write @ model.W_U[:, 7].detach().numpy()
    found = source_attribution(model, tokens, 7, pos=4)
    np.testing.assert_allclose(found.sel(layer=1, head=3), expected, rtol=0, atol=1e-11)


def test_the_constructed_answer_came_from_the_token_that_holds_it() -> None:
    model = constructed_induction()
    tokens = torch.tensor([[0, 7, 4, 9, 3, 4]])  # after 4 came 9, at position 3
    found = source_attribution(model, tokens, 9, 3)
    assert found.sel(layer=1, head=2, source=3).item() == pytest.approx(10.0, abs=1e-4)
    rest = found.copy()
    rest.loc[{"layer": 1, "head": 2, "source": 3}] = 0
    assert float(abs(rest).max()) < 1e-3
    words = ["before", "before", "before", "answer", "after", "after"]
    grouped = source_attribution(model, tokens, 9, 3, groups=words).sel(layer=1, head=2)
    assert grouped.sel(source="answer").item() == pytest.approx(10.0, abs=1e-4)


@KIND
@MASKED
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["each", "grouped"])
def test_reads_through_an_earlier_head(
    build: Any, tokens: Tensor, kind: str, mask: Tensor | None, groups: Any
) -> None:
    model = build(KINDS[kind])
    found = source_reads(model, tokens, 1, 3, through=(0, 2), groups=groups, attention_mask=mask)
    reads = residual_reads(model, tokens, 1, 3, attention_mask=mask)
    for letter in "qkv":
        whole = getattr(reads, letter).sel(write="L0H2")
        np.testing.assert_allclose(found[letter].sum("source"), whole, rtol=0, atol=1e-11)
    assert found.attrs == {"reader": "L1H3", "through": "L0H2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_models_own_precision(
    build: Any, tokens: Tensor, dtype: torch.dtype, backend: str
) -> None:
    """The sum over sources is held to the run's z; float64 weights from its rounded q and k."""
    model = build(KINDS["grouped, rotary"], dtype=dtype)
    found = source_attribution(model, tokens, 1, backend=backend)
    heads = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    whole = decompose_residual(model, tokens, backend=backend).logit_attribution(1)
    total = found.sum("source").values.reshape(8, 3)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    np.testing.assert_allclose(total, whole.sel(component=heads), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_large_value_bias_that_is_split_off_was_rounded_with_the_rest(
    build: Any, tokens: Tensor, dtype: torch.dtype
) -> None:
    for seed in range(4):
        model = build({"attn_bias": True, "norm": "none"}, dtype=dtype, seed=seed)
        with torch.no_grad():
            for block in model.blocks:
                assert block.attn.b_V is not None
                block.attn.b_V.mul_(100)
        source_attribution(model, tokens, 3, pos=None, split_value_bias=True)
        source_attribution(model, tokens, 3, split_value_bias=True)


def test_wrong_weights_would_be_caught(
    model: Decoder, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blurred(scores: Tensor, lse: Tensor) -> Tensor:
        return torch.softmax(0.99 * scores, -1)

    monkeypatch.setattr(source_tokens, "pattern_of", blurred)
    words = r"the sources of layer 0 do not sum to its output: largest error .*; the bound is"
    with pytest.raises(ExactnessError, match=words):
        source_attribution(model, tokens, 1)
    with pytest.raises(ExactnessError, match=words):
        source_writes(model, tokens, 0, 1)


def test_bad_input(model: Decoder, tokens: Tensor) -> None:
    with pytest.raises(ShapeError, match="there is no head 4: the model has 4, 0 to 3"):
        source_writes(model, tokens, 0, 4)
    with pytest.raises(ShapeError, match="there is no layer 2"):
        source_writes(model, tokens, 2, 0)
    with pytest.raises(
        ShapeError, match=r"groups are .* of shape \[5\], expected strings or whole .*= \[3, 6\]"
    ):
        source_writes(model, tokens, 0, 0, groups=GROUPS[:5])
    with pytest.raises(ShapeError, match=r"groups are float64 of shape \[6\], expected strings"):
        source_attribution(model, tokens, 1, groups=[0.5] * 6)
    with pytest.raises(TokenError, match=r"answer must lie in \[0, 20\)"):
        source_attribution(model, tokens, 20)
    with pytest.raises(ShapeError, match=r"pos must lie in \[-6, 6\)"):
        source_attribution(model, tokens, 1, pos=6)
    with pytest.raises(
        ShapeError, match=r"L1H0 reads nothing of L1H1, which does not come before it; give a"
    ):
        source_reads(model, tokens, 1, 0, through=(1, 1))


def test_an_edited_run_is_refused(model: Decoder, tokens: Tensor) -> None:
    with (
        model.hooks(fwd_hooks=[("blocks.0.attn.hook_v", lambda v, hook: v + 1)]),
        pytest.raises(HookError, match="cannot split a head by its sources: a hook edits"),
    ):
        source_writes(model, tokens, 1, 0)
