"""The hazard checker: silent over the real pipeline, right about what is broken, equal to a check by the book."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hazard_runs import (
    Ask,
    Build,
    Case,
    bare_plan,
    brute_force,
    changed,
    copies,
    events,
    frozen,
    named,
    pairs_of,
    played,
    random_case,
    row_plan,
    run_of,
    without,
)

from asyncsched import hazards, order
from asyncsched.accesses import Memory, Spot, accesses
from asyncsched.clocks import Edge
from asyncsched.config import EngineConfig
from asyncsched.findings import Finding, FindingKind
from asyncsched.flights import Where
from asyncsched.hazards import Collected, Failed, HazardChecker, Launched, Planned, Report, RunEvent, check
from asyncsched.kv import BlockPool
from asyncsched.plan import NO_COPIES, NO_SOURCE, StepPlan
from asyncsched.program import (
    Buffer,
    BufferKind,
    Event,
    EventKind,
    Lane,
    Op,
    OpKind,
    StepProgram,
    Template,
    build_program,
)
from asyncsched.rows import Rows
from asyncsched.scheduler import Scheduler

WAIT_H2D = Edge(Lane.COMPUTE, OpKind.WAIT, EventKind.H2D_DONE)
RECORD_H2D = Edge(Lane.H2D, OpKind.RECORD, EventKind.H2D_DONE)
WAIT_COMPUTE = Edge(Lane.D2H, OpKind.WAIT, EventKind.COMPUTE_DONE)
RECORD_COMPUTE = Edge(Lane.COMPUTE, OpKind.RECORD, EventKind.COMPUTE_DONE)
RECORD_D2H = Edge(Lane.D2H, OpKind.RECORD, EventKind.D2H_DONE)
SYNCHRONIZE = Edge(Lane.HOST, OpKind.SYNCHRONIZE, EventKind.D2H_DONE)
EDGES = (RECORD_H2D, WAIT_H2D, RECORD_COMPUTE, WAIT_COMPUTE, RECORD_D2H, SYNCHRONIZE)

SIX = tuple(Ask((1, 2, 3, number), 8) for number in range(6))  # six requests with a common prefix
ROOMY = EngineConfig(depth=2, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16, block_size=2, num_blocks=40)


def of_kind(report: Report, kind: FindingKind) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind is kind]


def steps_of(run: Iterable[RunEvent]) -> int:
    return sum(isinstance(event, Launched) for event in run)


# ---- the real pipeline has no hazards ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_the_pipeline_has_no_hazards(depth: int, preemption: str) -> None:
    """I4 and I11, over every policy; the figures at the end say that what could go wrong was there."""
    steps = offloads = restores = shared = windows = carried = 0
    for seed in range(120):
        case = random_case(seed, depth=depth, preemption=preemption)
        checker = HazardChecker(case.config)
        for event in run_of(case, seed):
            match event:
                case Planned(plan, rows):
                    checker.planned(plan, rows)
                    offloads += len(plan.offload.host)
                    restores += len(plan.restore.host)
                    first_chunks = plan.starts[plan.num_decodes :]
                    shared += int(np.count_nonzero(first_chunks)) if case.config.enable_prefix_caching else 0
                    carried += int(np.count_nonzero(plan.carry != NO_SOURCE))
                    windows += case.config.sliding_window is not None
                case Launched(program):
                    checker.launched(program)
                    steps += 1
                case Collected(step):
                    checker.collected(step)
        assert checker.num_findings == 0, f"seed {seed}: {checker.findings[0]}"
    assert steps > 1500
    assert shared > 50
    assert windows > 200
    assert (offloads > 20) == (restores > 20) == (preemption == "offload")
    assert (carried > 500) == (depth > 1)


@pytest.mark.parametrize(
    ("config", "asks"),
    [
        (  # the victim had no step in flight, so it could come back while its blocks were still being copied out
            replace(ROOMY, max_num_seqs=3, block_size=1, num_blocks=7, preemption="offload", num_host_blocks=8),
            (Ask((1,), 2), Ask((1, 0), 3), Ask((1, 1, 1), 1)),
        ),
        (  # the victim's blocks were shared, and their last owner let go of them while they were being copied out
            replace(
                ROOMY,
                max_num_batched_tokens=6,
                block_size=1,
                num_blocks=8,
                enable_prefix_caching=True,
                preemption="offload",
                num_host_blocks=8,
            ),
            (Ask((1, 2, 2, 4), 4), Ask((1, 2, 4, 1), 3), Ask((1, 2, 1), 2), Ask((1, 2, 0), 2)),
        ),
    ],
    ids=["restored while it is offloaded", "shared block freed while it is offloaded"],
)
def test_hazards_that_the_core_once_had(config: EngineConfig, asks: tuple[Ask, ...]) -> None:
    offloads = []

    def watched() -> Iterable[RunEvent]:
        for event in events(config, asks):
            if isinstance(event, Planned) and len(event.plan.offload.host):
                offloads.append(event.plan.step)
            yield event

    report = check(watched(), config)
    assert offloads
    assert report.findings == ()


# ---- every edge is needed ------------------------------------------------------------------------------------------

LOST = {  # edge: what else is told, and the race: earlier, later, buffer
    RECORD_H2D: (FindingKind.NEVER_RECORDED, OpKind.H2D, OpKind.CARRY, Memory.DEV_IN),
    WAIT_H2D: (None, OpKind.H2D, OpKind.CARRY, Memory.DEV_IN),
    RECORD_COMPUTE: (FindingKind.NEVER_RECORDED, OpKind.FORWARD, OpKind.D2H, Memory.DEV_OUT),
    WAIT_COMPUTE: (None, OpKind.FORWARD, OpKind.D2H, Memory.DEV_OUT),
    RECORD_D2H: (FindingKind.NEVER_RECORDED, OpKind.D2H, OpKind.SYNCHRONIZE, Memory.HOST_OUT),
    SYNCHRONIZE: (None, OpKind.D2H, OpKind.SYNCHRONIZE, Memory.HOST_OUT),
}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_lost_edge_is_found(edge: Edge, depth: int) -> None:
    config = replace(ROOMY, depth=depth)
    report = check(events(config, SIX, build=without(edge)), config)
    also, earlier, later, memory = LOST[edge]
    race = of_kind(report, FindingKind.UNORDERED)[0]
    assert race.earlier is not None
    assert (race.earlier.kind, race.later.kind, race.place) == (earlier, later, Spot(memory, 0))
    assert race.earlier.step == race.later.step == 0
    assert str(race.place) in race.text
    assert f"(step 0, slot 0) before {race.later.lane.value}(step 0, slot 0)" in race.text  # type: ignore[union-attr]
    assert bool(of_kind(report, FindingKind.NEVER_RECORDED)) == (also is not None)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_edge_of_the_template_is_needed(depth: int) -> None:
    config = replace(ROOMY, depth=depth)
    report = check(events(config, SIX), config)
    assert report.redundant == ()
    assert set(report.needed) == set(EDGES)
    for edge, finding in report.needed.items():
        _, earlier, later, memory = LOST[edge]
        assert finding.earlier is not None
        assert (finding.earlier.kind, finding.later.kind) == (earlier, later)
        assert isinstance(finding.place, Spot)
        assert finding.place.memory is memory


def with_extra(*extra: Op, before: OpKind) -> Build:
    """Programs with operations of their slot added before one of another kind."""

    def change(op: Op) -> Iterable[Op]:
        if op.kind is before:
            slot = (op.reads or op.writes)[0].slot
            yield from (replace(e, event=e.event._replace(slot=slot)) for e in extra if e.event)
        yield op

    return changed(change)


EXTRA = [
    (Op(Lane.COMPUTE, OpKind.WAIT, event=Event(EventKind.H2D_DONE, 0)), OpKind.CARRY),
    (Op(Lane.D2H, OpKind.WAIT, event=Event(EventKind.H2D_DONE, 0)), OpKind.D2H),
    (Op(Lane.COMPUTE, OpKind.RECORD, event=Event(EventKind.H2D_DONE, 0)), OpKind.D2H),
]


@pytest.mark.parametrize(
    ("extra", "before"), EXTRA, ids=lambda value: f"{value.lane.value}" if isinstance(value, Op) else ""
)
def test_an_edge_that_nobody_needs_is_redundant(extra: Op, before: OpKind) -> None:
    assert extra.event is not None
    report = check(events(ROOMY, SIX, build=with_extra(extra, before=before)), ROOMY)
    assert report.findings == ()
    edge = Edge(extra.lane, extra.kind, extra.event.kind)
    twin = [edge, edge._replace(nth=1)] if edge in EDGES else [edge]  # each of two equal ones may go alone
    assert list(report.redundant) == twin
    assert f"redundant: {edge}" in str(report)
    build = with_extra(extra, before=before)
    for gone in twin:
        bare = check(events(ROOMY, SIX, build=lambda plan, gone=gone: only_without(build(plan), gone)), ROOMY)
        assert bare.findings == bare.redundant == ()


@cache
def template_without(template: Template, edge: Edge) -> Template:
    kept = [op if name != edge else replace(op, event=None) for op, name in named(template)]
    return replace(template, ops=tuple(op for op in kept if op.event or op.reads or op.writes))


def only_without(program: StepProgram, edge: Edge) -> StepProgram:
    return program._replace(template=template_without(program.template, edge))


def only_kv(op: Op) -> Iterable[Op]:
    """An operation that touches no slot, so that nothing but KV asks for order."""
    yield replace(
        op,
        reads=tuple(b for b in op.reads if "kv" in b.kind.value),
        writes=tuple(b for b in op.writes if "kv" in b.kind.value),
    )


of_kv = changed(only_kv)


def test_an_edge_that_only_kv_needs_is_needed() -> None:
    """Offloads read what earlier steps wrote, on another lane: here they come before their own step's wait."""
    first = row_plan(0, 0, [(0, 0, 0, 2)])
    second = bare_plan(1, 1, offload=copies((5, 1)))
    config = replace(ROOMY, preemption="offload", num_host_blocks=4)
    rows = Rows(config)
    rows.table[0, 0], rows.known[0] = 5, 2

    run = [of_kv(first), of_kv(second)]
    report = check(played(run, rows), config)
    assert report.findings == ()
    assert report.needed[WAIT_COMPUTE].place == Spot(Memory.KV, 5, 0)
    assert report.needed[WAIT_COMPUTE].earlier == Where(0, 0, Lane.COMPUTE, OpKind.FORWARD)
    assert report.needed[WAIT_COMPUTE].later == Where(1, 1, Lane.D2H, OpKind.OFFLOAD)
    alone = check(played(run[:1], rows), config)
    assert WAIT_COMPUTE in alone.redundant


