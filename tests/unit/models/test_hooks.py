"""Hooks: nothing silent, nothing left behind, nothing aliased, and every point is alive."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import BackendError, HookError, ShapeError
from headstream.models.hooks import capture, edited
from headstream.models.resolve import resolve

Z = "blocks.0.attn.hook_z"
# float64 sums in another order; two orders above what is found.
EXACT = 1e-10


def zero(x: Tensor, hook: object) -> Tensor:
    return torch.zeros_like(x)


def look(x: Tensor, hook: object) -> None:
    """Reads, changes nothing."""


# FR-23: every hook point is alive, or says that it is not.

KINDS: list[dict[str, Any]] = [
    {"positions": "learned", "d_mlp": 8, "attn_bias": True, "mlp_bias": True},
    {"positions": "rotary", "norm": "rmsnorm", "d_mlp": 8, "gated_mlp": True, "n_kv_heads": 2},
    {"positions": "shortformer", "n_kv_heads": 1},
    {"positions": "sinusoidal", "norm": "none", "d_mlp": 8},
]


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: fields["positions"])
def test_every_writable_hook_changes_the_logits(
    build: Callable[..., Decoder], backend: str, fields: dict[str, Any]
) -> None:
    """50 added to one element must show; what cannot be written must raise."""
    model = build(fields)
    tokens = torch.tensor([[0, 1, 2, 3, 1, 2]])
    baseline = model(tokens, backend=backend)

    def poke(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        place = [0] * x.ndim
        # A query that has several keys to choose from, and a key that it may read.
        place[hook.spec.pos_axis] = 3
        x[tuple(place)] += 50
        return x

    for name, point in model.hook_dict.items():
        if point.spec.naive_only and backend == "flash":
            with pytest.raises(BackendError, match=rf"'{name}' never fires: backend 'flash' does"):
                model.run_with_hooks(tokens, fwd_hooks=[(name, poke)], backend=backend)
        elif not point.spec.writable:
            with pytest.raises(HookError, match=rf"'{name}' is read-only: its value follows from"):
                model.run_with_hooks(tokens, fwd_hooks=[(name, poke)], backend=backend)
        else:
            logits = model.run_with_hooks(tokens, fwd_hooks=[(name, poke)], backend=backend)
            assert (logits - baseline).abs().max() > 1e-3, name
        assert model.hooks_active() == 0
    assert torch.equal(model(tokens, backend=backend), baseline)


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: fields["positions"])
def test_an_edit_is_the_same_on_both_backends(
    build: Callable[..., Decoder], fields: dict[str, Any]
) -> None:
    model = build(fields)
    tokens = torch.tensor([[0, 1, 2, 3, 1, 2], [4, 4, 5, 6, 19, 0]])

    def shrink(x: Tensor, hook: object) -> Tensor:
        return x * 0.5

    for name, point in model.hook_dict.items():
        if point.spec.writable and not point.spec.naive_only:
            naive, flash = (
                model.run_with_hooks(tokens, fwd_hooks=[(name, shrink)], backend=backend)
                for backend in ("naive", "flash")
            )
            assert (naive - flash).abs().max() < EXACT, name


def test_an_edited_pattern_reaches_the_logits_or_is_refused(model: Decoder, tokens: Tensor) -> None:
    """FR-24: uniform attention of L0H1, on every backend the same effect or an error."""

    def uniform(pattern: Tensor, hook: object) -> Tensor:
        pattern = pattern.clone()
        pattern[:, 1] = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
        return pattern

    hooks = [("blocks.0.attn.hook_pattern", uniform)]
    naive = model.run_with_hooks(tokens, fwd_hooks=hooks, backend="naive")
    auto = model.run_with_hooks(tokens, fwd_hooks=hooks)
    # Layer 1 stays flash under auto.
    assert (auto - naive).abs().max() < EXACT
    assert (naive - model(tokens)).abs().max() > 0.1
    words = "use backend='naive', or 'auto', which turns this layer naive"
    with pytest.raises(BackendError, match=words):
        model.run_with_hooks(tokens, fwd_hooks=hooks, backend="flash")
    with pytest.raises(HookError, match="backend 'flash' does not form the n x n matrix; use"):
        model.run_with_hooks(tokens, fwd_hooks=[("*hook_pattern", uniform)], backend="flash")


def test_lse_follows_the_edited_scores(model: Decoder, tokens: Tensor) -> None:
    """hook_lse fires after an edit of the scores and before an edit of the pattern."""

    def mask_first(scores: Tensor, hook: object) -> Tensor:
        scores = scores.clone()
        scores[..., 0] = -torch.inf
        return scores

    hooks = [
        ("blocks.0.attn.hook_attn_scores", mask_first),
        ("blocks.0.attn.hook_pattern", zero),
    ]
    with model.hooks(fwd_hooks=hooks):
        _, acts = capture(model, tokens, ["blocks.0.attn.*"])
    lse = acts["blocks.0.attn.hook_lse"]
    assert torch.equal(lse, acts["blocks.0.attn.hook_attn_scores"].logsumexp(-1))
    assert torch.isneginf(lse[..., 0]).all()
    assert not acts["blocks.0.attn.hook_pattern"].any()
    assert not acts[Z].any()


def test_lse_is_differentiable_on_every_backend(model: Decoder, tokens: Tensor) -> None:
    names = [f"blocks.{layer}.attn.hook_lse" for layer in range(2)]
    grads = {}
    for backend in ("naive", "flash", "auto"):
        _, acts = capture(model, tokens, names, grads=True, backend=backend)
        total = sum((i + 1) * acts[name].square().sum() for i, name in enumerate(names))
        grads[backend] = torch.autograd.grad(total, model.blocks[0].attn.W_K)[0]
    assert grads["naive"].abs().max() > 0.1
    for backend in ("flash", "auto"):
        assert (grads[backend] - grads["naive"]).abs().max() < 1e-9 * grads["naive"].abs().max()


# FR-20, FR-21: everything is undone, one level at a time.


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit()])
def test_hooks_go_after_an_exception(
    model: Decoder, tokens: Tensor, backend: str, error: BaseException
) -> None:
    baseline = model(tokens, backend=backend)

    def fail(x: Tensor, hook: object) -> None:
        raise error

    for run in (model.run_with_hooks, model.run_with_cache):
        hooks = [(Z, zero), ("blocks.1.attn.hook_z", fail)]
        with pytest.raises(type(error)), model.hooks(fwd_hooks=hooks):
            run(tokens, backend=backend)
        assert model.hooks_active() == 0
        assert model.context_level == 0
    with pytest.raises(type(error)):
        capture(model, tokens, [Z], backend=backend, return_type=fail_later(error))
    assert model.hooks_active() == 0
    assert torch.equal(model(tokens, backend=backend), baseline)


def fail_later(error: BaseException) -> Any:
    """A return type whose comparison raises: an error from inside the pass, after the hooks."""

    class Trap(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise error

        __hash__ = str.__hash__

    return Trap("logits")


def test_nothing_is_attached_when_one_of_three_cannot_be(
    model: Decoder, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = model(tokens)
    named = "no hook matches 'blocks.0.attn.hook_q_'"
    with pytest.raises(HookError, match=named):
        model.run_with_hooks(
            tokens, fwd_hooks=[(Z, zero), ("blocks.0.attn.hook_q_", zero), ("hook_embed", zero)]
        )
    assert model.hooks_active() == 0
    # Also when it is torch that refuses the second, after the first is on.
    point = model.hook_dict["blocks.1.attn.hook_z"]

    def refuse(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(point, "register_forward_hook", refuse)
    with pytest.raises(KeyboardInterrupt):
        model.run_with_hooks(tokens, fwd_hooks=[("*hook_z", zero), ("hook_embed", zero)])
    assert model.hooks_active() == 0
    assert torch.equal(model(tokens), baseline)


def test_contexts_unwind_one_level_at_a_time(model: Decoder, tokens: Tensor) -> None:
    def scale(factor: float) -> Callable[..., Tensor]:
        return lambda x, hook: x * factor

    runs = []
    baseline = model(tokens)
    with model.hooks(fwd_hooks=[(Z, scale(2.0))]):
        runs.append(model(tokens))
        with model.hooks(fwd_hooks=[(Z, scale(3.0))]):
            runs.append(model(tokens))
            assert model.hooks_active() == 2
        runs.append(model(tokens))
        assert model.hooks_active() == 1
    assert model.hooks_active() == 0
    assert torch.equal(runs[0], runs[2])
    assert torch.equal(model(tokens), baseline)
    six = model.run_with_hooks(tokens, fwd_hooks=[(Z, scale(6.0))])
    assert (runs[1] - six).abs().max() < EXACT
    assert (runs[0] - baseline).abs().max() > 0.1


@pytest.mark.parametrize("how", ["context", "left on", "permanent", "added"])
def test_a_cached_run_keeps_the_users_hooks(model: Decoder, tokens: Tensor, how: str) -> None:
    """FR-21: also at the point that is cached, however the hook got there."""

    def zero_head(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, 1] = 0
        return z

    baseline = model(tokens)
    if how == "context":
        with model.hooks(fwd_hooks=[(Z, zero_head)]):
            first = model(tokens)
            cached, cache = model.run_with_cache(tokens)
            _, acts = capture(model, tokens, Z)
            third = model(tokens)
    else:
        if how == "left on":
            model.run_with_hooks(tokens, fwd_hooks=[(Z, zero_head)], reset_hooks_end=False)
        elif how == "permanent":
            model.add_perma_hook(Z, zero_head)
        else:
            model.add_hook(Z, zero_head)
        first = model(tokens)
        cached, cache = model.run_with_cache(tokens)
        _, acts = capture(model, tokens, Z)
        third = model(tokens)
        model.reset_hooks(including_permanent=True)
    assert torch.equal(first, third)
    assert (cached - first).abs().max() < EXACT
    assert (first - baseline).abs().max() > 0.1
    assert not cache[Z][:, :, 1].any()
    assert not acts[Z][:, :, 1].any()
    assert torch.equal(model(tokens), baseline)


# FR-25: names.


@pytest.mark.parametrize(
    "form",
    [
        Z,
        [Z],
        (Z,),
        lambda name: name == Z,
        "*.0.attn.hook_z",
        ["blocks.0.attn.hook_z*", Z],
        functools.partial(str.__eq__, Z),
    ],
    ids=["string", "list", "tuple", "callable", "glob", "both", "partial"],
)
def test_forms_of_one_name(model: Decoder, tokens: Tensor, form: Any) -> None:
    logits, cache = model.run_with_cache(tokens, names_filter=form)
    assert list(cache.keys()) == [Z]
    assert torch.equal(logits, model(tokens))
    single = [form] if callable(form) or isinstance(form, str) else form
    seen: list[str] = []
    model.run_with_hooks(
        tokens, fwd_hooks=[(name, lambda x, hook: seen.append(hook.name)) for name in single]
    )
    assert set(seen) == {Z}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            "blocks.0.attn.hook_patern",
            "no hook matches 'blocks.0.attn.hook_patern'; nearest is 'blocks.0.attn.hook_pattern'",
        ),
        ([Z, "hook_embd"], "no hook matches 'hook_embd'; nearest is 'hook_embed'"),
        ("blocks.7.*", r"no hook matches 'blocks.7.\*'; n"),
        ("xyz", "no hook matches 'xyz'; names look like 'hook_embed'"),
        (lambda name: False, r"the predicate on hook names matches none of \d+ hooks; names look"),
        ([], "names_filter names no hook; None means every hook"),
    ],
    ids=["typo", "typo in a list", "glob", "far off", "predicate", "empty"],
)
def test_names_that_match_nothing(model: Decoder, tokens: Tensor, names: Any, words: str) -> None:
    with pytest.raises(HookError, match=words):
        model.run_with_cache(tokens, names_filter=names)
    with pytest.raises(HookError, match=words):
        model.add_caching_hooks(names)
    single = names[-1:] if isinstance(names, list) else [names]
    if single:
        with pytest.raises(HookError, match=words):
            model.run_with_hooks(tokens, fwd_hooks=[(single[0], look)])
        with pytest.raises(HookError, match=words):
            model.run_with_hooks(tokens, bwd_hooks=[(single[0], look)])
        with pytest.raises(HookError, match=words):
            model.add_hook(single[0], look)
    assert model.hooks_active() == 0


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_name_and_no_hook(model: Decoder, tokens: Tensor) -> None:
    with pytest.raises(HookError, match="a hook name is a string or a predicate, got int"):
        model.run_with_hooks(tokens, fwd_hooks=[(3, look)])  # type: ignore[list-item]
    with pytest.raises(HookError, match=r"the hook for 'hook_embed' must be a function, got int"):
        model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", 3)])  # type: ignore[list-item]
    for pair in ("hook_embed", (Z, look, 3)):
        with pytest.raises(HookError, match=r"fwd_hooks must be pairs \(name, function\), got"):
            model.run_with_hooks(tokens, fwd_hooks=[pair])  # type: ignore[list-item]
    with pytest.raises(HookError, match="no hook names were given"):
        capture(model, tokens, [])
    assert model.hooks_active() == 0


def test_resolve() -> None:
    known = ["hook_embed", "blocks.0.hook_z", "blocks.1.hook_z", "blocks.10.hook_z"]
    assert resolve(known, "blocks.1.hook_z") == ["blocks.1.hook_z"]
    assert resolve(known, "blocks.*.hook_z") == known[1:]
    assert resolve(known, "blocks.?.hook_z") == known[1:3]
    assert resolve(known, "*") == known
    assert resolve(known, lambda name: "embed" in name) == ["hook_embed"]


def test_hooks_may_come_from_an_iterator(model: Decoder, tokens: Tensor) -> None:
    pairs = [(Z, zero)]
    expected = model.run_with_hooks(tokens, fwd_hooks=pairs)
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=iter(pairs)), expected)
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=(pair for pair in pairs)), expected)
    assert (expected - model(tokens)).abs().max() > 0.1


class Counter:
    """A hook with a state, as a bound method and as an object that can be called."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, x: Tensor, hook: object) -> None:
        self.calls += 1

    def __call__(self, x: Tensor, hook: object) -> Tensor:
        self.calls += 1
        return x * 2


