"""The engine's four policies behind one guard: a policy that raises or answers nonsense must not cost anybody a token.

The first fault replaces the policy by its plain default for the rest of the run and is kept in `faults` for the user to
see. What was decided before stays decided.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from asyncsched.config import EngineConfig
from asyncsched.policies import (
    Fcfs,
    Key,
    LatestArrival,
    Optimistic,
    Recompute,
    load_admission,
    load_preemption,
    load_reservation,
    load_victim,
)
from asyncsched.request import RequestView


class PolicySet:
    """Asks the policies that `config` names. Raises ConfigError where one cannot be loaded."""

    def __init__(self, config: EngineConfig) -> None:
        self.faults: list[str] = []
        self._admission = load_admission(config.admission)
        self._victim = load_victim(config.victim)
        self._reservation = load_reservation(config.reservation)
        self._preemption = load_preemption(config.preemption)

    def admission_key(self, request: RequestView) -> Key:
        return self._ask("admission", lambda: self._admission.admission_key(request))

    def choose_victim(self, candidates: list[RequestView]) -> int:
        """Position of the candidate with the largest key, among equals the latest arrival."""

        def choose() -> int:
            keys = [(self._victim.victim_key(view), view.number, place) for place, view in enumerate(candidates)]
            return max(keys)[2]

        place: int = self._ask("victim", choose)
        return place

    def reserved_tokens(self, request: RequestView) -> int:
        """At least 1: an admission that reserves nothing could not start."""
        tokens: int = self._ask("reservation", lambda: operator.index(self._reservation.reserved_tokens(request)))
        return max(tokens, 1)

    def offloads(self, request: RequestView) -> bool:
        offloads: bool = self._ask("preemption", lambda: bool(self._preemption.offloads(request)))
        return offloads

    def distrust(self, field: str, error: Exception) -> None:
        """Replaces the policy of one field by its default."""
        policy = type(getattr(self, f"_{field}")).__name__
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        default = DEFAULTS[field]()
        self.faults.append(f"{field}: policy {policy} failed ({reason}); {type(default).__name__} is used instead")
        setattr(self, f"_{field}", default)

    def _ask(self, field: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:  # a user's policy may raise anything
            self.distrust(field, error)
            return question()


DEFAULTS: dict[str, Callable[[], Any]] = {
    "admission": Fcfs,
    "victim": LatestArrival,
    "reservation": Optimistic,
    "preemption": Recompute,
}
