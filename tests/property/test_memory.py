"""An MLP as a memory over drawn decoders: the sum is exact, and neurons have no order."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from headstream.circuits.memory.contexts import neuron_key_contexts
from headstream.circuits.memory.neuron_run import neuron_activations
from headstream.circuits.memory.tokens import neuron_key_tokens, neuron_value_tokens
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
seeds = st.integers(0, 2**16)


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    """Fields of a small decoder with an MLP of any kind."""
    return {
        "n_layers": 2,
        "n_heads": 2,
        "d_model": 6,
        "d_head": 2,
        "d_vocab": 7,
        "n_ctx": 6,
        "d_mlp": 5,
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm", "none"])),
        "activation": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        "mlp_bias": draw(st.booleans()),
        "gated_mlp": draw(st.booleans()),
        "unembed_bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
    }


def decoder(fields: dict[str, Any], seed: int) -> Decoder:
    """In float64, biases and gains as random as the rest."""
    model = Decoder(DecoderConfig(**fields), seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b" in name.removeprefix("blocks") or name.endswith(".w"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def prompts(seed: int) -> Tensor:
    return torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(seed))


@quick
@given(configs(), seeds)
def test_the_output_is_the_sum_and_the_last_layer_adds_up_to_the_logits(
    fields: dict[str, Any], seed: int
) -> None:
    """With the MLPs' attribution taken away, what is left is the run with those outputs at zero,
    read through the same scale."""
    model, tokens = decoder(fields, seed), prompts(seed)
    run = neuron_activations(model, tokens, 1)
    assert run.largest_error <= run.bound <= 1e-10
    found = run.logit_attribution(3, pos=-1).sum("component").values
    kept: dict[str, Tensor] = {}

    def hold(scale: Tensor, hook: Any) -> Tensor:
        return kept.setdefault(hook.name, scale)

    hooks: list[Any] = [("blocks.1.hook_mlp_out", lambda out, hook: torch.zeros_like(out))]
    held = [("ln_final.hook_scale", hold)] if fields["norm"] != "none" else []
    with torch.no_grad():
        before = model.run_with_hooks(tokens, fwd_hooks=held)
        after = model.run_with_hooks(tokens, fwd_hooks=hooks + held)
    # A scale near sqrt(eps) magnifies rounding.
    np.testing.assert_allclose(found, (before - after)[:, -1, 3], rtol=0, atol=1e-9)


@quick
@given(configs(), seeds)
def test_neurons_have_no_order(fields: dict[str, Any], seed: int) -> None:
    model, tokens = decoder(fields, seed), prompts(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))

    def readings() -> list[np.ndarray[Any, Any]]:
        return [
            neuron_activations(model, tokens, 1).logit_attribution(3)[:5].values,
            neuron_key_tokens(model, 1, top=7)["activation"].values,
            neuron_value_tokens(model, 1, top=7)["effect"].values.swapaxes(0, 1),
            neuron_key_contexts(model, 1, tokens, top=4)["activation"].values,
        ]

    before = readings()
    with torch.no_grad():
        mlp = model.blocks[1].mlp
        for name, parameter in mlp.named_parameters():
            if name == "W_out":
                parameter.copy_(parameter[order].clone())
            elif name != "b_out":
                parameter.copy_(parameter[..., order].clone())
    for old, new in zip(before, readings(), strict=True):
        np.testing.assert_allclose(new, old[order], rtol=0, atol=1e-10)
