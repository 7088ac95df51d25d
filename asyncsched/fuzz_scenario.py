"""Scenarios of the fuzzer: everything one episode depends on.

A scenario says what is submitted, aborted and paused before which plan, on which engine, against which adversary, and
what goes wrong in which step. It is plain data, so that it can be shrunk, written as JSON and run again, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.faults import Fault, FaultKind
from asyncsched.request import SamplingParams

ADVERSARIES = ("seeded", "lazy", "eager")


class Submission(NamedTuple):
    """A request that enters before plan `at`. `pattern`: tokens that its stop matcher waits for; () for no matcher."""

    at: int
    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    pattern: tuple[int, ...] = ()
    priority: int = 0

    @property
    def params(self) -> SamplingParams:
        return _params(self.max_tokens, self.min_tokens, self.stop_token_ids)


@lru_cache(4096)
def _params(max_tokens: int, min_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids)


class Control(NamedTuple):
    """What else enters before plan `at`: "abort" of a request id, "pause", "clear" (a pause with clear) or "resume"."""

    at: int
    kind: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One episode."""

    config: EngineConfig
    commands: tuple[Submission | Control, ...]
    faults: tuple[Fault, ...] = ()
    adversary: str = "seeded"
    adversary_seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "config": asdict(self.config),
            "adversary": self.adversary,
            "adversary_seed": self.adversary_seed,
            "commands": [command._asdict() for command in self.commands],
            "faults": [fault._asdict() | {"kind": fault.kind.value} for fault in self.faults],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        """What `to_dict` wrote. Raises ConfigError."""
        try:
            config = EngineConfig(**_tuples(data["config"]))
            commands = tuple(_command(_tuples(command)) for command in data["commands"])
            faults = tuple(Fault(**{**fault, "kind": FaultKind(fault["kind"])}) for fault in data["faults"])
            adversary, seed = str(data["adversary"]), int(data["adversary_seed"])
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError("scenario", "", f"use a file that `asyncsched fuzz` wrote ({reason})") from None
        if adversary not in ADVERSARIES:
            raise ConfigError("adversary", adversary, f"use one of {', '.join(ADVERSARIES)}")
        return cls(config, commands, faults, adversary, seed)


def _command(data: Mapping[str, Any]) -> Submission | Control:
    return Control(**data) if "kind" in data else Submission(**data)


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
