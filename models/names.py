"""The vocabulary: axes, weights and hooks, each named once.

Axes (row vectors act from the left, `x @ W`):

    batch      one prompt a row                   pos        token position, 0 first
    query_pos  the position that reads            key_pos    the position that is read
    layer      block, 0 first                     head       query head; `L1H4` is layer 1 head 4
    kv_head    key/value head (a group of query heads shares one)
    d_model    the residual stream                d_head     inside one head
    d_mlp      neurons: a privileged basis        d_vocab    tokens

Hook names and weight names are TransformerLens'. `hook_table` says of each hook a decoder has:
its axes, whether a hook may write it, whether only the naive backend has it, and whether it fires
only when somebody listens.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstream.models.config import DecoderConfig


@dataclass(frozen=True)
class HookSpec:
    """What is true of one hook point.

    Attributes:
        axes: axis names of the tensor that passes.
        writable: whether an edit is honoured; a write to the others raises.
        naive_only: whether it belongs to the n x n matrix, which flash never forms.
        on_request: whether it costs extra and fires only when a hook is attached to it by name
            (a cache of "everything" leaves it out).
    """

    axes: tuple[str, ...]
    writable: bool = True
    naive_only: bool = False
    on_request: bool = False

    @property
    def pos_axis(self) -> int:
        """Index of the axis that counts (query) positions."""
        return next(i for i, axis in enumerate(self.axes) if axis in ("pos", "query_pos"))

    @property
    def head_axis(self) -> int | None:
        """Index of the axis that counts (key/value) heads, or None."""
        return next((i for i, axis in enumerate(self.axes) if axis in ("head", "kv_head")), None)


STREAM = ("batch", "pos", "d_model")
SQUARE = ("batch", "head", "query_pos", "key_pos")


def hook_table(config: DecoderConfig) -> dict[str, HookSpec]:
    """Every hook point of a decoder with this configuration, in the order in which they fire."""
    table: dict[str, HookSpec] = {"hook_embed": HookSpec(STREAM)}
    if config.positions in ("learned", "sinusoidal"):
        table["hook_pos_embed"] = HookSpec(STREAM)
    if config.positions == "shortformer":
        # Not `hook_pos_embed`: that name promises a write to the stream, and tools add it up.
        table["hook_shortformer_pos"] = HookSpec(STREAM)
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        attn = block + "attn."
        table[block + "hook_resid_pre"] = HookSpec(STREAM)
        table |= _norm_hooks(config, block + "ln1.")
        table[attn + "hook_q"] = HookSpec(("batch", "pos", "head", "d_head"))
        table[attn + "hook_k"] = HookSpec(("batch", "pos", "kv_head", "d_head"))
        table[attn + "hook_v"] = HookSpec(("batch", "pos", "kv_head", "d_head"))
        if config.positions == "rotary":
            table[attn + "hook_rot_q"] = HookSpec(("batch", "pos", "head", "d_head"))
            table[attn + "hook_rot_k"] = HookSpec(("batch", "pos", "kv_head", "d_head"))
        table[attn + "hook_attn_scores"] = HookSpec(SQUARE, naive_only=True)
        table[attn + "hook_lse"] = HookSpec(("batch", "head", "query_pos"), writable=False)
        table[attn + "hook_pattern"] = HookSpec(SQUARE, naive_only=True)
        table[attn + "hook_z"] = HookSpec(("batch", "pos", "head", "d_head"))
        table[attn + "hook_result"] = HookSpec(("batch", "pos", "head", "d_model"), on_request=True)
        table[block + "hook_attn_out"] = HookSpec(STREAM)
        if config.has_mlp:
            table[block + "hook_resid_mid"] = HookSpec(STREAM)
            table |= _norm_hooks(config, block + "ln2.")
            table[block + "mlp.hook_pre"] = HookSpec(("batch", "pos", "d_mlp"))
            if config.gated_mlp:
                table[block + "mlp.hook_pre_linear"] = HookSpec(("batch", "pos", "d_mlp"))
            table[block + "mlp.hook_post"] = HookSpec(("batch", "pos", "d_mlp"))
            table[block + "hook_mlp_out"] = HookSpec(STREAM)
        table[block + "hook_resid_post"] = HookSpec(STREAM)
    return table | _norm_hooks(config, "ln_final.")


def _norm_hooks(config: DecoderConfig, prefix: str) -> dict[str, HookSpec]:
    if config.norm == "none":
        return {}
    return {
        prefix + "hook_scale": HookSpec(("batch", "pos", "one")),
        prefix + "hook_normalized": HookSpec(STREAM),
    }


def axis_size(config: DecoderConfig, axis: str) -> int | None:
    """Size of an axis as far as the configuration fixes it (None for batch and positions)."""
    sizes = {
        "d_model": config.d_model,
        "d_head": config.d_head,
        "d_mlp": config.d_mlp,
        "head": config.n_heads,
        "kv_head": config.kv_heads,
        "one": 1,
    }
    return sizes.get(axis)


def head_name(layer: int, head: int) -> str:
    """`L1H4`, the field's name of layer 1, head 4."""
    return f"L{layer}H{head}"
