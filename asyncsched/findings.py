"""What the hazard checker tells: who touches what, who else does, and which edge is missing, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from asyncsched.accesses import OF_SLOT, Memory, Spot
from asyncsched.clocks import COLLECTED, NEVER, Problem, Trouble
from asyncsched.contents import Flaw, FlawKind
from asyncsched.flights import Flight, Race, Where
from asyncsched.program import Event, Lane, OpKind


class FindingKind(Enum):
    """UNORDERED       two conflicting accesses that nothing orders
    UNWRITTEN       a read of what nobody wrote
    STALE           a read of what was written for another step, request or position
    EARLY           a read of a shared KV block that is not known to be complete
    COLLISION       two rows of one step write to one KV block, or one writes to the null block
    NEVER_RECORDED  a wait for an event that nobody recorded
    RECORDED_AGAIN  a wait for an event that a later step recorded again
    QUARANTINE      a use of what a step that never came back may still write to
    """

    UNORDERED = "unordered"
    UNWRITTEN = "unwritten"
    STALE = "stale"
    EARLY = "early"
    COLLISION = "collision"
    NEVER_RECORDED = "never recorded"
    RECORDED_AGAIN = "recorded again"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class Finding:
    """`later` is the operation that is wrong; `earlier` the one it conflicts with, or that wrote what it read."""

    kind: FindingKind
    later: Where
    earlier: Where | None
    place: Spot | Event
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}"


def of_race(later: Flight, race: Race, found_by_waits: dict[int, str]) -> Finding:
    """`found_by_waits` says, by place in the program of `later`, whose record its waits found."""
    one, other = race.earlier.where(race.earlier_op), later.where(race.op)
    assert one.lane is not None
    assert other.lane is not None
    spot = f"{race.spot}" + (f" (and {race.units - 1} more blocks)" if race.units > 1 else "")
    text = (
        f"{other} may {'overwrite' if race.writes else 'read'} {spot} while {one} "
        f"{'writes' if race.earlier_writes else 'reads'} it: nothing orders {one.lane.value}(step {one.step}, "
        f"slot {one.slot}) before {other.lane.value}(step {other.step}, slot {other.slot}); "
    )
    return Finding(FindingKind.UNORDERED, other, one, race.spot, text + _remedy(later, race, found_by_waits))


def of_old_race(later: Flight, problem: Problem) -> Finding:
    """A race with a step that the checker has forgotten."""
    where, spot = later.where(problem.op), _spot(problem)
    text = f"{where} touches {spot} while a step long ago may still do so: the host was never told that it is over"
    return Finding(FindingKind.UNORDERED, where, None, spot, text)


def of_problem(flight: Flight, problem: Problem, in_flight: Sequence[int]) -> Finding:
    """Anything but a race. `in_flight` are the steps that tags mean."""
    where, tag = flight.where(problem.op), problem.tag
    writer = Where(in_flight[tag]) if tag >= 0 else None
    if problem.event is not None:
        event = f"{problem.event.kind.value}[{problem.event.slot}]"
        if problem.trouble is Trouble.NEVER_RECORDED:
            text = f"{where} waits for {event}, which nobody has recorded"
            return Finding(FindingKind.NEVER_RECORDED, where, None, problem.event, text)
        text = f"{where} waits for {event}, which {whose(tag, in_flight)} has recorded again since its own program did"
        return Finding(FindingKind.RECORDED_AGAIN, where, writer, problem.event, text)
    spot = _spot(problem)
    if tag == NEVER:
        text = f"{where} reads {spot}, which nobody has written"
        return Finding(FindingKind.UNWRITTEN, where, None, spot, text)
    text = f"{where} reads {spot}, which holds what {whose(tag, in_flight)} wrote and not its own step"
    return Finding(FindingKind.STALE, where, writer, spot, text)


def of_flaw(flight: Flight, place: int, flaw: Flaw, writer: Flight | None) -> Finding:
    """`writer` is the step that the flaw names, if the checker still knows more of it."""
    where = flight.where(place)
    earlier = writer.writer_of(flaw.spot) if writer is not None else None
    if earlier is None and flaw.writer >= 0:
        earlier = Where(flaw.writer)
    writes = flaw.kind is FlawKind.COLLISION
    source = f" ({earlier} wrote it)" if earlier is not None and not writes else ""
    text = f"{where} {'writes' if writes else 'reads'} {flaw.spot}: {flaw.text}{source}"
    return Finding(FindingKind[flaw.kind.name], where, None if writes else earlier, flaw.spot, text)


def of_quarantine(later: Flight, race: Race) -> Finding:
    one, other = race.earlier.where(race.earlier_op), later.where(race.op)
    text = (
        f"{other} {'writes' if race.writes else 'reads'} {race.spot}, and {one}, which never came back, may still "
        "write to it; what such a step touches is never used again"
    )
    return Finding(FindingKind.QUARANTINE, other, one, race.spot, text)


def misread_kind(problem: Problem) -> FindingKind:
    return FindingKind.UNWRITTEN if problem.tag == NEVER else FindingKind.STALE


def whose(tag: int, in_flight: Sequence[int]) -> str:
    if tag == NEVER:
        return "nobody"
    return "a step collected before" if tag == COLLECTED else f"step {in_flight[tag]}"


def _spot(problem: Problem) -> Spot:
    assert problem.buffer is not None
    return Spot(OF_SLOT[problem.buffer.kind], problem.buffer.slot)


def _remedy(later: Flight, race: Race, found_by_waits: dict[int, str]) -> str:
    """The missing edge, and what a wait found that should have been it."""
    event, earlier = race.earlier.event_after(race.earlier_op), race.earlier.where(race.earlier_op)
    op = later.shape.ops[race.op]
    if event is None:
        assert earlier.lane is not None
        return f"a record behind it on lane {earlier.lane.value}, and a wait for that on lane {op.lane.value}, would"
    name = f"{event.kind.value}[{event.slot}]"
    if op.lane is Lane.HOST:
        collect = f", or collecting step {earlier.step} first," if op.kind is OpKind.FILL else ""
        return f"a host synchronize on {name} before it{collect} would" + _found(later, race, event, found_by_waits)
    if earlier.step == later.step:
        other = ""
    elif race.spot.memory in (Memory.KV, Memory.HOST_KV):
        other = f", or keeping the block out of use until step {earlier.step} is collected,"
    else:
        other = ", or a host synchronize before the fill,"
    return f"a wait on {name} on lane {op.lane.value}{other} would" + _found(later, race, event, found_by_waits)


def _found(later: Flight, race: Race, event: Event, found_by_waits: dict[int, str]) -> str:
    """What a wait for `event` found, if there is one before the operation on its lane."""
    op = later.shape.ops[race.op]
    for place, found in found_by_waits.items():
        wait = later.shape.ops[place]
        if place <= race.op and wait.lane is op.lane and wait.event == event:
            return f" (it waits for {event.kind.value}[{event.slot}], and found the record of {found})"
    return ""
