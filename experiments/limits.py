"""What the device could do: the bandwidth of copies, dense products, and the bytes and FLOPs that a model asks for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from executors.models import Model


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy within device memory reads and writes; the best of several."""
    size = 2**30 if device.type == "cuda" else 2**24
    source, target = torch.empty(2, size, dtype=torch.uint8, device=device)
    return 2 * size / _best_s(lambda: target.copy_(source), device)


def dense_flops(device: torch.device) -> float:
    """FLOP/s of a product of large bfloat16 matrices; the best of several."""
    size = 8192 if device.type == "cuda" else 256
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / _best_s(lambda: left @ right, device)


def weight_bytes(model: Model) -> int:
    """Read by every step: all weights but an embedding table that is not also the output layer."""
    module = model.module
    weights = {id(one): one.nbytes for one in module.parameters()}
    table = module.get_input_embeddings().weight
    if module.get_output_embeddings() is None or module.get_output_embeddings().weight is not table:
        del weights[id(table)]
    return sum(weights.values())


def prefill_flops(model: Model, prompts: int, length: int) -> float:
    """Of whole prompts: products with every weight but the output layer's, and causal attention."""
    module = model.module
    outside = {id(one.weight): one.weight for one in (module.get_input_embeddings(), module.get_output_embeddings())}
    num_weights = sum(one.numel() for one in module.parameters() if id(one) not in outside)
    pairs = length * (length + 1) / 2
    attention = sum(2 * pairs * layer.query_heads * (layer.key_dim + layer.value_dim) for layer in model.layers)
    output = sum(2 * one.numel() for key, one in outside.items() if key == id(module.get_output_embeddings().weight))
    return prompts * (2.0 * num_weights * length + attention + output)


def _best_s(work: Callable[[], object], device: torch.device, rounds: int = 20) -> float:
    work()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return min(times)
