"""What a layer costs the host when no graph holds the step: as written, merged, compiled, and bound.

    python experiments/launch_cost.py --json

Tiny matrices and attention that does nothing, so that what is left is mostly calls. It runs on a CPU, where the
arithmetic is in the figures too, the same in all of them.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from asyncsched.cli.tables import print_table
from executors import compiled
from executors.attention import Attend
from executors.compiled import CompileSettings
from executors.kv_cache import KvCache
from executors.models import Model
from executors.named_configs import named_config
from executors.step_view import Chunk, StepView, view_of

LAYERS, TOKENS, REPEATS = 32, 3, 60
BLOCK_SIZE = 16


class NoAttention:
    """A backend that answers with whatever is in memory."""

    captures_mixed = False

    def begin(self, view: StepView, kv: KvCache) -> Attend:
        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
            return queries.new_empty((*queries.shape[:2], values.shape[-1]))

        return attend


def main(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Microseconds of process time per layer, the best of many passes over a model."""
    torch.set_num_threads(1)
    rows = {"as written": per_layer(load(merge=False)), "merged": per_layer(load())}
    model = load(compile=CompileSettings())
    for name, way in (("compiled, checked on every call", compiled.checked), ("compiled, bound", nullcontext)):
        with way(model.module):
            rows[name] = per_layer(model)
    if as_json:
        print(json.dumps({"us_per_layer": rows, "layers": LAYERS, "tokens": TOKENS, "torch": torch.__version__}))
        return
    cells = [[name, f"{us:.0f}"] for name, us in rows.items()]
    print_table("host time of a layer", ["layers", "us"], cells, numbers=["us"])


def load(**options: Any) -> Model:
    config = named_config("llama-tiny")
    config.num_hidden_layers = LAYERS
    return Model.load(config, device="cpu", dummy_weights=True, check=False, **options)


@torch.no_grad()
def per_layer(model: Model) -> float:
    model = replace(model, backend=NoAttention())
    kv = model.allocate_kv(TOKENS, BLOCK_SIZE)
    chunks = [Chunk([1], 3, [1 + i]) for i in range(TOKENS)]
    view = view_of(chunks, block_size=BLOCK_SIZE, device=model.device)
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        model.forward(view, kv)
        times.append(time.process_time() - started)
    return min(times) * 1e6 / LAYERS


if __name__ == "__main__":
    typer.run(main)