def test_an_edge_that_orders_a_step_collected_long_ago_is_needed() -> None:
    """With the synchronize, the host knows that step 0 is over; without it, it does not."""
    config = replace(ROOMY, preemption="offload", num_host_blocks=4)
    plans = [bare_plan(0, 0, offload=copies((5, 1))), bare_plan(1, 1), bare_plan(2, 0, restore=copies((6, 1)))]
    first, second, third = map(of_kv, plans)
    report = check(played([first, 0, second, 1, third], Rows(config)), config)
    assert report.findings == ()
    assert report.needed[SYNCHRONIZE].place == Spot(Memory.HOST_KV, 1, 0)
    assert report.needed[SYNCHRONIZE].earlier == Where(0, 0, Lane.D2H, OpKind.OFFLOAD)
    assert SYNCHRONIZE in check(played([first, 0, second, 1], Rows(config)), config).redundant


# ---- slots ---------------------------------------------------------------------------------------------------------


def test_refilling_before_collecting_is_found() -> None:
    report = check(events(ROOMY, SIX, collect_late=True), ROOMY)
    race = next(f for f in report.findings if f.place == Spot(Memory.HOST_IN, 0))
    assert (race.kind, race.later, race.earlier) == (
        FindingKind.UNORDERED,
        Where(2, 0, Lane.HOST, OpKind.FILL),
        Where(0, 0, Lane.H2D, OpKind.H2D),
    )
    assert "may overwrite host_in[0] while h2d copy of step 0 reads it" in race.text
    assert "a host synchronize on h2d_done[0] before it, or collecting step 0 first, would" in race.text
    again = of_kind(report, FindingKind.RECORDED_AGAIN)[0]
    assert (again.later.step, again.place) == (0, Event(EventKind.D2H_DONE, 0))
    stale = next(f for f in of_kind(report, FindingKind.STALE) if f.place == Spot(Memory.HOST_OUT, 0))
    assert stale.later.step == 0
    assert stale.earlier is not None
    assert stale.earlier.step == 2
    assert "holds what step 2 wrote" in stale.text


def test_reusing_one_slot_is_found() -> None:
    report = check(events(ROOMY, SIX, build=lambda plan: build_program(replace(plan, slot=0))), ROOMY)
    race = report.findings[0]
    assert (race.later, race.place) == (Where(1, 0, Lane.HOST, OpKind.FILL), Spot(Memory.HOST_IN, 0))
    assert race.earlier is not None
    assert race.earlier.step == 0
    assert any(f.kind is FindingKind.UNWRITTEN and f.place == Spot(Memory.DEV_OUT, 1) for f in report.findings)


