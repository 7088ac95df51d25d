"""One decode step's forward pass, by how the layers run, from eager to all that we do; and what it cannot beat.

    python experiments/model_step.py --batch 32 --context 512,4096,8192 --json
    python experiments/model_step.py --config tiny --batch 4 --context 64      # a dry run on a CPU

On CUDA a step is one captured graph, as in the engine, but for the kernel that completes its inputs; steps are replayed
without a pause. Kernels are sorted into classes by their names; `--longest N` lists those that take longest. The floor
is what the step has to read (weights, without an embedding table that is only looked up, and KV) over the bandwidth of
a device-to-device copy, measured in the same run. The launch is the host's time for the same pass without a graph.
All times are milliseconds; gaps are the time of a step in which no kernel runs.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
import typer
from one_line import errors_in_one_line, whole_numbers

from asyncsched.cli.tables import print_table
from asyncsched.errors import AsyncschedError, ConfigError
from executors.compiled import CompileSettings
from executors.errors import one_line
from executors.kv_cache import KvCache
from executors.models import Model
from executors.named_configs import named_config
from executors.sampling import sample
from executors.sampling_layout import NUM_WORDS, Features
from executors.sampling_state import SamplerState
from executors.step_view import Chunk, StepView, view_of

BLOCK_SIZE = 16


class Variant(NamedTuple):
    merge: bool = True
    compile: CompileSettings | None = CompileSettings()
    own_products: bool = True


VARIANTS = {
    "eager": Variant(merge=False, compile=None, own_products=False),
    "compiled": Variant(merge=False, own_products=False),
    "merged": Variant(compile=None, own_products=False),
    "both": Variant(own_products=False),
    "both+descent": Variant(compile=CompileSettings(coordinate_descent=True), own_products=False),
    "both-combo": Variant(compile=CompileSettings(combo_kernels=False), own_products=False),
    "both+fours": Variant(compile=CompileSettings(layers_per_graph=4), own_products=False),
    "both+autotune": Variant(compile=CompileSettings(max_autotune_gemm=True), own_products=False),
    "all": Variant(),
}

CLASSES = (  # by the first name that matches; the compiler names its kernels after all that is in them and near them
    ("other", re.compile(r"triton_(poi|red|per|for)_")),
    ("matmul", re.compile(r"triton_tem|gemm|gemv|nvjet|cutlass|cublas|splitK|multiply_row|gate_row", re.I)),
    ("kv write", re.compile(r"index_copy|indexFunc|write_kv", re.I)),
    ("attention", re.compile(r"attend|attention|combine_splits|flash|fmha", re.I)),
    ("sampling", re.compile(r"_find_peaks|_choose")),
)
REPLAYS, IN_A_ROW, PROFILED = 12, 5, 5
LISTED = 24  # kernels by name
COPIED_BYTES = 2**30
HOST_RUNS = 10


@dataclass(frozen=True)
class Step:
    """A decode step over a cache of random keys and values."""

    model: Model
    kv: KvCache
    view: StepView
    words: torch.Tensor
    sampler: SamplerState

    @classmethod
    def of(cls, model: Model, kv: KvCache, view: StepView) -> Step:
        """Samples as the engine does a greedy step."""
        words = torch.zeros(view.num_seqs, NUM_WORDS, dtype=torch.int32, device=model.device)
        return cls(model, kv, view, words, SamplerState(view.num_seqs, model.vocab_size, model.device))

    def run(self) -> torch.Tensor:
        return sample(self.model.forward(self.view, self.kv), self.words, self.sampler, Features.NONE).tokens


def main(
    config: Annotated[str, typer.Option(metavar="NAME", help="A named shape, or tiny.")] = "llama-8b",
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences in the step.")] = "32",
    context: Annotated[str, typer.Option(metavar="N,...", help="KV length of each sequence.")] = "512,4096,8192",
    variants: Annotated[str, typer.Option(metavar="NAME,...", help=f"Of {', '.join(VARIANTS)}.")] = ",".join(VARIANTS),
    attention: Annotated[str, typer.Option(help="The attention backend.")] = "auto",
    longest: Annotated[int, typer.Option(min=0, max=LISTED, help="List so many kernels of each step.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time one decode step of each variant."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    with errors_in_one_line():
        batches, contexts, names = (
            whole_numbers("--batch", batch),
            whole_numbers("--context", context),
            variants.split(","),
        )
        if unknown := [name for name in names if name not in VARIANTS]:
            raise ConfigError("--variants", unknown[0], f"use {', '.join(VARIANTS)}")
    shape = "llama-tiny" if config == "tiny" else config
    bandwidth = copy_bandwidth(device)
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            rows += measure(name, shape, device, batches, contexts, bandwidth, attention)
        except (AsyncschedError, RuntimeError) as cause:  # out of memory, or what cannot be captured: the others go on
            rows.append({"variant": name, "error": one_line(cause)})
        _release()
    about = {
        "config": shape,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "copy_tb_s": bandwidth / 1e12,
    }
    _print(rows, about, longest, as_json=as_json)


def measure(
    name: str,
    shape: str,
    device: torch.device,
    batches: Sequence[int],
    contexts: Sequence[int],
    bandwidth: float,
    attention: str,
) -> list[dict[str, Any]]:
    """A row per batch and context."""
    variant = VARIANTS[name]
    said: list[str] = []
    started = time.perf_counter()
    model = Model.load(
        named_config(shape),
        device=device,
        dummy_weights=True,
        **variant._asdict(),
        attention=attention,
        report=said.append,
        check=False,
    )
    load_s = time.perf_counter() - started
    if variant.compile is not None and model.compiled is None:
        return [{"variant": name, "error": said[-1]}]
    kv = model.allocate_kv(max(batches) * -(-max(contexts) // BLOCK_SIZE), BLOCK_SIZE)
    for pool in (*kv.keys, *kv.values):
        pool.normal_()
    rows = []
    for size in batches:
        for length in contexts:
            step = Step.of(model, kv, _decode(size, length, max(contexts), device))
            floor_ms = 1e3 * (weight_bytes(model) + size * length * model.kv_bytes_per_token) / bandwidth
            row = {"variant": name, "batch": size, "context": length, "load_s": load_s, "floor_ms": floor_ms}
            if model.compiled is not None:
                row["compile_s"] = model.compiled.seconds
            row |= _on_cuda(step) if device.type == "cuda" else _on_cpu(step)
            rows.append({**row, "times_floor": row["step_ms"] / floor_ms})
    return rows


def weight_bytes(model: Model) -> int:
    """Of the weights that a step reads: an embedding table that is not the output's too is only looked up."""
    module = model.module
    table, output = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    total = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return total if output is table else total - table.numel() * table.element_size()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.ones(COPIED_BYTES if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(_seconds(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * source.numel() / seconds


def _decode(batch: int, context: int, capacity: int, device: torch.device) -> StepView:
    """One token of each sequence at the end of its context, blocks shuffled; room in the table for `capacity`."""
    per_sequence = -(-capacity // BLOCK_SIZE)
    blocks = (torch.randperm(batch * per_sequence, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    chunks = [Chunk([i + 1], context - 1, blocks[i * per_sequence : (i + 1) * per_sequence]) for i in range(batch)]
    view = view_of(chunks, block_size=BLOCK_SIZE, device=device)
    ids = {"token_ids": view.token_ids.long(), "positions": view.positions.long()}  # as the engine's kernel writes them
    return replace(view, **ids, max_seq_len=capacity, samples_all=True)


def _on_cuda(step: Step) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.run()
        launches = []
        for _ in range(HOST_RUNS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step.run()
            launches.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step.run()
        for _ in range(3):
            graph.replay()
        times = [_seconds(lambda: _replay(graph), step.model.device) / IN_A_ROW for _ in range(REPLAYS)]
        kernels = _profiled(graph)
    step_ms = 1e3 * statistics.median(times)
    return {"step_ms": step_ms, "launch_ms": 1e3 * statistics.median(launches), **kernels}


def _replay(graph: torch.cuda.CUDAGraph) -> None:
    """Steps that wait for the device and not for the host, as in the engine: a launch takes as long as 100 kernels."""
    for _ in range(IN_A_ROW):
        graph.replay()


def _on_cpu(step: Step) -> dict[str, Any]:
    step.run()
    return {"step_ms": 1e3 * min(_seconds(step.run, step.model.device) for _ in range(5))}


def _profiled(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """Milliseconds of a replay by class of kernel, how many there are, and those that take longest."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    by_name: dict[str, float] = {}
    count = 0
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / PROFILED
            count += 1
    classes = dict.fromkeys((name for name, _ in CLASSES), 0.0)
    for name, ms in by_name.items():
        classes[next((label for label, pattern in CLASSES if pattern.search(name)), "other")] += ms
    longest = sorted(by_name, key=by_name.__getitem__, reverse=True)[:LISTED]
    return {
        "kernels_ms": classes,
        "busy_ms": sum(by_name.values()),
        "kernels": count / PROFILED,
        "longest_ms": {name[:90]: by_name[name] for name in longest},
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _release() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _print(rows: list[dict[str, Any]], about: dict[str, Any], longest: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**about, "rows": rows}, indent=2, allow_nan=False))
        return
    print(f"{about['config']} on {about['device']}, torch {about['torch']}, copy {about['copy_tb_s']:.2f} TB/s")
    columns = ["variant", "batch", "context", "ms", "floors", "launch", "matmul", "attn", "kv", "sampling", "other"]
    columns += ["gaps", "kernels", "compile s"]
    good = [row for row in rows if "error" not in row]
    print_table("one decode step", columns, [_cells(row) for row in good], numbers=columns[1:])
    for row in rows:
        if "error" in row:
            print(f"{row['variant']}: {row['error']}")
        elif longest:
            print(f"{row['variant']}, batch {row['batch']}, context {row['context']}")
            for name, ms in list(row.get("longest_ms", {}).items())[:longest]:
                print(f"{ms:8.3f} ms  {name}")


def _cells(row: dict[str, Any]) -> list[str]:
    def cell(value: float | None, form: str = "{:.3f}") -> str:
        return "-" if value is None else form.format(value)

    kinds = row.get("kernels_ms", {})
    return [
        row["variant"],
        str(row["batch"]),
        str(row["context"]),
        cell(row["step_ms"]),
        cell(row["times_floor"], "{:.2f}"),
        cell(row.get("launch_ms")),
        *(cell(kinds.get(kind)) for kind in ("matmul", "attention", "kv write", "sampling", "other")),
        cell(row["step_ms"] - row["busy_ms"] if "busy_ms" in row else None),
        cell(row.get("kernels"), "{:.0f}"),
        cell(row.get("compile_s"), "{:.1f}"),
    ]


if __name__ == "__main__":
    typer.run(main)
