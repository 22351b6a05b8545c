"""What holds of every decoder, whatever its configuration and tokens."""

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder
from headstream.models.kv_cache import KVCache
from headstream.models.names import hook_table

# float64 sums in another order on numbers of order 10.
EXACT = 1e-10
D_VOCAB, N_CTX = 7, 9


@st.composite
def fields_of_any(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of any decoder of one or two layers that fits in a few kilobytes."""
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    d_mlp = draw(st.sampled_from((None, 5)))
    fields: dict[str, Any] = {
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": kv_heads * draw(st.integers(1, 3)),
        "n_kv_heads": kv_heads,
        "d_model": draw(st.sampled_from((4, 6))),
        "d_head": draw(st.sampled_from((2, 4))),
        "d_vocab": D_VOCAB,
        "n_ctx": N_CTX,
        "d_mlp": d_mlp,
        "gated_mlp": d_mlp is not None and draw(st.booleans()),
        "mlp_bias": d_mlp is not None and draw(st.booleans()),
        "attn_scale": draw(st.sampled_from((None, 1.0, 0.1))),
    }
    for name, values in {
        "positions": ("learned", "shortformer", "sinusoidal", "rotary", "none"),
        "norm": ("layernorm", "rmsnorm", "none"),
        "activation": ("gelu", "gelu_new", "relu", "silu"),
        "attn_bias": (False, True),
        "unembed_bias": (False, True),
        "tied_embeddings": (False, True),
    }.items():
        fields[name] = draw(st.sampled_from(values))
    return fields


def decoder(fields: dict[str, Any], seed: int) -> Decoder:
    """With weights and biases of order one, so that attention is far from uniform."""
    model = Decoder(DecoderConfig(**fields), dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.add_(0.5 * drawn)
    return model


def token_rows(batch: int, length: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(st.integers(0, D_VOCAB - 1), min_size=length, max_size=length)
    return st.lists(row, min_size=batch, max_size=batch).map(torch.tensor)


@st.composite
def masks(draw: st.DrawFn, batch: int, length: int) -> Tensor:
    """Padding on either side and holes; at least one real token a row."""
    rows = draw(
        st.lists(
            st.lists(st.booleans(), min_size=length, max_size=length).filter(any),
            min_size=batch,
            max_size=batch,
        )
    )
    return torch.tensor(rows)


FIELDS, SEEDS = fields_of_any(), st.integers(0, 2**20)
BACKENDS = st.sampled_from(("naive", "flash"))
few = settings(max_examples=25)


@few
@given(data=st.data(), fields=FIELDS, seed=SEEDS, backend=BACKENDS)
def test_the_future_changes_nothing(
    data: st.DataObject, fields: dict[str, Any], seed: int, backend: str
) -> None:
    """Every activation at positions up to i, bit for bit, whatever stands after i."""
    model = decoder(fields, seed)
    length = data.draw(st.integers(2, N_CTX))
    cut = data.draw(st.integers(1, length - 1))
    tokens, other = (data.draw(token_rows(2, length)) for _ in range(2))
    other[:, :cut] = tokens[:, :cut]
    table = hook_table(model.config)
    wanted = lambda name: backend == "naive" or not table[name].naive_only  # noqa: E731
    with torch.no_grad():
        first, acts = model.run_with_cache(tokens, names_filter=wanted, backend=backend)
        second, later = model.run_with_cache(other, names_filter=wanted, backend=backend)
    assert torch.equal(first[:, :cut], second[:, :cut])
    for name in list(acts):
        axis = table[name].pos_axis
        pair = [run[name].narrow(axis, 0, cut) for run in (acts, later)]
        if "key_pos" in table[name].axes:
            pair = [square[..., :cut] for square in pair]
        assert torch.equal(*pair), name


@few
@given(data=st.data(), fields=FIELDS, seed=SEEDS, backend=BACKENDS)
def test_rows_do_not_see_each_other(
    data: st.DataObject, fields: dict[str, Any], seed: int, backend: str
) -> None:
    """A shuffled batch gives the shuffled logits, and each row what it gives alone."""
    model = decoder(fields, seed)
    tokens, mask = data.draw(token_rows(4, 4)), data.draw(masks(4, 4))
    order = data.draw(st.permutations(range(4)))
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, backend=backend)
        shuffled = model(tokens[order], attention_mask=mask[order], backend=backend)
        row = data.draw(st.integers(0, 3))
        alone = model(tokens[row], attention_mask=mask[row], backend=backend)
    assert (shuffled - logits[order]).abs().max() < EXACT
    assert (alone[0] - logits[row]).abs().max() < EXACT


@settings(max_examples=40)
@given(data=st.data(), fields=FIELDS, seed=SEEDS)
def test_flash_is_naive(data: st.DataObject, fields: dict[str, Any], seed: int) -> None:
    """Logits, lse, and the gradient of every weight, with any mask and of any logits."""
    model = decoder(fields, seed)
    length = data.draw(st.integers(1, N_CTX))
    tokens = data.draw(token_rows(2, length))
    mask = data.draw(st.one_of(st.none(), masks(2, length)))
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, length, D_VOCAB, generator=random, dtype=torch.float64)
    runs = []
    for backend in ("naive", "flash"):
        logits = model(tokens, attention_mask=mask, backend=backend)
        used = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad((logits * weights).sum(), used, allow_unused=True)
        with torch.no_grad():
            _, acts = model.run_with_cache(
                tokens, names_filter="*hook_lse", attention_mask=mask, backend=backend
            )
        runs.append(([logits.detach(), *acts.values()], grads))
    for naive, flash in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.allclose(naive, flash, rtol=0, atol=EXACT)
    for naive, flash in zip(runs[0][1], runs[1][1], strict=True):
        assert (naive is None) == (flash is None)
        if naive is not None:
            # Relative to the gradient: it grows with the weights and the length.
            assert (naive - flash).abs().max() <= 1e-9 * (1 + naive.abs().max())


@few
@given(data=st.data(), fields=FIELDS, seed=SEEDS, backend=BACKENDS)
def test_padding_takes_no_part(
    data: st.DataObject, fields: dict[str, Any], seed: int, backend: str
) -> None:
    """Real tokens of a row with padding and holes compute what they compute without."""
    model = decoder(fields, seed)
    tokens, mask = data.draw(token_rows(1, N_CTX)), data.draw(masks(1, N_CTX))
    real = mask[0]
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, backend=backend)
        expected = model(tokens[:, real], backend=backend)
    assert torch.isfinite(logits).all()
    assert (logits[:, real] - expected).abs().max() < EXACT


@few
@given(data=st.data(), fields=FIELDS, seed=SEEDS, backend=BACKENDS)
def test_chunks_are_one_pass(
    data: st.DataObject, fields: dict[str, Any], seed: int, backend: str
) -> None:
    """Any split of the tokens over calls with a cache gives the logits of one call."""
    model = decoder(fields, seed)
    tokens, mask = data.draw(token_rows(2, N_CTX)), data.draw(masks(2, N_CTX))
    cuts = data.draw(st.sets(st.integers(1, N_CTX - 1)))
    edges = [0, *sorted(cuts), N_CTX]
    cache = KVCache(model, 2)
    with torch.no_grad():
        parts = [
            model(
                tokens[:, start:stop],
                attention_mask=mask[:, start:stop],
                kv_cache=cache,
                backend=backend,
            )
            for start, stop in itertools.pairwise(edges)
        ]
        expected = model(tokens, attention_mask=mask, backend=backend)
    difference = (torch.cat(parts, 1) - expected)[mask]
    assert difference.abs().max() < EXACT


@few
@given(fields=FIELDS)
def test_configurations_survive_json(fields: dict[str, Any]) -> None:
    config = DecoderConfig(**fields)
    assert DecoderConfig.from_json(config.to_json()) == config