@pytest.mark.parametrize("kind", [BufferKind.HOST_IN, BufferKind.DEV_IN, BufferKind.DEV_OUT, BufferKind.HOST_OUT])
@pytest.mark.parametrize("on", [OpKind.H2D, OpKind.FORWARD, OpKind.D2H])
def test_swapping_a_slot_in_one_operation_is_found(kind: BufferKind, on: OpKind) -> None:
    def swapped(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(b._replace(slot=1 - b.slot) if b.kind is kind else b for b in buffers)

    def swap(op: Op) -> Iterable[Op]:
        yield replace(op, reads=swapped(op.reads), writes=swapped(op.writes)) if op.kind is on else op

    touches = {
        b.kind for op in build_program(bare_plan(0)).template.ops if op.kind is on for b in (*op.reads, *op.writes)
    }
    report = check(events(ROOMY, SIX, build=changed(swap)), ROOMY)
    if kind not in touches:
        assert report.findings == ()
        return
    memory = Memory(kind.value)
    found = [f for f in report.findings if isinstance(f.place, Spot) and f.place.memory is memory]
    assert found
    assert {f.kind for f in found} <= {FindingKind.UNORDERED, FindingKind.STALE, FindingKind.UNWRITTEN}


def test_a_wait_before_its_record_is_found() -> None:
    """In a program in the wrong order the wait finds the record of the slot's step before, or none."""

    @cache
    def reordered(template: Template) -> Template:
        ops = list(template.ops)
        wait = next(op for op in ops if op.lane is Lane.D2H and op.kind is OpKind.WAIT)
        ops.remove(wait)
        ops.insert(next(place for place, op in enumerate(ops) if op.kind is OpKind.FORWARD), wait)
        return replace(template, ops=tuple(ops))

    def build(plan: StepPlan) -> StepProgram:
        return StepProgram(reordered(build_program(plan).template), plan)

    report = check(events(ROOMY, SIX, build=build), ROOMY)
    assert of_kind(report, FindingKind.NEVER_RECORDED)[0].place == Event(EventKind.COMPUTE_DONE, 0)
    races = [f for f in of_kind(report, FindingKind.UNORDERED) if f.place == Spot(Memory.DEV_OUT, 0)]
    assert [(f.later.step, f.earlier and f.earlier.step) for f in races[:2]] == [(0, 0), (2, 2)]
    assert "it waits for compute_done[0], and found the record of nobody" in races[0].text
    assert "it waits for compute_done[0], and found the record of a step collected before" in races[1].text


# ---- carry-over ----------------------------------------------------------------------------------------------------


def test_a_lost_carry_over_is_found() -> None:
    report = check(events(ROOMY, SIX, build=changed(lambda op: [] if op.kind is OpKind.CARRY else [op])), ROOMY)
    lost = of_kind(report, FindingKind.UNWRITTEN)[0]
    assert lost.later == Where(1, 1, Lane.COMPUTE, OpKind.FORWARD)
    assert lost.place == Spot(Memory.DEV_IN, 1)
    assert "the token of position 4 of request 0 is neither on the host nor carried over" in lost.text


def carried_over(change: Callable[[StepPlan], np.ndarray]) -> Report:
    """A run in which the first plan that carries over from another slot has another mask."""
    done: list[int] = []

    def build(plan: StepPlan) -> StepProgram:
        if not done and np.count_nonzero(plan.carry != NO_SOURCE) >= 2:
            done.append(plan.step)
            plan = replace(plan, carry=change(plan))
        return build_program(plan)

    report = check(events(replace(ROOMY, depth=3), SIX, build=build), replace(ROOMY, depth=3))
    assert done
    for finding in report.findings:
        assert finding.later.step == done[0]
        assert finding.later.kind is OpKind.CARRY
    return report


def test_a_carry_over_from_the_wrong_row_is_found() -> None:
    report = carried_over(lambda plan: plan.carry[::-1].copy())
    first = of_kind(report, FindingKind.STALE)[0]
    assert first.place == Spot(Memory.DEV_OUT, first.earlier.slot)  # type: ignore[union-attr]
    assert first.earlier.kind is OpKind.FORWARD  # type: ignore[union-attr]
    assert "is carried over for position 4 of request 0, and it holds position 4 of request" in first.text


def test_a_carry_over_from_the_wrong_slot_is_found() -> None:
    report = carried_over(lambda plan: np.where(plan.carry == NO_SOURCE, NO_SOURCE, (plan.carry + 4) % 12))
    assert of_kind(report, FindingKind.UNWRITTEN)[0].place == Spot(Memory.DEV_OUT, 1)
    assert "nobody sampled it" in report.findings[0].text


def test_a_token_taken_from_the_host_before_it_is_there_is_found() -> None:
    report = carried_over(lambda plan: np.full_like(plan.carry, NO_SOURCE))
    assert "the token of position 4 of request 0 is neither on the host nor carried over" in report.findings[0].text


def test_a_source_that_does_not_exist_is_found() -> None:
    report = carried_over(lambda plan: plan.carry + 1000)
    assert "there is no such row" in of_kind(report, FindingKind.UNWRITTEN)[0].text


def test_a_carry_over_from_a_batch_too_old_is_found() -> None:
    """Slot 0 still holds what step 0 sampled for the request, but step 1 sampled its newest token."""
    config = replace(ROOMY, depth=3)
    rows = Rows(config)
    rows.table[0, :3], rows.known[0] = (1, 2, 3), 2
    plans = [
        row_plan(0, 0, [(0, 7, 0, 2)]),
        row_plan(1, 1, [(0, 7, 2, 3)], carry=[0]),
        row_plan(2, 2, [(0, 7, 3, 4)], carry=[0]),
    ]
    (finding,) = check(played(map(build_program, plans), rows), config).findings
    assert (finding.kind, finding.place) == (FindingKind.STALE, Spot(Memory.DEV_OUT, 0))
    assert (finding.later, finding.earlier) == (
        Where(2, 2, Lane.COMPUTE, OpKind.CARRY),
        Where(0, 0, Lane.COMPUTE, OpKind.FORWARD),
    )
    assert "for position 3 of request 7, and it holds position 2 of request 7" in finding.text
    plans[2] = replace(plans[2], carry=np.array([4]))
    assert check(played(map(build_program, plans), rows), config).findings == ()


def test_a_carry_over_from_a_row_that_the_newest_step_of_a_slot_has_not_is_found() -> None:
    """Step 1 is smaller than step 0, so the second token in its slot is nobody's, whatever may still be there."""
    rows = Rows(ROOMY)
    rows.table[:2, :2], rows.known[:2] = [[1, 2], [3, 4]], 3
    plans = [
        row_plan(0, 0, [(0, 0, 0, 2), (1, 1, 0, 2)]),
        row_plan(1, 0, [(0, 0, 2, 3)], carry=[NO_SOURCE]),
        row_plan(2, 1, [(1, 1, 2, 3)], carry=[1]),
    ]
    first, second, third = map(build_program, plans)
    (finding,) = check(played([first, 0, second, third], rows), ROOMY).findings
    assert (finding.kind, finding.place, finding.later.step) == (FindingKind.UNWRITTEN, Spot(Memory.DEV_OUT, 0), 2)


# ---- KV: order -----------------------------------------------------------------------------------------------------

TIGHT = replace(
    ROOMY,
    max_num_seqs=3,
    block_size=2,
    num_blocks=12,
    preemption="offload",
    num_host_blocks=24,
    max_num_batched_tokens=8,
)
EIGHT = tuple(Ask((number % 5, 1, 2, 3), 9) for number in range(8))


def test_a_missing_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(
        BlockPool, "release", lambda self, blocks, *, last_use=-1, fence=None: release(self, blocks, last_use=last_use)
    )
    report = check(events(TIGHT, EIGHT), TIGHT)
    races = [f for f in of_kind(report, FindingKind.UNORDERED) if f.place.memory is Memory.KV]  # type: ignore[union-attr]
    race = next(f for f in races if (f.earlier.kind, f.later.kind) == (OpKind.OFFLOAD, OpKind.FORWARD))  # type: ignore[union-attr]
    assert race.earlier is not None
    assert race.earlier.step < race.later.step
    assert f"may overwrite {race.place}" in race.text
    assert f"keeping the block out of use until step {race.earlier.step} is collected" in race.text


def test_a_restore_into_blocks_in_flight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "num_quiet", lambda self, collected: self.available)
    monkeypatch.setattr(BlockPool, "allocate_quiet", lambda self, count, collected: self.allocate(count))
    races = [
        race
        for case in (random_case(seed, depth=2 + seed % 3, preemption="offload") for seed in range(60))
        for race in of_kind(check(run_of(case), case.config), FindingKind.UNORDERED)
        if race.later.kind is OpKind.RESTORE and race.place.memory is Memory.KV  # type: ignore[union-attr]
    ]
    race = next(race for race in races if race.earlier and race.earlier.kind is OpKind.FORWARD)
    assert race.earlier is not None
    assert race.earlier.step < race.later.step
    assert f"may overwrite {race.place} while {race.earlier}" in race.text.replace(" (and 1 more blocks)", "")
    assert f"nothing orders compute(step {race.earlier.step}, slot {race.earlier.slot}) before h2d(step" in race.text