def test_hooks_of_every_kind(model: Decoder, tokens: Tensor) -> None:
    counter = Counter()

    def times(x: Tensor, hook: object, factor: float) -> Tensor:
        return x * factor

    doubled = model.run_with_hooks(tokens, fwd_hooks=[(Z, functools.partial(times, factor=2.0))])
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(Z, counter)]), doubled)
    model.run_with_hooks(tokens, fwd_hooks=[(Z, counter.count)])
    # The same hook twice on one point, and once on two points by a glob.
    model.run_with_hooks(tokens, fwd_hooks=[(Z, counter.count), (Z, counter.count)])
    model.run_with_hooks(tokens, fwd_hooks=[("*hook_z", counter.count)])
    assert counter.calls == 6


# An edit that does not fit.


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda x, hook: x[:1],
            r"returned shape \[1, 6, 4, \d\], expected \[3, 6, 4, \d\]; return",
        ),
        (lambda x, hook: x[..., None], r"returned shape \[3, 6, 4, \d, 1\], expected"),
        (lambda x, hook: x.mean(), r"\(batch pos head d_head\) returned shape \[\], expected"),
        (lambda x, hook: x.float(), r"returned dtype torch.float32, expected torch.float64"),
        (lambda x, hook: x.to("meta"), r"returned device meta, expected cpu"),
        (
            lambda x, hook: 0.0,
            r"returned float, expected a tensor of shape .* or None; return None",
        ),
        (lambda x, hook: (x,), r"returned tuple, expected a tensor"),
    ],
    ids=["batch", "rank", "scalar", "dtype", "device", "number", "tuple"],
)
def test_edits_that_do_not_fit(
    model: Decoder, tokens: Tensor, backend: str, edit: Any, words: str
) -> None:
    with pytest.raises(HookError, match=rf"the hook on '{Z}'.*{words}"):
        model.run_with_hooks(tokens, fwd_hooks=[(Z, edit)], backend=backend)
    with pytest.raises(HookError, match=rf"the hook on '{Z}'.*{words}"), model.hooks([(Z, edit)]):
        model(tokens, backend=backend)
    assert model.hooks_active() == 0


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda x, hook: x[:, :1], r"returned shape \[3, 1, 4, \d\], expected \[3, 6, 4, \d\]"),
        (lambda x, hook: x.float(), r"returned dtype torch.float32, expected torch.float64"),
        (lambda x, hook: 1, r"returned int, expected a tensor"),
    ],
)
def test_gradients_that_do_not_fit(model: Decoder, tokens: Tensor, edit: Any, words: str) -> None:
    with (
        pytest.raises(HookError, match=rf"the backward hook on '{Z}'.*{words}"),
        model.hooks(bwd_hooks=[(Z, edit)]),
    ):
        model(tokens, return_type="loss").backward()
    assert model.hooks_active() == 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writing_what_is_read_only(model: Decoder, tokens: Tensor, backend: str, mode: Any) -> None:
    name = "blocks.1.attn.hook_lse"

    def in_place(lse: Tensor, hook: object) -> None:
        lse.detach()[:, 0] = 3

    mask = torch.tensor([[0, 1, 1, 1, 1, 1]] * 3)
    options: dict[str, Any] = {"backend": backend, "attention_mask": mask}
    with mode():
        for write in (lambda lse, hook: lse * 2, lambda lse, hook: lse.clone(), in_place):
            with pytest.raises(HookError, match="is read-only: its value follows from the scores"):
                model.run_with_hooks(tokens, fwd_hooks=[(name, write)], **options)
        # Reading is no write: also where rows are -inf, and when the tensor itself is returned.
        for read in (look, lambda lse, hook: lse):
            got = model.run_with_hooks(tokens, fwd_hooks=[(name, read)], **options)
            assert (got - model(tokens, **options)).abs().max() < EXACT
    words = "takes no backward hook: it is read-only and nothing depends on it; differentiate"
    with pytest.raises(HookError, match=words):
        model.run_with_hooks(tokens, bwd_hooks=[(name, look)])


