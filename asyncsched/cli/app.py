"""The commands, and how a call of one ends.

Whatever goes wrong is one line on stderr: `error: field: value is not allowed; what is`. Nothing else may be printed
about it: no traceback, no box. Set ASYNCSCHED_TRACEBACK=1 to see where an error comes from.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from asyncsched.cli.advise import advise
from asyncsched.cli.bench import bench
from asyncsched.cli.calibrate import calibrate
from asyncsched.cli.capacity import capacity
from asyncsched.cli.fuzz import fuzz
from asyncsched.cli.generate import generate
from asyncsched.cli.importing import import_log
from asyncsched.cli.presets import presets
from asyncsched.cli.record import record
from asyncsched.cli.report import report
from asyncsched.cli.simulate import simulate
from asyncsched.cli.sweep import sweep
from asyncsched.cli.validate import validate
from asyncsched.cli.whatif import whatif
from asyncsched.errors import AsyncschedError, BadInputError, ConfigError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# What typer finds wrong. It is click's, which typer keeps in another place from version to version.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]

_LEVEL = re.compile(r"[A-Za-z0-9_]+:")

app = typer.Typer(add_completion=False)
app.command()(simulate)
app.command()(sweep)
app.command()(capacity)
app.command()(advise)
app.command()(report)
app.command()(presets)
app.command()(fuzz)
app.command()(generate)
app.command()(bench)
app.command()(record)
app.command("import")(import_log)
app.command()(calibrate)
app.command()(validate)
app.command()(whatif)


@app.callback(invoke_without_command=True)
def asyncsched(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """What would asynchronous batching buy you? Simulates an LLM inference engine: scheduler, host, copies and GPU.

    `generate` and `bench` run a real model under the same scheduler.
    """
    if version:
        from asyncsched import __version__

        typer.echo(f"asyncsched {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """One call of the command. Returns its exit status."""
    if "" not in sys.path:
        sys.path.append("")  # users' policies, `module:Class`; last, so that a folder here shadows no module
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may write what the terminal's encoding lacks
    command = typer.main.get_command(app)
    try:
        with command.make_context("asyncsched", _spread_goodput(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except KeyboardInterrupt as stopped:  # a command may have said what was finished
        return _fail(str(stopped) or "interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone, and knows it
        return FAILED
    except (ConfigError, BadInputError) as error:
        return _fail(str(error), BAD_INPUT)
    except USAGE_ERROR as error:
        return _fail(_usage(error), BAD_INPUT)
    except AsyncschedError as error:
        return _fail(str(error), FAILED)
    except MemoryError:
        sizes = "max_num_seqs, max_model_len, depth, num_blocks and num_host_blocks"
        return _fail(f"the run needs more memory than there is; {sizes} decide how much", FAILED)
    except Exception as error:  # a scheduler that is stuck, or a user's policy: it may raise anything
        return _fail(f"the run failed: {type(error).__name__}: {error}", FAILED)
    return DONE


def _spread_goodput(arguments: Sequence[str]) -> list[str]:
    """vLLM's `--goodput ttft:500 tpot:50`: an option with several values, which typer knows as one option repeated."""
    spread: list[str] = []
    levels = False
    for argument in arguments:
        if levels and _LEVEL.match(argument):
            spread += [argument] if spread[-1] == "--goodput" else ["--goodput", argument]
            continue
        levels = argument == "--goodput"
        spread.append(argument)
    return spread


def _fail(message: str, status: int) -> int:
    if os.environ.get("ASYNCSCHED_TRACEBACK"):
        import traceback

        traceback.print_exc()
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status


def _usage(error: Exception) -> str:
    """A problem found by typer, in the words of a ConfigError where it tells enough."""
    option = getattr(error, "option_name", None)
    message = (getattr(error, "message", "") or str(error)).rstrip(".")
    message = message[:1].lower() + message[1:]
    if option is None:
        return f"arguments: {message}; see --help"
    if hasattr(error, "possibilities"):
        near = " or ".join(sorted(error.possibilities or ()))
        return str(ConfigError("option", option, "no such option" + (f", did you mean {near}?" if near else "")))
    return str(ConfigError(option, "", message))
