"""The decoder against a plain reference, and what it does with arguments that mean nothing."""

import copy
import itertools
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.errors import BackendError, ConfigError, ShapeError, TokenError

# A dozen float64 operations on numbers of order 10; two orders above what is found.
EXACT = 1e-10


def reference(model: Decoder, tokens: list[int], positions: list[int] | None = None) -> Tensor:
    """Logits [pos, d_vocab] of one row by the formulas of the docstrings: loops, nothing fused."""
    c, w = model.config, model.state_dict()
    places = range(len(tokens)) if positions is None else positions

    def weight(name: str) -> Tensor | float:
        return w.get(name, 0.0)

    def norm(x: Tensor, name: str) -> Tensor:
        if c.norm == "none":
            return x
        centred = x - x.mean() if c.norm == "layernorm" else x
        scale = (centred.pow(2).sum() / c.d_model + c.eps) ** 0.5
        return centred / scale * w[f"{name}.w"] + weight(f"{name}.b")

    def turn(x: Tensor, place: int) -> Tensor:
        if c.positions != "rotary":
            return x
        out, half = x.clone(), c.d_head // 2
        for i in range(half):
            angle = place / c.rotary_base ** (2 * i / c.d_head)
            cos, sin = math.cos(angle), math.sin(angle)
            out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
        return out

    def act(x: Tensor) -> Tensor:
        cube = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return {
            "gelu": x * (1 + torch.erf(x / math.sqrt(2))) / 2,
            "gelu_new": x * (1 + torch.tanh(cube)) / 2,
            "relu": x.clamp(min=0),
            "silu": x / (1 + torch.exp(-x)),
        }[c.activation]

    table: Any = w.get("pos_embed.W_pos")
    if c.positions == "sinusoidal":
        waves = [
            [
                math.sin(p / 10000 ** (2 * (f // 2) / c.d_model) + (f % 2) * math.pi / 2)
                for f in range(c.d_model)
            ]
            for p in range(c.n_ctx)
        ]
        table = torch.tensor(waves, dtype=torch.float64)
    stream = [w["embed.W_E"][token] for token in tokens]
    if c.positions in ("learned", "sinusoidal"):
        stream = [x + table[place] for x, place in zip(stream, places, strict=True)]
    scale = c.attn_scale if c.attn_scale is not None else c.d_head**-0.5
    for layer in range(c.n_layers):
        attn = f"blocks.{layer}.attn."
        read = [norm(x, f"blocks.{layer}.ln1") for x in stream]
        addressed = read
        if c.positions == "shortformer":
            addressed = [x + table[place] for x, place in zip(read, places, strict=True)]
        writes: list[Any] = [weight(attn + "b_O") for _ in stream]
        for head in range(c.n_heads):
            shared = head // (c.n_heads // c.kv_heads)

            def project(x: Tensor, letter: str, which: int, at: str = attn) -> Tensor:
                bias = w[f"{at}b_{letter}"][which] if c.attn_bias else 0.0
                return x @ w[f"{at}W_{letter}"][which] + bias

            pairs = list(zip(addressed, places, strict=True))
            queries = [turn(project(x, "Q", head), p) for x, p in pairs]
            keys = [turn(project(x, "K", shared), p) for x, p in pairs]
            values = [project(x, "V", shared) for x in read]
            for i, query in enumerate(queries):
                scores = torch.stack([scale * query @ key for key in keys[: i + 1]])
                weights = torch.exp(scores) / torch.exp(scores).sum()
                z: Any = sum(a * v for a, v in zip(weights, values, strict=False))
                writes[i] = writes[i] + z @ w[attn + "W_O"][head]
        stream = [x + write for x, write in zip(stream, writes, strict=True)]
        if c.d_mlp is not None:
            mlp = f"blocks.{layer}.mlp."
            for i, x in enumerate(stream):
                y = norm(x, f"blocks.{layer}.ln2")
                linear = y @ w[mlp + "W_in"] + weight(mlp + "b_in")
                post = act(y @ w[mlp + "W_gate"]) * linear if c.gated_mlp else act(linear)
                stream[i] = x + post @ w[mlp + "W_out"] + weight(mlp + "b_out")
    W_U = w["embed.W_E"].T if c.tied_embeddings else w["unembed.W_U"]
    return torch.stack([norm(x, "ln_final") @ W_U + weight("unembed.b_U") for x in stream])


GRID = list(
    itertools.product(
        ("learned", "shortformer", "sinusoidal", "rotary", "none"),
        ("layernorm", "rmsnorm", "none"),
        ("no_mlp", "mlp", "gated"),
        (1, 2, 4),
    )
)


def fields_of(index: int) -> dict[str, Any]:
    """A cell of the grid; what is not on its axes is drawn, so that every pair of values meets."""
    positions, norm, mlp, kv_heads = GRID[index]
    draw = random.Random(index)
    has_mlp = mlp != "no_mlp"
    return {
        "n_kv_heads": kv_heads,
        "positions": positions,
        "norm": norm,
        "d_mlp": 12 if has_mlp else None,
        "gated_mlp": mlp == "gated",
        "d_head": draw.choice((2, 6)),
        "activation": draw.choice(("gelu", "gelu_new", "relu", "silu")),
        "attn_bias": draw.random() < 0.5,
        "mlp_bias": has_mlp and draw.random() < 0.5,
        "unembed_bias": draw.random() < 0.5,
        "tied_embeddings": draw.random() < 0.5,
        "attn_scale": draw.choice((None, 1.0)),
        "rotary_base": draw.choice((10000.0, 50.0)),
        "d_model": 8,
        "d_vocab": 11,
        "n_ctx": 7,
    }


@pytest.mark.parametrize("index", range(len(GRID)), ids=lambda i: "-".join(map(str, GRID[i])))
def test_logits_equal_the_formulas(build: Callable[..., Decoder], index: int) -> None:
    model = build(fields_of(index), seed=index)
    rows = [[3, 1, 4, 1, 5], [10, 0, 0, 7, 2]]
    expected = torch.stack([reference(model, row) for row in rows])
    for backend in ("naive", "flash", "auto"):
        logits = model(torch.tensor(rows), backend=backend)
        assert logits.shape == (2, 5, 11)
        assert (logits - expected).abs().max() < EXACT, backend


@pytest.mark.parametrize("positions", ["learned", "shortformer", "sinusoidal", "rotary", "none"])
def test_given_positions(build: Callable[..., Decoder], backend: str, positions: str) -> None:
    model = build({"positions": positions, "n_ctx": 40})
    places = [4, 4, 0, 39, 17]
    expected = reference(model, [3, 1, 4, 1, 5], places)
    logits = model(
        torch.tensor([[3, 1, 4, 1, 5]]), position_ids=torch.tensor([places]), backend=backend
    )
    assert (logits[0] - expected).abs().max() < EXACT


def test_head_and_position_axes_cannot_be_swapped(
    build: Callable[..., Decoder], backend: str
) -> None:
    """Batch = heads = positions: a swap of axes keeps every shape, so only values tell (FR-15)."""
    model = build({"attn_scale": 0.7, "n_kv_heads": 2})
    rows = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3]]
    expected = torch.stack([reference(model, row) for row in rows])
    assert (model(torch.tensor(rows), backend=backend) - expected).abs().max() < EXACT


@pytest.mark.parametrize(
    ("d_head", "n_heads"), [(8, 4), (2, 2)], ids=["wider than d_model", "narrower"]
)
def test_free_head_size(build: Callable[..., Decoder], d_head: int, n_heads: int) -> None:
    model = build({"d_head": d_head, "n_heads": n_heads, "positions": "rotary"})
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    _, cache = model.run_with_cache(tokens)
    assert cache["blocks.0.attn.hook_q"].shape == (1, 5, n_heads, d_head)
    assert (model(tokens)[0] - reference(model, [3, 1, 4, 1, 5])).abs().max() < EXACT


def test_query_heads_read_their_own_kv_head(build: Callable[..., Decoder]) -> None:
    """Zeroing kv head 1 of 2 changes z of query heads 2 and 3 only: repeated, not tiled."""
    model = build({"n_kv_heads": 2})
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    _, before = model.run_with_cache(tokens)
    with torch.no_grad():
        model.blocks[0].attn.W_V[1] = 0
    _, after = model.run_with_cache(tokens)
    moved = (after["blocks.0.attn.hook_z"] - before["blocks.0.attn.hook_z"]).abs().amax((0, 1, 3))
    assert (moved > 0.01).tolist() == [False, False, True, True]
    assert (moved == 0).tolist() == [True, True, False, False]


def test_pieces_of_a_run(model: Decoder, tokens: Tensor, backend: str) -> None:
    """Output hooks hold what is added to the stream, not the stream after adding (FR-31)."""
    _, cache = model.run_with_cache(
        tokens,
        names_filter=lambda name: "attn_scores" not in name and "pattern" not in name,
        backend=backend,
    )
    for layer in range(2):
        block = f"blocks.{layer}."
        pre, mid, post = (cache[f"{block}hook_resid_{part}"] for part in ("pre", "mid", "post"))
        assert torch.equal(pre + cache[block + "hook_attn_out"], mid)
        assert torch.equal(mid + cache[block + "hook_mlp_out"], post)
        heads = cache[block + "attn.hook_result"].sum(2) + model.b_O[layer]
        assert (heads - cache[block + "hook_attn_out"]).abs().max() < EXACT
        if layer:
            assert torch.equal(pre, cache["blocks.0.hook_resid_post"])
        # v and the MLP read the normalised stream after gain and bias.
        read = cache[block + "ln1.hook_normalized"] * model.blocks[layer].ln1.w
        read = read + getattr(model.blocks[layer].ln1, "b", 0.0)
        v = torch.einsum("bpd,hdk->bphk", read, model.W_V[layer]) + model.b_V[layer]
        assert (v - cache[block + "attn.hook_v"]).abs().max() < EXACT


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_hooks_stand_before_gain_and_bias(build: Callable[..., Decoder], norm: str) -> None:
    """eps is inside the root: on an input of 1e-4 a wrong place of it shows threefold (FR-32)."""
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    for eps in (1e-5, 1e-6):
        model = build({"norm": norm, "eps": eps, "positions": "none"})
        with torch.no_grad():
            model.embed.W_E.mul_(1e-4)
        _, cache = model.run_with_cache(tokens)
        x = cache["blocks.0.hook_resid_pre"]
        centred = x - x.mean(-1, keepdim=True) if norm == "layernorm" else x
        scale = (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        assert torch.allclose(cache["blocks.0.ln1.hook_scale"], scale, rtol=1e-14, atol=0)
        assert torch.allclose(
            cache["blocks.0.ln1.hook_normalized"], centred / scale, rtol=1e-12, atol=0
        )
        assert 0.9 < float(scale.mean()) / eps**0.5 < 1.1


def test_scores_and_pattern_are_what_they_are_called(model: Decoder, tokens: Tensor) -> None:
    """Masked scores are -inf, and the pattern is their softmax (FR-07); lse is natural (FR-11)."""
    for backend in ("naive", "auto"):
        _, cache = model.run_with_cache(tokens, backend=backend)
        for layer in range(2):
            scores = cache["attn_scores", layer]
            future = torch.ones(6, 6, dtype=torch.bool).triu(1)
            assert torch.equal(torch.isneginf(scores), future.expand_as(scores))
            assert torch.equal(scores.softmax(-1), cache["pattern", layer])
            lse = cache[f"blocks.{layer}.attn.hook_lse"]
            assert (lse - scores.logsumexp(-1)).abs().max() < EXACT
    _, flash = model.run_with_cache(tokens, backend="flash")
    for layer in range(2):
        scores = cache["attn_scores", layer]
        lse = flash[f"blocks.{layer}.attn.hook_lse"]
        assert (torch.exp(scores - lse[..., None]).sum(-1) - 1).abs().max() < EXACT


def test_asking_for_the_pattern_changes_nothing(model: Decoder, tokens: Tensor) -> None:
    """FR-09: capture turns a layer naive, and both paths mask alike."""
    plain = model(tokens)
    logits, cache = model.run_with_cache(tokens)
    assert (logits - plain).abs().max() < EXACT
    _, naive = model.run_with_cache(tokens, backend="naive")
    for layer in range(2):
        assert torch.equal(cache["pattern", layer], cache["pattern", layer].tril())
        assert torch.equal(cache["pattern", layer], naive["pattern", layer])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_by_rounding_only(model32: Decoder, dtype: torch.dtype) -> None:
    """FR-16: flash in half precision is as near to float32 as naive is; norms and lse are wide."""
    tokens = torch.randint(0, 20, (4, 16), generator=torch.Generator().manual_seed(0))
    half = copy.deepcopy(model32).to(dtype)
    wide = copy.deepcopy(half).float()
    exact = wide(tokens, backend="naive")
    errors = {
        name: (half(tokens, backend=name).float() - exact).abs().max()
        for name in ("naive", "flash")
    }
    assert errors["flash"] <= 2 * errors["naive"]
    # Logits of order 10; a unit in the last place of bfloat16 is 2^-8 of that.
    assert errors["naive"] < 0.1 * exact.abs().max()
    mask = torch.ones_like(tokens)
    mask[:2, :3] = 0
    lse = {}
    for name in ("naive", "flash"):
        logits, cache = half.run_with_cache(
            tokens,
            names_filter=["*hook_lse", "*hook_scale", "*hook_z"],
            backend=name,
            attention_mask=mask,
        )
        assert logits.dtype == dtype
        assert cache["blocks.0.ln1.hook_scale"].dtype == torch.float32
        assert cache["blocks.0.attn.hook_z"].dtype == dtype
        lse[name] = cache["blocks.0.attn.hook_lse"]
        assert lse[name].dtype == torch.float32
    # The first layer's q and k are the same numbers: what differs is float32 rounding (FR-12).
    assert torch.allclose(lse["naive"], lse["flash"], rtol=1e-5, atol=1e-5)
    assert torch.isneginf(lse["flash"][:2, :, :3]).all()
    assert lse["flash"][2:].std() > 0.1
    assert half(tokens, return_type="loss").dtype == torch.float32


def test_moved_and_copied_models(model32: Decoder, tokens: Tensor) -> None:
    double = copy.deepcopy(model32).double()
    assert (double.dtype, model32.dtype) == (torch.float64, torch.float32)
    assert double.cfg.dtype == torch.float64
    # float32 rounds at 6e-8 of logits of order 10.
    assert (double(tokens) - model32(tokens)).abs().max() < 1e-4
    # The copy computes by the formulas in its own precision: no float32 table is left in it.
    expected = reference(double, tokens[0].tolist())
    assert (double(tokens)[0] - expected).abs().max() < EXACT
    with double.hooks(fwd_hooks=[("hook_embed", lambda x, hook: x * 0)]):
        assert model32.hooks_active() == 0
        assert not torch.equal(double(tokens).float(), model32(tokens))
    for twin in (copy.deepcopy(double), pickle.loads(pickle.dumps(double))):
        assert torch.equal(twin(tokens), double(tokens))
        assert twin.run_with_cache(tokens)[1].keys() == double.run_with_cache(tokens)[1].keys()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(model: Decoder, tokens: Tensor, backend: str, mode: Any) -> None:
    expected = model(tokens, backend=backend).detach()
    with mode():
        logits, _cache = model.run_with_cache(tokens, backend=backend)
        edited = model.run_with_hooks(
            tokens, backend=backend, fwd_hooks=[("hook_embed", lambda x, hook: x * 0)]
        )
        continued = model.generate(tokens, 2)
    assert not logits.requires_grad
    assert torch.equal(logits, expected)
    assert not torch.equal(edited, expected)
    assert continued.shape == (3, 8)
    assert model(tokens, backend=backend).requires_grad


def test_one_row_and_text(model_a: Decoder) -> None:
    row = torch.tensor([0, 1, 2])
    assert torch.equal(model_a(row), model_a(row[None]))
    assert model_a(row).shape == (1, 3, 20)
    model_a.vocab = [f"w{i}" for i in range(20)]
    assert torch.equal(model_a("w0 w1 w2"), model_a(row))
    assert torch.equal(model_a(["w0 w1", "w3 w4"]), model_a(torch.tensor([[0, 1], [3, 4]])))


def test_the_same_call_through_three_doors(model: Decoder, tokens: Tensor, backend: str) -> None:
    """FR-38: a plain, a hooked and a cached run see the same tokens."""
    plain = model(tokens, backend=backend)
    seen = []
    hooked = model.run_with_hooks(
        tokens, backend=backend, fwd_hooks=[("hook_embed", lambda x, hook: seen.append(x.shape))]
    )
    cached, _ = model.run_with_cache(tokens, backend=backend, names_filter="hook_embed")
    assert torch.equal(plain, hooked)
    assert torch.equal(plain, cached)
    assert seen == [(3, 6, 16)]


def test_seed_decides_the_weights_and_nothing_else() -> None:
    sizes: dict[str, Any] = {
        "n_layers": 1,
        "n_heads": 2,
        "d_model": 64,
        "d_head": 4,
        "d_vocab": 50,
        "n_ctx": 9,
    }
    config = DecoderConfig(**sizes, attn_bias=True)
    state = torch.random.get_rng_state()
    first, again, other = (Decoder(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.weights_sha256() == again.weights_sha256() != other.weights_sha256()
    # 0.8 / sqrt(64), within five standard errors of 3200 draws.
    assert float(first.W_E.detach().std()) == pytest.approx(0.1, abs=5 * 0.1 / (2 * 3200) ** 0.5)
    assert not first.b_Q.any()
    assert torch.equal(first.ln_final.w, torch.ones(64))
    assert torch.equal(Decoder(config, seed=1, dtype=torch.float64).W_E.float(), first.W_E)
    assert not first.training


def test_weight_views(build: Callable[..., Decoder]) -> None:
    model = build(
        {
            "n_kv_heads": 2,
            "d_head": 8,
            "d_mlp": 12,
            "gated_mlp": True,
            "attn_bias": True,
            "mlp_bias": True,
            "unembed_bias": True,
        }
    )
    shapes = {
        "W_E": (20, 16),
        "W_pos": (16, 16),
        "W_U": (16, 20),
        "b_U": (20,),
        "W_Q": (2, 4, 16, 8),
        "W_K": (2, 2, 16, 8),
        "W_V": (2, 2, 16, 8),
        "W_O": (2, 4, 8, 16),
        "b_Q": (2, 4, 8),
        "b_K": (2, 2, 8),
        "b_V": (2, 2, 8),
        "b_O": (2, 16),
        "W_in": (2, 16, 12),
        "W_gate": (2, 16, 12),
        "W_out": (2, 12, 16),
        "b_in": (2, 12),
        "b_out": (2, 16),
    }
    for name, shape in shapes.items():
        assert getattr(model, name).shape == shape, name
        bare = build({"n_kv_heads": 2, "d_head": 8, "d_mlp": 12, "gated_mlp": True})
        assert getattr(bare, name).shape == shape, name
        if name.startswith("b_"):
            assert not getattr(bare, name).any()
    assert torch.equal(model.W_K[1], model.blocks[1].attn.W_K)
    assert torch.equal(model.b_out[1], model.blocks[1].mlp.b_out)
    # The views belong to the graph: a loss on one reaches the weights.
    model.W_Q.square().sum().backward()
    assert torch.equal(model.blocks[0].attn.W_Q.grad, 2 * model.blocks[0].attn.W_Q)
    tied = build({"tied_embeddings": True})
    assert torch.equal(tied.W_U, tied.W_E.T)
    assert "unembed.W_U" not in tied.state_dict()
    waves = build({"positions": "sinusoidal"})
    _, cache = waves.run_with_cache(torch.arange(16)[None], names_filter="hook_pos_embed")
    assert torch.equal(waves.W_pos, cache["hook_pos_embed"][0])


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"positions": "rotary"}, "W_pos", "model with rotary positions has no W_pos"),
        ({"positions": "none"}, "W_pos", "model with none positions has no W_pos"),
        ({}, "W_in", "attention-only model has no W_in"),
        ({}, "b_out", "attention-only model has no b_out"),
        ({"d_mlp": 8}, "W_gate", "model without a gated MLP has no W_gate"),
        ({}, "W_X", "no attribute 'W_X'"),
    ],
)
def test_weights_that_do_not_exist(
    build: Callable[..., Decoder], fields: dict[str, Any], name: str, words: str
) -> None:
    model = build(fields)
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=words):
        getattr(model, name)