# A hook that never fires.


def test_hooks_that_never_fire(model: Decoder, tokens: Tensor) -> None:
    last = "blocks.1.attn.hook_z"
    words = rf"the hook on '{last}' never fired; no pass that reaches it was run inside the block"
    with pytest.raises(HookError, match=words):
        model.run_with_hooks(tokens, fwd_hooks=[(last, look)], stop_at_layer=1)
    with pytest.raises(HookError, match=words), model.hooks(fwd_hooks=[(last, look)]):
        pass
    with pytest.raises(HookError, match="never fired"), model.hooks(fwd_hooks=[(last, look)]):
        model.reset_hooks()
    with pytest.raises(HookError, match=rf"'{last}' never fired in this pass"):
        model.run_with_cache(tokens, names_filter=[last, "hook_embed"], stop_at_layer=1)
    with pytest.raises(HookError, match="none of the names asked for fired in this pass"):
        model.run_with_cache(tokens, names_filter="blocks.1.*", stop_at_layer=1)
    with pytest.raises(HookError, match="never fired"):
        capture(model, tokens, ["hook_embed", last], stop_at_layer=1)
    # A hook that fired and was then reset did fire.
    with model.hooks(fwd_hooks=[(last, look)]):
        model(tokens)
        model.reset_hooks()
    assert model.hooks_active() == 0