def test_a_restore_of_what_is_being_offloaded_is_found() -> None:
    """Known in full: the copy out of step 1 and the copy back in of step 2 meet in host block 3."""
    config = replace(ROOMY, depth=3, preemption="offload", num_host_blocks=4)
    rows = Rows(config)
    rows.table[0, 0], rows.known[0] = 5, 2
    plans = [
        row_plan(0, 0, [(0, 0, 0, 2)]),
        bare_plan(1, 1, offload=copies((5, 3))),
        bare_plan(2, 2, restore=copies((6, 3))),
    ]
    (race,) = check(played(map(build_program, plans), rows), config).findings
    assert (race.earlier, race.later, race.place) == (
        Where(1, 1, Lane.D2H, OpKind.OFFLOAD),
        Where(2, 2, Lane.H2D, OpKind.RESTORE),
        Spot(Memory.HOST_KV, 3, 0),
    )
    assert "nothing orders d2h(step 1, slot 1) before h2d(step 2, slot 2)" in race.text
    assert "a wait on d2h_done[1] on lane h2d" in race.text
    programs = [build_program(plan) for plan in plans]
    assert check(played([*programs[:2], 0, 1, programs[2]], rows), config).findings == ()


def test_positions_of_one_block_do_not_conflict() -> None:
    """A lane may write to one end of a block while another reads the other end."""
    writes = Op(Lane.H2D, OpKind.RESTORE, writes=(Buffer(BufferKind.KV_WRITTEN, 0),))
    reads = Op(Lane.COMPUTE, OpKind.FORWARD, reads=(Buffer(BufferKind.KV_READ, 0),))
    end = Op(Lane.HOST, OpKind.SYNCHRONIZE)
    config = replace(ROOMY, block_size=4, sliding_window=1)
    for start, conflicts in ((2, False), (1, True)):
        rows = Rows(config)
        rows.table[:2, 0], rows.known[:2] = 5, 4
        first = StepProgram(Template(0, 0, (writes, end)), row_plan(0, 0, [(0, 0, 0, 2)]))
        second = StepProgram(Template(0, 0, (reads, end)), row_plan(1, 0, [(1, 1, start, 3)]))
        report = check(played([first, second], rows), config)
        spots = [f.place for f in of_kind(report, FindingKind.UNORDERED)]
        assert spots == ([Spot(Memory.KV, 5, 1)] if conflicts else [])


# ---- KV: contents --------------------------------------------------------------------------------------------------


def corrupted(config: EngineConfig, change: Callable[[Rows, StepPlan], bool], asks: tuple[Ask, ...] = SIX) -> Report:
    """A run in which block tables are changed, once, as soon as `change` finds something to change."""
    schedulers: list[Scheduler] = []
    steps: list[int] = []

    def build(plan: StepPlan) -> StepProgram:
        if not steps and change(schedulers[0].rows, plan):
            steps.append(plan.step)
        return build_program(plan)

    def until_changed() -> Iterable[RunEvent]:
        for event in events(config, asks, prepare=schedulers.append, build=build):
            yield event
            if steps and isinstance(event, Launched):
                return

    report = check(until_changed(), config)
    assert steps, "nothing was changed"
    assert report.findings
    assert {finding.later.step for finding in report.findings} == set(steps)
    return report


def swap_tables(rows: Rows, plan: StepPlan) -> bool:
    if plan.num_decodes < 2:
        return False
    rows.table[plan.rows[:2], 0] = rows.table[plan.rows[1::-1], 0]
    return True


def test_a_wrong_block_table_is_found() -> None:
    report = corrupted(ROOMY, swap_tables)
    stale = of_kind(report, FindingKind.STALE)[0]
    assert stale.later.kind is stale.earlier.kind is OpKind.FORWARD  # type: ignore[union-attr]
    assert stale.place.memory is Memory.KV  # type: ignore[union-attr]
    assert "positions 0..1 of request 0 are meant, and the block holds positions 0..1 of request" in stale.text