def test_accumulated_bias(model_a: Decoder) -> None:
    b_O, b_out = model_a.b_O, model_a.b_out
    assert not model_a.accumulated_bias(0).any()
    assert torch.equal(model_a.accumulated_bias(1), b_O[0] + b_out[0])
    assert torch.equal(model_a.accumulated_bias(1, include_mlp_biases=False), b_O[0])
    assert torch.allclose(model_a.accumulated_bias(1, mlp_input=True), b_O.sum(0) + b_out[0])
    assert torch.allclose(model_a.accumulated_bias(2), b_O.sum(0) + b_out.sum(0))


def test_cfg_is_a_view(model_r: Decoder) -> None:
    cfg = model_r.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.n_key_value_heads) == (2, 4, 8, 2)
    assert (cfg.positions, cfg.n_kv_heads, cfg.bos_token_id) == ("rotary", 2, None)
    assert cfg.to_json() == model_r.config.to_json()
    with pytest.raises(ConfigError, match=r"cannot be changed: use_attn_result = True; build a"):
        cfg.use_attn_result = True
    with pytest.raises(AttributeError, match="no_such_field"):
        cfg.no_such_field  # noqa: B018


LONG = torch.zeros(1, 17, dtype=torch.int64)
T = torch.tensor([[0, 1, 2, 3, 1, 2]])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None,), ShapeError, r"tokens must be an int64 tensor \[batch, pos\], got NoneType; use"),
        ((T.int(),), ShapeError, r"tokens must be int64 \[batch, pos\], got int32 \[1, 6\]; use"),
        ((T.double(),), ShapeError, r"got float64 \[1, 6\]; use tokens\.long\(\)"),
        ((T.bool(),), ShapeError, r"got bool \[1, 6\]"),
        ((T[None],), ShapeError, r"must be \[batch, pos\] or \[pos\] and not empty, got \[1, 1, 6"),
        ((T[:, :0],), ShapeError, r"not empty, got \[1, 0\]"),
        ((T[:0],), ShapeError, r"not empty, got \[0, 6\]"),
        ((torch.tensor(3),), ShapeError, r"must be \[batch, pos\] or \[pos\] .* got \[\]"),
        ((T + 17,), TokenError, r"tokens\[0, 3\] is 20, outside the vocabulary \[0, 20\)"),
        ((T - 1,), TokenError, r"tokens\[0, 0\] is -1, outside the vocabulary \[0, 20\)"),
        ((LONG,), ShapeError, r"tokens are 17 long, over n_ctx = 16; shorten the prompt"),
        (([1, 2],), TokenError, r"text must be strings, got int 1; give token ids as a tensor"),
        (("a b",), TokenError, r"to_tokens needs a vocabulary, and this model has none; pass"),
    ],
)
def test_tokens_that_mean_nothing(
    model_a: Decoder, arguments: tuple[Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model_a(*arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "fast"}, BackendError, "backend must be one of naive, flash, auto, got 'fa"),
        (
            {"return_type": "both"},
            ShapeError,
            "return_type must be one of logits, loss, loss_per_",
        ),
        (
            {"attention_mask": torch.ones(1, 4)},
            ShapeError,
            r"attention_mask must be \[batch, pos\] = \[1, 6\], got \[1, 4\]",
        ),
        ({"attention_mask": torch.ones(6, 1).bool()}, ShapeError, r"= \[1, 6\], got \[6, 1\]"),
        (
            {"attention_mask": torch.ones(1, 6)},
            ShapeError,
            r"attention_mask must be bool or integers, .* got torch.float32; use mask.bool\(\)",
        ),
        (
            {"attention_mask": 2 * torch.ones(1, 6).long()},
            ShapeError,
            r"must hold 0 \(masked\) and 1 \(real\) only, got values in \[2, 2\]",
        ),
        ({"attention_mask": [[1] * 6]}, ShapeError, r"= \[1, 6\], got list; use torch.tensor"),
        ({"attention_mask": torch.tensor(1)}, ShapeError, r"= \[1, 6\], got \[\]"),
        (
            {"position_ids": T.int()},
            ShapeError,
            r"position_ids must be int64 \[batch, pos\] = \[1, 6\], got torch.int32 \[1, 6\]",
        ),
        ({"position_ids": T[:, :3]}, ShapeError, r"\[1, 6\], got torch.int64 \[1, 3\]"),
        ({"position_ids": [0]}, ShapeError, r"position_ids must be int64 .* got list"),
        (
            {"position_ids": T + 14},
            ShapeError,
            r"position_ids must lie in \[0, 16\) = \[0, n_ctx\), got values in \[14, 17\]",
        ),
        ({"position_ids": T - 1}, ShapeError, r"must lie in \[0, 16\) .* values in \[-1, 2\]"),
        ({"kv_cache": 3}, ShapeError, r"kv_cache must be a KVCache, got int; make one with"),
    ],
)
def test_arguments_that_mean_nothing(
    model_a: Decoder, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model_a(T, **arguments)


def test_options_that_do_not_exist(model_a: Decoder) -> None:
    for run in (model_a, model_a.run_with_cache, model_a.run_with_hooks):
        with pytest.raises(TypeError, match="attention_maks"):
            run(T, attention_maks=None)
    with pytest.raises(TypeError, match="incl_bdw"):
        model_a.run_with_cache(T, incl_bdw=True)


@pytest.mark.usefixtures("unchecked")
def test_decoders_that_cannot_be(model_a: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"config must be a DecoderConfig, got dict"):
        Decoder({})  # type: ignore[arg-type]
    for dtype in (torch.int32, "float32", torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ConfigError, match=r"dtype must be torch\.float16, bfloat16, .* got"):
            Decoder(model_a.config, dtype=dtype)  # type: ignore[arg-type]


def test_rotary_positions_have_no_table_to_leave(model_r: Decoder) -> None:
    far = model_r(T, position_ids=T + 1000)
    assert torch.isfinite(far).all()
    with pytest.raises(ShapeError, match=r"position_ids must lie in \[0, inf\), got values in"):
        model_r(T, position_ids=T - 5)


def test_the_largest_matrix_auto_will_form(model_a: Decoder, tokens: Tensor) -> None:
    """A pattern over the limit is an error that states the bytes, not an attempt."""
    needed = 2 * 3 * 4 * 6 * 6 * 8  # scores and pattern, batch, heads, 6 x 6, float64
    model_a.naive_limit = needed - 1
    model_a.run_with_cache(tokens, names_filter="*hook_z")
    words = (
        rf"scores or pattern of layer 0 needs {needed:,} bytes .* over the limit of {needed - 1:,}"
    )
    with pytest.raises(BackendError, match=words + r"; hook fewer rows, or raise model\.naive_"):
        model_a.run_with_cache(tokens)
    assert model_a.hooks_active() == 0
    model_a.naive_limit = needed
    model_a.run_with_cache(tokens)
    model_a.naive_limit = 1
    model_a.run_with_cache(tokens, backend="naive")


def test_repr_says_what_it_is(model_r: Decoder) -> None:
    assert repr(model_r) == (
        "<Decoder unnamed: 2 layers x 4 heads, d_model 16, d_mlp 32, rmsnorm norm, rotary "
        "positions, d_vocab 20, n_ctx 16, float64 on cpu>"
    )