@pytest.mark.parametrize("name", ["blocks.0.attn.hook_pattern", "blocks.0.attn.hook_attn_scores"])
def test_the_matrix_that_flash_never_forms(model: Decoder, tokens: Tensor, name: str) -> None:
    """Naming it is an error that says what to do; a glob takes what fires."""
    words = f"'{name}' never fires: backend 'flash' does not form the n x n matrix; use backend="
    for run in (
        lambda: model.run_with_cache(tokens, names_filter=name, backend="flash"),
        lambda: model.run_with_cache(tokens, names_filter=[name, "*hook_z"], backend="flash"),
        lambda: model.run_with_hooks(tokens, fwd_hooks=[(name, look)], backend="flash"),
        lambda: model.run_with_hooks(tokens, bwd_hooks=[(name, look)], backend="flash"),
        lambda: capture(model, tokens, name, backend="flash"),
    ):
        with pytest.raises(BackendError, match=words):
            run()
        assert model.hooks_active() == 0
    for everything in (None, "*", lambda _: True):
        _, cache = model.run_with_cache(tokens, names_filter=everything, backend="flash")
        assert name not in cache
        assert Z in cache
    model.backend = "flash"
    with pytest.raises(BackendError, match=words):
        model.run_with_cache(tokens, names_filter=name)


