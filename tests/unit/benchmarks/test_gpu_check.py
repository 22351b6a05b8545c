"""The script for whoever has a GPU: what it does without one, and that it can fail."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headstream.models.attend_flash import attend_flash

PATH = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_cuda_it_says_not_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 0
    assert capsys.readouterr().out == "not run: torch finds no CUDA device here\n"


def test_it_holds_flash_to_naive(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in script.checks("cpu", 40) if "float64" in row[0] or "bfloat" in row[0]]
    assert script.print_checks(iter(rows))
    assert capsys.readouterr().out.count("| ok |") == len(rows) == 14


def test_a_wrong_kernel_and_a_broken_one_fail(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_base_two(*given: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        z, lse = attend_flash(*given, **options)
        return z, lse / torch.log(torch.tensor(2.0))

    def refused(*given: torch.Tensor, **options: object) -> None:
        raise RuntimeError("no kernel image is available")

    for attend, words in ((of_base_two, "FAILED |"), (refused, "RuntimeError: no kernel image")):
        monkeypatch.setattr(script, "attend_flash", attend)
        first = next(script.checks("cpu", 40))
        assert not script.print_checks(iter([first]))
        assert words in capsys.readouterr().out


def test_times_are_printed_with_the_kernel(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.print_times("cpu", [32], 1e12)
    out = capsys.readouterr().out
    assert out.count(" ms |") == 4
    assert "float32 kernel: fused; bfloat16: fused" in out
