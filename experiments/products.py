"""The matrix products of a step, one by one: what libraries and a Triton kernel take for each shape, and their floors.

    python experiments/products.py --batch 1,32,256

Only on CUDA. A product is x W^T, x [batch, in], W [out, in], bf16, merged as the engine merges them. Each is captured
in one graph with copies of its weight, so that none is in the cache when its turn comes; of Triton's kernel the best of
some tilings counts. The floor is the larger of the weight's bytes over the bandwidth of a copy and of the operations
over the rate of a large square product, both measured here. All times are microseconds. Takes about a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn import functional

from asyncsched.cli.tables import print_table

LAYERS = 32
SHAPES = {  # of the Llama 8B shape: out, in, how often per step
    "q, k, v": (6144, 4096, LAYERS),
    "o": (4096, 4096, LAYERS),
    "gate, up": (28672, 4096, LAYERS),
    "down": (4096, 14336, LAYERS),
    "logits": (128256, 4096, 1),
}
COLD_BYTES = 400e6  # of weights that a graph passes through: eight times the cache
REPLAYS = 7
LARGE = 8192

Product = Callable[[Tensor, Tensor], Tensor]


class Tiling(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILINGS = (
    Tiling(16, 64, 256, 4, 4),
    Tiling(32, 64, 128, 4, 5),
    Tiling(64, 64, 128, 4, 4),
    Tiling(64, 128, 128, 4, 4),
    Tiling(64, 256, 64, 4, 4),
    Tiling(128, 64, 64, 4, 6),
    Tiling(128, 128, 64, 4, 4),
    Tiling(128, 128, 64, 8, 4),
    Tiling(128, 256, 64, 8, 3),
    Tiling(256, 64, 64, 8, 4),
    Tiling(256, 128, 64, 8, 3),
)


def main(
    batch: Annotated[str, typer.Option(metavar="N,...", help="Rows of the input.")] = "1,32,256",
    triton: Annotated[bool, typer.Option(help="Also a Triton kernel.")] = True,
) -> None:
    """Microseconds per product, and milliseconds per step."""
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA device")
    bandwidth, rate = _bandwidth(), _rate()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
    table, totals = [], []
    for size in map(int, batch.split(",")):
        of_step: dict[str, float] = {}
        for name, (out, width, count) in SHAPES.items():
            floor = max(2 * out * width / bandwidth, 2 * size * out * width / rate) * 1e6
            found = {"floor": floor, **_libraries(size, out, width)}
            tiling = ""
            if triton:
                found["triton"], tiling = _triton(size, out, width)
            found["best"] = min(us for kind, us in found.items() if kind != "floor")
            for kind, us in found.items():
                of_step[kind] = of_step.get(kind, 0.0) + us * count / 1e3
            table.append([str(size), name, *(f"{us:.1f}" for us in found.values()), tiling])
        totals.append([str(size), *(f"{ms:.3f}" for ms in of_step.values())])
    kinds = list(of_step)
    print_table("us per product", ["batch", "product", *kinds, "tiling"], table, numbers=kinds)
    print_table("ms per step", ["batch", *kinds], totals, numbers=kinds)


def _libraries(batch: int, out: int, width: int) -> dict[str, float]:
    found = {}
    for name in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(name)
        found[name] = _us(functional.linear, batch, out, width)
    return found


def _triton(batch: int, out: int, width: int) -> tuple[float, str]:
    """Of the tilings whose rows are no more than twice the batch, or the smallest; wrong results do not count."""
    x, weight = _random(batch, width), _random(out, width)
    expected = functional.linear(x, weight).float()
    best, chosen = float("inf"), "none"
    for tiling in TILINGS:
        if tiling.rows > max(16, 2 * batch) or (batch >= 128 and tiling.rows < 64):
            continue
        product = partial(_product, tiling=tiling)
        try:
            error = (product(x, weight).float() - expected).norm() / expected.norm()
            us = _us(product, batch, out, width) if error < 1e-2 else float("inf")
        except RuntimeError:  # more shared memory than there is
            continue
        if us < best:
            best, chosen = us, "x".join(map(str, tiling))
    return best, chosen


def _product(x: Tensor, weight: Tensor, *, tiling: Tiling) -> Tensor:
    import product_kernel  # beside this file; needs Triton
    import triton

    (rows, depth), columns = x.shape, len(weight)
    output = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, tiling.rows), triton.cdiv(columns, tiling.columns))
    constants: dict[str, Any] = {"BLOCK_M": tiling.rows, "BLOCK_N": tiling.columns, "BLOCK_K": tiling.depth}
    product_kernel.product[grid](
        x, weight, output, rows, columns, depth, **constants, num_warps=tiling.warps, num_stages=tiling.stages
    )
    return output


@torch.no_grad()
def _us(product: Product, batch: int, out: int, width: int) -> float:
    copies = max(2, round(COLD_BYTES / (2 * out * width)))
    x, weights = _random(batch, width), [_random(out, width) for _ in range(copies)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product(x, weights[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                product(x, weight)
        graph.replay()
        return statistics.median(_seconds(graph.replay) for _ in range(REPLAYS)) / copies * 1e6


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 64


def _bandwidth() -> float:
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / min(_seconds(lambda: target.copy_(source)) for _ in range(10))


def _rate() -> float:
    x = _random(LARGE, LARGE)
    return 2 * LARGE**3 / min(_seconds(lambda: functional.linear(x, x)) for _ in range(10))


def _seconds(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


if __name__ == "__main__":
    typer.run(main)
