"""Requests that wait, in the order the admission policy wants. Evicted requests wait here too."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from asyncsched.policies import Key
from asyncsched.policy_set import PolicySet
from asyncsched.request import Request, RequestView


class WaitingQueue:
    """Sorted by the policy's key, then by arrival."""

    def __init__(self, policies: PolicySet) -> None:
        self._policies = policies
        self._entries: list[tuple[Key, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    @property
    def head(self) -> Request:
        return self._entries[0][2]

    def push(self, request: Request, view: RequestView) -> None:
        faults = len(self._policies.faults)
        entry = (self._policies.admission_key(view), request.number, request)
        try:
            insort(self._entries, entry)
        except Exception as error:  # keys that do not compare with each other
            self._policies.distrust("admission", error)
            self._entries.append(entry)
        if len(self._policies.faults) > faults:  # the old keys mean nothing any more
            self._entries = [(request.number, request.number, request) for request in self]
            self._entries.sort(key=lambda entry: entry[1])

    def remove(self, request: Request) -> None:
        if self._entries[0][2] is request:  # an admission: the usual case, with many behind it
            del self._entries[0]
            return
        self._entries = [entry for entry in self._entries if entry[2] is not request]