def test_torchs_own_hooks_count_too(model: Decoder, tokens: Tensor) -> None:
    point = model.blocks[0].attn.hook_pattern
    shapes = []
    handle = point.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    model(tokens)
    assert shapes == [(3, 4, 6, 6)]
    with pytest.raises(BackendError, match="never fires: backend 'flash'"):
        model(tokens, backend="flash")
    handle.remove()
    model(tokens, backend="flash")


# Backward hooks and gradients (FR-29).


def test_cached_gradients_equal_autograd(model: Decoder, tokens: Tensor, backend: str) -> None:
    names = ["*" if backend == "naive" else "*hook_[!ap]*"]
    loss, cache = model.run_with_cache(
        tokens, names_filter=names, incl_bwd=True, return_type="loss", backend=backend
    )
    value, acts = capture(model, tokens, names, grads=True, return_type="loss", backend=backend)
    assert torch.equal(loss, value)
    writable = [name for name in acts if model.hook_dict[name].spec.writable]
    grads = torch.autograd.grad(value, [acts[name] for name in writable])
    assert {name for name in cache if not name.endswith("_grad")} == set(acts)
    assert {name for name in cache if name.endswith("_grad")} == {f"{n}_grad" for n in writable}
    for name, grad in zip(writable, grads, strict=True):
        assert (cache[name + "_grad"] - grad).abs().max() < EXACT, name
        assert torch.equal(cache[name], acts[name])
    assert model.hooks_active() == 0


