"""`asyncsched import`: a scenario from what another engine recorded about itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.figures import FIGURES, write
from asyncsched.cli.files import check_distinct, check_output, write_output
from asyncsched.cli.inputs import AsJson, print_json
from asyncsched.cli.progress import progress_bar
from asyncsched.errors import MISSING, ConfigError

if TYPE_CHECKING:
    from sim.learned import Learned

REQUESTS = ".requests.csv"  # how the trace beside the scenario is called
NEEDED = ("max_num_seqs", "max_num_batched_tokens")
UNITS = {
    "step": ("a step (ms)", 1e3),
    "token": ("a token (us)", 1e6),
    "kv_token": ("1,000 KV tokens read (us)", 1e9),
    "prefill_step": ("a prefill in the step (ms)", 1e3),
    "prefill_token": ("a prompt token, on top (us)", 1e6),
    "attn_pair": ("a million query-key pairs (ms)", 1e9),
}


def import_log(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="FILE.json of vllm bench serve with --save-result --save-detailed, or a folder with meta.json and "
            "requests.jsonl.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE.toml", help=f"Write the scenario there, and its requests to FILE{REQUESTS}."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="What the engine was served with, where the log does not say: max_num_seqs=256, num_blocks=9000, ... "
            "Repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Learn from a log of vLLM's requests what its steps cost, and write it as a scenario: no GPU is needed.

    `simulate`, `sweep`, `capacity` and `advise` take it.
    """
    check_output("--out", out, (".toml",))
    trace = out.with_suffix(REQUESTS)
    check_output("--out", trace, (".csv",))
    read = {"the log": log, "its meta.json": log / "meta.json", "its requests.jsonl": log / "requests.jsonl"}
    check_distinct({**read, "--out": out, f"--out, {REQUESTS}": trace})
    from sim.importers import import_run
    from sim.learned import learn, scenario_of, trace_of
    from sim.profile import toml_text
    from sim.scenario import Scenario

    run = import_run(log, _settings(settings or []))
    for name in NEEDED:
        if name not in run.info.engine:
            raise ConfigError(f"engine.{name}", MISSING, f"the log does not say it; give it as --set {name}=N")
    with progress_bar("learning") as progress:
        learned = learn(run, progress)
    data = scenario_of(run, learned.fitted, trace.name)
    Scenario.from_dict(data)
    comments = "".join(f"# {_one_line(note)}\n" for note in learned.notes)
    write_output("--out", trace, trace_of(run).encode())
    write_output("--out", out, (comments + toml_text(data)).encode())
    if as_json:
        print_json(
            {
                "scenario": str(out),
                "trace": str(trace),
                "requests": len(run.requests),
                "fit": learned.fitted.to_dict(),
                "figures": [{**row._asdict(), "error_pct": row.error} for row in learned.rows],
                "notes": list(learned.notes),
            }
        )
    else:
        _print(learned, out, trace)


def _settings(texts: list[str]) -> dict[str, Any]:
    """Settings of the engine by name; their values are checked where they are used."""
    from sim.scenario import parse_value, split_overrides

    values = {
        key.removeprefix("engine."): parse_value(text)
        for key, text in split_overrides(texts, "max_num_seqs=256").items()
    }
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _print(learned: Learned, out: Path, trace: Path) -> None:
    from asyncsched.cli.tables import print_table

    seconds = zip(UNITS.values(), learned.fitted.prices.seconds, strict=True)
    prices = [(label, f"{factor * price:.4g}") for (label, factor), price in seconds]
    print_table("Learned prices", ("price of", "is"), prices, numbers=("is",))
    rows = [
        (
            FIGURES[row.figure].label,
            write(row.figure, row.measured),
            write(row.figure, row.simulated),
            f"{row.error:+.1f}%",
        )
        for row in learned.rows
    ]
    columns = ("figure", "measured", "simulated", "error")
    print_table("The same requests at these prices", columns, rows, numbers=columns[1:])
    for note in learned.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"Wrote {out} and {trace}.")
