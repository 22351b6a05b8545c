"""Edges cut and patterns held: hand-worked rows, composition, bounds, and every error's words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstream.circuits.attention_run import record_attention
from headstream.circuits.interventions import cut_edges, freeze_attention
from headstream.models.decoder import Decoder
from headstream.models.errors import BackendError, HookError, ShapeError
from headstream.models.hooks import capture, edited
from headstream.models.kv_cache import KVCache

# Float64 sums in another order; two orders above what is found.
EXACT = 1e-10


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside had."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor):
                self.numel = max(self.numel, made.numel())
        return out


# In a model.


def definition(
    model: Decoder,
    tokens: Tensor,
    cut: Tensor,
    *,
    renormalise: bool,
    layer: int = 0,
) -> Tensor:
    """Logits with the edges `cut` [head, query_pos, key_pos] edited on the naive backend."""
    point, value = ("attn_scores", -torch.inf) if renormalise else ("pattern", 0.0)
    edits = {f"blocks.{layer}.attn.hook_{point}": lambda x: x.masked_fill(cut, value)}
    with edited(model, edits):
        return model(tokens, backend="naive")


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("backend", ["naive", "flash", "auto"])
def test_a_cut_is_the_same_edit_on_every_backend(
    model: Decoder, tokens: Tensor, renormalise: bool, backend: str
) -> None:
    """Including one query head of a group that shares its keys."""
    edges = torch.zeros(4, 6, 6, dtype=torch.bool)
    edges[1, 3:, :2] = True
    expected = definition(model, tokens, edges, renormalise=renormalise)
    with cut_edges(model, 0, keys=[0, 1], queries=slice(3, None), heads=1, renormalise=renormalise):
        got = model(tokens, backend=backend)
    assert (got - expected).abs().max() < EXACT
    assert (got - model(tokens)).abs().max() > 1e-3


def test_a_cut_of_nothing_but_the_future_changes_nothing_before(
    model: Decoder, tokens: Tensor
) -> None:
    with cut_edges(model, [0, 1], keys=[3]):
        got = model(tokens)
    assert torch.allclose(got[:, :3], model(tokens)[:, :3], rtol=0, atol=EXACT)
    assert (got - model(tokens))[:, 3:].abs().amax(-1).min() > 1e-3


def test_cuts_nest_over_layers_and_kinds_in_any_order(model: Decoder, tokens: Tensor) -> None:
    first = {"layer": 0, "keys": [0]}
    second = {"layer": 1, "keys": [1], "heads": [0, 3], "renormalise": False}
    third = {"layer": 1, "keys": [2, 1], "heads": [0], "queries": [4, 5]}
    outputs = []
    for one, two, three in ((first, second, third), (third, first, second)):
        with cut_edges(model, **one), cut_edges(model, **two), cut_edges(model, **three):
            outputs.append(model(tokens, backend="flash"))
            outputs.append(model(tokens, backend="naive"))
    for other in outputs[1:]:
        assert (other - outputs[0]).abs().max() < EXACT
    with cut_edges(model, None, keys=[1]):
        everywhere = model(tokens)
    with cut_edges(model, 0, keys=[1]), cut_edges(model, 1, keys=[1]):
        assert torch.equal(model(tokens), everywhere)


def test_everything_is_undone_after_an_exception(model: Decoder, tokens: Tensor) -> None:
    before = model(tokens)
    with (
        pytest.raises(ZeroDivisionError),
        cut_edges(model, 0, keys=[0]),
        freeze_attention(model, tokens, layers=1),
    ):
        raise ZeroDivisionError
    assert all(block.attn.edits == [] for block in model.blocks)
    assert torch.equal(model(tokens), before)
    # Only its own edit is taken off.
    with cut_edges(model, 0, keys=[0]):
        outer = model(tokens)
        with cut_edges(model, 0, keys=[0]):
            model(tokens)
        assert torch.equal(model(tokens), outer)


def test_hooks_come_before_and_after_an_edit(model: Decoder, tokens: Tensor) -> None:
    """q, k and v are taken as they leave all hooks; z is edited before a hook sees it."""
    seen: list[Tensor] = []
    hooks: list[Any] = [
        ("blocks.0.attn.hook_v", lambda v, hook: 2 * v),
        ("blocks.0.attn.hook_z", lambda z, hook: seen.append(z)),
    ]
    outputs = []
    for backend in ("flash", "naive"):
        with cut_edges(model, 0, keys=[0]):
            outputs.append(model.run_with_hooks(tokens, fwd_hooks=hooks, backend=backend))
    assert (outputs[0] - outputs[1]).abs().max() < EXACT
    assert (seen[0] - seen[1]).abs().max() < EXACT
    assert not seen[0][:, 0].any()
    with cut_edges(model, 0, keys=[0]):
        assert (model(tokens) - outputs[0]).abs().max() > 1e-3


def test_hook_lse_knows_of_the_scores_and_not_of_the_pattern(
    model: Decoder, tokens: Tensor
) -> None:
    name = "blocks.0.attn.hook_lse"
    _, plain = capture(model, tokens, name)
    with cut_edges(model, 0, keys=[0], renormalise=False):
        _, zeroed = capture(model, tokens, name, backend="flash")
    assert (zeroed[name] - plain[name]).abs().max() < EXACT
    with cut_edges(model, 0, keys=[0]):
        _, removed = capture(model, tokens, name, backend="flash")
    assert torch.isneginf(removed[name][:, :, 0]).all()
    assert (removed[name] < plain[name]).all()


def test_auto_stays_flash_and_forms_no_matrix(build: Callable[..., Decoder]) -> None:
    """n = 600: one pattern would hold 4 heads x 600 x 600; what is formed is far below."""
    model = build({"n_ctx": 600, "n_kv_heads": 2, "n_layers": 1}, dtype=torch.float32)
    tokens = torch.randint(20, (1, 600), generator=torch.Generator().manual_seed(0))
    model.naive_limit = 0
    # Every query but one in three: 200 spans if each were attended alone.
    queries = torch.arange(600) % 3 != 0
    with (
        freeze_attention(model, tokens, heads=[0]),
        cut_edges(model, 0, keys=[0], queries=queries),
        cut_edges(model, 0, keys=[5], heads=[1, 2], renormalise=False),
        torch.no_grad(),
        Largest() as largest,
    ):
        model(tokens)
    assert largest.numel < 600 * 600 / 5


def test_half_precision_accumulates_in_float32(build: Callable[..., Decoder]) -> None:
    model = build({"n_kv_heads": 2, "positions": "rotary"}, dtype=torch.bfloat16)
    tokens = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(0))
    names = ["blocks.0.attn.hook_z", "blocks.0.attn.hook_lse"]
    for renormalise in (True, False):
        with cut_edges(model, 0, keys=[0, 3], heads=[0, 1, 2], renormalise=renormalise):
            _, by_flash = capture(model, tokens, names, backend="flash")
            _, by_naive = capture(model, tokens, names, backend="naive")
        z = by_flash["blocks.0.attn.hook_z"]
        assert z.dtype == torch.bfloat16
        assert by_flash["blocks.0.attn.hook_lse"].dtype == torch.float32
        # Both round once, at the end: few entries differ, and in the last of their 8 bits.
        difference = (z - by_naive["blocks.0.attn.hook_z"]).abs().float()
        assert (difference <= 2**-7 * z.abs().float() + 1e-6).all()
        assert (difference > 0).float().mean() < 0.02


# With a key/value cache.


@pytest.mark.parametrize("renormalise", [True, False])
def test_positions_are_absolute_under_a_cache(
    model: Decoder, tokens: Tensor, renormalise: bool
) -> None:
    """Chunks of 2, 1 and 3 tokens give what one pass gives, before and after the cut's keys."""
    options: dict[str, Any] = {"keys": [1, 4], "queries": [2, 4, 5], "renormalise": renormalise}
    with cut_edges(model, None, **options):
        whole = model(tokens)
        store, parts = KVCache(model, 3), []
        for chunk in tokens.split([2, 1, 3], 1):
            parts.append(model(chunk, kv_cache=store))
    assert (torch.cat(parts, 1) - whole).abs().max() < EXACT


