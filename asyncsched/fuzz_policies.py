"""Policies for the fuzzer: an honest mix, and users' policies that raise or answer nonsense.

Each is named in a config as `asyncsched.fuzz_policies:Class`. What they answer depends on what they were asked, and how
often, alone.
"""

from __future__ import annotations

from asyncsched.policies import Key
from asyncsched.request import RequestView


class EveryOther:
    """Honest: offloads requests with an even number, recomputes the others."""

    def offloads(self, request: RequestView) -> bool:
        return request.number % 2 == 0


class Longest:
    """Honest: the request with the most blocks is preempted first."""

    def victim_key(self, request: RequestView) -> Key:
        return request.num_blocks


class _Counts:
    def __init__(self) -> None:
        self.asked = 0

    def next(self) -> int:
        self.asked += 1
        return self.asked


class RaisesInAdmission(_Counts):
    def admission_key(self, request: RequestView) -> Key:
        if self.next() % 5 == 4:
            raise RuntimeError("admission\nover two lines")
        return -request.number


class MixedKeys(_Counts):
    """Keys that do not compare with each other."""

    def admission_key(self, request: RequestView) -> Key:
        return request.number if self.next() % 4 else str(request.number)

    def victim_key(self, request: RequestView) -> Key:
        return request.number if self.next() % 7 else None


class NotANumber(_Counts):
    """Keys that compare, and never say anything."""

    def admission_key(self, request: RequestView) -> Key:
        return float("nan") if self.next() % 2 else 0.0

    def victim_key(self, request: RequestView) -> Key:
        return float("nan")


class RaisesInVictim(_Counts):
    def victim_key(self, request: RequestView) -> Key:
        if self.next() % 6 == 5:
            raise ZeroDivisionError
        return self.asked * 7 % 5


class RaisesInReservation(_Counts):
    def reserved_tokens(self, request: RequestView) -> int:
        if self.next() % 6 == 5:
            raise KeyError(request.request_id)
        return request.num_known_tokens


class WildReservation(_Counts):
    """Far too much, nothing, less than nothing."""

    def reserved_tokens(self, request: RequestView) -> int:
        return (10**30, 0, -(10**30))[self.next() % 3]


class TextReservation:
    def reserved_tokens(self, request: RequestView) -> int:
        return "many"  # type: ignore[return-value]  # a lie


class RaisesInPreemption(_Counts):
    def offloads(self, request: RequestView) -> bool:
        if self.next() % 4 == 3:
            raise OSError("no such preemption")
        return True


class Undecided:
    """An answer that is neither true nor false."""

    def offloads(self, request: RequestView) -> bool:
        class Neither:
            def __bool__(self) -> bool:
                raise TypeError("undecided")

        return Neither()  # type: ignore[return-value]  # a lie


HONEST = {"victim": ("Longest",), "preemption": ("EveryOther",)}
FAULTY = {
    "admission": ("RaisesInAdmission", "MixedKeys", "NotANumber"),
    "victim": ("RaisesInVictim", "MixedKeys", "NotANumber"),
    "reservation": ("RaisesInReservation", "WildReservation", "TextReservation"),
    "preemption": ("RaisesInPreemption", "Undecided"),
}


def full_name(name: str) -> str:
    return f"{__name__}:{name}"
