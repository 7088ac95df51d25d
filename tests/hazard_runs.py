"""Runs for the hazard checker: the real pipeline over an executor that makes tokens up, and hand-made programs.

A run is a generator of the checker's events, so that block tables are read at the moment they mean. `brute_force` is
happens-before by the book, for small runs: one graph over all operations, all pairs, all positions.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from asyncsched.accesses import Memory, Spot
from asyncsched.clocks import Edge
from asyncsched.config import EngineConfig
from asyncsched.findings import Finding, FindingKind
from asyncsched.flights import Where
from asyncsched.hazards import Collected, Launched, Planned, RunEvent
from asyncsched.pipeline import Abort, Collect, Idle, Inbox, Launch, Submit, pipeline
from asyncsched.plan import NO_COPIES, NO_SOURCE, BlockCopies, StepPlan
from asyncsched.program import Buffer, BufferKind, Event, Lane, Op, OpKind, StepProgram, Template, build_program
from asyncsched.request import SamplingParams
from asyncsched.rows import Rows
from asyncsched.scheduler import Scheduler

VOCABULARY = 5  # so small that stop tokens and shared prefixes happen
Build = Callable[[StepPlan], StepProgram]


class Ask(NamedTuple):
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[int, ...] = ()


# ---- the pipeline --------------------------------------------------------------------------------------------------


def events(
    config: EngineConfig,
    asks: Sequence[Ask],
    *,
    seed: int = 0,
    build: Build = build_program,
    prepare: Callable[[Scheduler], None] = lambda scheduler: None,
    aborts: float = 0.0,
    collect_late: bool = False,
) -> Iterator[RunEvent]:
    """What a driver sees. `collect_late`: the host refills a slot before it collects the step that had it."""
    rng = np.random.default_rng(seed)
    scheduler, inbox = Scheduler(config), Inbox()
    prepare(scheduler)
    for number, ask in enumerate(asks):
        params = SamplingParams(max_tokens=ask.max_tokens, stop_token_ids=ask.stop)
        inbox.put(Submit(str(number), np.array(ask.prompt, dtype=np.int32), params))
    loop, reply = pipeline(scheduler, inbox), None
    late: deque[RunEvent] = deque()
    while True:
        try:
            effect = loop.send(reply)
        except StopIteration:
            yield from late
            return
        reply = None
        match effect:
            case Launch(program):
                program = build(program.plan)
                yield Planned(program.plan, scheduler.rows)
                yield Launched(program)
                yield from late
                late.clear()
                reply = program
            case Collect(ticket, plan):
                collected = Collected(ticket)  # type: ignore[arg-type]
                if collect_late:
                    late.append(collected)
                else:
                    yield collected
                reply = rng.integers(0, VOCABULARY, len(plan.sampled), dtype=np.int32)
                if rng.random() < aborts and not inbox.closed:
                    inbox.put(Abort(str(int(rng.integers(len(asks))))))
            case Idle():
                inbox.close()


class Case(NamedTuple):
    config: EngineConfig
    asks: tuple[Ask, ...]
    aborts: float


def random_case(seed: int, **fixed: object) -> Case:
    """A small, tight engine and a workload with common prefixes; `fixed` are settings that every case has."""
    rng = random.Random(seed)
    size, family = rng.choice([1, 2, 3, 4, 8]), [rng.randrange(VOCABULARY) for _ in range(20)]
    asks = []
    for _ in range(rng.randint(3, 12)):
        length = rng.randint(1, 16)
        common = rng.randint(0, length)
        prompt = (*family[:common], *(rng.randrange(VOCABULARY) for _ in range(length - common)))
        asks.append(Ask(prompt, rng.randint(1, 14), tuple(rng.sample(range(VOCABULARY), rng.randint(0, 1)))))
    most = max(len(ask.prompt) + ask.max_tokens for ask in asks)
    depth = int(str(fixed.get("depth", rng.randint(1, 4))))
    seqs = rng.choice([2, 3, 4, 6])
    values: dict[str, object] = {
        "depth": depth,
        "batching": rng.choice(["continuous", "static"]) if depth == 1 else "continuous",
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.choice([1, 2, 4, 8, 16, 64]),
        "max_model_len": 32,
        "block_size": size,
        "num_blocks": -(-most // size) + rng.choice([0, 0, 1, 2, 3, 5, 9]),
        "enable_prefix_caching": rng.random() < 0.5,
        "enable_chunked_prefill": rng.random() < 0.7,
        "sliding_window": rng.choice([None, None, None, 1, 3, 7]),
        "decode_buckets": rng.choice([(), (1, 2), (seqs,)]),
        "admission": rng.choice(["fcfs", "priority", "shortest-prompt"]),
        "victim": rng.choice(["latest-arrival", "lowest-priority", "least-progress"]),
        "reservation": rng.choice(["optimistic", "optimistic", "worst-case"]),
        "preemption": rng.choice(["recompute", "offload"]),
        "num_host_blocks": rng.choice([4, 20, 100]),
    }
    config = EngineConfig(**{**values, **fixed})  # type: ignore[arg-type]
    return Case(config, tuple(asks), rng.choice([0.0, 0.0, 0.1]))


def run_of(case: Case, seed: int = 0, **options: object) -> Iterator[RunEvent]:
    return events(case.config, case.asks, seed=seed, aborts=case.aborts, **options)  # type: ignore[arg-type]


# ---- programs taken apart ------------------------------------------------------------------------------------------


def changed(change: Callable[[Op], Iterable[Op]]) -> Build:
    """A `build_program` in which every operation is replaced by what `change` makes of it."""

    @cache
    def rebuilt(template: Template) -> Template:
        ops = tuple(new for op in template.ops for new in change(op))
        return replace(template, ops=ops)

    def build(plan: StepPlan) -> StepProgram:
        program = build_program(plan)
        return StepProgram(rebuilt(program.template), plan)

    return build


def without(edge: Edge) -> Build:
    """Programs without one edge. A synchronize still reads, but waits for nothing."""

    @cache
    def rebuilt(template: Template) -> Template:
        ops, seen = [], 0
        for op in template.ops:
            if op.event is not None and Edge(op.lane, op.kind, op.event.kind) == edge._replace(nth=0):
                seen += 1
                if seen == edge.nth + 1:
                    if op.kind is OpKind.SYNCHRONIZE:
                        ops.append(replace(op, event=None))
                    continue
            ops.append(op)
        return replace(template, ops=tuple(ops))

    def build(plan: StepPlan) -> StepProgram:
        program = build_program(plan)
        return StepProgram(rebuilt(program.template), plan)

    return build


# ---- hand-made programs --------------------------------------------------------------------------------------------

NONE = np.zeros(0, dtype=np.int64)


def bare_plan(
    step: int, slot: int = 0, *, offload: BlockCopies = NO_COPIES, restore: BlockCopies = NO_COPIES
) -> StepPlan:
    """A plan without rows."""
    return StepPlan(step, slot, NONE, NONE, NONE, NONE, 0, NONE, NONE, NONE, NONE, 0, 0, offload, restore)


def row_plan(
    step: int,
    slot: int,
    rows: Sequence[tuple[int, int, int, int]],
    *,
    carry: Sequence[int] = (),
    offload: BlockCopies = NO_COPIES,
    restore: BlockCopies = NO_COPIES,
) -> StepPlan:
    """A plan of rows (row, request, start, end), all of which sample; the first ones decode, with this carry-over."""
    row, request, start, end = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    mask = np.array(carry, dtype=np.int64)
    tokens = int((end - start).sum())
    return StepPlan(
        step,
        slot,
        row,
        request,
        start,
        end,
        len(mask),
        mask,
        row,
        end,
        np.arange(len(row)),
        tokens,
        0,
        offload,
        restore,
    )


def copies(*pairs: tuple[int, int]) -> BlockCopies:
    device, host = zip(*pairs, strict=True)
    return BlockCopies(np.array(device, dtype=np.int64), np.array(host, dtype=np.int64))


def played(programs: Iterable[StepProgram | int], rows: Rows) -> Iterator[RunEvent]:
    """Programs are planned and launched in order; a number collects that step."""
    launched = {}
    for item in programs:
        if isinstance(item, int):
            yield Collected(launched[item])
        else:
            launched[item.plan.step] = item
            yield Planned(item.plan, rows)
            yield Launched(item)


# ---- by the book ---------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    where: Where
    touched: dict[tuple[object, ...], bool]  # elements, and whether they are written
    before: int  # bits of the operations that are over when this one starts


def brute_force(run: Iterable[RunEvent], config: EngineConfig, without: Edge | None = None) -> Counter[object]:
    """Every unordered conflicting pair of operations and the memory they meet in, counted."""
    nodes: list[Node] = []
    newest: dict[Lane, int] = {}
    records: dict[Event, int] = {}
    tables: dict[int, np.ndarray] = {}

    def enqueue(program: StepProgram, ops: Iterable[tuple[Op, Edge | None]]) -> None:
        for op, edge in ops:
            before = 0
            after = [newest.get(op.lane), newest.get(Lane.HOST)]
            if op.event is not None and op.kind is not OpKind.RECORD and edge != without:
                after.append(records.get(op.event))
            for node in after:
                if node is not None:
                    before |= nodes[node].before | 1 << node
            if op.event is not None and op.kind is OpKind.RECORD and edge != without:
                records[op.event] = len(nodes)
            where = Where(program.plan.step, program.template.slot, op.lane, op.kind)
            newest[op.lane] = len(nodes)
            nodes.append(Node(where, elements(program.plan, op, tables[program.plan.step], config), before))

    for event in run:
        match event:
            case Planned(plan, rows):
                tables[plan.step] = rows.table[plan.rows].copy()
            case Launched(program):
                enqueue(program, named(program.template)[: len(program.template.launched)])
            case Collected(program):
                assert isinstance(program, StepProgram)
                enqueue(program, named(program.template)[len(program.template.launched) :])
    found: Counter[object] = Counter()
    for later in range(len(nodes)):
        for earlier in range(later):
            if not nodes[later].before >> earlier & 1:
                one, other = nodes[earlier].touched, nodes[later].touched
                met = [element for element in one.keys() & other.keys() if one[element] or other[element]]
                for memory in {element[:2] if len(element) == 2 else element[:1] for element in met}:
                    found[nodes[earlier].where, nodes[later].where, memory] += 1
    return found


def named(template: Template) -> list[tuple[Op, Edge | None]]:
    """Operations with their names as edges."""
    seen: Counter[Edge] = Counter()
    result: list[tuple[Op, Edge | None]] = []
    for op in template.ops:
        edge = Edge(op.lane, op.kind, op.event.kind) if op.event else None
        result.append((op, edge._replace(nth=seen[edge]) if edge else None))
        if edge:
            seen[edge] += 1
    return result


def elements(plan: StepPlan, op: Op, table: np.ndarray, config: EngineConfig) -> dict[tuple[object, ...], bool]:
    touched: dict[tuple[object, ...], bool] = {}
    for writes, buffers in ((False, op.reads), (True, op.writes)):
        for buffer in buffers:
            for element in of_buffer(plan, buffer, table, config):
                touched[element] = touched.get(element, False) or writes
    return touched


def of_buffer(plan: StepPlan, buffer: Buffer, table: np.ndarray, config: EngineConfig) -> list[tuple[object, ...]]:
    size, window, kind = config.block_size, config.sliding_window, buffer.kind
    blocks = {
        BufferKind.KV_OFFLOADED: ("kv", plan.offload.device),
        BufferKind.HOST_KV_OFFLOADED: ("host_kv", plan.offload.host),
        BufferKind.KV_RESTORED: ("kv", plan.restore.device),
        BufferKind.HOST_KV_RESTORED: ("host_kv", plan.restore.host),
    }
    if kind in blocks:
        memory, which = blocks[kind]
        return [(memory, block, offset) for block in which.tolist() for offset in range(size)]
    if kind is BufferKind.CARRY_SOURCES:
        return [("dev_out", source // config.max_num_seqs) for source in plan.carry.tolist() if source != NO_SOURCE]
    if kind not in (BufferKind.KV_READ, BufferKind.KV_WRITTEN):
        return [(kind.value, buffer.slot)]
    found: list[tuple[object, ...]] = []
    for place, (start, end) in enumerate(zip(plan.starts.tolist(), plan.ends.tolist(), strict=True)):
        first = start
        if kind is BufferKind.KV_READ:
            first = 0 if window is None else max(0, start - window + 1)
        for position in range(first, end):
            block = int(table[place, position // size])
            if block:
                found.append(("kv", block, position % size))
    return found


def pairs_of(findings: Iterable[Finding]) -> Counter[object]:
    """Findings of missing order as `brute_force` counts them."""
    unordered = [finding for finding in findings if finding.kind is FindingKind.UNORDERED]
    return Counter((f.earlier, f.later, memory_of(f)) for f in unordered)


def memory_of(finding: Finding) -> tuple[object, ...]:
    """A slot's buffer, or KV at large."""
    assert isinstance(finding.place, Spot)
    memory, unit, _ = finding.place
    return (memory.value,) if memory in (Memory.KV, Memory.HOST_KV) else (memory.value, unit)


class Frozen(NamedTuple):
    """What a checker reads of the scheduler's rows, as it was."""

    table: np.ndarray
    known: np.ndarray
    tokens: np.ndarray


def frozen(run: Iterable[RunEvent], most: int) -> list[RunEvent]:
    """The first events of a run, to be checked several times."""
    kept: list[RunEvent] = []
    for event in run:
        if len(kept) == most:
            break
        if isinstance(event, Planned):
            rows = Frozen(event.rows.table.copy(), event.rows.known.copy(), event.rows.tokens.copy())
            event = Planned(event.plan, rows)  # type: ignore[arg-type]
        kept.append(event)
    return kept
