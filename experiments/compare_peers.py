"""This project beside its peers on one card: same process, same shape of weights, same prompts, same lengths.

    python experiments/compare_peers.py --only batch --only host --out experiments/results/h200-compare.json

Engines alternate (A B A B), figures are medians over rounds. All sections of a run share one load of our model, which
takes about 40 s, compiled. Sections, with their rough duration for 8B on an H200 beside that, per round:

batch        prompts of 128 tokens, 512 new ones, at batch 1, 8, 32, 128, 256, sync and async; 50 s, and 45 for spans
peers        the same at batch 32 beside all peers; 40 s, and 15 for the peers' weights and graphs
small-model  as batch, with a 1B shape, at batch 1, 32 and 256; 40 s, with its own load
seeds        32 requests of 8,192 new tokens, async unless --engine says otherwise, and the decode steps at context
             512, 4,096 and 8,192 against the memory floor; 85 s per mode
decode       those steps alone, each after prompts of that length; 45 s
prefill      our prefill of 32 prompts of 2,048 tokens against dense products; 15 s
host         our host time per step by kind, at batch 32 and 256, sync and async; 20 s
mixed        ours with 64 requests in flight, prompts arriving meanwhile, at two token budgets, sync and async; 80 s
invariant    the batch-invariant mode beside the usual one, at batch 8, 32 and 256; 30 s

Bandwidth and dense peak are measured in the same run. A dry run: --device cpu --shrink 16 --config llama-tiny.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated

import peers
import sections
import torch
import transformers
import typer
from one_line import errors_in_one_line
from peers import Load
from sections import Row, Setup

from asyncsched.cli.files import check_output, write_output
from asyncsched.errors import ConfigError
from executors.named_configs import named_config
from executors.settings import device_of

NEW_TOKENS = 512
SECTIONS = ("batch", "peers", "small-model", "seeds", "decode", "prefill", "host", "mixed", "invariant")
OURS = ("ours-sync", "ours-async")
Section = Enum("Section", {name: name for name in SECTIONS})
EngineName = Enum("EngineName", {name: name for name in peers.ENGINES})


def throughput(setup: Setup, loads: list[Load], names: list[str], rounds: int, peer_compile: int) -> list[Row]:
    """Tokens per second of each engine under each load; for ours also what the lanes did, and how many tokens agree."""
    reasons = {name: peers.cannot_run(name, setup.device) for name in names}
    for name, reason in reasons.items():
        if reason:
            say(f"{name} is left out: {reason}")
    engines = {
        name: peers.build(name, setup.shape, loads, setup.device, setup.models, peer_compile)
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
    setup.models.pop("transformers", None)  # ours stay for the next section
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
    engine: Annotated[list[EngineName] | None, typer.Option(help="Of batch, peers, small-model, seeds.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sizes for batch, peers and small-model.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    peer_compile: Annotated[int, typer.Option(min=0, max=3, help="transformers' default_compile_level.")] = 0,
    budget: Annotated[list[int] | None, typer.Option(min=1, help="Token budgets of the section mixed.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    shrink: Annotated[int, typer.Option(min=1, help="Divide batches and lengths, for a dry run.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A JSON file; its other sections stay.")] = None,
) -> None:
    """Measure, print tables, and write the results."""
    with errors_in_one_line():
        check_output("--out", out, (".json",))
        measured(out)
        device_of(device)
        setup = Setup(shape=named_config(config), device=device, rounds=rounds, shrink=shrink)
        small = Setup(shape=named_config(small_config), device=device, rounds=rounds, shrink=shrink)
    asked = [one.value for one in engine] if engine else []
    modes = tuple(name.removeprefix("ours-") for name in asked if name in OURS) or ("async",)

    def compared(of: Setup, names: tuple[str, ...], sizes: tuple[int, ...]) -> list[Row]:
        lengths = setup.less(128, 8), setup.less(NEW_TOKENS, 64)
        loads = [Load(size, *lengths) for size in sorted(set(batch or map(setup.less, sizes)))]
        return throughput(of, loads, asked or list(names), rounds, peer_compile)

    work: dict[str, Callable[[], list[Row]]] = {
        "batch": lambda: compared(setup, OURS, (1, 8, 32, 128, 256)),
        "peers": lambda: compared(setup, peers.ENGINES, (32,)),
        "small-model": lambda: compared(small, OURS, (1, 32, 256)),
        "seeds": lambda: sections.seeds(setup, modes, rounds),
        "decode": lambda: sections.decode(setup),
        "prefill": lambda: sections.prefill(setup),
        "host": lambda: sections.host(setup),
        "mixed": lambda: sections.mixed(setup, tuple(budget) if budget else (320, 512)),
        "invariant": lambda: sections.invariant(setup),
    }
    broken = []
    for name in [one.value for one in only] if only else work:
        started = time.perf_counter()
        try:
            rows = work[name]()
        except Exception:  # of a peer, or out of memory: what comes next does not depend on it
            broken.append(name)
            traceback.print_exc()
            continue
        record = {**about(device, small_config if name == "small-model" else config), "rows": rows}
        record["took_s"] = round(time.perf_counter() - started, 1)
        print_rows(name, record)
        if out is not None:
            save(out, name, record)
    if broken:
        raise SystemExit(f"error: broke off: {', '.join(broken)}")


def about(device: str, config: str) -> Row:
    """Where the figures come from."""
    cuda = device == "cuda"
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
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


def measured(out: Path | None) -> dict[str, Row]:
    """The sections that the file has. Raises ConfigError where it is none of ours."""
    if out is None or not out.exists():
        return {}
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--out", str(out), f"it exists and cannot be read ({error}); name another file") from None
    if not isinstance(found, dict):
        raise ConfigError("--out", str(out), "it exists and holds no sections; name another file")
    return found


def save(out: Path, section: str, record: Row) -> None:
    """Adds or replaces a section of the file, at once: what was measured before is not lost to a later fault."""
    results = {**measured(out), section: record}
    write_output("--out", out, (json.dumps(results, indent=1) + "\n").encode())


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
