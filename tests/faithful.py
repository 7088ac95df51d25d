"""A token-faithful model: small enough to check by eye, and wrong in its tokens as soon as anything it reads is wrong.

There is no arithmetic in it but a hash. The KV entry of a position is a digest of its token, its position and every
entry it can see; the next token is a digest of that entry. So a wrong token, a stale block, a swapped block table, a
lost carry-over or a window off by one changes every token after it.

`tell` is the reference: one request at a time, in a plain loop. `FaithfulDevice` runs step programs and reads nothing
but the buffers the programs name. It knows no scheduler: of a plan it uses the sizes alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.inputs import SlotInputs
from asyncsched.kv import NULL_BLOCK
from asyncsched.plan import NO_SOURCE, StepPlan
from asyncsched.program import Event, Op, OpKind, StepProgram
from asyncsched.request import FinishReason, Match, SamplingParams, TokenArray
from asyncsched.rows import Rows

VOCABULARY = 5  # so small that stop tokens and stop strings happen
UNWRITTEN = 0  # no KV entry is 0
NO_OUTPUT = -1

Entries = NDArray[np.uint64]


class FaithError(AssertionError):
    """An operation read what nobody wrote, or what its program gave it no right to."""


def kv_entry(token: int, position: int, seen: Entries) -> int:
    """What `position` holds after its token was computed; `seen` are the entries before it in view, oldest first."""
    text = seen.tobytes() + struct.pack("<qq", token, position)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1


def next_token(entry: int) -> int:
    return (entry >> 20) % VOCABULARY


class StopPattern:
    """A stop matcher: ends at a sequence of tokens, and holds back the longest tail that may still become it."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self.pattern = tuple(pattern)
        self._tail: tuple[int, ...] = ()

    def feed(self, token: int) -> Match:
        self._tail = (*self._tail, token)[-len(self.pattern) :]
        if self._tail == self.pattern:
            return Match(0, True)
        beginnings = (n for n in range(len(self.pattern) - 1, 0, -1) if self._tail[-n:] == self.pattern[:n])
        return Match(next(beginnings, 0), False)


class Story(NamedTuple):
    """All that can ever happen to a request that is left alone.

    tokens      prompt and outputs up to the length limit, content stops ignored
    entries     KV entry of every position that may be computed: overshoot computes past a content stop
    outputs     what is delivered
    reason      LENGTH or STOP
    released    released[k]: outputs delivered once k + 1 are known
    """

    tokens: tuple[int, ...]
    entries: tuple[int, ...]
    outputs: tuple[int, ...]
    reason: FinishReason
    released: tuple[int, ...]


def tell(
    prompt: Sequence[int], params: SamplingParams, pattern: Sequence[int] | None, sliding_window: int | None
) -> Story:
    """The reference: one token after the other, nothing shared, nothing batched."""
    total = len(prompt) + params.max_tokens
    tokens, entries = list(prompt), np.zeros(total, dtype=np.uint64)
    for position in range(total - 1):
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        entry = kv_entry(tokens[position], position, entries[first:position])
        entries[position] = entry
        if position == len(tokens) - 1:
            tokens.append(next_token(entry))
    outputs, reason, released = _stop(tokens[len(prompt) :], params, StopPattern(pattern) if pattern else None)
    return Story(tuple(tokens), tuple(entries[:-1].tolist()), outputs, reason, released)


def _stop(
    outputs: list[int], params: SamplingParams, matcher: StopPattern | None
) -> tuple[tuple[int, ...], FinishReason, tuple[int, ...]]:
    released: list[int] = []
    for count, token in enumerate(outputs, start=1):
        match = matcher.feed(token) if matcher else Match(0, False)
        if count >= params.min_tokens and (token in params.stop_token_ids or match.stopped):
            return tuple(outputs[:count]), FinishReason.STOP, (*released, count)
        released.append(max(count - match.held, released[-1] if released else 0))  # what is out cannot be held back
    return tuple(outputs), FinishReason.LENGTH, (*released[:-1], len(outputs))


class DeviceInputs(NamedTuple):
    """The device's copy of a slot's host inputs; see SlotInputs."""

    token_ids: TokenArray
    positions: TokenArray
    kv_positions: TokenArray
    carry: TokenArray
    rows: TokenArray
    query_start: TokenArray
    seq_lens: TokenArray
    logits_at: TokenArray
    table: TokenArray

    @classmethod
    def of(cls, inputs: SlotInputs) -> DeviceInputs:
        return cls(*(getattr(inputs, name).copy() for name in cls._fields))


