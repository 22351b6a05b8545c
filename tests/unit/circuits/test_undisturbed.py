"""What edits a run is refused before it is taken apart; what only reads is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.circuits.interventions import cut_edges, freeze_attention
from headstream.circuits.pattern_preserving import pattern_preserving_ablation
from headstream.circuits.stream.residual import decompose_residual
from headstream.circuits.undisturbed import undisturbed
from headstream.models.decoder import Decoder
from headstream.models.errors import HookError
from headstream.models.hooks import edited


def halve(tensor: Tensor, hook: Any) -> Tensor:
    return tensor / 2


@pytest.mark.parametrize(
    "name",
    [
        "hook_embed",
        "blocks.0.hook_resid_pre",
        "blocks.0.attn.hook_q",
        "blocks.0.attn.hook_pattern",
        "blocks.0.attn.hook_z",
        "blocks.1.hook_attn_out",
        "blocks.1.mlp.hook_post",
        "blocks.1.hook_mlp_out",
        "ln_final.hook_scale",
    ],
)
def test_an_edit_is_refused_wherever_it_is(model: Decoder, tokens: Tensor, name: str) -> None:
    with (
        model.hooks(fwd_hooks=[(name, halve)]),
        pytest.raises(
            HookError,
            match=rf"^cannot decompose the stream: a hook edits '{name}' in this run; take it "
            "apart outside the block, or detach the hook$",
        ),
    ):
        decompose_residual(model, tokens)
    assert model.hooks_active() == 0


def test_an_edit_of_z_would_not_show_in_the_sum(model: Decoder, tokens: Tensor) -> None:
    """Why the sum is no guard: z W_O of the edited z is what the edited model writes."""
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", halve)]):
        z: dict[str, Tensor] = {}

        def keep(tensor: Tensor, hook: Any) -> None:
            z["kept"] = tensor.detach().clone()

        names = [("blocks.0.attn.hook_z", keep)]
        with torch.no_grad():
            model.run_with_hooks(tokens, fwd_hooks=names)
        with pytest.raises(HookError, match="cannot decompose"):
            decompose_residual(model, tokens)
    whole = decompose_residual(model, tokens)
    assert torch.allclose(z["kept"] * 2, next(g for g in whole.groups if g.layer == 0).z)  # type: ignore[attr-defined]


def test_edits_in_place_and_several(model: Decoder, tokens: Tensor) -> None:
    def zero(tensor: Tensor, hook: Any) -> None:
        tensor[:, 0] = 0

    with (
        model.hooks(fwd_hooks=[("blocks.*.attn.hook_z", zero)]),
        pytest.raises(HookError, match=r"a hook edits 'blocks.0.attn.hook_z' and 1 more in"),
        torch.no_grad(),
    ):
        decompose_residual(model, tokens)
    with (
        edited(model, {"blocks.1.attn.hook_v": lambda v: v + 1}),
        pytest.raises(HookError, match=r"a hook edits 'blocks.1.attn.hook_v' in"),
    ):
        decompose_residual(model, tokens)


@pytest.mark.parametrize("how", ["naive", "flash", "auto"])
def test_hooks_that_read_are_left_alone(model: Decoder, tokens: Tensor, how: str) -> None:
    """A glob takes what fires: the watch must not ask a backend for more."""
    seen: list[str] = []

    def read(tensor: Tensor, hook: Any) -> None:
        seen.append(hook.name)

    expected = decompose_residual(model, tokens, backend=how)
    with model.hooks(fwd_hooks=[("*", read), ("blocks.0.hook_resid_pre", lambda x, hook: x)]):
        attached = model.hooks_active()
        found = decompose_residual(model, tokens, backend=how)
        assert model.hooks_active() == attached
    torch.testing.assert_close(
        torch.tensor(found.writes.values), torch.tensor(expected.writes.values)
    )
    assert ("blocks.0.attn.hook_pattern" in seen) == (how != "flash")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m, t: cut_edges(m, 1, keys=[0]), r"attention of layer 1 is edited \(edges cut"),
        (lambda m, t: freeze_attention(m, t.flip(0), layers=1), "attention of layer 1 is edited"),
        (lambda m, t: pattern_preserving_ablation(m, t, [(0, 1)]), "attention of layer . is"),
    ],
    ids=["cut", "frozen", "ablated"],
)
def test_edited_attention_is_refused(
    model: Decoder, tokens: Tensor, edit: Callable[..., Any], words: str
) -> None:
    with edit(model, tokens):
        with pytest.raises(HookError, match=f"^cannot decompose the stream: {words}"):
            decompose_residual(model, tokens)
        with torch.no_grad():
            model(tokens)  # a block that no pass met is an error of its own
    decompose_residual(model, tokens)


@pytest.mark.parametrize(
    ("attach", "where"),
    [
        (lambda model, hook: model.blocks[0].mlp.register_forward_hook(hook), "'blocks.0.mlp'"),
        (lambda model, hook: model.ln_final.register_forward_pre_hook(hook), "'ln_final'"),
        (lambda model, hook: model.register_forward_hook(hook), "the model"),
        (
            lambda model, hook: model.blocks[1].hook_attn_out.register_forward_hook(hook),
            "'blocks.1.hook_attn_out'",
        ),
    ],
)
def test_hooks_of_torch_cannot_be_seen_through(
    model: Decoder, tokens: Tensor, attach: Callable[..., Any], where: str
) -> None:
    handle = attach(model, lambda *_: None)
    with pytest.raises(HookError, match=f"a torch hook on {where} may edit the run; detach it, or"):
        decompose_residual(model, tokens)
    handle.remove()
    decompose_residual(model, tokens)


def test_the_watch_goes_after_an_exception(model: Decoder, tokens: Tensor) -> None:
    def fail(tensor: Tensor, hook: Any) -> None:
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="own"), model.hooks(fwd_hooks=[("hook_embed", fail)]):
        decompose_residual(model, tokens)
    assert model.hooks_active() == 0
    with undisturbed(model, "do anything"):
        pass


def test_in_inference_mode_values_are_compared(model: Decoder, tokens: Tensor) -> None:
    def zero(tensor: Tensor, hook: Any) -> None:
        tensor[:] = 0

    with (
        torch.inference_mode(),
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", zero)]),
        pytest.raises(HookError, match=r"a hook edits 'blocks.1.attn.hook_z'"),
    ):
        decompose_residual(model, tokens)
