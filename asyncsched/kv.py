"""The KV block pool: who owns which block, which blocks are shared, and which can be handed out now.

Every block is in exactly one state:

    free     nobody owns it and its content is worthless
    cached   nobody owns it, but it holds a committed prefix to share again; the least recently used is given up first
    held     `owners(block)` requests own it
    fenced   nobody owns it, but a copy may still touch it, until the step that the copy belongs to is collected;
             after a step that never came back, for ever

`available` counts free and cached blocks. The pool hands out ids and counts owners; it knows no request and no row.
Steps are numbers to it: fences, and the newest step that may touch a block. When a block may be reused after its owner
lets go is its caller's business. Block 0 is the null block: padding writes there, and it is never handed out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from asyncsched.request import TokenArray

NULL_BLOCK = 0
NO_STEP = -1
FOREVER = 2**63 - 1  # no step has this number


class BlockPool:
    """`num_blocks` usable blocks with ids 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # a stack: the block freed last is reused first
        self._owners = [0] * (num_blocks + 1)
        self._cached: dict[int, None] = {}  # in order of release, the oldest first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._fences: dict[int, list[int]] = {}  # by step
        self._fenced: set[int] = set()
        self._copied: dict[int, int] = {}  # held blocks that a copy may touch, and until which step
        self._last_use = [NO_STEP] * (num_blocks + 1)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    @property
    def num_coming(self) -> int:
        """Fenced blocks that will be available once steps are collected; what is in quarantine never will."""
        return sum(map(len, self._fences.values()))

    @property
    def num_usable(self) -> int:
        """Blocks that are not in quarantine, and will not be once their owners let go."""
        if not self._fenced and not self._copied:
            return self.num_blocks
        doomed = list(self._copied.values()).count(FOREVER)
        return self.num_blocks - self.num_fenced + self.num_coming - doomed

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached) - len(self._fenced)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each. Ask `available` first: too few is a bug of the caller."""
        free, owners = self._free, self._owners
        if count > len(free):
            if count > self.available:
                raise ValueError(f"{count} blocks asked for, {self.available} available")
            while len(free) < count:
                self._forget_oldest()
        split = len(free) - count
        blocks = free[split:]
        del free[split:]
        blocks.reverse()
        for block in blocks:
            owners[block] = 1
        return blocks

    def num_quiet(self, collected: int) -> int:
        """How many available blocks no step after `collected` touches."""
        return sum(self._last_use[block] <= collected for blocks in (self._free, self._cached) for block in blocks)

    def allocate_quiet(self, count: int, collected: int) -> list[int]:
        """`count` blocks that a copy may write at once, on any lane. Ask `num_quiet` first."""
        quiet = [block for block in self._free if self._last_use[block] <= collected][:count]
        spare = [block for block in self._cached if self._last_use[block] <= collected][: count - len(quiet)]
        if len(quiet) + len(spare) < count:
            raise ValueError(f"{count} quiet blocks asked for, {len(quiet) + len(spare)} available")
        for block in spare:
            del self._cached[block]
            del self._block_of[self._hash_of.pop(block)]
        taken = set(quiet)
        self._free = [block for block in self._free if block not in taken]
        for block in quiet + spare:
            self._owners[block] = 1
        return quiet + spare

    def share(self, blocks: Iterable[int]) -> None:
        """Adds an owner to blocks that `match` returned."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._cached[block]
            self._owners[block] += 1

    def release(self, blocks: Sequence[int], *, last_use: int = NO_STEP, fence: int | None = None) -> None:
        """Takes an owner from each block. The tail goes first, so that a prefix outlives what extends it.

        last_use  the newest step that may touch the blocks on the compute lane
        fence     the step whose copies touch the blocks; they are not available before `settle(fence)`, not even when
                  somebody else owns them until then
        """
        owners = self._owners
        if fence is None and not self._copied and not [block for block in blocks if owners[block] != 1]:
            self._release_sole(blocks, last_use)
            return
        for block in reversed(blocks):
            left = owners[block] - 1
            if left < 0:
                raise ValueError(f"block {block} has no owner to release")
            owners[block] = left
            self._last_use[block] = max(self._last_use[block], last_use)
            until = max(self._copied.pop(block, NO_STEP), NO_STEP if fence is None else fence)
            if left:
                if until != NO_STEP:
                    self._copied[block] = until
            elif until == NO_STEP:
                self._retire(block)
            else:
                self._fence(block, until)

    def _release_sole(self, blocks: Sequence[int], last_use: int) -> None:
        """The usual case, in short: one owner each, and no copies."""
        owners, used, named = self._owners, self._last_use, self._hash_of
        for block in blocks:
            owners[block] = 0
            if used[block] < last_use:
                used[block] = last_use
        if named:
            for block in reversed(blocks):
                self._retire(block)
        else:
            self._free.extend(reversed(blocks))

    def settle(self, step: int) -> None:
        """The step was collected: what its copies touched is available again."""
        if not self._fences and not self._copied:
            return
        for block in self._fences.pop(step, ()):
            self._fenced.remove(block)
            self._retire(block)
        if self._copied:
            self._copied = {block: until for block, until in self._copied.items() if until > step}

    def quarantine(self, step: int, blocks: Iterable[int] = ()) -> set[int]:
        """The step never came back: nobody gets its fenced blocks again, nor `blocks`, which it may still write.

        Returns those of `blocks` that somebody owns; they go when they are given up.
        """
        self._fences.pop(step, None)
        self._copied.update({block: FOREVER for block, until in self._copied.items() if until == step})
        lost = set(blocks) - {NULL_BLOCK}
        held = {block for block in lost if self._owners[block]}
        self._copied.update(dict.fromkeys(held, FOREVER))
        self._free = [block for block in self._free if block not in lost]
        self._cached = {block: None for block in self._cached if block not in lost}
        self._fences = {until: [b for b in fenced if b not in lost] for until, fenced in self._fences.items()}
        self._fenced |= lost - held
        for block in self._fenced.difference(*self._fences.values()):
            self._forget_name(block)
        return held

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of blocks, from the start, whose content is committed and equal to `hashes`."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None or block in self._fenced:
                break
            blocks.append(block)
        return blocks

    def num_unowned(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody owns: sharing them takes as many from `available`."""
        return sum(1 for block in blocks if self._owners[block] == 0)

    def num_sole(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` become available when one owner lets go."""
        return sum(1 for block in blocks if self._owners[block] == 1)

    def register(self, block: int, digest: bytes) -> None:
        """Makes a held block shareable. The first block with a content keeps the name; later ones stay private."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget_prefixes(self) -> None:
        """Drops every cached prefix, of held blocks too: what they hold no longer matches the model."""
        while self._cached:
            self._forget_oldest()
        self._hash_of.clear()
        self._block_of.clear()

    def _fence(self, block: int, until: int) -> None:
        self._fenced.add(block)
        if until != FOREVER:
            self._fences.setdefault(until, []).append(block)
        else:
            self._forget_name(block)

    def _forget_name(self, block: int) -> None:
        """Nobody shares the block again, so another one may have its content."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def _retire(self, block: int) -> None:
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _forget_oldest(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._block_of[self._hash_of.pop(block)]
        self._free.append(block)


def block_hash(parent: bytes, tokens: TokenArray) -> bytes:
    """The name of a full block: its tokens and, through `parent`, all tokens before it. Equal on every machine."""
    return hashlib.blake2b(tokens.astype("<i4", copy=False).tobytes(), key=parent, digest_size=16).digest()
