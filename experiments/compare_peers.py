"""This project beside its peers on one card: same process, same shape of weights, same prompts, same lengths.

    python experiments/compare_peers.py --only batch --only host --out experiments/results/h200-compare.json

Engines alternate (A B A B), figures are medians over rounds. Sections, with their rough duration for 8B on an H200 once
compiled kernels are cached; add about 15 s per engine for loading:

batch        prompts of 128 tokens, 512 new ones, at batch 1, 8, 32, 128, 256; per batch 20 s for ours, 60 s with peers
small-model  the same with a 1B shape, at batch 1, 32 and 256; half of that
seeds        32 requests of 8,192 new tokens, one round; 80 s per engine, ours alone unless --engine says otherwise
decode       our decode step at context 512, 4,096 and 8,192 against the memory floor; 40 s
prefill      our prefill of 32 prompts of 2,048 tokens against dense products; 15 s
host         our host time per step by kind, at batch 32 and 256, sync and async; 45 s
mixed        ours with 64 requests in flight, prompts arriving meanwhile, at two token budgets, sync and async; 100 s

Bandwidth and dense peak are measured in the same run. A dry run: --device cpu --shrink 16 --config llama-tiny.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import peers
import sections
import torch
import transformers
import typer
from peers import Load
from sections import Row, Setup

from executors.named_configs import named_config

NEW_TOKENS = 512
SEEDS = Load(32, 128, 8192)
Section = Enum("Section", {n: n for n in ("batch", "small-model", "seeds", "decode", "prefill", "host", "mixed")})
EngineName = Enum("EngineName", {name: name for name in peers.ENGINES})


def throughput(setup: Setup, loads: list[Load], names: list[str], rounds: int, peer_compile: int) -> list[Row]:
    """Tokens per second of each engine under each load; for ours also what the lanes did, and how many tokens agree."""
    models: dict[str, Any] = {}
    reasons = {name: peers.cannot_run(name, setup.device) for name in names}
    for name, reason in reasons.items():
        if reason:
            say(f"{name} is left out: {reason}")
    engines = {
        name: peers.build(name, setup.shape, loads, setup.device, models, peer_compile)
        for name, reason in reasons.items()
        if not reason
    }
    rows = []
    for load in loads:
        for engine in engines.values():
            engine.prepare(load)
        walls: dict[str, list[float]] = {name: [] for name in engines}
        tokens: dict[str, peers.Tokens | None] = {}
        for _ in range(rounds):
            for name, engine in engines.items():
                run = engine.generate(load)
                walls[name].append(run.wall_s)
                tokens[name] = run.tokens
        for name, engine in engines.items():
            profile = engine.profile(load) if isinstance(engine, peers.Ours) else {}
            wall = statistics.median(walls[name])
            equal = _equal(tokens.get("ours-sync"), tokens[name])
            rows.append(
                {
                    "engine": name,
                    **load._asdict(),
                    "tokens_per_s": load.requests * load.new_tokens / wall,
                    "wall_s": wall,
                    "walls_s": walls[name],
                    **profile,
                    "sequences_equal_to_sync": equal,
                    "notes": engine.notes,
                }
            )
            say(f"{name}, {load.requests} requests: {rows[-1]['tokens_per_s']:.0f} tokens/s")
    for engine in engines.values():
        engine.close()
    models.clear()
    peers.release()
    return rows


def _equal(first: peers.Tokens | None, second: peers.Tokens | None) -> int | None:
    if first is None or second is None:
        return None
    return sum(mine == other for mine, other in zip(first, second, strict=True))


def main(
    only: Annotated[list[Section] | None, typer.Option(help="A section; all without it.")] = None,
    config: Annotated[str, typer.Option(help="A named model shape.")] = "llama-8b",
    small_config: Annotated[str, typer.Option(help="That of the section small-model.")] = "llama-1b",
    engine: Annotated[list[EngineName] | None, typer.Option(help="Engines of batch, small-model and seeds.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes of batch and small-model.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    peer_compile: Annotated[int, typer.Option(min=0, max=3, help="transformers' default_compile_level.")] = 0,
    budget: Annotated[list[int] | None, typer.Option(min=1, help="Token budgets of the section mixed.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    shrink: Annotated[int, typer.Option(min=1, help="Divide batches and lengths, for a dry run.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A JSON file; its other sections stay.")] = None,
) -> None:
    """Measure, print tables, and write the results."""
    setup = Setup(shape=named_config(config), device=device, rounds=rounds, shrink=shrink)
    small = Setup(shape=named_config(small_config), device=device, rounds=rounds, shrink=shrink)
    names = [one.value for one in engine] if engine else list(peers.ENGINES)
    of_seeds = names if engine else [name for name in names if name.startswith("ours")]
    new_tokens = setup.less(NEW_TOKENS, 64)
    loads, small_loads = (
        [Load(size, setup.less(128, 8), new_tokens) for size in sorted(set(batch or map(setup.less, sizes)))]
        for sizes in ((1, 8, 32, 128, 256), (1, 32, 256))
    )
    long = Load(setup.less(SEEDS.requests), SEEDS.prompt_tokens // 2, setup.less(SEEDS.new_tokens))
    work: dict[str, Callable[[], list[Row]]] = {
        "batch": lambda: throughput(setup, loads, names, rounds, peer_compile),
        "small-model": lambda: throughput(small, small_loads, names, rounds, peer_compile),
        "seeds": lambda: throughput(setup, [long if shrink > 1 else SEEDS], of_seeds, 1, peer_compile),
        "decode": lambda: sections.decode(setup),
        "prefill": lambda: sections.prefill(setup),
        "host": lambda: sections.host(setup),
        "mixed": lambda: sections.mixed(setup, tuple(budget) if budget else (320, 512)),
    }
    for name in [one.value for one in only] if only else work:
        started = time.perf_counter()
        rows = work[name]()
        record = {**about(device, small_config if name == "small-model" else config), "rows": rows}
        record["took_s"] = round(time.perf_counter() - started, 1)
        print_rows(name, record)
        if out is not None:
            save(out, name, record)


def about(device: str, config: str) -> Row:
    """Where the figures come from."""
    cuda = device == "cuda"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"] if cuda else ["true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "config": config,
    }


def save(out: Path, section: str, record: Row) -> None:
    """Adds or replaces a section of the file, at once: what was measured before is not lost to a later fault."""
    results = json.loads(out.read_text()) if out.exists() else {}
    results[section] = record
    out.write_text(json.dumps(results, indent=1) + "\n")


def print_rows(section: str, record: Row) -> None:
    """Every figure of every row but lists, aligned; nested ones in a line of their own."""
    head = ", ".join(str(record[key]) for key in ("config", "device", "torch", "commit"))
    print(f"\n{section}: {head}; {record['took_s']} s", flush=True)
    rows = record["rows"]
    columns = [key for key in rows[0] if not isinstance(rows[0][key], dict | list) and key != "notes"]
    table = [columns, *([_short(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[place]) for line in table) for place in range(len(columns))]
    for number, line in enumerate(table):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        nested = {key: value for key, value in rows[number - 1].items() if isinstance(value, dict)} if number else {}
        for key, value in nested.items():
            print(f"      {key}: " + ", ".join(f"{kind} {_short(figure)}" for kind, figure in value.items()))
    for note in sorted({f"{row['engine']}: {row['notes']}" for row in rows if row.get("notes")}):
        print(f"  {note}")


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "-" if value is None else str(value)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
