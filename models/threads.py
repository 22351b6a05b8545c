"""How many threads a model of some size deserves."""

from __future__ import annotations

import torch

from headstream.models.decoder import Decoder

# Below about this many weights a forward pass is many operations of microseconds: a second thread
# gains nothing, and on a busy machine waiting for it costs several times the work.
_SMALL = 5_000_000


def use_one_thread_if_small(model: Decoder) -> None:
    """Give torch one thread in this process if `model` is too small to use more.

    For a process that owns its threads, as the command line does: this changes torch's global
    setting, which a library call must not.
    """
    if sum(parameter.numel() for parameter in model.parameters()) < _SMALL:
        torch.set_num_threads(1)
