"""Where launches and collections lead, worked out once and looked up from then on.

A pipeline visits few states (clocks.py), so what a program does to one is remembered. The same is done, beside it, for
every edge taken out in turn: an edge is needed as soon as a conflict that was in order is not without it. A
`Situation` is a state with the states that there would be without each edge in question; combinations of states are
many more than states, so runs are remembered by state, and moves by situation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from asyncsched.clocks import HOST, IDLE, Clock, Edge, KvOp, Problem, Run, Shape, State, Trouble, joined, without_tag

MAX_TEMPLATES = 1024
MAX_MOVES = 8192  # remembered; more than that only programs without end to their disorder make

Key = tuple[int, int, int]  # of a launch: shape, slots it carries from, tag; of a collection the second is COLLECTION
COLLECTION = -1


class Outcome(NamedTuple):
    """What the operations of one program do to a state. `captured` is explained at Move."""

    after: Node
    problems: tuple[Problem, ...]
    races: tuple[Problem, ...]
    kv: tuple[KvOp, ...]
    captured: dict[int, int]


class Node:
    """A state, and the outcomes from here that are known: by program, and by the edge that is taken out of it."""

    __slots__ = ("outcomes", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.outcomes: dict[tuple[Key, Edge | None], Outcome] = {}


WhatIfs = tuple[tuple[Edge, Node], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What a launch or a collection does: the situation after it, and what was found on the way.

    captured   for each wait and synchronize, by place in the program: the tag of the step whose record it found
    needed     edges that turn out to order a conflict over a slot buffer, with the race without them
    what_if_kv operations that touch KV as they are ordered without an edge
    """

    after: Situation
    problems: tuple[Problem, ...]
    kv: tuple[KvOp, ...]
    captured: dict[int, int]
    needed: tuple[tuple[Edge, Problem], ...]
    what_if_kv: tuple[tuple[Edge, tuple[KvOp, ...]], ...]


class Situation:
    """A state, the states it would be in without each edge in question, and the moves and changes from here that are
    known.

    `known` is what the host knows, whichever edge in question is taken out: by lane, relative to the newest operation.
    """

    __slots__ = ("changes", "known", "moves", "node", "what_ifs")

    def __init__(self, node: Node, what_ifs: WhatIfs) -> None:
        self.node = node
        self.what_ifs = what_ifs
        hosts = [n.state.clocks[HOST] for n in (node, *(what_if for _, what_if in what_ifs))]
        self.known: Clock = tuple(map(min, *hosts)) if len(hosts) > 1 else hosts[0]
        self.moves: dict[Key, Move] = {}
        self.changes: dict[int | Clock, Situation] = {}  # by the tag that goes, or what the host learns


class _Memory:
    """Situations, states and moves, for all checkers of the process: like any cache, it changes how fast they are, not
    what they say."""

    def __init__(self) -> None:
        self.situations: dict[tuple[Node, WhatIfs], Situation] = {}
        self.nodes: dict[State, Node] = {}
        self.num_moves = 0

    def node(self, state: State) -> Node:
        known = self.nodes.get(state)
        if known is None:
            known = self.nodes[state] = Node(state)
        return known

    def situation(self, node: Node, what_ifs: WhatIfs) -> Situation:
        key = node, what_ifs
        known = self.situations.get(key)
        if known is None:
            known = self.situations[key] = Situation(node, what_ifs)
        return known

    def note(self) -> None:
        """Another move is known. Before there are too many, all are forgotten."""
        self.num_moves += 1
        if self.num_moves >= MAX_MOVES:
            for situation in self.situations.values():
                situation.moves.clear()  # they lead in circles
                situation.changes.clear()
            for node in self.nodes.values():
                node.outcomes.clear()
            self.situations.clear()
            self.nodes.clear()
            self.num_moves = 0


_memory = _Memory()