def test_generation_goes_on_under_a_cut(model: Decoder, tokens: Tensor) -> None:
    """Position 7 exists only once the second new token does."""
    with cut_edges(model, None, keys=[2, 7]):
        with_cache = model.generate(tokens, 4)
        rows = tokens
        for step in range(4):
            options: dict[str, Any] = {"keys": [2, 7]} if step >= 2 else {"keys": [2]}
            with clean(model), cut_edges(model, None, **options):
                rows = torch.cat((rows, model(rows)[:, -1:].argmax(-1)), 1)
    assert torch.equal(with_cache, rows)


class clean:
    """The model without its edits, for a block."""

    def __init__(self, model: Decoder) -> None:
        self.lists = [block.attn.edits for block in model.blocks]

    def __enter__(self) -> None:
        self.before = [edits[:] for edits in self.lists]
        for edits in self.lists:
            edits.clear()

    def __exit__(self, *_: object) -> None:
        for edits, before in zip(self.lists, self.before, strict=True):
            edits[:] = before


def test_a_cut_that_no_chunk_meets(model: Decoder, tokens: Tensor) -> None:
    with (
        pytest.raises(HookError, match=r"the cut in layer 0 removed no edge in 1 passes with"),
        cut_edges(model, 0, keys=[9]),
    ):
        model(tokens, kv_cache=KVCache(model, 3))


