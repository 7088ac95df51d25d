"""The fuzzer's accounts of blocks and rows: made at every step, and each of their conditions finds its fault.

A fault is planted in the middle of an episode, right behind a comparison that passed, so the next one must see what has
changed, whatever it takes to be unchanged.
"""

from collections.abc import Callable

import pytest

from asyncsched.fuzz import run_episode
from asyncsched.fuzz_accounts import Accounts
from asyncsched.kv import NULL_BLOCK, BlockPool
from asyncsched.request import HostCopy, Request

MOST_EPISODES = 400


class Engine:
    """What a fault may change. Answers are empty where there is nothing of the kind now."""

    def __init__(self, accounts: Accounts, in_flight: dict[int, object]) -> None:
        self.accounts = accounts
        self.in_flight = in_flight
        self.rows, self.waiting = accounts._rows, accounts._waiting
        self.pool, self.host_pool = accounts._pool, accounts._host_pool
        self.lost_rows = accounts._lost_rows

    def holding(self, least: int = 1) -> list[int]:
        """Rows with at least so many blocks."""
        rows = self.rows
        return [row for row in range(rows.capacity) if rows.num_blocks[row] - rows.freed[row] >= least]

    def set_block(self, row: int, block: int) -> None:
        """The first block of a row."""
        self.rows.table[row, self.rows.freed[row]] = block

    def taken(self) -> list[int]:
        return [row for row, owner in enumerate(self.rows.owner) if owner is not None]

    def copied(self) -> list[Request]:
        return [request for request in self.waiting if request.host_copy is not None]


def blocks_of(pool: BlockPool, owners: int) -> list[int]:
    """With so many owners."""
    return [block for block, count in enumerate(pool._owners) if count == owners]


Plant = Callable[[Engine], bool]  # False where there is nothing to spoil


# ---- blocks in one state each ----------------------------------------------------------------------------------------


def leak(pool: BlockPool) -> bool:
    return bool(pool._free) and bool(pool._free.pop())


def free_twice(pool: BlockPool) -> bool:
    if len(pool._free) < 2:
        return False
    pool._free[0] = pool._free[-1]  # as many as before
    return True


def free_and_held(pool: BlockPool) -> bool:
    held = blocks_of(pool, 1)
    if not pool._free or not held:
        return False
    pool._free[0] = held[0]
    return True


def free_and_fenced(pool: BlockPool) -> bool:
    if not pool._free or not pool._fenced:
        return False
    pool._free[0] = next(iter(pool._fenced))
    return True


def free_and_cached(pool: BlockPool) -> bool:
    if not pool._free or not pool._cached:
        return False
    pool._free[0] = next(iter(pool._cached))
    return True


def cached_and_held(pool: BlockPool) -> bool:
    held = [block for block in blocks_of(pool, 1) if block in pool._hash_of]
    if not held or not pool._cached:
        return False
    del pool._cached[next(iter(pool._cached))]
    pool._cached[held[0]] = None
    return True


def cached_too(pool: BlockPool) -> bool:
    if not pool._free:
        return False
    pool._cached[pool._free[0]] = None
    return True


def cached_is_lost(pool: BlockPool) -> bool:
    if not pool._cached:
        return False
    del pool._cached[next(iter(pool._cached))]
    return True


def null_block_is_free(pool: BlockPool) -> bool:
    if not pool._free:
        return False
    pool._free[0] = NULL_BLOCK
    return True


def block_beyond_the_pool_is_free(pool: BlockPool) -> bool:
    if not pool._free:
        return False
    pool._free[0] = pool.num_blocks + 1
    return True


def null_block_is_cached(pool: BlockPool) -> bool:
    if not pool._cached:
        return False
    del pool._cached[next(iter(pool._cached))]
    pool._cached[NULL_BLOCK] = None
    return True


def fenced_too(pool: BlockPool) -> bool:
    if not pool._free:
        return False
    pool._fenced.add(pool._free[0])
    return True


def fenced_is_lost(pool: BlockPool) -> bool:
    return bool(pool._fenced) and bool(pool._fenced.pop())


# ---- owners ----------------------------------------------------------------------------------------------------------


def owner_too_many(pool: BlockPool) -> bool:
    held = blocks_of(pool, 1)
    if held:
        pool._owners[held[-1]] += 1
    return bool(held)