def test_blocks_in_the_wrong_order_are_found() -> None:
    def change(rows: Rows, plan: StepPlan) -> bool:
        if plan.num_decodes == 0 or plan.starts[0] < 6:
            return False
        rows.table[plan.rows[0], [0, 1]] = rows.table[plan.rows[0], [1, 0]]
        return True

    assert "holds positions 2..3 of request 0" in of_kind(corrupted(ROOMY, change), FindingKind.STALE)[0].text


def test_a_missing_block_is_found() -> None:
    def change(rows: Rows, plan: StepPlan) -> bool:
        if plan.num_decodes == 0:
            return False
        rows.table[plan.rows[0], 0] = 0
        return True

    assert "positions 0..1 of request 0 have no block" in corrupted(ROOMY, change).findings[0].text


def test_two_rows_that_write_to_one_block_are_found() -> None:
    def change(rows: Rows, plan: StepPlan) -> bool:
        if plan.num_decodes < 2 or plan.starts[0] % 2 or plan.starts[1] % 2:
            return False
        columns = plan.starts[:2] // 2
        rows.table[plan.rows[0], columns[0]] = rows.table[plan.rows[1], columns[1]]
        return True

    collision = of_kind(corrupted(ROOMY, change), FindingKind.COLLISION)[0]
    assert "2 rows of the step write to it" in collision.text