class Order:
    """Where a sequence of launches and collections has led.

    The tag of a step is its place among the steps in flight, the oldest being 0; its user keeps that list.
    """

    def __init__(self) -> None:
        self.situation = _memory.situation(_memory.node(IDLE), ())
        self._questioned: set[Edge] = set()

    def question(self, edges: Iterable[Edge | None]) -> None:
        """Asks from now on whether these edges are needed. No program so far may have had them."""
        new = [edge for edge in edges if edge is not None and edge not in self._questioned]
        if not new:
            return
        self._questioned.update(new)
        now = self.situation
        self.situation = _memory.situation(now.node, (*now.what_ifs, *((edge, now.node) for edge in new)))

    def answer(self, edge: Edge) -> None:
        """The edge is needed: asks no more."""
        now = self.situation
        left = tuple(what_if for what_if in now.what_ifs if what_if[0] != edge)
        self.situation = _memory.situation(now.node, left)

    def launch(self, shape: Shape, sources: int, own: int) -> Move:
        """Enqueues what a program launches. `own` tags its step, `sources` has a bit for each slot it carries from."""
        key = shape.serial, sources, own
        now = self.situation
        move = now.moves.get(key) or self._go(key, shape)
        self.situation = move.after
        return move

    def collect(self, shape: Shape, own: int) -> Move:
        """The host does the rest of a program, and its step is no more in flight."""
        key = shape.serial, COLLECTION, own
        now = self.situation
        move = now.moves.get(key) or self._go(key, shape)
        self.situation = move.after
        return move

    def forget(self, tag: int) -> None:
        """A step is no more in flight, though the host has not collected it."""
        self._change(tag, lambda state: without_tag(state, tag))

    def join(self, upto: Clock) -> None:
        """The host learnt, outside all programs, that operations up to `upto` are over (relative to the newest)."""
        self._change(upto, lambda state: joined(state, upto))

    def _go(self, key: Key, shape: Shape) -> Move:
        now = self.situation
        run = _outcome(now.node, key, shape, None)
        bad = {(problem.op, problem.buffer) for problem in run.races}
        needed: list[tuple[Edge, Problem]] = []
        what_ifs: list[tuple[Edge, Node]] = []
        what_if_kv: list[tuple[Edge, tuple[KvOp, ...]]] = []
        for edge, node in now.what_ifs:
            without = _outcome(node, key, shape, edge)
            races = [race for race in without.races if (race.op, race.buffer) not in bad]
            if races:
                needed.append((edge, races[0]))
            else:
                what_ifs.append((edge, without.after))
                what_if_kv.append((edge, without.kv))
        _memory.note()
        after = _memory.situation(run.after, tuple(what_ifs))
        move = Move(after, run.problems, run.kv, run.captured, tuple(needed), tuple(what_if_kv))
        now.moves[key] = move
        return move

    def _change(self, what: int | Clock, change: Callable[[State], State]) -> None:
        now = self.situation
        after = now.changes.get(what)
        if after is None:
            what_ifs = tuple((edge, _memory.node(change(node.state))) for edge, node in now.what_ifs)
            after = now.changes[what] = _memory.situation(_memory.node(change(now.node.state)), what_ifs)
            _memory.note()
        self.situation = after


def _outcome(node: Node, key: Key, shape: Shape, without: Edge | None) -> Outcome:
    known = node.outcomes.get((key, without))
    if known is not None:
        return known
    _, sources, own = key
    if sources == COLLECTION:
        run = Run(node.state, shape, range(shape.num_launched, len(shape.ops)), 0, own, without)
        after = without_tag(run.result(), own)
    else:
        run = Run(node.state, shape, range(shape.num_launched), sources, own, without)
        after = run.result()
    races = tuple(problem for problem in run.problems if problem.trouble is Trouble.RACE)
    outcome = Outcome(_memory.node(after), tuple(run.problems), races, tuple(run.kv), run.captured)
    node.outcomes[key, without] = outcome
    return outcome
