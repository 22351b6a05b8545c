"""Continuation: greedy equals the argmax of full passes; draws repeat with their seed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import HookError, ShapeError


def greedily(model: Decoder, tokens: Tensor, steps: int, **options: Any) -> Tensor:
    """The definition: a full pass a token."""
    for _ in range(steps):
        best = model(tokens, **options)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, best), 1)
    return tokens


def test_greedy_equals_full_passes(model: Decoder, tokens: Tensor) -> None:
    out = model.generate(tokens, 5)
    assert torch.equal(out, greedily(model, tokens, 5))
    assert torch.equal(out[:, :6], tokens)
    assert torch.equal(model.generate(tokens[0], 5), out[:1])
    assert torch.equal(model.generate(tokens, 0), tokens)
    assert model.generate(tokens, 10).shape == (3, 16)


def test_first_of_equals_is_taken(model_l1: Decoder) -> None:
    with torch.no_grad():
        model_l1.unembed.W_U.zero_()
    assert model_l1.generate(torch.tensor([[3, 4]]), 2).tolist() == [[3, 4, 0, 0]]


def test_draws_repeat_with_their_seed_and_follow_the_logits(model: Decoder) -> None:
    prompt = torch.tensor([[0, 1, 2]]).expand(4000, 3)
    state = torch.random.get_rng_state()
    first = model.generate(prompt, 1, temperature=2.0, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, model.generate(prompt, 1, temperature=2.0, seed=3))
    assert not torch.equal(first, model.generate(prompt, 1, temperature=2.0, seed=4))
    expected = (model(prompt[:1])[0, -1].detach() / 2).softmax(-1)
    share = torch.bincount(first[:, -1], minlength=20) / 4000
    # Five standard errors of a share at n = 4000.
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


def test_hooks_see_absolute_positions_at_every_step(model: Decoder, tokens: Tensor) -> None:
    """An edit of position 2 is made at every step, as in full passes with the same hook."""

    def edit(x: Tensor, hook: object) -> Tensor:
        x = x.clone()
        x[:, 2] = -3.0 * x[:, 2]
        return x

    hooks = [("blocks.0.hook_resid_pre", edit)]
    with model.hooks(fwd_hooks=hooks):
        expected = greedily(model, tokens, 6)
        # Hooks that are on the model already count as much as hooks that are passed.
        outer = model.generate(tokens, 6)
    given = model.generate(tokens, 6, fwd_hooks=iter(hooks))
    assert torch.equal(given, expected)
    assert torch.equal(outer, expected)
    assert not torch.equal(expected, model.generate(tokens, 6))
    assert model.hooks_active() == 0


def test_leaves_gradients_as_they_were(model: Decoder, tokens: Tensor) -> None:
    assert torch.is_grad_enabled()
    model.generate(tokens, 1)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_text(model_a: Decoder) -> None:
    model_a.vocab = [f"w{i}" for i in range(20)]
    assert torch.equal(model_a.generate("w3 w4", 2), model_a.generate(torch.tensor([[3, 4]]), 2))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 11}, r"6 tokens and max_new_tokens=11 pass n_ctx = 16"),
        ({"max_new_tokens": -1}, r"max_new_tokens must be a whole number >= 0, got -1"),
        ({"max_new_tokens": 1.0}, r"max_new_tokens must be a whole number >= 0, got 1\.0"),
        ({"temperature": -0.1}, r"temperature must be a finite number >= 0, got -0\.1"),
        ({"temperature": float("nan")}, r"temperature must be a finite number >= 0, got nan"),
        ({"temperature": "1"}, r"temperature must be a finite number >= 0, got '1'"),
        ({"temperature": 1.0}, r"temperature=1\.0 draws tokens and needs a whole .* got None"),
        ({"temperature": 1.0, "seed": 0.5}, r"needs a whole number as seed, got 0\.5"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, r"not empty, got \[1, 0\]"),
    ],
)
def test_arguments_that_mean_nothing(
    model: Decoder, tokens: Tensor, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        model.generate(**{"tokens": tokens, "max_new_tokens": 1} | arguments)


def test_hook_names_are_checked_even_for_no_token(model: Decoder, tokens: Tensor) -> None:
    with pytest.raises(HookError, match="no hook matches 'hook_embd'; nearest is 'hook_embed'"):
        model.generate(tokens, 0, fwd_hooks=[("hook_embd", lambda x, hook: None)])
