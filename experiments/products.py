"""The matrix products of a step, one by one: what libraries and kernels of our own take for each shape, and the floor.

    python experiments/products.py --batch 1,8,32,256

Only on CUDA. A product is x W^T, x [batch, in], W [out, in], bf16, merged as the engine merges them. Each is captured
in one graph with copies of its weight, 4 GB in all: with a few hundred megabytes a seventh of a weight is still in the
cache when its turn comes again. Ours is what `executors.few_rows` does for that shape, which may be the library. The
floor is the larger of the weight's bytes over the bandwidth of a copy and of the operations over the rate of a large
square product, both measured here. Behind the product of gate and up comes what joins them: a kernel behind the
library's, the same kernel in ours (`executors.gated`). All times are microseconds. Takes about half a minute.

Products of many rows draw more power than the card may for long, and its clock falls: so the three take turns, and the
rate of a large product is given twice, at once and after three seconds of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from one_line import errors_in_one_line, whole_numbers
from torch import Tensor
from torch.nn import functional

from asyncsched.cli.tables import print_table
from executors import few_rows, gated, library_products
from executors.cublaslt import Shape

LAYERS = 32
GATED = "gate, up, joined"
SHAPES = {  # of the Llama 8B shape: out, in, how often per step
    "q, k, v": (6144, 4096, LAYERS),
    "o": (4096, 4096, LAYERS),
    GATED: (28672, 4096, LAYERS),
    "down": (4096, 14336, LAYERS),
    "logits": (128256, 4096, 1),
}
COLD_BYTES = 4e9
REPLAYS = 7
LARGE = 8192
SUSTAINED_S = 3.0

Product = Callable[[Tensor, Tensor], Tensor]


def main(batch: Annotated[str, typer.Option(metavar="N,...", help="Rows of the input.")] = "1,8,32,256") -> None:
    """Microseconds per product, and milliseconds per step."""
    with errors_in_one_line():
        sizes = whole_numbers("--batch", batch)
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA device")
    bandwidth, rate = _bandwidth(), _rate(0.0)
    print(
        f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s, "
        f"after {SUSTAINED_S:g} s {_rate(SUSTAINED_S) / 1e12:.0f}"
    )
    totals: dict[int, dict[str, float]] = {size: {} for size in sizes}
    table = []
    for name, (out, width, count) in SHAPES.items():
        weights = [_random(out, width) for _ in range(max(2, round(COLD_BYTES / (2 * out * width))))]
        for size, of_step in totals.items():
            floor = max(2 * out * width / bandwidth, 2 * size * out * width / rate) * 1e6
            found = {"floor": floor, **_measured(name, _random(size, width), weights)}
            for kind, us in found.items():
                of_step[kind] = of_step.get(kind, 0.0) + us * count / 1e3
            table.append([str(size), name, *(f"{us:.1f}" for us in found.values()), _chosen(name, size, out, width)])
    kinds = list(next(iter(totals.values())))
    print_table("us per product", ["batch", "product", *kinds, "ours is"], table, numbers=kinds)
    rows = [[str(size), *(f"{ms:.3f}" for ms in of_step.values())] for size, of_step in totals.items()]
    print_table("ms per step", ["batch", *kinds], rows, numbers=kinds)


def _measured(name: str, x: Tensor, weights: list[Tensor]) -> dict[str, float]:
    def library(x: Tensor, weight: Tensor) -> Tensor:
        from executors.triton_gated import joined  # needs Triton

        output = functional.linear(x, weight)
        return joined(output, "silu") if name == GATED else output

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        if name == GATED:
            return torch.ops.asyncsched.gated(x, weight, "silu")
        return torch.ops.asyncsched.linear(x, weight, None)

    graphs = {}
    for kind in ("cublas", "cublaslt"):  # the latter last: ours falls back to it, as in the engine
        torch.backends.cuda.preferred_blas_library(kind)
        graphs[kind] = _captured(library, x, weights)
    if why := library_products.choose(weights, [len(x)]):
        raise SystemExit(f"error: {why}")
    graphs["ours"] = _captured(ours, x, weights)
    turns = [{kind: _seconds(graph.replay) for kind, graph in graphs.items()} for _ in range(REPLAYS)]
    return {kind: statistics.median(turn[kind] for turn in turns) / len(weights) * 1e6 for kind in graphs}


def _chosen(name: str, batch: int, out: int, width: int) -> str:
    if batch == 1:
        return "a row's kernel"
    multiprocessors = few_rows.multiprocessors(torch.device("cuda"))
    if name == GATED:
        tiling = gated.tiling_of(batch, out // 2, width, multiprocessors)
    else:
        tiling = few_rows.tiling_of(batch, out, width, multiprocessors)
    if tiling is not None:
        return f"{tiling.columns} x {tiling.depth}, in {tiling.splits}"
    shape = Shape(batch, out, width, torch.bfloat16)
    found = library_products.choice(shape, torch.device("cuda", 0))
    return "cublaslt, chosen" if found is not None and found.is_used else "cublaslt"


@torch.no_grad()
def _captured(product: Product, x: Tensor, weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    """The product with each weight; it has been replayed once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product(x, weights[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                product(x, weight)
        graph.replay()
        stream.synchronize()
    return graph


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 64


def _bandwidth() -> float:
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / min(_seconds(lambda: target.copy_(source)) for _ in range(10))


def _rate(after_s: float) -> float:
    """Operations per second of a large product, the best of ten once it has been computed for so long."""
    x = _random(LARGE, LARGE)
    began = time.perf_counter()
    while time.perf_counter() - began < after_s:
        _seconds(lambda: functional.linear(x, x))
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