def sharer_too_few(pool: BlockPool) -> bool:
    shared = blocks_of(pool, 2)
    if shared:
        pool._owners[shared[-1]] -= 1
    return bool(shared)


def owner_of_a_free_block(pool: BlockPool) -> bool:
    if pool._free:
        pool._owners[pool._free[-1]] = 1
    return bool(pool._free)


def less_than_no_owner(pool: BlockPool) -> bool:
    if pool._free:
        pool._owners[pool._free[-1]] = -1
    return bool(pool._free)


def no_owner(pool: BlockPool) -> bool:
    held = blocks_of(pool, 1)
    if held:
        pool._owners[held[0]] = 0
    return bool(held)


def owner_of_the_null_block(pool: BlockPool) -> bool:
    pool._owners[NULL_BLOCK] = 1
    return True


# ---- names and fences ------------------------------------------------------------------------------------------------


def cached_without_content(pool: BlockPool) -> bool:
    if not pool._cached:
        return False
    del pool._block_of[pool._hash_of.pop(next(iter(pool._cached)))]
    return True


def content_without_block(pool: BlockPool) -> bool:
    pool._block_of[b"nobody's"] = 1
    return True


def block_keeps_content(pool: BlockPool) -> bool:
    pool._hash_of[NULL_BLOCK] = b"nobody's"
    return True


# ---- fences, tables and rows -----------------------------------------------------------------------------------------


def fence_of_no_step(pool: BlockPool) -> bool:
    if not pool._fences:
        return False
    pool._fences[10**6] = pool._fences.pop(next(iter(pool._fences)))
    return True


def fence_of_nothing(pool: BlockPool) -> bool:
    pool._fences[10**6] = []
    return True


def fences_what_is_not_fenced(pool: BlockPool) -> bool:
    if not pool._fences or not pool._free:
        return False
    next(iter(pool._fences.values())).append(pool._free[0])
    return True


def step_left(engine: Engine) -> bool:
    """A step that still fences blocks is in flight no more; nothing else has changed."""
    step = next((step for step in engine.pool._fences if step in engine.in_flight), None)
    if step is not None:
        del engine.in_flight[step]
    return step is not None


def table_has_block_of_another(engine: Engine) -> bool:
    if not (rows := engine.holding()) or not engine.pool._free:
        return False
    engine.set_block(rows[0], engine.pool._free[0])
    return True


def tables_are_swapped(engine: Engine) -> bool:
    """Two rows with differently shared blocks: the same blocks, and other owners."""
    shared = blocks_of(engine.pool, 2)
    for row in engine.holding(2):
        blocks = engine.rows.blocks_of(row)
        if blocks[0] in shared and blocks[-1] not in shared:
            engine.set_block(row, blocks[-1])
            return True
    return False


def table_has_the_null_block(engine: Engine) -> bool:
    for row in engine.holding():
        engine.set_block(row, NULL_BLOCK)
        return True
    return False


def table_has(block: int) -> Plant:
    def plant(engine: Engine) -> bool:
        for row in engine.holding():
            engine.set_block(row, block)
            return True
        return False

    return plant


def table_lost_its_tail(engine: Engine) -> bool:
    for row in engine.holding(2):
        engine.rows.num_blocks[row] -= 1
        return True
    return False


def table_lost_its_head(engine: Engine) -> bool:
    for row in engine.holding(2):
        engine.rows.freed[row] += 1
        return True
    return False


def table_lost_everything(engine: Engine) -> bool:
    rows = engine.holding()
    if rows:
        engine.rows.num_blocks[rows[0]] = 0
    return bool(rows)


def table_has_more(engine: Engine) -> bool:
    rows = engine.rows
    for row in engine.holding():
        if rows.num_blocks[row] < rows.table.shape[1]:
            rows.num_blocks[row] += 1
            return True
    return False


def copy_is_lost(engine: Engine) -> bool:
    for request in engine.copied():
        request.host_copy = None
        return True
    return False


def copy_has_block_of_another(engine: Engine) -> bool:
    for request in engine.copied():
        if engine.host_pool._free:
            assert request.host_copy is not None
            request.host_copy.blocks[0] = engine.host_pool._free[0]  # the same list as before
            return True
    return False


def copy_has_the_null_block(engine: Engine) -> bool:
    for request in engine.copied():
        assert request.host_copy is not None
        request.host_copy.blocks[-1] = NULL_BLOCK
        return True
    return False


