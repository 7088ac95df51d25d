"""Routers: which replica gets a request. Bring your own as `module:Class`.

A router sees the request and all replicas, in order of their number, and answers with a number. It is asked once per
request, when the request arrives; whatever it keeps to itself must follow from what it was asked. A class without
arguments that has the method `route` is enough.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from asyncsched.errors import PolicyError
from asyncsched.kv import block_hash
from asyncsched.policies import load
from asyncsched.request import TokenArray


class Routed(NamedTuple):
    """A request that arrives. `prompt` is of zeros unless prefix caching is on: then equal starts are equal tokens."""

    number: int
    arrival_ns: int
    prompt: TokenArray
    max_tokens: int
    priority: int


@dataclass(slots=True)
class Replica:
    """What a router may see of a replica: requests that it got and that have not ended, and their prompts and
    max_tokens in sum. Not to be changed."""

    number: int
    num_requests: int = 0
    num_tokens: int = 0


class Router(Protocol):
    """Answers with the number of a replica. `sees_load = False` says that it never looks at their loads."""

    def route(self, request: Routed, replicas: Sequence[Replica]) -> int: ...


class RoundRobin:
    """Each in turn."""

    sees_load = False

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Routed, replicas: Sequence[Replica]) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """Fewest requests that have not ended, then fewest tokens of them, then the lowest number."""

    def route(self, request: Routed, replicas: Sequence[Replica]) -> int:
        return least_loaded(replicas).number


class PrefixAware:
    """The replica that was last sent the longest start of the prompt, unless it has more than twice as many requests as
    the least loaded one, and 8 more; then the least loaded.

    It remembers the 500,000 blocks of 16 tokens it saw last, not what replicas still hold.
    """

    BLOCK = 16
    MOST = 500_000

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, int] = OrderedDict()  # block -> replica, the longest unseen first

    def route(self, request: Routed, replicas: Sequence[Replica]) -> int:
        least = least_loaded(replicas)
        digests, digest = [], b""
        for first in range(0, len(request.prompt) - self.BLOCK + 1, self.BLOCK):
            digest = block_hash(digest, request.prompt[first : first + self.BLOCK])
            digests.append(digest)
        known = [self._sent.get(digest) for digest in digests]
        length = known.index(None) if None in known else len(known)
        chosen = least.number
        if length:
            last = known[length - 1]
            assert last is not None  # it is among the known ones
            if replicas[last].num_requests <= 2 * least.num_requests + 8:
                chosen = last
        for digest in digests:
            self._sent[digest] = chosen
            self._sent.move_to_end(digest)
        while len(self._sent) > self.MOST:
            self._sent.popitem(last=False)
        return chosen


def least_loaded(replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=operator.attrgetter("num_requests", "num_tokens", "number"))


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def load_router(name: str) -> Router:
    """A built-in router by name, or a user's by `module:Class`. Raises ConfigError."""
    router: Router = load("router", name, ROUTERS, "route")
    return router


def ask(router: Router, request: Routed, replicas: Sequence[Replica]) -> int:
    """The router's answer. Raises PolicyError where it is none."""
    name = type(router).__name__
    try:
        answer: Any = router.route(request, replicas)
        number = operator.index(answer)
    except Exception as error:  # a user's router may raise anything
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise PolicyError(f"router {name} failed for request {request.number} ({reason})") from error
    if not 0 <= number < len(replicas):
        raise PolicyError(
            f"router {name} sent request {request.number} to replica {number}; there are 0 to {len(replicas) - 1}"
        )
    return number
