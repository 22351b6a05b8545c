"""DecoderConfig: frozen, validated field by field, JSON both ways."""

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

from headstream.models.config import DecoderConfig
from headstream.models.errors import ConfigError

SIZES: dict[str, Any] = {
    "n_layers": 2,
    "n_heads": 4,
    "d_model": 16,
    "d_head": 4,
    "d_vocab": 20,
    "n_ctx": 16,
}


def test_defaults() -> None:
    config = DecoderConfig(**SIZES)
    assert dataclasses.asdict(config) == SIZES | {
        "n_kv_heads": None,
        "d_mlp": None,
        "positions": "learned",
        "rotary_base": 10000.0,
        "norm": "layernorm",
        "eps": 1e-5,
        "activation": "gelu",
        "gated_mlp": False,
        "attn_bias": False,
        "mlp_bias": False,
        "unembed_bias": False,
        "tied_embeddings": False,
        "attn_scale": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "n_train": None,
    }


def test_derived_sizes() -> None:
    config = DecoderConfig(**SIZES | {"d_head": 8, "n_kv_heads": 2})
    assert (config.kv_heads, config.group_size, config.has_mlp) == (2, 2, False)
    # 1 / sqrt(d_head), not sqrt(d_model / n_heads) = 2.
    assert config.scale == 1 / math.sqrt(8)
    assert DecoderConfig(**SIZES, attn_scale=1.0).scale == 1.0
    assert (DecoderConfig(**SIZES).kv_heads, DecoderConfig(**SIZES).group_size) == (4, 1)


def test_json_both_ways() -> None:
    config = DecoderConfig(
        **SIZES
        | {"n_kv_heads": 2, "d_mlp": 8, "gated_mlp": True, "attn_scale": 0.5, "bos_token_id": 0}
    )
    text = config.to_json()
    assert list(json.loads(text)) == [field.name for field in dataclasses.fields(DecoderConfig)]
    assert DecoderConfig.from_json(text) == config
    assert DecoderConfig.from_json(text).to_json() == text


def test_frozen_and_copied_like_a_value() -> None:
    config = DecoderConfig(**SIZES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layers = 3  # type: ignore[misc]
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        assert hash(other) == hash(config)
    assert dataclasses.replace(config, n_ctx=3).n_ctx == 3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_layers": 0}, r"n_layers must be a whole number >= 1, got 0"),
        ({"n_heads": 2.0}, r"n_heads must be a whole number >= 1, got 2\.0"),
        ({"d_model": True}, r"d_model must be a whole number >= 1, got True"),
        ({"d_vocab": "20"}, r"d_vocab must be a whole number >= 1, got '20'"),
        ({"d_mlp": -1}, r"d_mlp must be a whole number >= 1, got -1"),
        ({"n_train": 0}, r"n_train must be a whole number >= 1, got 0"),
        ({"n_kv_heads": 3}, r"n_kv_heads must divide n_heads, got n_kv_heads=3 and n_heads=4"),
        ({"n_kv_heads": 8}, r"n_kv_heads must divide n_heads, got n_kv_heads=8 and n_heads=4"),
        (
            {"positions": "rotery"},
            r"positions must be one of learned, .* got 'rotery'; nearest is 'rotary'",
        ),
        ({"norm": "batch"}, r"norm must be one of layernorm, rmsnorm, none, got 'batch'"),
        ({"activation": "swish"}, r"activation must be one of gelu, gelu_new, relu, silu, got"),
        ({"attn_bias": 1}, r"attn_bias must be True or False, got 1"),
        ({"eps": 0.0}, r"eps must be a finite number > 0, got 0\.0"),
        ({"eps": math.nan}, r"eps must be a finite number > 0, got nan"),
        ({"eps": None}, r"eps must be a finite number > 0, got None"),
        ({"rotary_base": -1.0}, r"rotary_base must be a finite number > 0, got -1\.0"),
        ({"attn_scale": math.inf}, r"attn_scale must be a finite number > 0, got inf"),
        ({"positions": "rotary", "d_head": 5}, r"need an even d_head, got d_head=5"),
        ({"positions": "sinusoidal", "d_model": 15}, r"need an even d_model, got d_model=15"),
        ({"gated_mlp": True}, r"need an MLP, but d_mlp is None .*; set d_mlp"),
        ({"mlp_bias": True}, r"need an MLP, but d_mlp is None"),
        ({"bos_token_id": 20}, r"bos_token_id must lie in \[0, 20\) = \[0, d_vocab\), got 20"),
        ({"pad_token_id": -1}, r"pad_token_id must lie in \[0, 20\)"),
        ({"bos_token_id": 1.5}, r"bos_token_id must be a whole number or None, got 1\.5"),
    ],
)
def test_what_no_decoder_can_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DecoderConfig(**SIZES | fields)
    with pytest.raises(ConfigError):
        DecoderConfig.from_json(json.dumps(SIZES | fields))


@pytest.mark.parametrize("how", ["constructor", "json"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rotary_dim": 4}, "rotary_dim: partial rotary positions is not supported yet"),
        ({"parallel_blocks": True}, "parallel_blocks: parallel attention and MLP is not"),
        ({"sink_logit": True}, "sink_logit: a learned sink logit is not supported yet"),
        ({"qk_norm": False}, "qk_norm: normalised queries and keys is not supported yet"),
        ({"n_kv_head": 2}, "unknown configuration field 'n_kv_head'; nearest is 'n_kv_heads'"),
        ({"dropout": 0.1}, "unknown configuration field 'dropout'"),
    ],
)
def test_a_feature_that_is_not_there_is_refused_by_name(
    how: str, fields: dict[str, Any], words: str
) -> None:
    wanted = SIZES | fields
    with pytest.raises(ConfigError, match=words):
        DecoderConfig.from_json(json.dumps(wanted)) if how == "json" else DecoderConfig(**wanted)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "configuration is not JSON"),
        ("[1]", "configuration must be a JSON object, got list"),
        ('{"n_layers": 1}', "configuration lacks n_heads, d_model, d_head, d_vocab, n_ctx"),
    ],
)
def test_text_that_is_no_configuration(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DecoderConfig.from_json(text)