def copy_of_nothing_held(engine: Engine) -> bool:
    for request in engine.waiting:
        if request.host_copy is None and engine.host_pool._free:
            request.host_copy = HostCopy([engine.host_pool._free[0]], 0, 1, 0)
            return True
    return False


def row_is_free_twice(engine: Engine) -> bool:
    free = engine.rows._free
    if len(free) < 2:
        return False
    free[0] = free[1]
    return True


def row_is_free_and_taken(engine: Engine) -> bool:
    free, taken = engine.rows._free, engine.taken()
    if not free or not taken:
        return False
    free[0] = taken[0]
    return True


def row_is_free_and_lost(engine: Engine) -> bool:
    free = engine.rows._free
    if free:
        engine.lost_rows.add(free[0])
    return bool(free)


def row_is_nowhere(engine: Engine) -> bool:
    return bool(engine.rows._free) and engine.rows._free.pop() >= 0


def lost_row_comes_back(engine: Engine) -> bool:
    for row in engine.lost_rows.difference(engine.taken()):
        engine.lost_rows.discard(row)
        return True
    return False


def row_lost_its_owner(engine: Engine) -> bool:
    taken = engine.taken()
    if taken:
        engine.rows.owner[taken[0]] = None
    return bool(taken)


def owner_has_another_row(engine: Engine) -> bool:
    taken = engine.taken()
    if taken:
        owner = engine.rows.owner[taken[0]]
        assert owner is not None
        owner.row += 1
    return bool(taken)


def owners_are_swapped(engine: Engine) -> bool:
    owners, taken = engine.rows.owner, engine.taken()
    if len(taken) < 2:
        return False
    owners[taken[0]], owners[taken[1]] = owners[taken[1]], owners[taken[0]]
    return True


def ownerless_row_holds_blocks(engine: Engine) -> bool:
    """The row is free, as it should be without an owner."""
    rows = engine.rows
    for row in engine.holding():
        if row not in engine.lost_rows and rows.owner[row] is not None:
            rows.owner[row] = None
            rows._free.append(row)
            return True
    return False


def block_moves_to_an_ownerless_row(engine: Engine) -> bool:
    """Pools and owners stay as they are."""
    rows = engine.rows
    for row in engine.holding(2):
        for other in rows._free:
            if not rows.num_blocks[other] and not rows.freed[other]:
                rows.num_blocks[row] -= 1
                rows.table[other, 0] = rows.table[row, rows.num_blocks[row]]
                rows.num_blocks[other] = 1
                return True
    return False


COUNTS, STATES, OWNERS, FENCES, NAMES = (
    "are not",
    "are in two states at once, or the null block is owned",
    "and tables and copies say",
    "which is not in flight",
    "contents have a block",
)
OF_A_POOL: dict[str, tuple[Callable[[BlockPool], bool], str]] = {
    "leak": (leak, COUNTS),
    "cached is lost": (cached_is_lost, COUNTS),
    "cached too": (cached_too, COUNTS),
    "fenced too": (fenced_too, COUNTS),
    "fenced is lost": (fenced_is_lost, COUNTS),
    "free twice": (free_twice, STATES),
    "free and held": (free_and_held, STATES),
    "free and fenced": (free_and_fenced, STATES),
    "free and cached": (free_and_cached, STATES),
    "cached and held": (cached_and_held, STATES),
    "null block is free": (null_block_is_free, STATES),
    "null block is cached": (null_block_is_cached, STATES),
    "a block beyond the pool is free": (block_beyond_the_pool_is_free, STATES),
    "owner too many": (owner_too_many, OWNERS),
    "sharer too few": (sharer_too_few, OWNERS),
    "owner of a free block": (owner_of_a_free_block, OWNERS),
    "less than no owner": (less_than_no_owner, OWNERS),
    "no owner": (no_owner, OWNERS),
    "owner of the null block": (owner_of_the_null_block, OWNERS),
    "cached without content": (cached_without_content, NAMES),
    "content without block": (content_without_block, NAMES),
    "block keeps content": (block_keeps_content, NAMES),
    "fence of no step": (fence_of_no_step, FENCES),
    "fence of nothing": (fence_of_nothing, FENCES),
    "fences what is not fenced": (fences_what_is_not_fenced, FENCES),
}
ONLY_ON_THE_DEVICE = (  # the host pool has no cached blocks, and nobody shares its blocks
    "cached is lost",
    "free and cached",
    "cached and held",
    "null block is cached",
    "sharer too few",
    "cached without content",
)
OF_AN_ENGINE: dict[str, tuple[Plant, str]] = {
    "step left": (step_left, FENCES),
    "table has block of another": (table_has_block_of_another, STATES),
    "tables are swapped": (tables_are_swapped, OWNERS),
    "table has the null block": (table_has_the_null_block, STATES),
    "table has a block below all": (table_has(-1), STATES),
    "table has a block beyond all": (table_has(10**6), STATES),
    "table lost its tail": (table_lost_its_tail, COUNTS),
    "table lost its head": (table_lost_its_head, COUNTS),
    "table lost everything": (table_lost_everything, COUNTS),
    "table has more": (table_has_more, COUNTS),
    "copy is lost": (copy_is_lost, COUNTS),
    "copy has block of another": (copy_has_block_of_another, STATES),
    "copy has the null block": (copy_has_the_null_block, STATES),
    "copy of nothing held": (copy_of_nothing_held, COUNTS),
    "row is free twice": (row_is_free_twice, "are free, ["),
    "row is free and taken": (row_is_free_and_taken, "are free, ["),
    "row is free and lost": (row_is_free_and_lost, "are free, ["),
    "row is nowhere": (row_is_nowhere, "are free and"),
    "lost row comes back": (lost_row_comes_back, "are free and"),
    "row lost its owner": (row_lost_its_owner, "are free and"),
    "owner has another row": (owner_has_another_row, "the owner of row"),
    "owners are swapped": (owners_are_swapped, "the owner of row"),
    "ownerless row holds blocks": (ownerless_row_holds_blocks, "hold blocks"),
    "block moves to an ownerless row": (block_moves_to_an_ownerless_row, "hold blocks"),
}


