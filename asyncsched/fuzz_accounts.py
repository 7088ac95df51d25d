"""The fuzzer's accounts: where every block and row is, and what steps that never came back hold for ever."""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import NoReturn

from asyncsched.config import EngineConfig
from asyncsched.errors import AsyncschedError
from asyncsched.kv import NULL_BLOCK, BlockPool
from asyncsched.plan import StepPlan
from asyncsched.request import Request
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


class Accounts:
    """Compares blocks and rows, each in one state, with the owners that tables and host copies say (I3).

    Made for every step: it keeps copies of all that a comparison read when it last passed. Where everything equals its
    copy, the comparison would say the same again.
    """

    def __init__(self, scheduler: Scheduler, lost_rows: set[int]) -> None:
        self._rows = scheduler.rows
        self._waiting = scheduler._waiting
        self._pool, self._host_pool = scheduler.residency.pool, scheduler.residency.host_pool
        self._lost_rows = lost_rows
        self._holding: list[int] = []  # rows that hold blocks
        self._tenants: list[tuple[int, Request]] = []  # rows and their owners
        self._seen: tuple[object, ...] = ()
        self._seen_on_host: tuple[object, ...] = ()
        self._seen_of_rows: tuple[object, ...] = ()

    def check(self, in_flight: Container[int]) -> None:
        """`in_flight`: steps."""
        rows, pool, host_pool = self._rows, self._pool, self._host_pool
        have, freed, table = rows.num_blocks.tobytes(), rows.freed.tobytes(), rows.table.tobytes()
        if (have, freed, table, pool._owners, pool._free, pool._cached, pool._fenced) != self._seen:
            holding, owned = self._read_tables()
            check_states("KV", pool, owned)
            self._holding = holding
            self._seen = have, freed, table, *_states(pool)
        copied: list[int] = []
        for _, _, request in self._waiting._entries:
            if request.host_copy is not None:
                copied += request.host_copy.blocks
        if (copied, host_pool._owners, host_pool._free, host_pool._cached, host_pool._fenced) != self._seen_on_host:
            check_states("host", host_pool, copied)
            self._seen_on_host = copied, *_states(host_pool)
        if pool._cached or pool._fences or len(pool._hash_of) != len(pool._block_of):
            check_names_and_fences("KV", pool, in_flight)
        if host_pool._cached or host_pool._fences or len(host_pool._hash_of) != len(host_pool._block_of):
            check_names_and_fences("host", host_pool, in_flight)
        if (rows.owner, rows._free, self._lost_rows, self._holding) != self._seen_of_rows:
            self._check_rows()
            self._seen_of_rows = rows.owner[:], rows._free[:], self._lost_rows.copy(), self._holding
        for row, tenant in self._tenants:
            if tenant.row != row:
                fail("I3", f"the owner of row {row} has row {tenant.row}")

    def _read_tables(self) -> tuple[list[int], list[int]]:
        """Rows that hold blocks, and the blocks of each, one row after the other."""
        rows = self._rows
        freed, table = rows.freed.tolist(), rows.table
        holding: list[int] = []
        owned: list[int] = []
        for row, count in enumerate(rows.num_blocks.tolist()):
            if count:
                holding.append(row)
                owned += table[row, freed[row] : count].tolist()
        return holding, owned

    def _check_rows(self) -> None:
        owners, free, lost, holding = self._rows.owner, self._rows._free, self._lost_rows, self._holding
        tenants = [(row, tenant) for row, tenant in enumerate(owners) if tenant is not None]
        taken = {row for row, _ in tenants}
        if len(set(free)) != len(free) or not taken.isdisjoint(free) or not lost.isdisjoint(free):
            fail("I3", f"rows {free} are free, {sorted(taken)} taken, {sorted(lost)} lost")
        if len(taken | lost) + len(free) != self._rows.capacity:
            fail("I3", f"of {self._rows.capacity} rows {len(free)} are free and {len(taken | lost)} taken or lost")
        if not taken.issuperset(holding):
            fail("I3", f"rows {holding} hold blocks, {sorted(taken)} have an owner")
        self._tenants = tenants


def check_states(name: str, pool: BlockPool, owned: list[int]) -> None:
    """free + cached + held + fenced = all; each block is one of them and has the owners that tables and copies say.

    `owned`: the blocks of all owners, one after the other.
    """
    free, cached, held, fenced = pool._free, pool._cached, set(owned), pool._fenced
    if len(free) + len(cached) + len(held) + len(fenced) != pool.num_blocks:
        fail(
            "I3",
            f"{name} blocks: {len(free)} free + {len(cached)} cached + {len(held)} held + {len(fenced)} fenced "
            f"are not {pool.num_blocks}",
        )
    if _all_blocks(pool.num_blocks).difference(free, cached, fenced) != held:
        fail("I3", f"{name} blocks are in two states at once, or the null block is owned")
    owners = [0] * (pool.num_blocks + 1)
    for block in owned:
        owners[block] += 1
    if owners != pool._owners:
        fail("I3", f"{name} blocks have owners {pool._owners}, and tables and copies say {owners}")


def check_names_and_fences(name: str, pool: BlockPool, in_flight: Container[int]) -> None:
    """What is cached has a content, as many contents have a block, and steps in flight fence what is fenced."""
    for step, blocks in pool._fences.items():
        if step not in in_flight or not pool._fenced.issuperset(blocks):
            fail("I3", f"{name} blocks {blocks} are fenced by step {step}, which is not in flight")
    if not pool._hash_of.keys() >= pool._cached.keys() or len(pool._hash_of) != len(pool._block_of):
        fail("I3", f"{name} blocks: {len(pool._hash_of)} have a content, {len(pool._block_of)} contents have a block")


@cache
def _all_blocks(count: int) -> frozenset[int]:
    return frozenset(range(NULL_BLOCK + 1, count + 1))


def _states(pool: BlockPool) -> tuple[object, ...]:
    """Copies."""
    return pool._owners[:], pool._free[:], pool._cached.copy(), pool._fenced.copy()


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
