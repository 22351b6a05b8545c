"""Hold the flash backend on a GPU to the definition, and time it: under three minutes.

    python benchmarks/gpu_check.py                        needs CUDA; without it says "not run"
    python benchmarks/gpu_check.py --device cpu --quick   the script itself, tried out anywhere

Prints two tables. Exits 1 if a value is off or a check raised, else 0; timings are for reading.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from headstream.circuits.interventions import cut_edges, freeze_attention
from headstream.circuits.measuring.masses import Offset, SinkMass
from headstream.circuits.measuring.matches import InductionMass
from headstream.circuits.measuring.measure import measure_attention
from headstream.circuits.measuring.segments import SegmentMass
from headstream.circuits.measuring.spread import Entropy
from headstream.models.attend_flash import attend_flash, why_not_fused
from headstream.models.attend_naive import attend_naive
from headstream.models.config import DecoderConfig
from headstream.models.decoder import Decoder

LIMIT = 150.0  # seconds after which no further timing is begun
FORMING = 2**30  # elements of a naive pattern above which it is not formed

# Largest |flash - naive| of values of size about 1, both in this dtype: sums of some hundred terms
# in another order. Half precision is held to naive's own error instead (`half`).
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}

Check = tuple[str, Callable[[], tuple[float, float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="short lengths only")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("not run: torch finds no CUDA device here")
        return 0
    start = time.perf_counter()
    print(f"torch {torch.__version__}, {name_of(options.device)}")
    length = 96 if options.quick else 777
    good = print_checks(checks(options.device, length))
    lengths = (64, 128) if options.quick else (2048, 8192, 32768)
    print_times(options.device, lengths, start)
    print(
        f"\n{'all values hold' if good else 'VALUES ARE OFF'}; {time.perf_counter() - start:.0f} s"
    )
    return 0 if good else 1


def print_checks(rows: Iterator[Check]) -> bool:
    """The table of checks; whether all held."""
    print("\n| flash = naive | largest difference | bound | |\n|---|---|---|---|")
    good = True
    for name, check in rows:
        try:
            error, bound = check()
        except Exception as failure:
            # One broken path must not hide what the others show.
            print(f"| {name} | {type(failure).__name__}: {failure} | | FAILED |", flush=True)
            good = False
            continue
        held = error <= bound
        print(f"| {name} | {error:.1e} | {bound:.1e} | {'ok' if held else 'FAILED'} |", flush=True)
        good &= held
    return good


def checks(device: str, length: int) -> Iterator[Check]:
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for what, options in (
            ("", {}),
            (", key mask with empty rows", {"masked": True}),
            (", grouped heads", {"kv_heads": 2}),
            (", the last third of the queries", {"queries": length // 3}),
            (", one query", {"queries": 1}),
            (", width 80 and values of width 48", {"width": 80, "value_width": 48}),
        ):
            made = partial(problem, device, dtype, length, **options)
            yield f"{name}{what}", partial(values, made)
        yield f"{name}, gradients", partial(gradients, partial(problem, device, dtype, length))
        masked = partial(problem, device, dtype, length, masked=True)
        yield f"{name}, gradients with empty rows", partial(gradients, masked)
        yield f"{name}, model: logits", partial(logits, device, dtype, length)
        yield f"{name}, model: edges cut", partial(logits, device, dtype, length, edit=cut)
        yield (
            f"{name}, model: attention frozen",
            partial(logits, device, dtype, length, edit=frozen),
        )
        yield f"{name}, model: statistics", partial(statistics, device, dtype, length)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for what, options in (("", {}), (", key mask", {"masked": True})):
            made = partial(problem, device, dtype, length, **options)
            yield f"{name}{what}, error against float32", partial(half, made)


def problem(
    device: str,
    dtype: torch.dtype,
    length: int,
    *,
    masked: bool = False,
    kv_heads: int = 8,
    queries: int | None = None,
    width: int = 64,
    value_width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and key mask, the same numbers on every device. Scores have deviation 2."""
    draws = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).to(device, dtype)

    q = 2 * normal(2, length if queries is None else queries, 8, width)
    k, v = normal(2, length, kv_heads, width), normal(2, length, kv_heads, value_width or width)
    mask = torch.rand(2, length, generator=draws) < 0.7
    mask[0, :5] = False
    return q, k, v, mask.to(device) if masked else None


def values(make: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor | None]]) -> tuple[float, float]:
    """Of z and of the log-sum-exp."""
    q, k, v, mask = make()
    flash, naive = (
        attend(q, k, v, scale=q.shape[3] ** -0.5, key_mask=mask)
        for attend in (attend_flash, attend_naive)
    )
    return max(difference(a, b) for a, b in zip(flash, naive, strict=True)), BOUNDS[q.dtype]


def gradients(
    make: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor | None]],
) -> tuple[float, float]:
    """Of a function of z, with respect to q, k and v; relative to the largest."""
    *inputs, mask = make()
    found = []
    for attend in (attend_flash, attend_naive):
        q, k, v = leaves = [x.detach().requires_grad_() for x in inputs if x is not None]
        z, _ = attend(q, k, v, scale=q.shape[3] ** -0.5, key_mask=mask)
        weight = torch.linspace(-1, 1, z.numel(), dtype=z.dtype, device=z.device)
        found.append(torch.autograd.grad((z.flatten() * weight).sum(), leaves))
    largest = max(float(grad.abs().max()) for grad in found[1])
    off = max(difference(a, b) for a, b in zip(*found, strict=True))
    return off / largest, BOUNDS[leaves[0].dtype]