def test_a_frozen_pattern_refuses_a_cache(model: Decoder, tokens: Tensor) -> None:
    with (
        pytest.raises(BackendError, match=r"layer 0 is frozen to a whole run, and a pass with kv_"),
        freeze_attention(model, tokens),
    ):
        model(tokens, kv_cache=KVCache(model, 3))


# Frozen attention.


@pytest.mark.parametrize("backend", ["naive", "flash", "auto"])
def test_freezing_is_forcing_the_stored_pattern(
    model: Decoder, tokens: Tensor, backend: str
) -> None:
    other = tokens.flip(1)
    name = "blocks.1.attn.hook_pattern"
    _, stored = capture(model, other, name, backend="naive")

    def force(pattern: Tensor) -> Tensor:
        forced = pattern.clone()
        forced[:, [0, 3]] = stored[name][:, [0, 3]]
        return forced

    with edited(model, {name: force}):
        expected = model(tokens, backend="naive")
    for given in (other, record_attention(model, other), record_attention(model, other, layers=1)):
        with freeze_attention(model, given, layers=1, heads=[3, 0]):
            got = model(tokens, backend=backend)
        assert (got - expected).abs().max() < EXACT
    assert (expected - model(tokens)).abs().max() > 1e-3


def test_freezing_some_heads_of_a_group_leaves_the_others(model_r: Decoder, tokens: Tensor) -> None:
    """Heads 0 and 1 share keys; freezing 0 moves z of head 0 alone."""
    name = "blocks.0.attn.hook_z"
    _, plain = capture(model_r, tokens, name)
    with freeze_attention(model_r, tokens.flip(1), heads=[0]):
        _, frozen = capture(model_r, tokens, name)
    difference = (frozen[name] - plain[name]).abs().amax((0, 1, 3))
    assert difference[0] > 1e-3
    assert difference[1:].max() < EXACT


def test_a_run_frozen_to_itself_is_itself(model: Decoder, tokens: Tensor) -> None:
    mask = torch.ones(3, 6, dtype=torch.int64)
    mask[0, :2] = 0
    with freeze_attention(model, tokens, attention_mask=mask):
        got = model(tokens, attention_mask=mask)
    assert (got - model(tokens, attention_mask=mask)).abs().max() < EXACT


def test_the_pattern_of_a_frozen_head_is_that_of_the_run(model: Decoder, tokens: Tensor) -> None:
    """Its mask too: padding of that run stays unread, whatever is real in this one."""
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 2] = False
    name = "blocks.0.attn.hook_pattern"
    _, there = capture(model, tokens, name, attention_mask=mask)
    with freeze_attention(model, tokens, attention_mask=mask):
        _, here = capture(model, tokens.flip(1), name)
    assert (here[name] - there[name]).abs().max() < EXACT
    assert not here[name][1, :, :, 2].any()


