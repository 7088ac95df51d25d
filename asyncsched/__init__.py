"""asyncsched: a scheduling core for LLM inference that a simulator and a GPU executor share."""

from asyncsched.config import EngineConfig
from asyncsched.errors import AsyncschedError, ConfigError, PolicyError
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