def half(make: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor | None]]) -> tuple[float, float]:
    """Flash may err by twice what naive errs by in the same precision."""
    q, k, v, mask = make()
    scale = q.shape[3] ** -0.5
    exact, _ = attend_naive(q.float(), k.float(), v.float(), scale=scale, key_mask=mask)
    errors = [
        difference(attend(q, k, v, scale=scale, key_mask=mask)[0].float(), exact)
        for attend in (attend_flash, attend_naive)
    ]
    return errors[0], 2 * errors[1]


def model_of(device: str, dtype: torch.dtype, length: int, n_layers: int = 2) -> Decoder:
    config = DecoderConfig(
        n_layers=n_layers,
        n_heads=8,
        n_kv_heads=4,
        d_model=256,
        d_head=32,
        d_mlp=512,
        d_vocab=500,
        n_ctx=length,
        positions="rotary",
    )
    return Decoder(config, dtype=dtype, device=device)


def tokens_of(device: str, length: int, batch: int = 2) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randint(500, (batch, length), generator=draws).to(device)


def cut(model: Decoder, tokens: Tensor) -> AbstractContextManager[Decoder]:
    queries = slice(tokens.shape[1] // 2, None)
    return cut_edges(model, None, keys=[0, 3], queries=queries, heads=[1, 2, 6], renormalise=False)


def frozen(model: Decoder, tokens: Tensor) -> AbstractContextManager[Decoder]:
    return freeze_attention(model, tokens.flip(1), heads=[0, 5])


def logits(
    device: str,
    dtype: torch.dtype,
    length: int,
    edit: Callable[[Decoder, Tensor], AbstractContextManager[Decoder]] | None = None,
) -> tuple[float, float]:
    model, tokens = model_of(device, dtype, length), tokens_of(device, length)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    outputs = []
    for backend in ("flash", "naive"):
        with torch.no_grad():
            if edit is None:
                outputs.append(model(tokens, attention_mask=mask, backend=backend))
                continue
            with edit(model, tokens):
                outputs.append(model(tokens, attention_mask=mask, backend=backend))
    return difference(*outputs), BOUNDS[dtype]


def measured(length: int) -> list[object]:
    labels = ["instruction"] * (length // 4) + ["data"] * (length - length // 4)
    return [SinkMass(), Offset(1), InductionMass(), Entropy(), SegmentMass(labels)]


def statistics(device: str, dtype: torch.dtype, length: int) -> tuple[float, float]:
    model, tokens = model_of(device, dtype, length), tokens_of(device, length)
    flash, naive = (
        measure_attention(model, tokens, measured(length), backend=backend)  # type: ignore[arg-type]
        for backend in ("flash", "naive")
    )
    if any(bool((flash[name].isnull() != naive[name].isnull()).any()) for name in naive):
        return float("inf"), BOUNDS[dtype]
    return max(float(abs(flash[name] - naive[name]).max()) for name in naive), BOUNDS[dtype]


def difference(a: Tensor, b: Tensor) -> float:
    """The largest, over entries that are not the same infinity; NaN counts as infinite."""
    off = torch.where(a == b, torch.zeros_like(a), a - b).detach().abs().double()
    return float(off.nan_to_num(nan=torch.inf).max())


def print_times(device: str, lengths: Sequence[int], start: float) -> None:
    """Seconds of a forward pass of 2 layers x 8 heads, and the peak of memory it adds."""
    print("\n| float32 | naive | flash | flash with five statistics | flash with an edge cut |")
    print("|---|---|---|---|---|")
    for length in lengths:
        model, tokens = model_of(device, torch.float32, length), tokens_of(device, length, 1)
        whole = partial(model, tokens, stop_at_layer=2)
        cells = []
        for run in (
            partial(whole, backend="naive") if 8 * length**2 <= FORMING else None,
            partial(whole, backend="flash"),
            partial(measure_attention, model, tokens, measured(length)),
            partial(under_cut, model, whole),
        ):
            if run is None:
                cells.append("not formed")
            elif time.perf_counter() - start > LIMIT:
                cells.append("out of time")
            else:
                try:
                    cells.append(timed(run, device))
                except torch.cuda.OutOfMemoryError:
                    cells.append("out of memory")
        print(f"| n = {length} | {' | '.join(cells)} |", flush=True)
    q = torch.empty(1, 2, 8, 32, device=device)
    print(f"\nfloat32 kernel: {why_not_fused(q, q, q) or 'fused'}", end="")
    half_q = q.to(torch.bfloat16)
    print(f"; bfloat16: {why_not_fused(half_q, half_q, half_q) or 'fused'}")


def under_cut(model: Decoder, run: Callable[..., Tensor]) -> None:
    with cut_edges(model, None, keys=[0]):
        run(backend="flash")


def timed(run: Callable[[], object], device: str) -> str:
    """The fastest of three after one to warm up."""
    cuda = device.startswith("cuda")
    seconds = []
    with torch.no_grad():
        run()
        if cuda:
            torch.cuda.synchronize(device)
            held = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            begin = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begin)
    text = f"{1000 * min(seconds):.1f} ms"
    if cuda:
        text += f", {(torch.cuda.max_memory_allocated(device) - held) / 2**20:.0f} MiB"
    return text


def name_of(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


if __name__ == "__main__":
    sys.exit(main())