def test_a_pattern_may_come_from_another_model(
    build: Callable[..., Decoder], tokens: Tensor
) -> None:
    """Of the same heads, and with its own scale."""
    fields: dict[str, Any] = {"positions": "rotary", "n_kv_heads": 2}
    one, two = build(fields), build(fields | {"attn_scale": 0.1}, seed=1)
    _, there = capture(two, tokens, "blocks.0.attn.hook_pattern")
    with freeze_attention(one, record_attention(two, tokens), layers=0):
        _, here = capture(one, tokens, "blocks.0.attn.hook_pattern")
    for name, pattern in there.items():
        assert (here[name] - pattern).abs().max() < EXACT


def test_the_later_of_two_frozen_patterns_holds(model: Decoder, tokens: Tensor) -> None:
    one, two = record_attention(model, tokens.flip(1)), record_attention(model, tokens.flip(0))
    with freeze_attention(model, one), freeze_attention(model, two):
        both = model(tokens)
    with freeze_attention(model, two):
        assert torch.equal(model(tokens), both)


def test_gradients_flow_through_values_alone(model: Decoder, tokens: Tensor) -> None:
    names = [f"blocks.0.attn.hook_{what}" for what in ("q", "k", "v")]
    with freeze_attention(model, tokens.flip(1)):
        logits, acts = capture(model, tokens, names, grads=True)
        grads = torch.autograd.grad(logits.sum(), list(acts.values()), allow_unused=True)
    assert grads[2] is not None
    assert grads[2].abs().max() > 0
    assert all(grad is None or not grad.any() for grad in grads[:2])


# Errors, by their words.


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], "keys is empty; name at least one position"),
        (range(3, 3), "keys is empty"),
        (slice(4, 4), r"keys is slice\(4, 4, None\), which is empty"),
        (slice(None, None, 0), "which is empty"),
        (slice(-2, None), r"keys is slice\(-2, None, None\), expected whole numbers >= 0"),
        ([0, -1], "keys holds position -1, expected positions >= 0; count positions from the"),
        ([1.5], "keys holds 1.5, expected whole numbers; give a list of positions, a slice, or a"),
        ([True, False], "keys holds True, expected whole numbers"),
        ("0", "keys is '0', expected a list of positions"),
        (3, "keys is 3, expected a list of positions"),
        (torch.zeros(6, dtype=torch.bool), "keys is empty: no position in it is True"),
        (torch.ones(1, 1, 6, dtype=torch.bool), r"keys is boolean \[1, 1, 6\], expected"),
    ],
)
def test_sets_of_positions_that_are_none(model_a: Decoder, keys: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words), cut_edges(model_a, 0, keys=keys):
        pass
    words = words.replace("keys", "queries")
    with pytest.raises(ShapeError, match=words), cut_edges(model_a, 0, keys=[0], queries=keys):
        pass


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"keys": [2, 6]}, "keys holds position 6, out of range: the rows of this pass have 6 pos"),
        ({"keys": [0], "queries": [7]}, "queries holds position 7, out of range"),
        ({"keys": slice(2, 7)}, r"keys is slice\(2, 7\), out of range: the rows of this pass have"),
        ({"keys": slice(6, None)}, "out of range"),
        ({"keys": torch.ones(5).bool()}, r"keys is boolean \[1, 5\], but this pass has \[batch, p"),
        ({"keys": torch.ones(2, 6).bool()}, r"keys is boolean \[2, 6\], but this pass has .*3, 6"),
        ({"keys": [5], "queries": [2, 4]}, "the cut in layer 0 removes no edge: in every row its"),
    ],
)
@pytest.mark.parametrize("backend", ["naive", "flash"])
def test_sets_that_do_not_fit_the_pass(
    model_a: Decoder, tokens: Tensor, backend: str, sets: dict[str, Any], words: str
) -> None:
    with pytest.raises(ShapeError, match=words), cut_edges(model_a, 0, **sets):
        model_a(tokens, backend=backend)


