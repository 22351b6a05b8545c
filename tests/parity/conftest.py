"""GPT-2 and Llama of transformers, tiny and random, and our decoder with the same weights.

The converters are oracles for these tests: small, private, and for two architectures only.
"""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder, build


def randomise(model: Any) -> Any:
    """Every parameter random: default initialisation hides norms and biases."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
            gain = "ln_" in name or "norm" in name
            parameter.copy_(1 + 0.3 * drawn if gain and "weight" in name else 0.3 * drawn)
    return model.double().eval()


def gpt2() -> tuple[Any, Decoder]:
    config = GPT2Config(
        vocab_size=11,
        n_positions=12,
        n_embd=8,
        n_layer=2,
        n_head=4,
        n_inner=20,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = randomise(GPT2LMHeadModel(config))
    w = theirs.transformer.state_dict()
    heads, d_head = 4, 2
    weights = {"embed.W_E": w["wte.weight"], "pos_embed.W_pos": w["wpe.weight"]}
    for layer in range(2):
        old, new = f"h.{layer}.", f"blocks.{layer}."
        matrices = w[old + "attn.c_attn.weight"].split(8, dim=1)
        biases = w[old + "attn.c_attn.bias"].split(8)
        for letter, matrix, bias in zip("QKV", matrices, biases, strict=True):
            weights[f"{new}attn.W_{letter}"] = matrix.unflatten(1, (heads, d_head)).transpose(0, 1)
            weights[f"{new}attn.b_{letter}"] = bias.unflatten(0, (heads, d_head))
        weights[new + "attn.W_O"] = w[old + "attn.c_proj.weight"].unflatten(0, (heads, d_head))
        weights[new + "attn.b_O"] = w[old + "attn.c_proj.bias"]
        weights[new + "mlp.W_in"] = w[old + "mlp.c_fc.weight"]
        weights[new + "mlp.b_in"] = w[old + "mlp.c_fc.bias"]
        weights[new + "mlp.W_out"] = w[old + "mlp.c_proj.weight"]
        weights[new + "mlp.b_out"] = w[old + "mlp.c_proj.bias"]
        for ours, name in (("ln1", "ln_1"), ("ln2", "ln_2")):
            weights |= {f"{new}{ours}.{p[0]}": w[f"{old}{name}.{p}"] for p in ("weight", "bias")}
    weights |= {f"ln_final.{p[0]}": w[f"ln_f.{p}"] for p in ("weight", "bias")}
    fields: dict[str, Any] = dict(n_layers=2, n_heads=heads, d_model=8, d_head=d_head, d_mlp=20)
    ours_config = DecoderConfig(
        **fields,
        d_vocab=11,
        n_ctx=12,
        activation="gelu_new",
        attn_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
        eps=config.layer_norm_epsilon,
    )
    return theirs, build(ours_config, weights)


def llama() -> tuple[Any, Decoder]:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=12,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = randomise(LlamaForCausalLM(config))
    w = theirs.state_dict()
    weights = {
        "embed.W_E": w["model.embed_tokens.weight"],
        "unembed.W_U": w["lm_head.weight"].T,
        "ln_final.w": w["model.norm.weight"],
    }
    for layer in range(2):
        old, new = f"model.layers.{layer}.", f"blocks.{layer}."
        for letter in "qkv":
            matrix = w[f"{old}self_attn.{letter}_proj.weight"].unflatten(0, (-1, 6))
            weights[f"{new}attn.W_{letter.upper()}"] = matrix.transpose(1, 2)
        weights[new + "attn.W_O"] = w[old + "self_attn.o_proj.weight"].T.unflatten(0, (4, 6))
        for ours, name in (("W_gate", "gate"), ("W_in", "up"), ("W_out", "down")):
            weights[f"{new}mlp.{ours}"] = w[f"{old}mlp.{name}_proj.weight"].T
        weights[new + "ln1.w"] = w[old + "input_layernorm.weight"]
        weights[new + "ln2.w"] = w[old + "post_attention_layernorm.weight"]
    ours_config = DecoderConfig(
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_model=8,
        d_head=6,
        d_mlp=20,
        d_vocab=11,
        n_ctx=12,
        positions="rotary",
        rotary_base=100.0,
        norm="rmsnorm",
        eps=1e-6,
        activation="silu",
        gated_mlp=True,
    )
    return theirs, build(ours_config, weights)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Decoder, str]:
    theirs, ours = {"gpt2": gpt2, "llama": llama}[request.param]()
    return theirs, ours, request.param
