"""asyncsched: a scheduling core for LLM inference that a simulator and a GPU executor share.

`LLM` and `AsyncEngine` generate with a real model. They need torch and transformers, which are loaded when one of the
two is first asked for.
"""

from asyncsched.config import EngineConfig
from asyncsched.errors import INSTALL_TORCH, AsyncschedError, ConfigError, PolicyError
from asyncsched.pipeline import Inbox, pipeline
from asyncsched.request import FinishReason, SamplingParams
from asyncsched.scheduler import Scheduler

__all__ = [
    "AsyncschedError",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "Inbox",
    "PolicyError",
    "SamplingParams",
    "Scheduler",
    "pipeline",
]
__version__ = "0.1.0"

_REAL = ("AsyncEngine", "LLM")


def __getattr__(name: str) -> object:
    if name not in _REAL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from executors.async_engine import AsyncEngine
        from executors.llm import LLM
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ImportError(f"{name} needs {error.name}: {INSTALL_TORCH}") from error
    return {"AsyncEngine": AsyncEngine, "LLM": LLM}[name]


def __dir__() -> list[str]:
    return sorted((*globals(), *_REAL))
