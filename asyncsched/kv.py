"""The KV block pool: who owns which block, which blocks are shared, and which can be handed out now.

Every block is in exactly one state:

    free     nobody owns it and its content is worthless
    cached   nobody owns it, but it holds a committed prefix to share again; the least recently used is given up first
    held     `owners(block)` requests own it

`available` counts free and cached blocks. The pool hands out ids and counts owners; it knows no request, no
row and no step. When a block may be reused after its owner lets go is the scheduler's business. Block 0 is
the null block: padding writes there, and it is never handed out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from asyncsched.request import TokenArray

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` usable blocks with ids 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # a stack: the block freed last is reused first
        self._owners = [0] * (num_blocks + 1)
        self._cached: dict[int, None] = {}  # in order of release, the oldest first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

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
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each. Ask `available` first: too few is a bug of the caller."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        while len(self._free) < count:
            self._forget_oldest()
        split = len(self._free) - count
        blocks = self._free[split:]
        del self._free[split:]
        blocks.reverse()
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds an owner to blocks that `match` returned."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._cached[block]
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes an owner from each block. The tail goes first, so that a prefix outlives what extends it."""
        for block in reversed(blocks):
            left = self._owners[block] - 1
            if left < 0:
                raise ValueError(f"block {block} has no owner to release")
            self._owners[block] = left
            if left == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of blocks, from the start, whose content is committed and equal to `hashes`."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
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

    def _forget_oldest(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._block_of[self._hash_of.pop(block)]
        self._free.append(block)


def block_hash(parent: bytes, tokens: TokenArray) -> bytes:
    """The name of a full block: its tokens and, through `parent`, all tokens before it. Equal on every machine."""
    return hashlib.blake2b(tokens.astype("<i4", copy=False).tobytes(), key=parent, digest_size=16).digest()