def test_a_row_that_writes_to_what_another_reads_is_found() -> None:
    """In one step: what the other row read before was right, and a step later it is too late to see."""

    def change(rows: Rows, plan: StepPlan) -> bool:
        if plan.num_decodes < 2 or plan.starts[0] < 2 or plan.starts[1] % 2:
            return False
        rows.table[plan.rows[1], plan.starts[1] // 2] = rows.table[plan.rows[0], 0]
        return True

    report = corrupted(ROOMY, change)
    collision = of_kind(report, FindingKind.COLLISION)[0]
    assert "one row of the step writes to it and another reads it" in collision.text
    assert collision == report.findings[0]


def test_a_block_that_was_freed_too_early_is_found() -> None:
    """Scenario 7: a running request's block goes to the next that asks."""
    victims: list[int] = []

    def prepare(scheduler: Scheduler) -> None:
        pool = scheduler.residency.pool
        allocate = pool.allocate

        def generous(count: int) -> list[int]:
            for row in scheduler._seated:
                if not victims and count and scheduler.rows.num_blocks[row] >= 2:
                    victims.append(int(scheduler.rows.table[row, 0]))
                    return [victims[0], *allocate(count - 1)]
            return allocate(count)

        pool.allocate = generous  # type: ignore[method-assign]

    report = check(islice(events(ROOMY, SIX, prepare=prepare), 16), ROOMY)
    (block,) = victims
    stale = of_kind(report, FindingKind.STALE)[0]
    assert stale.place == Spot(Memory.KV, block, 0)
    assert stale.earlier is not None
    assert stale.earlier.step < stale.later.step


@pytest.mark.parametrize(
    ("end", "place", "missing"), [(2, Spot(Memory.KV, 9, 0), "2..2"), (3, None, ""), (1, Spot(Memory.KV, 4, 1), "1..1")]
)
def test_a_skipped_position_is_found(end: int, place: Spot | None, missing: str) -> None:
    """A chunk of positions 0..end-1, then another query: what stands between them was never written."""
    rows = Rows(ROOMY)
    rows.table[0, :2], rows.known[0] = (4, 9), 9
    start = 3 if end > 1 else 2
    plans = [row_plan(0, 0, [(0, 0, 0, end)]), row_plan(1, 1, [(0, 0, start, start + 1)])]
    report = check(played(map(build_program, plans), rows), ROOMY)
    found = [(f.kind, f.place, f.later.step) for f in report.findings]
    assert found == ([(FindingKind.UNWRITTEN, place, 1)] if place else [])
    assert f"positions {missing} of request 0 were never written" in str(report) or not place


def test_positions_written_by_another_operation_than_reads_them() -> None:
    """An operation that writes KV, and one that reads it: it reads its own positions too, and all before them."""
    writes = Op(Lane.COMPUTE, OpKind.FORWARD, writes=(Buffer(BufferKind.KV_WRITTEN, 0),))
    reads = Op(Lane.COMPUTE, OpKind.FORWARD, reads=(Buffer(BufferKind.KV_READ, 0),))
    end = Op(Lane.HOST, OpKind.SYNCHRONIZE)
    config = replace(ROOMY, block_size=4)
    rows = Rows(config)
    rows.table[0, :2], rows.known[0] = (5, 6), 8
    for ops, start, missing in (
        ((writes, reads), 0, None),
        ((writes, reads), 2, Spot(Memory.KV, 5, 0)),
        ((writes, reads), 5, Spot(Memory.KV, 5, 0)),
        ((reads,), 0, Spot(Memory.KV, 5, 0)),
        ((reads, writes), 0, Spot(Memory.KV, 5, 0)),
    ):
        program = StepProgram(Template(0, 0, (*ops, end)), row_plan(0, 0, [(0, 0, start, start + 2)]))
        report = check(played([program], rows), config)
        unwritten = of_kind(report, FindingKind.UNWRITTEN)
        assert [f.place for f in unwritten][:1] == ([missing] if missing else [])


PREFIXES = replace(ROOMY, enable_prefix_caching=True, max_num_batched_tokens=8)


def test_a_prefix_shared_before_it_is_computed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 13: blocks are registered when they are planned."""

    def prepare(scheduler: Scheduler) -> None:
        take_copies = scheduler.residency.take_copies

        def eager() -> object:
            for request in scheduler._active.values():
                if request.row >= 0:
                    row, size = request.row, scheduler.config.block_size
                    full = int(scheduler.rows.planned[row]) // size
                    hashes = scheduler.residency._hashes(request, scheduler.rows.tokens[row], full)
                    for column in range(min(full, len(request.tokens) // size)):
                        scheduler.residency.pool.register(int(scheduler.rows.table[row, column]), hashes[column])
            return take_copies()

        scheduler.residency.take_copies = eager  # type: ignore[assignment,method-assign]

    report = check(events(PREFIXES, SIX, prepare=prepare), PREFIXES)
    early = of_kind(report, FindingKind.EARLY)[0]
    assert early.earlier is not None
    assert early.earlier.step == early.later.step - 1
    assert "positions 0..1 of request" in early.text
    assert "are shared from request" in early.text
    assert check(events(PREFIXES, SIX), PREFIXES).findings == ()


@pytest.mark.parametrize(
    ("block_hash", "second", "held"),
    [
        (lambda parent, tokens: tokens[1:].tobytes(), (0, 2, 3, 4, 5), "0..1"),  # leaves out a token
        (lambda parent, tokens: tokens.tobytes(), (3, 4, 1, 2, 5), "2..3"),  # leaves out what stands before
    ],
)
def test_a_prefix_of_other_tokens_is_found(
    block_hash: object, second: tuple[int, ...], held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsched.residency.block_hash", block_hash)
    config = replace(PREFIXES, max_num_seqs=1)
    report = check(events(config, (Ask((1, 2, 3, 4, 5), 2), Ask(second, 2))), config)
    stale = of_kind(report, FindingKind.STALE)[0]
    assert f"positions 0..1 of request 1 are meant, and the block holds positions {held} of request 0" in stale.text
    assert check(events(config, (Ask((1, 2, 3, 4, 5), 2), Ask((1, 2, 3, 4, 5), 2))), config).findings == ()


def test_a_sliding_window_reads_what_it_sees() -> None:
    """Blocks that left the window may be gone; one that is still in view may not."""
    config = replace(ROOMY, sliding_window=3)
    rows = Rows(config)
    rows.table[0, :5], rows.known[0] = (1, 2, 3, 4, 5), 9
    gone = Rows(config)
    for start, freed, missing in ((6, 2, ""), (6, 3, "4..5"), (7, 2, ""), (7, 3, "5..5"), (8, 3, "")):
        plans = [row_plan(0, 0, [(0, 0, 0, start)]), row_plan(1, 1, [(0, 0, start, start + 1)])]
        gone.table[:], gone.known[:] = rows.table, rows.known
        gone.table[0, :freed] = 0
        run = [Planned(plans[0], rows), Planned(plans[1], gone)]
        programs = [build_program(plan) for plan in plans]
        report = check([run[0], Launched(programs[0]), run[1], Launched(programs[1])], config)
        assert len(report.findings) == bool(missing)
        assert f"positions {missing} of request 0 have no block" in str(report) or not missing


# ---- faults --------------------------------------------------------------------------------------------------------


def failing_run(config: EngineConfig, *, stuck: bool, reuse: bool) -> Report:
    """Step 0 fails; step 1 uses its slot and its block, or others."""
    rows = Rows(config)
    rows.table[0, 0], rows.table[1, 0], rows.known[:2] = 5, (5 if reuse else 6), 2
    programs = [
        build_program(row_plan(0, 0, [(0, 0, 0, 2)])),
        build_program(row_plan(1, 0 if reuse else 1, [(1, 1, 0, 2)])),
    ]
    run = [
        Planned(programs[0].plan, rows),
        Launched(programs[0]),
        Failed(programs[0], stuck),
        Planned(programs[1].plan, rows),
        Launched(programs[1]),
        Collected(programs[1]),
    ]
    return check(run, config)


def test_what_a_failed_step_had_may_be_used_again() -> None:
    assert failing_run(ROOMY, stuck=False, reuse=True).findings == ()


def test_what_a_stuck_step_had_may_not_be_used_again() -> None:
    report = failing_run(ROOMY, stuck=True, reuse=True)
    places = {f.place for f in of_kind(report, FindingKind.QUARANTINE)}
    assert {Spot(Memory.KV, 5, 0), Spot(Memory.HOST_IN, 0), Spot(Memory.DEV_OUT, 0)} <= places
    assert "forward of step 0, which never came back, may still write to it" in str(report)
    assert failing_run(ROOMY, stuck=True, reuse=False).findings == ()


def test_what_a_failed_step_wrote_is_worth_nothing() -> None:
    rows = Rows(ROOMY)
    rows.table[0, :2], rows.known[0] = (5, 6), 4
    programs = [build_program(row_plan(0, 0, [(0, 0, 0, 2)])), build_program(row_plan(1, 1, [(0, 0, 2, 3)]))]
    run = [
        Planned(programs[0].plan, rows),
        Launched(programs[0]),
        Failed(programs[0]),
        Planned(programs[1].plan, rows),
        Launched(programs[1]),
    ]
    (finding,) = check(run, ROOMY).findings
    assert (finding.kind, finding.place) == (FindingKind.UNWRITTEN, Spot(Memory.KV, 5, 0))


def test_a_plan_that_was_never_launched_is_forgotten() -> None:
    checker = HazardChecker(ROOMY)
    checker.planned(bare_plan(0), Rows(ROOMY))
    checker.failed(bare_plan(0))
    with pytest.raises(ValueError, match="step 0 is launched, but `planned` was not called for it"):
        checker.launched(build_program(bare_plan(0)))


def test_wrong_use_is_told() -> None:
    checker = HazardChecker(ROOMY)
    with pytest.raises(ValueError, match="step 4 is not in flight"):
        checker.collected(bare_plan(4))
    checker.planned(bare_plan(0, 2), Rows(ROOMY))
    with pytest.raises(ValueError, match="a program uses slot 2, and depth is 2"):
        checker.launched(build_program(bare_plan(0, 2)))
    tail = Template(0, 0, (Op(Lane.COMPUTE, OpKind.FORWARD), Op(Lane.D2H, OpKind.D2H)))
    with pytest.raises(ValueError, match="after the launch a program may have host operations only"):
        checker.launched(StepProgram(tail, bare_plan(0)))


# ---- hand-made programs with known answers -------------------------------------------------------------------------

X, Y = Buffer(BufferKind.DEV_IN, 0), Buffer(BufferKind.DEV_OUT, 0)
E, F = Event(EventKind.H2D_DONE, 0), Event(EventKind.COMPUTE_DONE, 0)
A = Op(Lane.H2D, OpKind.H2D, writes=(X,))
B = Op(Lane.COMPUTE, OpKind.FORWARD, reads=(X,))
C = Op(Lane.D2H, OpKind.D2H, writes=(X,))


def record(lane: Lane, event: Event) -> Op:
    return Op(lane, OpKind.RECORD, event=event)


def wait(lane: Lane, event: Event) -> Op:
    return Op(lane, OpKind.WAIT, event=event)


REC_A, WAIT_B, REC_B, WAIT_C = record(Lane.H2D, E), wait(Lane.COMPUTE, E), record(Lane.COMPUTE, F), wait(Lane.D2H, F)


@pytest.mark.parametrize(
    ("ops", "races", "never"),
    [
        pytest.param((A, B), ["h2d-forward"], 0, id="nothing orders them"),
        pytest.param((A, REC_A, WAIT_B, B), [], 0, id="record and wait"),
        pytest.param((A, WAIT_B, REC_A, B), ["h2d-forward"], 1, id="wait before record"),
        pytest.param((REC_A, A, WAIT_B, B), ["h2d-forward"], 0, id="record before what it should cover"),
        pytest.param((A, REC_A, B, WAIT_B), ["h2d-forward"], 0, id="wait after what it should hold back"),
        pytest.param((A, REC_A, wait(Lane.D2H, E), B), ["h2d-forward"], 0, id="wait on another lane"),
        pytest.param((A, REC_A, WAIT_B, B, REC_B, WAIT_C, C), [], 0, id="transitive"),
        pytest.param((A, REC_A, WAIT_B, B, WAIT_C, C), ["h2d-d2h", "forward-d2h"], 1, id="a gap in the chain"),
        pytest.param(
            (A, REC_A, wait(Lane.D2H, E), C, WAIT_B, B), ["d2h-forward"], 0, id="reader beside the second writer"
        ),
        pytest.param((A, A), [], 0, id="one lane"),
        pytest.param((A, REC_A, A, WAIT_B, B), ["h2d-forward"], 0, id="the second write is behind the record"),
        pytest.param((A, REC_A, A, REC_A, WAIT_B, B), [], 0, id="the newest record counts"),
    ],
)
def test_a_small_program(ops: tuple[Op, ...], races: list[str], never: int) -> None:
    end = Op(Lane.HOST, OpKind.SYNCHRONIZE)
    report = check(played([StepProgram(Template(0, 0, (*ops, end)), bare_plan(0))], Rows(ROOMY)), ROOMY)
    found = of_kind(report, FindingKind.UNORDERED)
    assert [f"{f.earlier.kind.value}-{f.later.kind.value}" for f in found] == races  # type: ignore[union-attr]
    assert {f.place for f in found} <= {Spot(Memory.DEV_IN, 0)}
    assert len(of_kind(report, FindingKind.NEVER_RECORDED)) == never


def test_a_carry_over_reads_the_slots_of_its_mask_alone() -> None:
    """Somebody else writes to `dev_out[1]`: a race for who carries over from there, whatever others did before."""
    writes = Op(Lane.D2H, OpKind.D2H, writes=(Buffer(BufferKind.DEV_OUT, 1),))
    carry = Op(Lane.COMPUTE, OpKind.CARRY, reads=(Buffer(BufferKind.CARRY_SOURCES, 0),))
    end = Op(Lane.HOST, OpKind.SYNCHRONIZE)
    template = Template(0, 0, (writes, carry, end))
    for sources in ([0], [4], [0], [4, 0], [NO_SOURCE]):
        chunks = [(row, row, 2, 3) for row in range(len(sources))]
        program = StepProgram(template, row_plan(0, 0, chunks, carry=sources))
        races = of_kind(check(played([program], Rows(ROOMY)), ROOMY), FindingKind.UNORDERED)
        assert [f.place for f in races] == ([Spot(Memory.DEV_OUT, 1)] if 4 in sources else [])
        assert [f.earlier for f in races] == ([Where(0, 0, Lane.D2H, OpKind.D2H)] if 4 in sources else [])


def test_the_host_orders_what_it_waited_for() -> None:
    """A synchronize orders all that the host enqueues later, and only behind what the event covers."""
    done = Op(Lane.HOST, OpKind.SYNCHRONIZE, event=E)
    first = StepProgram(Template(0, 0, (A, REC_A, done)), bare_plan(0))
    second = StepProgram(Template(0, 0, (C, done)), bare_plan(1))
    assert check(played([first, 0, second], Rows(ROOMY)), ROOMY).findings == ()
    (race,) = check(played([first, second], Rows(ROOMY)), ROOMY).findings
    assert (race.earlier, race.later) == (Where(0, 0, Lane.H2D, OpKind.H2D), Where(1, 0, Lane.D2H, OpKind.D2H))
    early = StepProgram(Template(0, 0, (REC_A, A, done)), bare_plan(0))
    assert len(check(played([early, 0, second], Rows(ROOMY)), ROOMY).findings) == 1


def test_accesses_are_expanded() -> None:
    config = replace(ROOMY, sliding_window=3, max_num_seqs=4)
    rows = [(0, 0, 5, 6), (3, 1, 0, 3)]
    plan = row_plan(0, 1, rows, carry=[2], offload=copies((7, 1), (8, 2)))
    program = build_program(plan)
    table = np.array([[0, 11, 12], [21, 0, 0]])  # no block is no access
    found = {}
    for op in program.template.ops:
        for access in accesses(program, op, table, config):
            spans = zip(access.units.tolist(), access.first.tolist(), access.stop.tolist(), strict=True)
            found[op.kind, access.memory, access.writes] = sorted(spans)
    assert found[OpKind.FORWARD, Memory.KV, False] == [(11, 1, 2), (12, 0, 2), (21, 0, 2)]
    assert found[OpKind.FORWARD, Memory.KV, True] == [(12, 1, 2), (21, 0, 2)]
    assert found[OpKind.OFFLOAD, Memory.KV, False] == [(7, 0, 2), (8, 0, 2)]
    assert found[OpKind.OFFLOAD, Memory.HOST_KV, True] == [(1, 0, 2), (2, 0, 2)]
    assert found[OpKind.CARRY, Memory.DEV_OUT, False] == [(0, 0, 1)]
    assert found[OpKind.FILL, Memory.HOST_IN, True] == [(1, 0, 1)]


# ---- by the book ---------------------------------------------------------------------------------------------------


def edited(seed: int, depth: int) -> Build:
    """Programs with one to three random edits, the same in every step of a slot or in all."""

    @cache
    def rebuilt(template: Template) -> Template:
        rng = random.Random(f"{seed} {template.slot if seed % 2 else ''}")
        ops = list(template.ops)
        for _ in range(rng.randint(1, 3)):
            place, lane = rng.randrange(len(ops) - 1), rng.choice([Lane.H2D, Lane.COMPUTE, Lane.D2H])
            event = Event(rng.choice(list(EventKind)), rng.randrange(depth))
            match rng.randrange(5):
                case 0 if ops[place].event:
                    del ops[place]
                case 1:
                    ops.insert(place, wait(lane, event))
                case 2:
                    ops.insert(place, record(lane, event))
                case 3 if place + 1 < len(ops) - 1:
                    ops[place : place + 2] = ops[place + 1], ops[place]
                case 4 if rng.random() < 0.3:
                    ops[-1] = replace(ops[-1], event=None)
        return replace(template, ops=tuple(ops))

    return lambda plan: StepProgram(rebuilt(build_program(plan).template), plan)


def test_findings_of_missing_order_are_those_of_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unordered pair of random programs in the real pipeline, and none beside them."""
    monkeypatch.setattr(hazards, "MAX_FINDINGS", 10**6)
    pairs = clean = 0
    for seed in range(150):
        case = random_case(seed)
        run = frozen(run_of(case, seed, build=edited(seed, case.config.depth)), 50)
        expected = brute_force(run, case.config)
        assert pairs_of(check(run, case.config).findings) == expected, f"seed {seed}"
        pairs += expected.total()
        clean += not expected
    assert pairs > 2000
    assert clean > 20


def random_kv_run(seed: int) -> tuple[list[RunEvent], EngineConfig]:
    """Steps whose tables, offloads and restores are drawn at random, so that nearly all of them conflict."""
    rng = random.Random(seed)
    config = replace(ROOMY, depth=4, num_blocks=8, num_host_blocks=6, sliding_window=rng.choice([None, 3]))
    run: list[RunEvent] = []
    flying: list[StepProgram] = []
    for step in range(12):
        if flying and (len(flying) == 4 or rng.random() < 0.4):
            run.append(Collected(flying.pop(0)))
        rows = Rows(config)
        rows.table[:] = np.array([[rng.randint(0, 8) for _ in row] for row in rows.table])
        chunks = [(row, row, start := rng.randint(0, 9), start + rng.randint(1, 5)) for row in range(rng.randint(1, 3))]
        drawn = [copies(*((rng.randint(1, 8), rng.randint(1, 6)) for _ in range(2))) for _ in range(2)]
        offload, restore = (copy if rng.random() < 0.4 else NO_COPIES for copy in drawn)
        plan = row_plan(step, step % 4, chunks, offload=offload, restore=restore)
        program = build_program(plan)
        if rng.random() < 0.3:
            program = edited(seed, 4)(plan)
        run += [Planned(plan, rows), Launched(program)]
        flying.append(program)
    return run, config


def test_findings_over_kv_are_those_of_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazards, "MAX_FINDINGS", 10**6)
    total = {("kv",): 0, ("host_kv",): 0}
    for seed in range(100):
        run, config = random_kv_run(seed)
        expected = brute_force(run, config)
        assert pairs_of(check(run, config).findings) == expected, f"seed {seed}"
        for (_, _, memory), count in expected.items():  # type: ignore[misc]
            if memory in total:
                total[memory] += count
    assert min(total.values()) > 50