def test_gradient_of_a_constant(build: Callable[..., Decoder]) -> None:
    """Sinusoidal positions and frozen weights: a graph starts where somebody listens."""
    model = build({"positions": "sinusoidal", "d_mlp": 8})
    tokens = torch.tensor([[0, 1, 2, 3]])
    _, cache = model.run_with_cache(
        tokens, names_filter="hook_pos_embed", incl_bwd=True, return_type="loss"
    )
    expected = cache["hook_pos_embed_grad"]
    assert expected.abs().max() > 1e-3
    model.requires_grad_(False)
    loss, acts = capture(
        model, tokens, ["hook_pos_embed", Z, "*hook_lse"], grads=True, return_type="loss"
    )
    grads = torch.autograd.grad(loss, [acts["hook_pos_embed"], acts[Z]])
    assert (grads[0] - expected).abs().max() < EXACT
    assert grads[1].abs().max() > 1e-3


def test_a_backward_hook_turns_its_layer_naive(model: Decoder, tokens: Tensor) -> None:
    """Under auto, for pattern and scores alike, and the gradient is the naive one."""
    for name in ("blocks.0.attn.hook_pattern", "blocks.1.attn.hook_attn_scores"):
        seen: dict[str, list[Tensor]] = {"auto": [], "naive": []}
        for backend, grads in seen.items():
            hooks = [(name, lambda grad, hook, grads=grads: grads.append(grad.clone()))]
            with model.hooks(bwd_hooks=hooks):
                model(tokens, return_type="loss", backend=backend).backward()
        assert seen["auto"][0].shape == (3, 4, 6, 6)
        assert (seen["auto"][0] - seen["naive"][0]).abs().max() < EXACT


def test_a_backward_hook_on_everything(model: Decoder, tokens: Tensor) -> None:
    """A set of names takes what a gradient can reach."""
    for everything in ("*", lambda name: True):
        seen: set[str] = set()
        hooks = [(everything, lambda grad, hook, seen=seen: seen.add(hook.name))]
        with model.hooks(bwd_hooks=hooks):
            model(tokens, return_type="loss").backward()
        assert seen == {name for name, point in model.hook_dict.items() if point.spec.writable}
        assert model.hooks_active() == 0


def test_an_edited_gradient_reaches_the_weights(model: Decoder, tokens: Tensor) -> None:
    """A zero gradient at z stops what reaches W_V, in both forms TransformerLens accepts."""
    weight = model.blocks[1].attn.W_V
    for stop in (zero, lambda grad, hook: (torch.zeros_like(grad),)):
        model.zero_grad()
        with model.hooks(bwd_hooks=[("blocks.1.attn.hook_z", stop)]):
            model(tokens, return_type="loss").backward()
        assert not weight.grad.any()
    model(tokens, return_type="loss").backward()
    assert weight.grad.any()


def test_gradients_that_cannot_be(model: Decoder, tokens: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"incl_bwd=True needs a scalar output, got \[3, 6, 20\]"):
        model.run_with_cache(tokens, incl_bwd=True)
    with pytest.raises(ShapeError, match="needs a scalar output, got NoneType; pass return_type="):
        model.run_with_cache(tokens, incl_bwd=True, return_type=None)
    model.requires_grad_(False)
    words = "incl_bwd=True needs an output that carries a gradient, and no weight requires one"
    with pytest.raises(ShapeError, match=words):
        model.run_with_cache(tokens, incl_bwd=True, return_type="loss")
    assert model.hooks_active() == 0


# What is kept.


def test_everything_is_kept_in_firing_order(model: Decoder, tokens: Tensor) -> None:
    logits, cache = model.run_with_cache(tokens)
    expected = [name for name in model.hook_dict if not name.endswith("hook_result")]
    assert list(cache.keys()) == expected
    # Caching reads; naive and flash differ by rounding only.
    assert (logits - model(tokens)).abs().max() < EXACT
    assert cache["q", 0].shape == cache["blocks.0.attn.hook_q"].shape
    _, plain = model.run_with_cache(tokens, return_cache_object=False, names_filter=Z)
    assert type(plain) is dict
    _, named = model.run_with_cache(tokens, names_filter="*hook_result")
    assert list(named.keys()) == [f"blocks.{layer}.attn.hook_result" for layer in range(2)]


