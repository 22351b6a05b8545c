"""What a process shares with every library in it: read before and after, and compared.

Not a test module: `test_global_state.py` runs it by path, in its own process and in a fresh one.
"""

import logging
import os
import random
import signal
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def state() -> dict[str, Any]:
    """What a process shares: functions others call, switches, random states, handlers."""
    backends = torch.backends
    return {
        "sdpa": functional.scaled_dot_product_attention,
        "call": torch.nn.Module.__call__,
        "register": torch.nn.Module.register_forward_hook,
        "softmax": (functional.softmax, torch.softmax, Tensor.softmax),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "kernels": (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "torch random": torch.random.get_rng_state().numpy().tobytes(),
        "numpy random": str(np.random.get_state()),
        "random": random.getstate(),
        "warnings": list(warnings.filters),
        "hooks": (sys.excepthook, sys.displayhook, sys.settrace, warnings.showwarning),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.disabled),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": os.umask(os.umask(0o22)),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "print": torch._tensor_str.PRINT_OPTS.precision,
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]
