"""The decoder: tokens in, logits out, with every read from and write to the stream hookable.

    resid  = W_E[tokens]  (+ positions)
    resid  = block_l(resid)                     l = 0 .. n_layers-1
    logits = ln_final(resid) W_U (+ b_U)

Names of weights and hooks are TransformerLens' (`names.hook_table` lists the hooks of a
configuration), and the class stands on TransformerLens' HookedRootModule, so that its tools run on
this model; `lens_surface.py` holds what they ask for beyond that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headstream.models import generation
from headstream.models.arguments import (
    check_backend,
    check_cache,
    check_layers,
    check_length,
    check_mask,
    check_return_type,
    check_stream,
    readable_keys,
    token_positions,
)
from headstream.models.attention import Backend, PassContext
from headstream.models.block import Block
from headstream.models.config import DecoderConfig
from headstream.models.embedding import Embed, PosEmbed, Unembed
from headstream.models.errors import ConfigError
from headstream.models.hook_point import HookPoint
from headstream.models.kv_cache import KVCache
from headstream.models.lens_surface import LensSurface
from headstream.models.loss import next_token_loss
from headstream.models.names import hook_table
from headstream.models.norms import make_norm
from headstream.models.positions import rotary_tables, sinusoidal_vectors
from headstream.models.shapes import check_weights
from headstream.models.vocabulary import check_tokens


class Decoder(LensSurface):
    """A decoder-only transformer.

    Args:
        config: what to build.
        seed: of the initial weights: normal with standard deviation 0.8/sqrt(d_model) (what
            TransformerLens gives its own models), biases 0, norm gains 1. The global random state
            is neither read nor changed.
        dtype, device: of the weights. The same seed gives the same numbers, rounded to `dtype`.

    `torch.compile` leaves it as it is: a compiled pass would ignore hooks attached afterwards.

    Attributes:
        config: the `DecoderConfig`; `cfg` is the same as TransformerLens' tools want it.
        backend: `"auto"` unless set; what a call without `backend=` uses.
        naive_limit: bytes of scores and pattern in one layer above which `auto` refuses to form
            them for a hook (8 GiB).
        name, card, vocab: what `load` found beside the weights; `vocab` is a list of strings.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise ConfigError(f"config must be a DecoderConfig, got {type(config).__name__}")
        check_dtype(dtype)
        self.config = config
        self.backend: Backend = "auto"
        self.naive_limit = 8 * 2**30
        self.name = "unnamed"
        self.card: dict[str, Any] | None = None
        self.vocab = None
        self.embed = Embed(config)
        self.hook_embed = HookPoint()
        if config.positions in ("learned", "shortformer"):
            self.pos_embed = PosEmbed(config)
        if config.positions in ("learned", "sinusoidal"):
            self.hook_pos_embed = HookPoint()
        if config.positions == "shortformer":
            self.hook_shortformer_pos = HookPoint()
        blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.blocks = cast(Sequence[Block], blocks)
        self.ln_final = make_norm(config)
        self.unembed = Unembed(config)
        _initialise(self, seed)
        self.to(device=device, dtype=dtype)
        self.setup()
        table = hook_table(config)
        assert set(table) == set(self.hook_dict), set(table) ^ set(self.hook_dict)
        # In firing order, so that a cache of everything reads from top to bottom.
        self.hook_dict = {name: self.hook_dict[name] for name in table}
        for name, spec in table.items():
            self.hook_dict[name].spec = spec
        self.eval()

    def forward(
        self,
        tokens: Tensor | str | Sequence[str],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        backend: str | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        kv_cache: KVCache | None = None,
        return_type: str | None = "logits",
    ) -> Any:
        """Run the model.

        Args:
            tokens: int64 `[batch, pos]` (or `[pos]`, one row; or text, through `to_tokens`). With
                `start_at_layer=k`: `resid_pre` of layer k, `[batch, pos, d_model]`.
            attention_mask: `[batch, pos]`, 1 where a token is real; padding on either side. With
                `kv_cache` it covers the new tokens only.
            position_ids: int64 `[batch, pos]`; by default they count the allowed tokens.
            backend: `"naive"`, `"flash"`, `"auto"`; None is `self.backend`.
            start_at_layer: first block to run.
            stop_at_layer: first block not to run; its `resid_pre` is returned.
            kv_cache: earlier keys and values, extended by this call if it succeeds.
            return_type: `"logits"` `[batch, pos, d_vocab]`; `"loss"`, the mean next-token loss in
                nats over real targets; `"loss_per_token"` `[batch, pos-1]`, entry t for target
                t+1, NaN where there is no real target; None returns None.
        Raises:
            ShapeError, TokenError: an argument of the wrong rank, dtype or size, or a token
                outside the vocabulary.
            BackendError: an unknown backend, or a hook that the backend cannot serve.
        """
        if torch.compiler.is_compiling():
            # A compiled pass would ignore hooks attached after its compilation: run as we are.
            eager = torch.compiler.disable(Decoder.forward)
            return eager(
                self,
                tokens,
                attention_mask=attention_mask,
                position_ids=position_ids,
                backend=backend,
                start_at_layer=start_at_layer,
                stop_at_layer=stop_at_layer,
                kv_cache=kv_cache,
                return_type=return_type,
            )
        chosen = check_backend(self.backend if backend is None else backend)
        first, last = check_layers(
            start_at_layer,
            stop_at_layer,
            n_layers=self.config.n_layers,
            cached=kv_cache is not None,
        )
        check_return_type(return_type, start=start_at_layer, stop=stop_at_layer)
        rows = self._rows(tokens, start_at_layer)
        batch, length = rows.shape[:2]
        check_cache(kv_cache, config=self.config, batch=batch, dtype=self.dtype, device=self.device)
        past = 0 if kv_cache is None else kv_cache.length
        check_length(length, past=past, n_ctx=self.config.n_ctx)
        mask = check_mask(attention_mask, batch, length, self.device)
        positions = token_positions(
            position_ids,
            mask,
            batch=batch,
            length=length,
            kv_cache=kv_cache,
            config=self.config,
            device=self.device,
        )
        key_mask = readable_keys(
            mask, batch=batch, length=length, kv_cache=kv_cache, device=self.device
        )
        with self._offset(past), _unfinished(kv_cache):
            if start_at_layer is None:
                resid = self._add_positions(self.hook_embed(self.embed(rows)), positions)
            else:
                # A copy, so that no hook can edit the caller's tensor in place.
                resid = rows.clone()
            context = PassContext(
                backend=chosen,
                key_mask=key_mask,
                rotary=self._rotary(positions),
                shortformer=self._shortformer(positions),
                kv_cache=kv_cache,
                naive_limit=self.naive_limit,
            )
            for block in self.blocks[first:last]:
                resid = block(resid, context)
            if stop_at_layer is not None:
                return resid
            output = self._read_out(resid, rows, mask, return_type)
            if kv_cache is not None:
                if key_mask is None:
                    key_mask = torch.ones(
                        batch, past + length, dtype=torch.bool, device=self.device
                    )
                kv_cache.commit(key_mask)
        return output

    def generate(
        self,
        tokens: Tensor | str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        fwd_hooks: Iterable[tuple[str | Callable[[str], bool], Callable[..., Any]]] = (),
    ) -> Int[Tensor, "batch pos"]:
        """`tokens` continued by `max_new_tokens`; see `generation.generate`."""
        return generation.generate(
            self,
            tokens,
            max_new_tokens,
            temperature=temperature,
            seed=seed,
            fwd_hooks=fwd_hooks,
        )

    def weights_sha256(self) -> str:
        """SHA-256 over the sorted (name, dtype, shape, bytes) of the weights, not of a file."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            value = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(value.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: Any, *, overwrite: bool = False) -> Any:
        """Write the model to `folder`; see `store.save`."""
        from headstream.models import store

        return store.save(self, folder, overwrite=overwrite)

    def __repr__(self) -> str:
        c = self.config
        mlp = f"d_mlp {c.d_mlp}" if c.has_mlp else "attention only"
        return (
            f"<Decoder {self.name}: {c.n_layers} layers x {c.n_heads} heads, d_model {c.d_model}, "
            f"{mlp}, {c.norm} norm, {c.positions} positions, d_vocab {c.d_vocab}, n_ctx {c.n_ctx}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}>"
        )

    # The steps of a pass.

    def _rows(self, tokens: Any, start_at_layer: int | None) -> Tensor:
        """Tokens [batch, pos], or with `start_at_layer` the stream [batch, pos, d_model]."""
        if start_at_layer is not None:
            resid = check_stream(tokens, d_model=self.config.d_model, dtype=self.dtype)
            return resid.to(self.device)
        if isinstance(tokens, (str, list, tuple)):
            tokens = self.to_tokens(tokens)
        return check_tokens(tokens, self.config.d_vocab).to(self.device)

    @contextmanager
    def _offset(self, past: int) -> Iterator[None]:
        """Hook points say that `past` tokens came before the rows of this pass."""
        before = self.hook_embed.offset
        if past != before:
            self._set_offset(past)
        try:
            yield
        finally:
            if past != before:
                self._set_offset(before)

    def _set_offset(self, offset: int) -> None:
        for point in self.hook_dict.values():
            point.offset = offset

    def _read_out(
        self, resid: Tensor, rows: Tensor, mask: Tensor | None, return_type: str | None
    ) -> Tensor | None:
        normalised = self.ln_final(resid)
        if return_type is None:
            # Hooks have seen everything; [batch, pos, d_vocab] may be more than all they saw.
            return None
        logits = normalised @ self.W_U
        if self.unembed.b_U is not None:
            logits = logits + self.unembed.b_U
        if return_type == "logits":
            return logits
        return next_token_loss(logits, rows, mask, per_token=return_type == "loss_per_token")

    def _add_positions(self, resid: Tensor, positions: Tensor) -> Tensor:
        kind = self.config.positions
        if kind == "learned":
            out: Tensor = resid + self.hook_pos_embed(self.pos_embed(positions))
            return out
        if kind == "sinusoidal":
            vectors = sinusoidal_vectors(positions, self.config.d_model, self.dtype)
            if self.hook_pos_embed.wanted and torch.is_grad_enabled():
                # A constant, but who listens may want the gradient that arrives here.
                vectors.requires_grad_()
            out = resid + self.hook_pos_embed(vectors)
            return out
        return resid

    def _shortformer(self, positions: Tensor) -> Tensor | None:
        if self.config.positions != "shortformer":
            return None
        out: Tensor = self.hook_shortformer_pos(self.pos_embed(positions))
        return out

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rotary":
            return None
        return rotary_tables(positions, self.config.d_head, self.config.rotary_base, self.dtype)


def check_dtype(dtype: object) -> None:
    """Raise ConfigError unless weights can be of this dtype."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ConfigError(
            f"dtype must be torch.float16, bfloat16, float32 or float64, got {dtype!r}"
        )


def build(config: DecoderConfig, weights: Mapping[str, Tensor]) -> Decoder:
    """A decoder with exactly these weights: names, shapes and one dtype must fit.

    Raises:
        ConfigError: naming the keys that are missing, unknown or of the wrong shape.
    """
    dtypes = {tensor.dtype for tensor in weights.values()}
    if len(dtypes) > 1:
        raise ConfigError(f"weights mix dtypes {sorted(map(str, dtypes))}; one is expected")
    dtype = next(iter(dtypes), torch.float32)
    check_dtype(dtype)
    # Before anything is allocated: the configuration may ask for more than there is memory.
    check_weights(config, weights)
    model = Decoder(config, dtype=dtype)
    model.load_state_dict(dict(weights))
    return model


@contextmanager
def _unfinished(kv_cache: KVCache | None) -> Iterator[None]:
    """What a pass staged and did not commit is forgotten."""
    try:
        yield
    finally:
        if kv_cache is not None:
            kv_cache.discard()


def _initialise(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    std = 0.8 / model.config.d_model**0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].startswith("W_"):
                # Drawn in float64, so that every dtype gets the same weights, rounded.
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn * std)
