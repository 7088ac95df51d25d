"""The block pool against a model so naive that it is obviously right: lists, and scans where the pool has an index."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncsched.kv import FOREVER, NO_STEP, NULL_BLOCK, BlockPool, block_hash

CONTENTS = [bytes([content]) for content in range(5)]


class PoolMachine(RuleBasedStateMachine):
    """Holders own blocks as requests do: they allocate, share what matches, register, and let go of all they own.

    held      one list of blocks per holder
    free      never-used content, the next to be handed out last
    cached    released but registered, the oldest first
    fenced    released, and until which step a copy may touch them, the oldest first
    copied    held, and until which step a copy may touch them
    names     content by block
    used      newest step that may touch a block on the compute lane
    """

    @initialize(count=st.sampled_from([1, 4, 6, 9]))
    def start(self, count: int) -> None:
        self.count = count
        self.pool = BlockPool(count)
        self.step = NO_STEP  # the newest one that is collected
        self.held: list[list[int]] = []
        self.free = list(range(count, 0, -1))
        self.cached: list[int] = []
        self.fenced: dict[int, int] = {}
        self.copied: dict[int, int] = {}
        self.names: dict[int, bytes] = {}
        self.used = dict.fromkeys(range(1, count + 1), NO_STEP)

    @precondition(lambda self: self.free or self.cached)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(4, len(self.free) + len(self.cached))))
        while len(self.free) < count:
            oldest = self.cached.pop(0)
            del self.names[oldest]
            self.free.append(oldest)
        expected = [self.free.pop() for _ in range(count)]
        assert self.pool.allocate(count) == expected
        self.held.append(expected)

    @precondition(lambda self: self.quiet())
    @rule(data=st.data())
    def allocate_quiet(self, data: st.DataObject) -> None:
        quiet = self.quiet()
        expected = quiet[: data.draw(st.integers(1, min(3, len(quiet))))]
        assert self.pool.num_quiet(self.step) == len(quiet)
        assert self.pool.allocate_quiet(len(expected), self.step) == expected
        for block in expected:
            if block in self.cached:
                del self.names[block]
        self.free = [block for block in self.free if block not in expected]
        self.cached = [block for block in self.cached if block not in expected]
        self.held.append(expected)

    @rule(first=st.integers(0, len(CONTENTS) - 1), count=st.integers(1, 3))
    def match_and_share(self, first: int, count: int) -> None:
        wanted, matched = CONTENTS[first : first + count], []
        for content in wanted:
            named = [block for block, name in self.names.items() if name == content and block not in self.fenced]
            if not named:
                break
            matched += named
        assert self.pool.match(wanted) == matched
        unowned = [block for block in matched if block in self.cached]
        assert self.pool.num_unowned(matched) == len(unowned)
        self.pool.share(matched)
        self.cached = [block for block in self.cached if block not in unowned]
        self.held.append(matched)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), last_use=st.integers(0, 3), fence=st.one_of(st.none(), st.none(), st.integers(1, 3)))
    def release(self, data: st.DataObject, last_use: int, fence: int | None) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert self.pool.num_sole(blocks) == sum(self.owners(block) == 0 for block in blocks)
        newest, until = self.step + last_use, None if fence is None else self.step + fence
        self.pool.release(blocks, last_use=newest, fence=until)
        for block in reversed(blocks):
            self.used[block] = max(self.used[block], newest)
            touched = max(self.copied.pop(block, NO_STEP), NO_STEP if until is None else until)
            if touched == NO_STEP:
                if self.owners(block) == 0:
                    self.retire(block)
            else:
                (self.copied if self.owners(block) else self.fenced)[block] = touched
        self.forget_the_lost()

    @rule()
    def settle(self) -> None:
        self.step += 1
        self.pool.settle(self.step)
        for block in [block for block, until in self.fenced.items() if until == self.step]:
            del self.fenced[block]
            self.retire(block)
        self.copied = {block: until for block, until in self.copied.items() if until > self.step}

    @rule(data=st.data(), chance=st.integers(0, 5))
    def quarantine(self, data: st.DataObject, chance: int) -> None:
        if chance:  # now and then only, as it is for ever
            return
        self.step += 1
        lost = data.draw(st.sets(st.integers(NULL_BLOCK, self.count), max_size=2))
        owned = {block for block in lost if self.owners(block)}
        assert self.pool.quarantine(self.step, lost) == owned
        for touched in (self.fenced, self.copied):
            touched.update({block: FOREVER for block, until in touched.items() if until == self.step})
        self.copied.update(dict.fromkeys(owned, FOREVER))
        self.fenced.update(dict.fromkeys(lost - owned - {NULL_BLOCK}, FOREVER))
        self.free = [block for block in self.free if block not in lost]
        self.cached = [block for block in self.cached if block not in lost]
        self.forget_the_lost()

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), first=st.integers(0, len(CONTENTS) - 1))
    def register(self, data: st.DataObject, first: int) -> None:
        """A holder's blocks get the next contents in turn."""
        blocks = data.draw(st.sampled_from([blocks for blocks in self.held if blocks]))
        for block, content in zip(blocks, CONTENTS[first:], strict=False):
            self.pool.register(block, content)
            if block not in self.names and content not in self.names.values():
                self.names[block] = content

    @rule(chance=st.integers(0, 5))
    def forget_prefixes(self, chance: int) -> None:
        if chance:
            return
        self.pool.forget_prefixes()
        self.free += self.cached
        self.cached = []
        self.names = {}

    @rule(extra=st.integers(1, 3))
    def misuse(self, extra: int) -> None:
        with pytest.raises(ValueError, match="asked for"):
            self.pool.allocate(len(self.free) + len(self.cached) + extra)
        with pytest.raises(ValueError, match="asked for"):
            self.pool.allocate_quiet(len(self.quiet()) + extra, self.step)
        for block in self.free[:1] + self.cached[:1] + list(self.fenced)[:1]:
            with pytest.raises(ValueError, match="no owner"):
                self.pool.release([block])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):  # before `start`
            return
        pool, blocks = self.pool, range(1, self.count + 1)
        owners = [self.owners(block) for block in blocks]
        assert [pool.owners(block) for block in blocks] == owners
        assert pool.owners(NULL_BLOCK) == 0
        lost = sum(until == FOREVER for until in self.fenced.values())
        assert (pool.num_free, pool.num_cached) == (len(self.free), len(self.cached))
        assert (pool.num_fenced, pool.num_coming) == (len(self.fenced), len(self.fenced) - lost)
        assert pool.num_held == sum(count > 0 for count in owners)
        doomed = sum(until == FOREVER for until in self.copied.values())  # lost once their owners let go
        assert pool.num_usable == self.count - lost - doomed
        assert pool.available == len(self.free) + len(self.cached)
        assert pool.available + pool.num_held + pool.num_fenced == self.count

    def owners(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.held)

    def quiet(self) -> list[int]:
        return [block for block in self.free + self.cached if self.used[block] <= self.step]

    def forget_the_lost(self) -> None:
        """Another block may have the content of one that nobody gets again."""
        for block, until in self.fenced.items():
            if until == FOREVER:
                self.names.pop(block, None)

    def retire(self, block: int) -> None:
        (self.cached if block in self.names else self.free).append(block)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