def test_a_cut_among_padding_removes_nothing(model_a: Decoder, tokens: Tensor) -> None:
    mask = torch.ones(3, 6, dtype=torch.int64)
    mask[:, 0] = 0
    with pytest.raises(ShapeError, match="removes no edge"), cut_edges(model_a, 0, keys=[0]):
        model_a(tokens, attention_mask=mask)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layer": 2}, "there is no layer 2: the model has 2, 0 to 1"),
        ({"layer": -1}, "there is no layer -1"),
        ({"layer": True}, "there is no layer True"),
        ({"layer": []}, r"no layers were given; name layers in \[0, 2\)"),
        ({"heads": [0, 4]}, "there is no head 4: the model has 4, 0 to 3"),
        ({"heads": []}, "no heads were given"),
        ({"heads": 1.0}, "there is no head 1.0"),
    ],
)
def test_layers_and_heads_that_do_not_exist(
    model_a: Decoder, tokens: Tensor, given: dict[str, Any], words: str
) -> None:
    with (
        pytest.raises(ShapeError, match=words),
        cut_edges(model_a, **({"layer": 0, "keys": [0]} | given)),
    ):
        pass
    given = {name.replace("layer", "layers").replace("ss", "s"): it for name, it in given.items()}
    with pytest.raises(ShapeError, match=words), freeze_attention(model_a, tokens, **given):
        pass


def test_an_edit_that_no_pass_meets(model_a: Decoder, tokens: Tensor) -> None:
    words = "the cut in layer 1 was never used; no pass that reaches the layer was run inside"
    with pytest.raises(HookError, match=words), cut_edges(model_a, 1, keys=[0]):
        model_a(tokens, stop_at_layer=1)
    with (
        pytest.raises(HookError, match="the frozen pattern in layer 0 was never used"),
        freeze_attention(model_a, tokens),
    ):
        pass


def test_runs_of_unequal_rows(model_a: Decoder, tokens: Tensor) -> None:
    words = r"a run of \[batch, pos, head, kv_head\] = \[3, 5, 4, 4\], but this pass has \[3, 6, 4"
    with pytest.raises(ShapeError, match=words), freeze_attention(model_a, tokens[:, 1:]):
        model_a(tokens)
    with (
        pytest.raises(ShapeError, match="both runs must have as many rows, of equal length"),
        freeze_attention(model_a, tokens[:1]),
    ):
        model_a(tokens)


def test_runs_that_do_not_fit(
    model_a: Decoder, build: Callable[..., Decoder], tokens: Tensor
) -> None:
    run = record_attention(model_a, tokens, layers=[1])
    with (
        pytest.raises(ShapeError, match=r"the run holds no attention of layer 0, only of \[1\]"),
        freeze_attention(model_a, run, layers=[0, 1]),
    ):
        pass
    with (
        pytest.raises(ShapeError, match="attention_mask belongs to tokens, and a recorded run"),
        freeze_attention(model_a, run, attention_mask=torch.ones(3, 6).bool()),
    ):
        pass
    one_layer = build({"n_layers": 1})
    with (
        pytest.raises(ShapeError, match="there is no layer 1: the model has 1"),
        freeze_attention(one_layer, run),
    ):
        pass
    narrow = build({}, dtype=torch.float32)
    with (
        pytest.raises(ShapeError, match=r"a run in torch.float64 on cpu, but this pass is torch"),
        freeze_attention(narrow, run, layers=1),
    ):
        narrow(tokens)


def test_a_run_that_queries_and_keys_do_not_tell(model_a: Decoder, tokens: Tensor) -> None:
    with cut_edges(model_a, 1, keys=[0]):
        with pytest.raises(HookError, match="attention of layer 1 is edited: its queries and keys"):
            record_attention(model_a, tokens)
        record_attention(model_a, tokens, layers=0)
        model_a(tokens)
    with edited(model_a, {"*hook_pattern": torch.zeros_like}):
        words = "a hook is on 'blocks.0.attn.hook_pattern': what it changes would not be in the q"
        with pytest.raises(HookError, match=words), freeze_attention(model_a, tokens):
            pass
        model_a(tokens)