def test_redundant_edges_are_those_of_the_book() -> None:
    """An edge is redundant if the run without it has no unordered pair either."""
    redundant = needed = 0
    for seed in range(200):
        case = random_case(seed, num_host_blocks=20)
        run = frozen(run_of(case, seed, build=edited(seed, case.config.depth)), 40)
        if brute_force(run, case.config):
            continue
        report = check(run, case.config)
        edges = {
            edge for event in run if isinstance(event, Launched) for _, edge in named(event.program.template) if edge
        }
        expected = {edge for edge in edges if not brute_force(run, case.config, edge)}
        assert set(report.redundant) == expected, f"seed {seed}"
        assert set(report.needed) == edges - expected
        redundant += len(expected)
        needed += len(edges - expected)
    assert redundant > 20
    assert needed > 100


# ---- memory ------------------------------------------------------------------------------------------


def long_run(steps: int, depth: int, build: Build = build_program) -> Iterable[RunEvent]:
    """Decodes of one request after another, for ever."""
    asks = [Ask((number % 5, 1, 2), 12) for number in range(steps // 4)]
    config = replace(ROOMY, depth=depth, enable_prefix_caching=True, num_blocks=16)
    for seen, event in enumerate(events(config, asks, build=build)):
        if seen >= 3 * steps:
            return
        yield event


@pytest.mark.parametrize(
    ("steps", "build"), [(20_000, build_program), (1_500, without(SYNCHRONIZE)), (1_500, without(RECORD_D2H))]
)
def test_memory_does_not_grow_with_the_run(steps: int, build: Build) -> None:
    config = replace(ROOMY, enable_prefix_caching=True, num_blocks=16)
    checker = HazardChecker(config)
    most = launched = 0
    half: list[tuple[int, int]] = []
    for event in long_run(steps, config.depth, build):
        match event:
            case Planned(plan, rows):
                checker.planned(plan, rows)
            case Launched(program):
                checker.launched(program)
                launched += 1
            case Collected(step):
                checker.collected(step)
                most = max(most, checker.num_tracked)
                half += [(most, order._memory.num_moves)] if launched == steps // 2 else []
    assert launched >= steps * 0.9
    assert most < 300
    assert most == half[-1][0]
    if build is build_program:
        assert order._memory.num_moves == half[-1][1]  # it sees nothing new, which is what makes it fast
    assert order._memory.num_moves < order.MAX_MOVES
    assert len(order._memory.situations) <= order.MAX_MOVES
    assert len(order._memory.nodes) <= 16 * order.MAX_MOVES  # a state for each edge in question


def test_only_the_first_findings_are_kept() -> None:
    report = check(events(ROOMY, SIX, build=without(WAIT_H2D)), ROOMY)
    assert len(report.findings) <= hazards.MAX_FINDINGS
    checker = HazardChecker(ROOMY)
    for event in events(ROOMY, SIX * 20, build=without(WAIT_H2D)):
        match event:
            case Planned(plan, rows):
                checker.planned(plan, rows)
            case Launched(program):
                checker.launched(program)
            case Collected(step):
                checker.collected(step)
    assert len(checker.findings) == hazards.MAX_FINDINGS
    assert checker.num_findings == checker.counts[FindingKind.UNORDERED] > hazards.MAX_FINDINGS


def test_what_one_checker_saw_does_not_change_what_another_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share what they worked out; forgotten in between or not, the answers are the same."""
    case = Case(ROOMY, SIX, 0.0)
    first = check(run_of(case, build=without(WAIT_COMPUTE)), ROOMY)
    again = check(run_of(case, build=without(WAIT_COMPUTE)), ROOMY)
    monkeypatch.setattr(order, "MAX_MOVES", 3)
    forgetful = check(run_of(case, build=without(WAIT_COMPUTE)), ROOMY)
    assert first == again == forgetful
    assert first.findings


def test_the_example_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "checking.md").read_text("utf-8")
    _, code, _, printed, *_ = re.split(r"```(?:python)?\n", text)
    exec(compile(code, "checking.md", "exec"), {})
    assert capsys.readouterr().out == printed
