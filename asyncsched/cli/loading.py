"""Loading a real model for a command: the options of its engine, and one line for whatever is wrong with them."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.config import FIELD_NAMES
from asyncsched.errors import INSTALL_TORCH, MISSING, BadInputError, ConfigError

if TYPE_CHECKING:
    from executors.llm import LLM

ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="A folder, a .gguf file, or a model on the Hub.", show_default=False),
]
ENGINE = "Engine"  # a panel of the help
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda", help="Where to run; auto is CUDA where there is one.", rich_help_panel=ENGINE
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the model's layers; without it, on CUDA.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Tokens that do not depend on who shares the batch; slower. Needs CUDA.",
        rich_help_panel=ENGINE,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another setting, as in num_blocks=512. Repeatable.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
Nvtx = Annotated[
    bool,
    typer.Option("--nvtx", help="Mark steps and lanes for Nsight Systems (CUDA).", rich_help_panel=ENGINE),
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write a measured trace; open it at https://ui.perfetto.dev.")
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the measured lanes over a few steps: .png, .svg or .pdf.")
]

_NEEDED = ("torch", "transformers")
_SET_ELSEWHERE = {"depth": "use --depth", "vocab_size": "the model decides it"}
_STARTED = time.perf_counter()


def say(line: str) -> None:
    """Tells a user at a terminal what the command is doing."""
    if sys.stderr.isatty():
        print(f"{time.perf_counter() - _STARTED:6.1f} s  {line}", file=sys.stderr, flush=True)


def parse_depth(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 4 and int(text) >= 1):
        raise ConfigError(option, text, "use a whole number of at least 1")
    return int(text)


def check_model(model: str | None, config: str | None, dummy_weights: bool) -> str:
    """What to call the model."""
    if (model is None) == (config is None):
        raise ConfigError(
            "--model",
            MISSING if model is None else model,
            "give one of --model NAME and --config NAME --dummy-weights",
        )
    if model is not None and not (model and model.isprintable()):
        raise ConfigError("--model", model, "name a folder, a .gguf file, or a model on the Hub")
    if config is not None:
        from executors.named_configs import check_name

        check_name(config)
        if not dummy_weights:
            raise ConfigError("--config", config, "a shape has no weights: add --dummy-weights")
    return model or config or ""


def engine_settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """Settings of the engine by name; LLM checks their values. Raises ConfigError."""
    from sim.scenario import parse_value, split_overrides

    split = split_overrides(texts or (), "num_blocks=512")
    return {_known(name, value): parse_value(value) for name, value in split.items()}


def _known(name: str, value: str) -> str:
    if name in _SET_ELSEWHERE:
        raise ConfigError("--set", f"{name}={value}", _SET_ELSEWHERE[name])
    if name not in FIELD_NAMES:
        near = difflib.get_close_matches(name, FIELD_NAMES) or FIELD_NAMES
        raise ConfigError("--set", f"{name}={value}", f"there is no such setting; there are {', '.join(near)}")
    return name


def check_engine(
    model: str | None, mode: str | None, depth: int | None, device: str, settings: Mapping[str, Any]
) -> None:
    """What can be told of them before torch is imported, which takes seconds. Raises ConfigError, or BadInputError for
    a model that is nowhere."""
    from executors.asked import check_device, check_path, check_settings, depth_of
    from executors.errors import ModelLoadError

    check_device(device)
    given = dict(settings)
    check_settings(depth_of(mode, depth), given.pop("num_blocks", None), given)
    if model is not None:
        try:
            check_path(model)
        except ModelLoadError as error:
            raise BadInputError(str(error)) from error


def require_torch(**needs_cuda: object) -> None:
    """Imports what a real model needs; `needs_cuda` are options with what was asked of them, if anything. Raises
    BadInputError or ConfigError."""
    say("importing torch and transformers")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars that transformers does not turn off; read when tqdm is loaded
    try:
        import torch

        for option, asked in needs_cuda.items():
            if asked and not torch.cuda.is_available():
                name = f"--{option.replace('_', '-')}"
                raise ConfigError(name, asked, "it needs CUDA, and there is no CUDA device here")
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in _NEEDED:
            raise
        raise BadInputError(f"{missing} is not installed, and a real model needs it: {INSTALL_TORCH}") from None
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def load_llm(model: Any, **options: Any) -> LLM:
    """The model and its engine, saying what it does. Raises ConfigError, or BadInputError for an unfit model."""
    require_torch()
    from executors.errors import ModelLoadError, UnsupportedModelError
    from executors.llm import LLM

    try:
        return LLM(model, report=say, **options)
    except (ModelLoadError, UnsupportedModelError) as error:
        raise BadInputError(str(error)) from error