class FaithfulDevice:
    """Interprets step programs, each operation as soon as it is launched, in the order of the list.

    One method per kind of operation, so that another order is another caller of `execute`. Steps in
    `corrupt` write wrong KV and sample wrong tokens: their failure must reach nobody else.
    """

    def __init__(self, config: EngineConfig, rows: Rows, corrupt: Collection[int] = ()) -> None:
        self.config = config
        self.corrupt = corrupt
        samples = max(config.max_num_seqs, *config.decode_buckets, 1)
        self.host_in = [SlotInputs(config, rows) for _ in range(config.depth)]
        self.dev_in: list[DeviceInputs | None] = [None] * config.depth
        self.dev_out = np.full((config.depth, samples), NO_OUTPUT, dtype=np.int64)
        self.host_out = np.full((config.depth, samples), NO_OUTPUT, dtype=np.int64)
        self.kv: Entries = np.full((config.num_blocks + 1, config.block_size), UNWRITTEN, dtype=np.uint64)
        self.recorded: dict[Event, int] = {}
        self._run = {
            OpKind.FILL: self.fill,
            OpKind.H2D: self.h2d,
            OpKind.CARRY: self.carry,
            OpKind.FORWARD: self.forward,
            OpKind.D2H: self.d2h,
        }

    def launch(self, program: StepProgram) -> None:
        for op in program.template.launched:
            self.execute(op, program.plan)

    def collect(self, program: StepProgram) -> TokenArray:
        """The sampled tokens, copied out of the slot. What the slot held is unreadable afterwards."""
        self.execute(program.template.ops[-1], program.plan)
        slot, count = program.plan.slot, len(program.plan.sampled)
        tokens = self.host_out[slot, :count].astype(np.int32)
        _require(NO_OUTPUT not in tokens, f"step {program.plan.step} is collected before its output was copied")
        self.host_out[slot] = self.dev_out[slot] = NO_OUTPUT
        return tokens

    def execute(self, op: Op, plan: StepPlan) -> None:
        if op.kind is OpKind.RECORD:
            assert op.event is not None
            self.recorded[op.event] = plan.step
        elif op.kind in (OpKind.WAIT, OpKind.SYNCHRONIZE):
            assert op.event is not None
            _require(self.recorded.get(op.event) == plan.step, f"step {plan.step} waits for an event not recorded")
        else:
            self._run[op.kind](plan)

    def fill(self, plan: StepPlan) -> None:
        self.host_in[plan.slot].fill(plan)

    def h2d(self, plan: StepPlan) -> None:
        self.dev_in[plan.slot] = DeviceInputs.of(self.host_in[plan.slot])

    def carry(self, plan: StepPlan) -> None:
        """Replaces placeholders by tokens that other slots sampled and nobody has collected."""
        inputs = self._inputs(plan)
        for index in np.flatnonzero(inputs.carry[: plan.bucket or plan.num_tokens] != NO_SOURCE).tolist():
            slot, sample = divmod(int(inputs.carry[index]), self.config.max_num_seqs)
            token = int(self.dev_out[slot, sample])
            _require(token != NO_OUTPUT, f"step {plan.step} carries over from slot {slot}, which holds no such token")
            inputs.token_ids[index] = token

    def forward(self, plan: StepPlan) -> None:
        """Computes every sequence of the batch, padding included, and samples."""
        inputs = self._inputs(plan)
        entries = np.zeros(len(inputs.token_ids), dtype=np.uint64)
        for sequence in range(plan.bucket or plan.num_seqs):
            self._compute(inputs, sequence, entries)
        logits = entries[inputs.logits_at[: len(plan.sampled)]]
        shift = int(plan.step in self.corrupt)
        tokens = [(next_token(entry) + shift) % VOCABULARY for entry in logits.tolist()]
        self.dev_out[plan.slot] = NO_OUTPUT
        self.dev_out[plan.slot, : len(tokens)] = tokens
        if shift:
            blocks, offsets = np.divmod(inputs.kv_positions[: plan.num_tokens], self.config.block_size)
            self.kv[blocks, offsets] ^= np.uint64(1 << 40)

    def d2h(self, plan: StepPlan) -> None:
        count = len(plan.sampled)
        self.host_out[plan.slot, :count] = self.dev_out[plan.slot, :count]

    def _compute(self, inputs: DeviceInputs, sequence: int, entries: Entries) -> None:
        """The query tokens of one sequence, in order, each reading the KV before it through the block table."""
        size, window = self.config.block_size, self.config.sliding_window
        first, last = inputs.query_start[sequence : sequence + 2].tolist()
        row, length = int(inputs.rows[sequence]), int(inputs.seq_lens[sequence])
        is_padding = row == len(inputs.table) - 1
        for index in range(first, last):
            position = length - (last - index)
            _require(position == inputs.positions[index], f"token {index} is at position {position}")
            start = 0 if window is None else max(0, position - window + 1)
            columns, offsets = np.divmod(np.arange(start, position), size)
            blocks = inputs.table[row, columns]
            seen = self.kv[blocks, offsets]
            _require(UNWRITTEN not in seen, f"row {row} reads KV that was never written")
            _require(is_padding or NULL_BLOCK not in blocks, f"row {row} reads the null block")
            entry = kv_entry(int(inputs.token_ids[index]), position, seen)
            block, offset = divmod(int(inputs.kv_positions[index]), size)
            _require(is_padding == (block == NULL_BLOCK), f"row {row} writes block {block}")
            entries[index] = self.kv[block, offset] = entry

    def _inputs(self, plan: StepPlan) -> DeviceInputs:
        inputs = self.dev_in[plan.slot]
        assert inputs is not None
        return inputs


def _require(condition: object, message: str) -> None:
    if not condition:
        raise FaithError(message)