test_pool_agrees_with_a_naive_model = PoolMachine.TestCase


def test_the_content_of_a_lost_block_is_shared_from_another():
    pool = BlockPool(4)
    lost, held, *others = pool.allocate(4)
    for block, content in ((lost, CONTENTS[0]), (held, CONTENTS[1])):
        pool.register(block, content)
    pool.release([lost])
    assert pool.quarantine(3, [lost, held]) == {held}
    assert pool.match(CONTENTS[:1]) == []
    pool.register(others[0], CONTENTS[0])
    assert pool.match(CONTENTS[:1]) == others[:1]
    pool.release([held])  # lost, too, from now on
    pool.register(others[1], CONTENTS[1])
    assert pool.match(CONTENTS[:2]) == others


def test_the_tail_of_a_prefix_is_given_up_before_its_head():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, content in zip(blocks, CONTENTS, strict=False):
        pool.register(block, content)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match(CONTENTS[:3]) == blocks[:2]


def test_a_block_hash_names_the_tokens_and_all_before_them():
    tokens = np.arange(4, dtype=np.int32)
    root = block_hash(b"", tokens)
    assert root == hashlib.blake2b(struct.pack("<4i", 0, 1, 2, 3), digest_size=16).digest()  # equal on every machine
    assert root == block_hash(b"", np.arange(8, dtype=np.int32)[:4])
    assert len({root, block_hash(root, tokens), block_hash(b"", tokens + 1), block_hash(b"", tokens[:3])}) == 4
