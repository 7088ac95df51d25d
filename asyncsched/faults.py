"""Faults that can be planted in a step of the token-faithful executor."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from asyncsched.program import OpKind

NEVER = 2**30  # launches and collects until a stalled lane goes on
COPIES = (OpKind.H2D, OpKind.D2H, OpKind.OFFLOAD, OpKind.RESTORE)  # what `where` of a COPY fault numbers


class FaultKind(Enum):
    """RAISE       the forward pass raises
    COPY        a copy raises: number `where` of COPIES if the step has it, else h2d
    TOKEN       sampled row `where`, modulo their number, gets the token `value`
    HOST_STALL  lanes run as far ahead as they can once it is launched
    LANE_STALL  lane `where` stops before the step, for `value` launches and collects
    TIME_OUT    Collect gives the step up without waiting, and its operations run later
    MEMORY      Launch is refused before anything is enqueued
    """

    RAISE = "raise"
    COPY = "copy"
    TOKEN = "token"
    HOST_STALL = "host-stall"
    LANE_STALL = "lane-stall"
    TIME_OUT = "time-out"
    MEMORY = "memory"


class Fault(NamedTuple):
    """Planted in one step. `where` and `value` are explained at the kinds."""

    kind: FaultKind
    step: int
    where: int = 0
    value: int = 0