def found_after(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the accounts say of a fault, planted in the first episode and step where it can be."""
    planted: list[int] = []
    check = Accounts.check

    def spoiled(self: Accounts, in_flight: dict[int, object]) -> None:
        check(self, in_flight)
        check(self, in_flight)  # it has seen all there is
        if plant(Engine(self, in_flight)):
            planted.append(seed)
            check(self, in_flight)
            pytest.fail("the accounts say nothing of it")

    monkeypatch.setattr(Accounts, "check", spoiled)
    for seed in range(MOST_EPISODES):
        finding = run_episode(seed).finding
        if planted:
            assert finding is not None
            assert finding.check == "I3"
            return finding.message
        assert finding is None
    pytest.fail(f"there was nothing to spoil in {MOST_EPISODES} episodes")


@pytest.mark.parametrize("name", OF_A_POOL)
def test_fault_of_the_kv_pool_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, says = OF_A_POOL[name]
    found = found_after(lambda engine: plant(engine.pool), monkeypatch)
    assert found.startswith("KV blocks")
    assert says in found


@pytest.mark.parametrize("name", [name for name in OF_A_POOL if name not in ONLY_ON_THE_DEVICE])
def test_fault_of_the_host_pool_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, says = OF_A_POOL[name]
    found = found_after(lambda engine: plant(engine.host_pool), monkeypatch)
    assert found.startswith("host blocks")
    assert says in found


@pytest.mark.parametrize("name", OF_AN_ENGINE)
def test_fault_of_tables_copies_and_rows_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, says = OF_AN_ENGINE[name]
    assert says in found_after(plant, monkeypatch)


def test_accounts_are_compared_at_every_step_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    check = Accounts.check

    def counting(self: Accounts, in_flight: dict[int, object]) -> None:
        settled.append(len(in_flight))
        check(self, in_flight)

    monkeypatch.setattr(Accounts, "check", counting)
    failed = 0
    for seed in range(60):
        settled.clear()
        episode = run_episode(seed)
        assert episode.finding is None
        assert len(settled) == episode.steps + 1
        failed += episode.counts["failed_steps"]
    assert failed > 0


def test_what_has_not_changed_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what makes it cheap; that it sees what has changed is shown above."""
    calls: list[str] = []
    monkeypatch.setattr("asyncsched.fuzz_accounts.check_states", lambda name, pool, owned: calls.append(name))
    episode = run_episode(8)
    assert episode.steps > 20
    assert 0 < calls.count("KV") < episode.steps
    assert 0 < calls.count("host") < episode.steps