@pytest.mark.parametrize("cut", [2, -1, (1, 4), [0, 5], (0, 6, 2), torch.tensor([3])])
def test_position_slices_cut_positions_and_nothing_else(
    model: Decoder, tokens: Tensor, cut: Any
) -> None:
    """FR-29: of per-head and square tensors too, hook_lse and rotated queries included."""
    _, whole = model.run_with_cache(tokens, incl_bwd=True, return_type="loss")
    _, cache = model.run_with_cache(tokens, pos_slice=cut, incl_bwd=True, return_type="loss")
    assert set(cache) == set(whole)
    index = slice(*cut) if isinstance(cut, tuple) else cut
    for name, value in whole.items():
        axis = model.hook_dict[name.removesuffix("_grad")].spec.pos_axis
        expected = value[(slice(None),) * axis + (index,)]
        # TransformerLens keeps the axis of a single position.
        assert torch.equal(cache[name].reshape(expected.shape), expected), name


def test_without_the_batch_axis(model: Decoder, tokens: Tensor) -> None:
    _, whole = model.run_with_cache(tokens[:1])
    _, cache = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    assert not cache.has_batch_dim
    assert all(torch.equal(cache[name], whole[name][0]) for name in list(whole))
    words = r"remove_batch_dim=True needs a batch of one, but 'hook_embed' has 3 rows"
    with pytest.raises(ShapeError, match=words):
        model.run_with_cache(tokens, remove_batch_dim=True)
    assert model.hooks_active() == 0


def test_device_of_what_is_kept(model: Decoder, tokens: Tensor) -> None:
    for device in ("cpu", torch.device("cpu"), None):
        _, cache = model.run_with_cache(tokens, names_filter=Z, device=device)
        assert cache[Z].device == model.device


@pytest.mark.parametrize(
    "options", [{}, {"stop_at_layer": 1}, {"start_at_layer": 1}, {"start_at_layer": 2}]
)
def test_nothing_kept_shares_storage(
    model: Decoder, tokens: Tensor, backend: str, options: dict[str, Any]
) -> None:
    """Neither with another entry, nor with the output, nor with the argument."""
    start = options.get("start_at_layer")
    first = tokens if start is None else model(tokens, stop_at_layer=start).detach()
    with torch.no_grad():
        output, cache = model.run_with_cache(first, backend=backend, **options)
    storages = {value.untyped_storage().data_ptr() for value in cache.values()}
    assert len(storages) == len(cache)
    assert first.untyped_storage().data_ptr() not in storages
    assert output.untyped_storage().data_ptr() not in storages


def test_a_later_edit_in_place_rewrites_nothing_kept(model: Decoder, tokens: Tensor) -> None:
    """resid_pre of layer 1 is the very tensor that was resid_post of layer 0."""

    def in_place(x: Tensor, hook: object) -> None:
        x.mul_(0)

    post, pre = "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"
    with torch.no_grad():
        _, clean = capture(model, tokens, [post], backend="naive")
        with model.hooks(fwd_hooks=[(pre, in_place)]):
            _, acts = capture(model, tokens, [post, pre], backend="naive")
            _, cache = model.run_with_cache(tokens, backend="naive")
            _, only = model.run_with_cache(tokens, names_filter=[post], backend="naive")
    for kept in (acts, cache, only):
        assert torch.equal(kept[post], clean[post])
    assert not acts[pre].any()
    assert not cache[pre].any()


def test_captured_tensors_are_copies(model: Decoder, tokens: Tensor) -> None:
    output, acts = capture(model, tokens, ["hook_*", "blocks.*"], stop_at_layer=2)
    kept = {name: value.clone() for name, value in acts.items()}
    assert all(not value.requires_grad for value in acts.values())
    output.detach().fill_(7)
    for name in list(acts):
        assert torch.equal(acts[name], kept[name]), name
        acts.pop(name).fill_(3)


def test_a_slice_does_not_keep_the_whole_alive(model: Decoder, tokens: Tensor) -> None:
    _, cache = model.run_with_cache(tokens, pos_slice=-1)
    for name, value in cache.items():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name


def test_capture(model: Decoder, tokens: Tensor, backend: str) -> None:
    logits, acts = capture(model, tokens, ["*hook_z", "hook_embed", Z], backend=backend)
    assert list(acts) == ["hook_embed", Z, "blocks.1.attn.hook_z"]
    assert torch.equal(logits, model(tokens, backend=backend))
    _, cache = model.run_with_cache(tokens, backend=backend, names_filter=list(acts))
    assert all(torch.equal(acts[name], cache[name]) for name in acts)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]] * 3)
    _, masked = capture(model, tokens, Z, backend=backend, attention_mask=mask)
    assert not masked[Z][:, 0].any()
    # Values as they leave all other hooks.
    with model.hooks(fwd_hooks=[(Z, zero)]):
        assert not capture(model, tokens, Z, backend=backend)[1][Z].any()


