"""The fuzzer's accounts: where every block and row is, and what steps that never came back hold for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from asyncsched.config import EngineConfig
from asyncsched.errors import AsyncschedError
from asyncsched.kv import NULL_BLOCK, BlockPool
from asyncsched.plan import StepPlan
from asyncsched.scheduler import Scheduler


class FindingError(AsyncschedError):
    """A check failed. `check` names it: an invariant, or what went wrong."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check
        self.message = message


def fail(check: str, message: str) -> NoReturn:
    raise FindingError(check, message)


class Quarantine:
    """What the steps that never came back may still touch, in the checker's own view.

    blocks, host_blocks  that nobody may get any more
    losable              device blocks that may be kept back: those, what else the requests of the steps had, and
                         what somebody gave up while the steps were in flight
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        self.slots: set[int] = set()
        self.rows: set[int] = set()
        self.blocks: set[int] = set()
        self.host_blocks: set[int] = set()
        self.losable: set[int] = set()
        self._size = config.block_size
        self._state = scheduler.rows
        self._pool = scheduler.residency.pool

    def add(self, plan: StepPlan) -> None:
        """The step never came back. Before the scheduler knows."""
        rows, size = self._state, self._size
        self.slots.add(plan.slot)
        self.rows.update(plan.rows.tolist())
        for row, start, end in zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True):
            written = rows.table[row, start // size : -(-end // size)].tolist()
            self.losable.update(written)  # by a row that gave its blocks up, too: nobody may have them yet
            if rows.live[row] and rows.num_blocks[row]:
                self.blocks.update(written)
                self.losable.update(rows.blocks_of(row))
        self.losable.update(block for block, step in enumerate(self._pool._last_use) if step >= plan.step)
        self.blocks.update(plan.restore.device.tolist(), plan.offload.device.tolist())
        self.host_blocks.update(plan.offload.host.tolist(), plan.restore.host.tolist())
        self.blocks.discard(NULL_BLOCK)
        self.losable |= self.blocks

    def check(self, plan: StepPlan) -> None:
        """A later plan uses nothing of it."""
        if plan.slot in self.slots:
            fail("quarantine", f"step {plan.step} uses slot {plan.slot}, which a step that never came back holds")
        rows, size = self._state, self._size
        for row, start, end in zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True):
            if row in self.rows:
                fail("quarantine", f"step {plan.step} uses row {row}, which a step that never came back may touch")
            written = rows.table[row, start // size : -(-end // size)].tolist()
            if not self.blocks.isdisjoint(written):
                fail("quarantine", f"step {plan.step} writes blocks {written}, which a step that never came back may")
        if not self.blocks.isdisjoint(plan.restore.device.tolist()):
            fail("quarantine", f"step {plan.step} restores to blocks that a step that never came back may touch")
        if not self.host_blocks.isdisjoint(plan.offload.host.tolist()):
            fail("quarantine", f"step {plan.step} offloads to blocks that a step that never came back may touch")


def check_accounts(scheduler: Scheduler, in_flight: Iterable[int], lost_rows: set[int]) -> None:
    """Blocks and rows: each in one state, with the owners that tables and host copies say (I3)."""
    rows, residency = scheduler.rows, scheduler.residency
    have, freed = rows.num_blocks.tolist(), rows.freed.tolist()
    holding = [row for row, count in enumerate(have) if count]
    owners = Counter(block for row in holding for block in rows.table[row, freed[row] : have[row]].tolist())
    check_pool("KV", residency.pool, owners, in_flight)
    copies = [request.host_copy.blocks for request in scheduler._waiting if request.host_copy is not None]
    check_pool("host", residency.host_pool, Counter(b for blocks in copies for b in blocks), in_flight)
    taken = {row for row, owner in enumerate(rows.owner) if owner is not None}
    free = rows._free
    if len(set(free)) != len(free) or not taken.isdisjoint(free) or not lost_rows.isdisjoint(free):
        fail("I3", f"rows {free} are free, {sorted(taken)} taken, {sorted(lost_rows)} lost")
    if len(taken | lost_rows) + len(free) != rows.capacity:
        fail("I3", f"of {rows.capacity} rows {len(free)} are free and {len(taken | lost_rows)} taken or lost")
    if any(owner.row != row for row, owner in enumerate(rows.owner) if owner is not None):
        fail("I3", "a row's owner has another row")
    if not taken.issuperset(holding):
        fail("I3", f"rows {holding} hold blocks, {sorted(taken)} have an owner")


def check_eviction(scheduler: Scheduler) -> None:
    """Somebody is about to be evicted: the step needs more blocks than are free or on their way."""
    rows, pool, size = scheduler.rows, scheduler.residency.pool, scheduler.config.block_size
    room = len(pool._free) + len(pool._cached) + sum(map(len, pool._fences.values()))

    def lacks_block(row: int) -> bool:
        return int(rows.planned[row]) // size >= int(rows.num_blocks[row])

    decodes = sum(map(lacks_block, scheduler._decode[: scheduler.config.max_num_batched_tokens].tolist()))
    prefills = any(lacks_block(request.row) for request in scheduler._prefilling)  # one after the other, a block each
    if room >= max(decodes, prefills):
        fail("eviction", f"needless: {room} blocks are free or on their way, {decodes} rows lack one to decode")


def check_pool(name: str, pool: BlockPool, owners: Counter[int], in_flight: Iterable[int]) -> None:
    """free + cached + held + fenced = all; each block is one of them and has the owners that tables and copies say."""
    free, cached, fenced = pool._free, pool._cached, pool._fenced
    held = {block for block, count in enumerate(pool._owners) if count}
    if len(free) + len(cached) + len(held) + len(fenced) != pool.num_blocks:
        fail(
            "I3",
            f"{name} blocks: {len(free)} free + {len(cached)} cached + {len(held)} held + {len(fenced)} fenced "
            f"are not {pool.num_blocks}",
        )
    if len(held.union(free, cached, fenced)) != pool.num_blocks or NULL_BLOCK in owners:
        fail("I3", f"{name} blocks are in two states at once, or the null block is owned")
    if dict(owners) != {block: pool._owners[block] for block in held}:
        fail("I3", f"{name} blocks have other owners than tables say: {dict(owners)}")
    for step, blocks in pool._fences.items():
        if step not in in_flight or not fenced.issuperset(blocks):
            fail("I3", f"{name} blocks {blocks} are fenced by step {step}, which is not in flight")
    if not pool._hash_of.keys() >= cached.keys() or len(pool._hash_of) != len(pool._block_of):
        fail("I3", f"{name} blocks: {len(pool._hash_of)} have a content, {len(pool._block_of)} contents have a block")
