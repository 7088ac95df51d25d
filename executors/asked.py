"""What an `LLM` is asked for by name, checked as far as neither model nor machine is needed for it.

Imports no torch, which takes seconds: the commands refuse bad options first. Every problem is one ConfigError that
names the setting, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsched.config import FIELD_NAMES, EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.policy_set import PolicySet
from asyncsched.request import SamplingParams
from executors.errors import ModelLoadError

MODE_DEPTH = {"sync": 1, "async": 2}
MOST_DEPTH = 64  # nothing is gained beyond a few
OWN_SETTINGS = ("depth", "num_blocks", "vocab_size")  # of EngineConfig: arguments of their own, or the model's


def check_seed(seed: object) -> None:
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ConfigError("seed", seed, "use a whole number from 0 to 2**63 - 1")


def check_warm_up(warm_up: object) -> None:
    if not isinstance(warm_up, list | tuple) or not all(isinstance(params, SamplingParams) for params in warm_up):
        raise ConfigError("warm_up", warm_up, "use a list of SamplingParams")


def depth_of(mode: str | None, depth: int | None) -> int:
    if mode is not None and not (isinstance(mode, str) and mode in MODE_DEPTH):
        raise ConfigError("mode", mode, f"use one of {', '.join(MODE_DEPTH)}, or give a depth")
    if depth is None:
        return MODE_DEPTH[mode or "async"]
    if isinstance(depth, int) and depth > MOST_DEPTH:
        raise ConfigError("depth", depth, f"use at most {MOST_DEPTH}: each step in flight has buffers of its own")
    if mode is not None and MODE_DEPTH[mode] != depth:
        raise ConfigError("depth", depth, f"mode {mode!r} means depth {MODE_DEPTH[mode]}; give one of them")
    return depth


def check_settings(depth: int, num_blocks: int | None, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for what no model could run with, before one is loaded."""
    for name, value in given.items():
        if name not in FIELD_NAMES or name in OWN_SETTINGS:
            known = [field for field in FIELD_NAMES if field not in OWN_SETTINGS]
            raise ConfigError(name, value, f"there is no such setting; there are {', '.join(known)}")
    room = {"num_blocks": num_blocks} if num_blocks is not None else {}
    shaped = {name: value for name, value in given.items() if name != "batch_invariant"}  # its shapes are not given yet
    PolicySet(EngineConfig(depth=depth, **room, **shaped))


def check_device(name: str) -> None:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("device", name, "use auto, cpu or cuda")


def check_path(name: str) -> None:
    """Raises ModelLoadError for a model's name that is a path, and of nothing that could be one."""
    try:
        path = Path(name).expanduser()
        is_there, is_file = path.exists(), path.is_file()
    except (OSError, RuntimeError) as error:  # a folder that may not be read, a name too long, ~somebody who is nobody
        reason = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"{name}: it cannot be looked up ({reason})") from None
    if _looks_like_a_path(name) and not is_there:
        raise ModelLoadError(f"{name}: there is no such model folder")
    if is_file and path.suffix != ".gguf":
        raise ModelLoadError(f"{name}: it is a file; name the folder that it is in, or a .gguf file")


def _looks_like_a_path(name: str) -> bool:
    """A name on the Hub is `model` or `owner/model`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf")