def test_caching_hooks_that_stay(model: Decoder, tokens: Tensor) -> None:
    kept = model.add_caching_hooks(["*hook_z"])
    assert kept == {}
    model(tokens)
    assert list(kept) == [Z, "blocks.1.attn.hook_z"]
    model.reset_hooks()
    given: dict[str, Tensor] = {}
    cache, forward, backward = model.get_caching_hooks(Z, incl_bwd=True, cache=given)
    with model.hooks(fwd_hooks=forward, bwd_hooks=backward):
        model(tokens, return_type="loss").backward()
    assert cache is given
    assert list(given) == [Z, Z + "_grad"]
    assert torch.equal(given[Z], kept[Z])


# edited.


def test_edited(model: Decoder, tokens: Tensor, backend: str) -> None:
    baseline = model(tokens, backend=backend)
    expected = model.run_with_hooks(tokens, fwd_hooks=[("*hook_z", zero)], backend=backend)
    with edited(model, {"*hook_z": torch.zeros_like}) as same:
        assert same is model
        assert torch.equal(model(tokens, backend=backend), expected)
        assert torch.equal(model(tokens, backend=backend), expected)
    assert torch.equal(model(tokens, backend=backend), baseline)
    with edited(model, {Z: lambda z: z}):
        assert torch.equal(model(tokens, backend=backend), baseline)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda z: z.mul_(0), rf"the edit of '{Z}' changed its argument in place; clone it first"),
        (lambda z: None, rf"the edit of '{Z}' returned None, expected a tensor; return the arg"),
        (lambda z: z[:1], rf"the hook on '{Z}' .* returned shape \[1, 6, 4, \d\], expected"),
        (lambda z: z.float(), rf"the hook on '{Z}' .* returned dtype torch.float32"),
    ],
    ids=["in place", "none", "shape", "dtype"],
)
def test_edits_that_cannot_be_honoured(
    model: Decoder, tokens: Tensor, mode: Any, edit: Any, words: str
) -> None:
    with mode(), pytest.raises(HookError, match=words), edited(model, {Z: edit}):
        model(tokens)
    assert model.hooks_active() == 0


def test_edits_that_never_happen(model: Decoder, tokens: Tensor) -> None:
    with pytest.raises(HookError, match="never fired"), edited(model, {Z: torch.zeros_like}):
        pass
    words = "no hook matches 'hook_embd'; nearest is 'hook_embed'"
    with pytest.raises(HookError, match=words), edited(model, {"hook_embd": torch.zeros_like}):
        model(tokens)
    # FR-26: a value that was never kept is a KeyError, not an empty edit.
    _, cache = model.run_with_cache(tokens, names_filter="hook_embed")
    with pytest.raises(KeyError), edited(model, {Z: lambda z: cache[Z]}):
        model(tokens)
    assert model.hooks_active() == 0


def test_a_batch_is_not_squeezed(model: Decoder, backend: str) -> None:
    """FR-37: batch of three, and batch = positions = heads, row by row equal to solo runs."""
    for rows in (
        [[0, 1, 2, 3, 1, 2]] * 3,
        [[0, 1, 2, 3], [4, 5, 6, 7], [1, 1, 1, 1], [9, 8, 7, 6]],
    ):
        batch = torch.tensor(rows)
        names = lambda name: "scores" not in name and "pattern" not in name  # noqa: E731
        logits, acts = model.run_with_cache(batch, names_filter=names, backend=backend)
        for index, row in enumerate(rows):
            solo, alone = model.run_with_cache(
                torch.tensor([row]), names_filter=names, backend=backend
            )
            assert (logits[index] - solo[0]).abs().max() < EXACT
            for name in list(alone):
                difference = (acts[name][index] - alone[name][0]).abs().max()
                assert difference < EXACT, name


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_model_sees_hooks(model_a: Decoder, tokens: Tensor) -> None:
    """FR-28: hooks attached after compilation act as they do without it."""
    compiled = torch.compile(model_a, backend="eager")
    baseline = model_a(tokens)
    assert torch.equal(compiled(tokens), baseline)
    with model_a.hooks(fwd_hooks=[(Z, zero)]):
        hooked = compiled(tokens)
    assert torch.equal(hooked, model_a.run_with_hooks(tokens, fwd_hooks=[(Z, zero)]))
    assert (hooked - baseline).abs().max() > 0.1
    assert torch.equal(compiled(tokens), baseline)
    assert compiled(tokens, return_type="loss", backend="naive").ndim == 0
