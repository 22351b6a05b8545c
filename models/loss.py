"""Next-token loss that padding and holes cannot touch."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from headstream.models.errors import ShapeError


def next_token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"] | None,
    *,
    per_token: bool,
) -> Float[Tensor, ""] | Float[Tensor, "batch targets"]:
    """Cross-entropy in nats of each real token given the real tokens before it.

    A masked token is neither a target nor a source: the token after a hole is predicted from the
    last real one before it, so a padded row has the loss of the row without its padding.

    Args:
        per_token: `[batch, pos-1]`, entry t for target t+1, NaN where there is no real target;
            otherwise the mean over all real targets.
    Raises:
        ShapeError: if no token has a real one before it.
    """
    batch, length, _ = logits.shape
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if mask is None:
        source = torch.arange(length - 1, device=tokens.device).expand(batch, length - 1)
        real = torch.ones_like(source, dtype=torch.bool)
    else:
        index = torch.arange(length, device=tokens.device).expand(batch, length)
        last_real = torch.where(mask, index, -1).cummax(-1).values[:, :-1]
        real = mask[:, 1:] & (last_real >= 0)
        source = last_real.clamp(min=0)
    if not bool(real.any()):
        raise ShapeError("the loss has no target: no real token follows another real token")
    picked = wide.gather(1, source[:, :, None].expand(-1, -1, wide.shape[-1]))
    loss = functional.cross_entropy(picked.transpose(1, 2), tokens[:, 1:], reduction="none")
    return loss.masked_fill(~real, torch.nan) if per_token else loss[real].mean()


def check_finite_loss(losses: np.ndarray, dtype: torch.dtype) -> None:
    """Refuse losses of finite weights that are no numbers: the model cannot be judged by them.

    Args:
        losses: of real targets only, in nats.
        dtype: of the model, for the message.
    Raises:
        ShapeError: if one is NaN or infinite.
    """
    if not bool(np.isfinite(losses).all()):
        raise ShapeError(
            f"the loss of this model is not finite: its logits overflow {dtype}",
            hint="look for very large numbers in the weights, W_U before all",
        )
