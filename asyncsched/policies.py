"""Policies: the order of the queue, the choice of victims, and what an admission must find free.

A policy sees frozen views and answers with a key or a number; it changes nothing and knows no time. Bring your own as
`module:Class`; a class without arguments that has the method of the protocol is enough.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from asyncsched.errors import ConfigError
from asyncsched.request import RequestView

Key = Any  # anything that orders: int, tuple, str


class AdmissionPolicy(Protocol):
    """Orders the queue: the smallest key is admitted first, equal keys by arrival. Asked once per stay in the queue."""

    def admission_key(self, request: RequestView) -> Key: ...


class VictimPolicy(Protocol):
    """Chooses who is preempted when KV blocks run out: the largest key goes first, equal keys by latest arrival."""

    def victim_key(self, request: RequestView) -> Key: ...


class ReservationPolicy(Protocol):
    """Says for how many tokens an admission must find KV blocks, on top of what was promised to running requests."""

    def reserved_tokens(self, request: RequestView) -> int: ...


class PreemptionPolicy(Protocol):
    """Says whether a victim's KV is copied to the host (as far as there is room) or computed again."""

    def offloads(self, request: RequestView) -> bool: ...


class Fcfs:
    """First come, first served. A preempted request keeps its place."""

    def admission_key(self, request: RequestView) -> Key:
        return request.number


class Priority:
    """Lowest number first, as in vLLM; equal priorities by arrival."""

    def admission_key(self, request: RequestView) -> Key:
        return (request.priority, request.number)


class ShortestPrompt:
    """Shortest prompt first. Long prompts wait for as long as shorter ones keep arriving: no bound is promised."""

    def admission_key(self, request: RequestView) -> Key:
        return (request.num_prompt_tokens, request.number)


class LatestArrival:
    """Preempts who came last, so the oldest request always advances."""

    def victim_key(self, request: RequestView) -> Key:
        return request.number


class LowestPriority:
    """Preempts the largest priority number, and among equals who came last."""

    def victim_key(self, request: RequestView) -> Key:
        return (request.priority, request.number)


class LeastProgress:
    """Preempts who has the fewest known tokens beyond the prompt: the least to compute again."""

    def victim_key(self, request: RequestView) -> Key:
        return (request.num_prompt_tokens - request.num_known_tokens, request.number)


class Optimistic:
    """Admits when the tokens known now fit; later growth may preempt."""

    def reserved_tokens(self, request: RequestView) -> int:
        return request.num_known_tokens


class WorstCase:
    """Admits only when the request can run to its length limit: nobody is ever preempted."""

    def reserved_tokens(self, request: RequestView) -> int:
        return request.num_prompt_tokens + request.max_tokens - 1  # the last token's KV is never written


class Recompute:
    """Gives the blocks up at once; the request starts over from its known tokens."""

    def offloads(self, request: RequestView) -> bool:
        return False


class Offload:
    """Copies the blocks to the host; they are usable once the copy is collected."""

    def offloads(self, request: RequestView) -> bool:
        return True


ADMISSION: dict[str, type[AdmissionPolicy]] = {"fcfs": Fcfs, "priority": Priority, "shortest-prompt": ShortestPrompt}
VICTIM: dict[str, type[VictimPolicy]] = {
    "latest-arrival": LatestArrival,
    "lowest-priority": LowestPriority,
    "least-progress": LeastProgress,
}
RESERVATION: dict[str, type[ReservationPolicy]] = {"optimistic": Optimistic, "worst-case": WorstCase}
PREEMPTION: dict[str, type[PreemptionPolicy]] = {"recompute": Recompute, "offload": Offload}


def load_admission(name: str) -> AdmissionPolicy:
    policy: AdmissionPolicy = load("admission", name, ADMISSION, "admission_key")
    return policy


def load_victim(name: str) -> VictimPolicy:
    policy: VictimPolicy = load("victim", name, VICTIM, "victim_key")
    return policy


def load_reservation(name: str) -> ReservationPolicy:
    policy: ReservationPolicy = load("reservation", name, RESERVATION, "reserved_tokens")
    return policy


def load_preemption(name: str) -> PreemptionPolicy:
    policy: PreemptionPolicy = load("preemption", name, PREEMPTION, "offloads")
    return policy


def load(field: str, name: str, known: dict[str, Any], method: str) -> Any:
    """A built-in policy by name, or a user's by `module:Class`. Raises ConfigError."""
    if name in known:
        return known[name]()
    allowed = f"use one of {', '.join(known)}, or module:Class with a method {method}"
    module_name, separator, class_name = name.partition(":")
    if not separator or not module_name or not class_name:
        raise ConfigError(field, name, allowed)
    try:
        policy = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # a user's module may fail in any way while it loads
        reason = str(error).replace("\n", " ")
        raise ConfigError(
            field, name, f"it could not be loaded ({type(error).__name__}: {reason}); {allowed}"
        ) from error
    if not callable(getattr(policy, method, None)):
        raise ConfigError(field, name, f"the class has no method {method}; {allowed}")
    return policy
