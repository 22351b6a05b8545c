"""Starting and stopping at a layer: the rest of the same run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import ShapeError

MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize("positions", ["learned", "shortformer", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_stopping_and_going_on_is_one_run(
    build: Callable[..., Decoder],
    tokens: Tensor,
    backend: str,
    positions: str,
    mask: Tensor | None,
) -> None:
    """FR-48: mask and positions apply from whatever layer the run starts; equal bit for bit."""
    model = build({"positions": positions, "n_layers": 3, "d_mlp": 8})
    options: dict[str, Any] = {"attention_mask": mask, "backend": backend}
    logits, cache = model.run_with_cache(tokens, names_filter="*hook_resid_*", **options)
    for layer in range(4):
        resid = model(tokens, stop_at_layer=layer, **options)
        seen = f"blocks.{layer}.hook_resid_pre" if layer < 3 else "blocks.2.hook_resid_post"
        assert torch.equal(resid, cache[seen])
        assert torch.equal(model(resid, start_at_layer=layer, **options), logits)
        for later in range(layer, 4):
            part = model(resid, start_at_layer=layer, stop_at_layer=later, **options)
            assert torch.equal(part, model(tokens, stop_at_layer=later, **options))


def test_given_positions_apply_too(model: Decoder, tokens: Tensor, backend: str) -> None:
    places = torch.tensor([[0, 3, 4, 9, 9, 1]]).expand(3, 6)
    options: dict[str, Any] = {"position_ids": places, "backend": backend}
    resid = model(tokens, stop_at_layer=1, **options)
    assert torch.equal(model(resid, start_at_layer=1, **options), model(tokens, **options))


def test_only_the_layers_run_fire(model: Decoder, tokens: Tensor) -> None:
    resid, cache = model.run_with_cache(tokens, stop_at_layer=1)
    assert {name.split(".")[1] for name in cache if name.startswith("blocks")} == {"0"}
    assert "hook_embed" in cache
    _, rest = model.run_with_cache(resid, start_at_layer=1)
    assert {name.split(".")[1] for name in rest if name.startswith("blocks")} == {"1"}
    assert "hook_embed" not in rest
    assert "ln_final.hook_scale" in rest


def test_the_callers_stream_is_never_written(model: Decoder, tokens: Tensor) -> None:
    resid = model(tokens, stop_at_layer=1).detach()
    before = resid.clone()

    def in_place(x: Tensor, hook: object) -> Tensor:
        return x.mul_(0)

    model.run_with_hooks(resid, start_at_layer=1, fwd_hooks=[("blocks.1.hook_resid_pre", in_place)])
    assert torch.equal(resid, before)
    same = model(resid, start_at_layer=1, stop_at_layer=1)
    same.mul_(0)
    assert torch.equal(resid, before)


STREAM = torch.zeros(1, 4, 16, dtype=torch.float64)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("first", "arguments", "words"),
    [
        (STREAM, {"start_at_layer": 3}, r"start_at_layer must lie in \[0, 2\], got 3"),
        (STREAM, {"start_at_layer": -1}, r"start_at_layer must lie in \[0, 2\], got -1"),
        (STREAM, {"start_at_layer": True}, r"start_at_layer must lie in \[0, 2\], got True"),
        (STREAM, {"stop_at_layer": 1.0}, r"stop_at_layer must lie in \[0, 2\], got 1\.0"),
        (
            STREAM,
            {"start_at_layer": 2, "stop_at_layer": 1},
            r"start_at_layer=2 lies after stop_at_layer=1",
        ),
        (
            torch.zeros(1, 4, dtype=torch.int64),
            {"start_at_layer": 1},
            r"the residual stream \[batch, pos, 16\] torch.float64, got \[1, 4\] torch.int64",
        ),
        (STREAM.float(), {"start_at_layer": 1}, r"got \[1, 4, 16\] torch.float32"),
        (STREAM[..., :15], {"start_at_layer": 1}, r"got \[1, 4, 15\] torch.float64"),
        (STREAM[:, :0], {"start_at_layer": 1}, r"got \[1, 0, 16\]"),
        (None, {"start_at_layer": 1}, r"the residual stream .*, got NoneType"),
        (
            STREAM.expand(1, 4, 16).repeat(1, 5, 1),
            {"start_at_layer": 1},
            r"tokens are 20 long, over n_ctx = 16",
        ),
        (
            STREAM,
            {"start_at_layer": 1, "return_type": "loss"},
            r"return_type='loss' needs tokens, but with start_at_layer=1 the first argument is a",
        ),
        (
            torch.zeros(1, 4, dtype=torch.int64),
            {"stop_at_layer": 1, "return_type": "loss_per_token"},
            r"return_type='loss_per_token' needs logits, but with stop_at_layer=1 the residual",
        ),
    ],
)
def test_arguments_that_mean_nothing(
    model_a: Decoder, first: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        model_a(first, **arguments)
