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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headstream.models import generation
from headstream.models.attention import Backend, PassContext
from headstream.models.block import Block
from headstream.models.config import DecoderConfig
from headstream.models.errors import BackendError, ConfigError, ShapeError
from headstream.models.hook_point import HookPoint
from headstream.models.kv_cache import KVCache
from headstream.models.lens_surface import LensSurface
from headstream.models.loss import next_token_loss
from headstream.models.names import hook_table
from headstream.models.norms import make_norm
from headstream.models.positions import count_positions, rotary_tables, sinusoidal_vectors
from headstream.models.vocabulary import check_tokens, check_vocabulary

ReturnType = Literal["logits", "loss", "loss_per_token"]


class Embed(nn.Module):
    """`W_E` [d_vocab, d_model]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(config.d_vocab, config.d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        return self.W_E[tokens]


class PosEmbed(nn.Module):
    """`W_pos` [n_ctx, d_model], for learned and shortformer positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(config.n_ctx, config.d_model))

    def forward(self, positions: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        return self.W_pos[positions]


class Unembed(nn.Module):
    """`W_U` [d_model, d_vocab], `b_U` [d_vocab] where configured; tied models hold neither."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if not config.tied_embeddings:
            self.W_U = nn.Parameter(torch.empty(config.d_model, config.d_vocab))
        bias = nn.Parameter(torch.zeros(config.d_vocab)) if config.unembed_bias else None
        self.register_parameter("b_U", bias)


class Decoder(LensSurface):
    """A decoder-only transformer.

    Args:
        config: what to build.
        seed: of the initial weights: normal with standard deviation 0.8/sqrt(d_model) (what
            TransformerLens gives its own models), biases 0, norm gains 1. The global random state
            is neither read nor changed.
        dtype, device: of the weights. The same seed gives the same numbers, rounded to `dtype`.

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
        self.config = config
        self.backend: Backend = "auto"
        self.naive_limit = 8 * 2**30
        self.name = "unnamed"
        self.card: dict[str, Any] | None = None
        self._vocab: list[str] | None = None
        self.embed = Embed(config)
        self.hook_embed = HookPoint()
        if config.positions in ("learned", "shortformer"):
            self.pos_embed = PosEmbed(config)
        if config.positions in ("learned", "sinusoidal"):
            self.hook_pos_embed = HookPoint()
        if config.positions == "shortformer":
            self.hook_shortformer_pos = HookPoint()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
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
            cast(HookPoint, self.hook_dict[name]).spec = spec
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
        chosen = self._check_backend(backend)
        start, stop = self._check_layers(start_at_layer, stop_at_layer, kv_cache)
        if return_type not in (*get_args(ReturnType), None):
            raise ShapeError(
                f"return_type must be one of {', '.join(get_args(ReturnType))} or None, "
                f"got {return_type!r}"
            )
        if isinstance(tokens, (str, list, tuple)):
            tokens = self.to_tokens(tokens)
        assert isinstance(tokens, Tensor) or start_at_layer is None
        rows: Tensor
        if start_at_layer is None:
            rows = check_tokens(cast(Tensor, tokens), self.config.d_vocab)
        else:
            rows = self._check_stream(tokens)
            if return_type in ("loss", "loss_per_token"):
                raise ShapeError(
                    f"return_type={return_type!r} needs tokens, but start_at_layer="
                    f"{start_at_layer} was given a residual stream",
                    hint="ask for logits",
                )
        batch, length = rows.shape[:2]
        self._check_length(batch, length, kv_cache)
        mask = self._check_mask(attention_mask, batch, length)
        past = 0 if kv_cache is None else kv_cache.length
        positions = self._positions(position_ids, mask, batch, length, kv_cache)
        key_mask = _key_mask(mask, batch, length, kv_cache, rows.device)
        if past or kv_cache is not None:
            for point in self.hook_dict.values():
                cast(HookPoint, point).offset = past
        try:
            if start_at_layer is None:
                resid = self.hook_embed(self.embed(rows))
                resid = self._add_positions(resid, positions)
            else:
                resid = rows
            context = PassContext(
                backend=chosen,
                key_mask=key_mask,
                rotary=self._rotary(positions),
                shortformer=self._shortformer(positions),
                kv_cache=kv_cache,
                naive_limit=self.naive_limit,
            )
            for block in self.blocks[start:stop]:
                resid = block(resid, context)
            if stop_at_layer is not None:
                return resid
            logits = self.ln_final(resid) @ self.W_U
            if self.unembed.b_U is not None:
                logits = logits + self.unembed.b_U
            if kv_cache is not None:
                full = key_mask
                if full is None:
                    full = torch.ones(batch, past + length, dtype=torch.bool, device=rows.device)
                kv_cache.commit(full)
        finally:
            if kv_cache is not None:
                kv_cache.discard()
                for point in self.hook_dict.values():
                    cast(HookPoint, point).offset = 0
        if return_type is None:
            return None
        if return_type == "logits":
            return logits
        return next_token_loss(logits, rows, mask, per_token=return_type == "loss_per_token")

    def generate(
        self,
        tokens: Tensor | str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        fwd_hooks: Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]] = (),
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

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights."""
        return self.embed.W_E.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.W_E.device

    @property
    def vocab(self) -> list[str] | None:
        """The strings of the tokens, or None. Setting it checks length and distinctness."""
        return self._vocab

    @vocab.setter
    def vocab(self, words: Sequence[str] | None) -> None:
        self._vocab = None if words is None else check_vocabulary(words, self.config.d_vocab)

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

    # Checks, and what the arguments mean.

    def _check_backend(self, backend: str | None) -> Backend:
        chosen = self.backend if backend is None else backend
        if chosen not in get_args(Backend):
            raise BackendError(
                f"backend must be one of {', '.join(get_args(Backend))}, got {chosen!r}"
            )
        return chosen

    def _check_layers(
        self, start: int | None, stop: int | None, kv_cache: KVCache | None
    ) -> tuple[int, int]:
        n_layers = self.config.n_layers
        for name, value in (("start_at_layer", start), ("stop_at_layer", stop)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= n_layers:
                raise ShapeError(f"{name} must lie in [0, {n_layers}], got {value!r}")
            if kv_cache is not None:
                raise ShapeError(
                    f"{name}={value} cannot be combined with kv_cache: the layers left out "
                    "would cache nothing",
                    hint="run all layers, or without a cache",
                )
        first, last = start or 0, n_layers if stop is None else stop
        if first > last:
            raise ShapeError(f"start_at_layer={first} lies after stop_at_layer={last}")
        return first, last

    def _check_stream(self, resid: object) -> Tensor:
        expected = f"[batch, pos, {self.config.d_model}] {self.dtype}"
        if not isinstance(resid, Tensor):
            raise ShapeError(
                f"with start_at_layer the first argument is the residual stream {expected}, "
                f"got {type(resid).__name__}"
            )
        right = resid.ndim == 3 and resid.shape[2] == self.config.d_model and resid.numel() > 0
        if not right or resid.dtype != self.dtype:
            raise ShapeError(
                f"with start_at_layer the first argument is the residual stream {expected}, "
                f"got {list(resid.shape)} {resid.dtype}"
            )
        return resid

    def _check_length(self, batch: int, length: int, kv_cache: KVCache | None) -> None:
        past = 0
        if kv_cache is not None:
            if kv_cache.config != self.config:
                raise ShapeError("kv_cache was made for a model of another configuration")
            if kv_cache.batch != batch:
                raise ShapeError(f"kv_cache has batch {kv_cache.batch}, tokens have {batch}")
            past = kv_cache.length
        if past + length > self.config.n_ctx:
            cached = f" after {past} cached ones" if past else ""
            raise ShapeError(
                f"tokens are {length} long{cached}, over n_ctx = {self.config.n_ctx}",
                hint="shorten the prompt",
            )

    def _check_mask(
        self, mask: Tensor | None, batch: int, length: int
    ) -> Bool[Tensor, "batch pos"] | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim not in (1, 2):
            raise ShapeError(f"attention_mask must be a tensor [batch, pos] = [{batch}, {length}]")
        rows = mask if mask.ndim == 2 else mask[None]
        if tuple(rows.shape) != (batch, length):
            raise ShapeError(
                f"attention_mask must be [batch, pos] = [{batch}, {length}], got {list(mask.shape)}"
            )
        if rows.is_floating_point() or not bool(((rows == 0) | (rows == 1)).all()):
            raise ShapeError(
                "attention_mask must hold 0 (masked) and 1 (real) only, as bool or integers"
            )
        allowed = rows.bool().to(self.device)
        # Nothing masked is no mask: the same numbers, by the faster path.
        return None if bool(allowed.all()) else allowed

    def _positions(
        self,
        given: Tensor | None,
        mask: Tensor | None,
        batch: int,
        length: int,
        kv_cache: KVCache | None,
    ) -> Int[Tensor, "batch pos"]:
        if given is not None:
            rows = given if given.ndim == 2 else given[None]
            if given.dtype != torch.int64 or tuple(rows.shape) != (batch, length):
                raise ShapeError(
                    f"position_ids must be int64 [batch, pos] = [{batch}, {length}], "
                    f"got {given.dtype} {list(given.shape)}"
                )
            table = self.config.positions in ("learned", "shortformer")
            if bool((rows < 0).any()) or (table and bool((rows >= self.config.n_ctx).any())):
                limit = f"[0, {self.config.n_ctx})" if table else ">= 0"
                raise ShapeError(f"position_ids must lie in {limit}, got {rows.tolist()}")
            return rows.to(self.device)
        if mask is None and kv_cache is None:
            return torch.arange(length, device=self.device).expand(batch, length)
        new = torch.ones(batch, length, dtype=torch.bool, device=self.device)
        past = torch.zeros(batch, dtype=torch.int64, device=self.device)
        return count_positions(
            new if mask is None else mask, past if kv_cache is None else kv_cache.allowed
        )

    def _add_positions(self, resid: Tensor, positions: Tensor) -> Tensor:
        kind = self.config.positions
        if kind == "learned":
            out: Tensor = resid + self.hook_pos_embed(self.pos_embed(positions))
            return out
        if kind == "sinusoidal":
            vectors = sinusoidal_vectors(positions, self.config.d_model, self.dtype)
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


def build(config: DecoderConfig, weights: Mapping[str, Tensor]) -> Decoder:
    """A decoder with exactly these weights: names, shapes and one dtype must fit.

    Raises:
        ConfigError: naming the keys that are missing, unknown or of the wrong shape.
    """
    dtypes = {tensor.dtype for tensor in weights.values()}
    if len(dtypes) > 1:
        raise ConfigError(f"weights mix dtypes {sorted(map(str, dtypes))}; one is expected")
    model = Decoder(config, dtype=next(iter(dtypes), torch.float32))
    expected = model.state_dict()
    missing = sorted(set(expected) - set(weights))
    unknown = sorted(set(weights) - set(expected))
    if missing or unknown:
        parts = [f"missing {missing}"] * bool(missing) + [f"unknown {unknown}"] * bool(unknown)
        raise ConfigError(f"weights do not fit the configuration: {'; '.join(parts)}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise ConfigError(
                f"weight '{name}' has shape {list(tensor.shape)}, "
                f"expected {list(expected[name].shape)}"
            )
    model.load_state_dict(dict(weights))
    return model


def _key_mask(
    mask: Tensor | None, batch: int, length: int, kv_cache: KVCache | None, device: torch.device
) -> Tensor | None:
    """Keys that may be read, over cached and new tokens; None when all may."""
    if kv_cache is None:
        return mask
    if mask is None and bool(kv_cache.mask.all()):
        return None
    new = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    return torch.cat((kv_cache.mask, new), 1)


def _initialise(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    std = 0.8 / model.config.d_model**0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].startswith("W_"):
                # Drawn in float64, so that every dtype gets the same weights, rounded.
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn * std)
