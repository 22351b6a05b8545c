"""What TransformerLens' tools ask of a model, made strict.

`LensSurface` is the base of `Decoder`: hooks and caches with TransformerLens' names and meanings,
weight views with its shapes, text with its method names. Its own methods are kept where they are
right; those that are silent about a mistake are overridden here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.utilities import Slice

from headstream.models.config import DecoderConfig
from headstream.models.errors import HookError, ShapeError, TokenError
from headstream.models.hook_point import HookFunction, HookPoint
from headstream.models.lens_config import LensConfig
from headstream.models.positions import sinusoidal_vectors
from headstream.models.resolve import resolve
from headstream.models.vocabulary import check_tokens, encode

if TYPE_CHECKING:
    from headstream.models.block import Block

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
NamedHook = tuple[str | Callable[[str], bool], HookFunction]


class LensSurface(HookedRootModule):
    """TransformerLens' surface over `config`, `blocks`, `embed`, `unembed` and `ln_final`."""

    config: DecoderConfig
    blocks: nn.ModuleList
    vocab: list[str] | None
    dtype: torch.dtype
    device: torch.device

    @property
    def cfg(self) -> LensConfig:
        """The configuration as TransformerLens' tools want it; ours is behind every other name."""
        return LensConfig(self.config, dtype=self.dtype, device=self.device)

    # Hooks.

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[NamedHook] = (),
        bwd_hooks: Sequence[NamedHook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[LensSurface]:
        """Attach hooks for the duration of a `with` block.

        Arguments as in TransformerLens; a name may be a glob. Everything is undone at the end,
        also after an exception.

        Raises:
            HookError: for a name that matches nothing (before anything is attached), and at the
                end of the block for a forward hook that never fired.
        """
        for name, _ in (*fwd_hooks, *bwd_hooks):
            resolve(self.hook_dict, name)
        with super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
            level = self.context_level
            yield self
            for name, hook in fwd_hooks:
                self._require_fired(name, hook, level)

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Sequence[NamedHook] = (),
        bwd_hooks: Sequence[NamedHook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward pass with hooks attached; see `hooks`."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        return_cache_object: bool = True,
        **model_kwargs: Any,
    ) -> tuple[Any, Any]:
        """One forward pass, and what it computed.

        Arguments as in TransformerLens, with these differences: a name may be a glob, and one that
        matches nothing is an error; everything (`None`) leaves out `hook_result`, which costs
        n_heads times the stream and is given when named; `pos_slice` cuts the position axis of
        every activation, `hook_lse` included; cached tensors share no storage with each other.

        Returns:
            (output, ActivationCache). Gradients, with `incl_bwd=True` on a scalar output, are
            under `name + "_grad"`.
        """
        names, by_name = self._cached_names(names_filter)
        cut = Slice.unwrap(pos_slice)
        store: dict[str, Tensor] = {}
        storages: set[int] = set()

        def keep(suffix: str) -> HookFunction:
            def save(tensor: Tensor, *, hook: Any) -> None:
                name = str(hook.name)
                spec = cast(HookPoint, self.hook_dict[name]).spec
                value = tensor.detach().to(device)
                if spec is not None:
                    value = cut.apply(value, dim=spec.pos_axis)
                if remove_batch_dim:
                    value = _without_batch(value, name)
                pointer = value.untyped_storage().data_ptr()
                # A tensor that passes two points, or that another hook may still edit in place,
                # is copied, so that no entry of the cache can change another.
                if pointer in storages or len(self.hook_dict[name].fwd_hooks) > 1:
                    value = value.clone()
                storages.add(value.untyped_storage().data_ptr())
                store[name + suffix] = value

            return save

        with (
            self.hooks(reset_hooks_end=reset_hooks_end, clear_contexts=clear_contexts),
            torch.set_grad_enabled(torch.is_grad_enabled() or incl_bwd),
        ):
            for name in names:
                point = cast(HookPoint, self.hook_dict[name])
                point.add_hook(keep(""), "fwd", level=self.context_level, by_name=by_name)
                if incl_bwd and point.spec is not None and point.spec.writable:
                    point.add_hook(keep("_grad"), "bwd", level=self.context_level, by_name=by_name)
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                if not isinstance(output, Tensor) or output.ndim:
                    raise ShapeError(
                        "incl_bwd=True needs a scalar output",
                        hint="pass return_type='loss'",
                    )
                output.backward()
        missing = [name for name in names if name not in store] if by_name else []
        if missing:
            raise HookError(
                f"'{missing[0]}' never fired in this pass",
                hint=never_fired_hint(cast(HookPoint, self.hook_dict[missing[0]])),
            )
        if not store:
            raise HookError("none of the names asked for fired in this pass")
        ordered = {name: store[name] for name in names if name in store}
        ordered |= {name: value for name, value in store.items() if name not in ordered}
        if not return_cache_object:
            return output, ordered
        return output, ActivationCache(ordered, self, has_batch_dim=not remove_batch_dim)

    def hooks_active(self) -> int:
        """How many hooks are attached, forward and backward, over all points."""
        return sum(len(point.fwd_hooks) + len(point.bwd_hooks) for point in self.hook_points())

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: HookFunction,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Attach a hook until `reset_hooks`; the name may be a glob and must match."""
        by_name = _is_exact(name)
        for match in resolve(self.hook_dict, name):
            point = cast(HookPoint, self.hook_dict[match])
            point.add_hook(hook, dir, is_permanent, level, prepend, by_name=by_name)

    def _enable_hook(
        self, name: str | Callable[[str], bool], hook: HookFunction, dir: Literal["fwd", "bwd"]
    ) -> None:
        self.add_hook(name, hook, dir, level=self.context_level)

    def _cached_names(self, names_filter: NamesFilter) -> tuple[list[str], bool]:
        if names_filter is None:
            points = cast(dict[str, HookPoint], self.hook_dict)
            return [n for n, p in points.items() if p.spec is None or not p.spec.on_request], False
        if isinstance(names_filter, str) or callable(names_filter):
            return resolve(self.hook_dict, names_filter), _is_exact(names_filter)
        wanted: dict[str, None] = {}
        for name in names_filter:
            wanted |= dict.fromkeys(resolve(self.hook_dict, name))
        return [n for n in self.hook_dict if n in wanted], all(map(_is_exact, names_filter))

    def _require_fired(
        self, name: str | Callable[[str], bool], hook: HookFunction, level: int
    ) -> None:
        """Raise unless `hook` fired: at that very point, or at one of a set."""
        matches = resolve(self.hook_dict, name)
        fired = False
        for match in matches:
            for handle in self.hook_dict[match].fwd_hooks:
                if handle.context_level == level and handle.user_hook is hook:
                    fired = fired or handle.checked.calls > 0
        if not fired:
            raise HookError(
                f"the hook on {name!r} never fired",
                hint=never_fired_hint(cast(HookPoint, self.hook_dict[matches[0]])),
            )

    # Weights, with TransformerLens' shapes. What does not exist is zeros (biases) or refused.

    def _stack(self, part: str, name: str) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    def _stack_bias(self, part: str, name: str, *shape: int) -> Tensor:
        values = [getattr(getattr(block, part), name) for block in self.blocks]
        if values[0] is None:
            return torch.zeros(len(values), *shape, dtype=self.dtype, device=self.device)
        return torch.stack(values)

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """Position vectors: learned, shortformer or sinusoidal. Other models have none."""
        if self.config.positions == "sinusoidal":
            index = torch.arange(self.config.n_ctx, device=self.device)
            return sinusoidal_vectors(index, self.config.d_model, self.dtype)
        if self.config.positions not in ("learned", "shortformer"):
            raise AttributeError(f"a model with {self.config.positions} positions has no W_pos")
        return self.pos_embed.W_pos

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        return self.embed.W_E.T if self.config.tied_embeddings else self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        if self.unembed.b_U is None:
            return torch.zeros(self.config.d_vocab, dtype=self.dtype, device=self.device)
        return self.unembed.b_U

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        return self._stack("attn", "W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        return self._stack("attn", "W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return self._stack("attn", "W_O")

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        return self._stack_bias("attn", "b_Q", self.config.n_heads, self.config.d_head)

    @property
    def b_K(self) -> Float[Tensor, "layer kv_head d_head"]:
        return self._stack_bias("attn", "b_K", self.config.kv_heads, self.config.d_head)

    @property
    def b_V(self) -> Float[Tensor, "layer kv_head d_head"]:
        return self._stack_bias("attn", "b_V", self.config.kv_heads, self.config.d_head)

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        return self._stack_bias("attn", "b_O", self.config.d_model)

    def _mlp(self, name: str) -> Tensor:
        if not self.config.has_mlp:
            raise AttributeError(f"an attention-only model has no {name}")
        if name.startswith("b_"):
            width = self.config.d_mlp if name == "b_in" else self.config.d_model
            return self._stack_bias("mlp", name, cast(int, width))
        return self._stack("mlp", name)

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        return self._mlp("W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"]:
        if not self.config.gated_mlp:
            raise AttributeError("a model without a gated MLP has no W_gate")
        return self._mlp("W_gate")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        return self._mlp("W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        return self._mlp("b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        return self._mlp("b_out")

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Sum of the output biases of the layers before `layer`, as TransformerLens' cache asks."""
        total = torch.zeros(self.config.d_model, dtype=self.dtype, device=self.device)
        blocks = cast("list[Block]", list(self.blocks))
        for index, block in enumerate(blocks[: layer + 1 if mlp_input else layer]):
            if block.attn.b_O is not None:
                total = total + block.attn.b_O
            whole = include_mlp_biases and block.has_mlp and not (mlp_input and index == layer)
            if whole and block.mlp.b_out is not None:
                total = total + block.mlp.b_out
        return total

    # Text.

    def to_tokens(
        self, text: str | Sequence[str] | Tensor, prepend_bos: bool | None = None
    ) -> Tensor:
        """Text as int64 `[batch, pos]`: words separated by spaces, one prompt a string.

        Args:
            text: a prompt, or several of equal length. Tokens pass unchanged.
            prepend_bos: None prepends the BOS token if the model has one and the prompt does not
                already start with it; nothing is ever dropped.
        Raises:
            TokenError: without a vocabulary, on a word outside it, or on ragged prompts.
        """
        if isinstance(text, Tensor):
            return check_tokens(text, self.config.d_vocab)
        prompts = [text] if isinstance(text, str) else list(text)
        bos = self.config.bos_token_id
        if prepend_bos and bos is None:
            raise TokenError("prepend_bos=True, but this model has no BOS token")
        rows = [encode(prompt, self._words("to_tokens")) for prompt in prompts]
        if bos is not None and prepend_bos is not False:
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) != 1 or lengths == [0]:
            raise TokenError(
                f"prompts must be non-empty and equally long, got lengths {lengths}",
                hint="pad them yourself and pass attention_mask",
            )
        return torch.tensor(rows, device=self.device)

    def to_string(self, tokens: Tensor | Sequence[int]) -> str:
        """One row of tokens as text."""
        return " ".join(self.to_str_tokens(tokens))

    def to_str_tokens(self, tokens: Tensor | Sequence[int] | str) -> list[str]:
        """The strings of one row of tokens (or of a prompt, BOS included)."""
        if isinstance(tokens, str):
            tokens = self.to_tokens(tokens)
        rows = check_tokens(torch.as_tensor(tokens, device="cpu"), self.config.d_vocab)
        if rows.shape[0] != 1:
            raise ShapeError(f"one row of tokens is expected, got {rows.shape[0]}")
        words = self._words("to_str_tokens")
        return [words[token] for token in rows[0].tolist()]

    def to_single_token(self, word: str) -> int:
        """The token of one word."""
        ids = encode(word, self._words("to_single_token"))
        if len(ids) != 1:
            raise TokenError(f"{word!r} is {len(ids)} tokens, expected one")
        return ids[0]

    def tokens_to_residual_directions(
        self, tokens: str | int | Tensor
    ) -> Float[Tensor, "*tokens d_model"]:
        """The columns of W_U for `tokens`: the directions that raise their logits."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        index = torch.as_tensor(tokens, device=self.device)
        out: Tensor = self.W_U.T[index]
        # TransformerLens gives one direction, not a stack of one, for a single token.
        return out[0] if index.ndim and index.numel() == 1 else out

    def _words(self, method: str) -> list[str]:
        if self.vocab is None:
            raise TokenError(
                f"{method} needs a vocabulary, and this model has none",
                hint="pass token ids, or set model.vocab",
            )
        return self.vocab


def never_fired_hint(point: HookPoint) -> str:
    """Why a point may not have fired, in words."""
    if point.spec is not None and point.spec.naive_only:
        return "backend 'flash' does not form the n x n matrix; use backend='naive' or 'auto'"
    return "no pass that reaches it was run inside the block"


def _is_exact(name: object) -> bool:
    return isinstance(name, str) and not any(sign in name for sign in "*?[")


def _without_batch(value: Tensor, name: str) -> Tensor:
    if value.shape[0] != 1:
        raise ShapeError(
            f"remove_batch_dim=True needs a batch of one, but '{name}' has {value.shape[0]} rows"
        )
    return value[0]
