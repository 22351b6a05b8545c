"""FR-74: importing and using the models changes nothing outside them."""

import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headstream.models.decoder import Decoder
from headstream.models.errors import HookError
from headstream.models.hooks import capture
from headstream.models.kv_cache import KVCache
from headstream.models.store import load

PROBE = Path(__file__).with_name("process_state.py")


@pytest.mark.usefixtures("unchecked")
def test_calls_change_nothing(model: Decoder, tokens: Tensor, tmp_path: Path) -> None:
    probe = runpy.run_path(str(PROBE))
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]] * 3)

    def fail(x: Tensor, hook: object) -> None:
        raise RuntimeError("from a hook")

    def failing() -> None:
        for backend in ("naive", "flash"):
            for run in (model.run_with_hooks, model.run_with_cache):
                with pytest.raises(RuntimeError), model.hooks([("blocks.1.attn.hook_z", fail)]):
                    run(tokens, backend=backend)
        with pytest.raises(RuntimeError):
            model.generate(tokens, 2, fwd_hooks=[("hook_embed", fail)])
        with pytest.raises(HookError):
            model.run_with_cache(tokens, names_filter="typo", incl_bwd=True)
        with pytest.raises(OSError, match="no model"):
            load("no-such-model")

    calls = {
        "build": lambda: Decoder(model.config, seed=5),
        "run": lambda: [model(tokens, backend=b, attention_mask=mask) for b in ("naive", "flash")],
        "loss": lambda: model(tokens, return_type="loss").backward(),
        "cache": lambda: model.run_with_cache(tokens, incl_bwd=True, return_type="loss"),
        "capture": lambda: capture(model, tokens, "*", grads=True),
        "generate": lambda: model.generate(tokens, 2, temperature=1.0, seed=0),
        "steps": lambda: model(tokens, kv_cache=KVCache(model, 3)),
        "save": lambda: load(model.save(tmp_path / "toy"), dtype=torch.bfloat16),
        "half": lambda: load(tmp_path / "toy").bfloat16()(tokens),
        "failing": failing,
    }
    for name, call in calls.items():
        before = probe["state"]()
        call()
        assert probe["differences"](before, probe["state"]()) == [], name
        assert model.hooks_active() == 0
    with torch.no_grad():
        model.run_with_cache(tokens, incl_bwd=True, return_type="loss")
        assert not torch.is_grad_enabled()


def test_import_changes_nothing() -> None:
    """In a process of its own, as the first import happens once."""
    program = f"""
        import runpy
        probe = runpy.run_path({str(PROBE)!r})
        before = probe["state"]()
        import headstream.models.decoder, headstream.models.hooks, headstream.models.store
        print(probe["differences"](before, probe["state"]()))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    # TransformerLens brings libraries whose import adds warning filters; ours adds none.
    assert result.stdout.strip() in ("[]", "['warnings']"), result.stdout
