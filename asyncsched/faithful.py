"""The token-faithful executor: runs step programs on the model of oracle.py, in any order that lanes and events allow.

Every buffer is real. Filling writes the host arrays at Launch; each other operation reads and writes its buffers at the
moment it runs, and an adversary decides when that is. So a host array rewritten before its copy, a carry-over from the
wrong place, a block reused too early or an order that nothing enforces ends in other tokens. A read of KV that nobody
wrote is kept in `unwritten` as well.

Lanes run before the host's part of a launch and before it reads what it collects: nothing else that a host does is
visible to a lane, or the other way round, so these are all orders there are. What an operation takes from the plan is
what a launch bakes in: sizes, and the blocks of copies. Buffers are lists where that is faster: it is meant for small
batches.
"""

from __future__ import annotations

from itertools import chain
from operator import mul
from typing import NamedTuple

import numpy as np

from asyncsched.adversary import LANES, Adversary
from asyncsched.config import EngineConfig
from asyncsched.errors import AsyncschedError
from asyncsched.faults import COPIES, Fault, FaultKind
from asyncsched.inputs import SlotInputs
from asyncsched.kv import NULL_BLOCK
from asyncsched.lanes import DeadlockError, Lanes, Ticket
from asyncsched.oracle import UNWRITTEN, new_key, sample, weights
from asyncsched.pipeline import StepFailure
from asyncsched.plan import StepPlan
from asyncsched.program import OpKind, StepProgram, Template
from asyncsched.request import TokenArray
from asyncsched.rows import Rows

# Each operation asks whether it is one of these that raises, and a member of an Enum is slow to look up.
H2D, RESTORE, FORWARD, D2H, OFFLOAD = OpKind.H2D, OpKind.RESTORE, OpKind.FORWARD, OpKind.D2H, OpKind.OFFLOAD
NOBODY = -1  # the request of a padding row
INT32 = np.dtype(np.int32)
NO_OUTPUT = -(2**31)  # in an output buffer: nobody has written this


class IllegalAccessError(AsyncschedError):
    """An operation would touch memory outside its buffers: its inputs are not what they should be."""


class UnwrittenRead(NamedTuple):
    """A row of `step` read a position of its request that nobody wrote, or a carried token that nobody sampled."""

    step: int
    request: int
    position: int


class FaithfulExecutor:
    """The device of one engine. Drive it with `launch` and `collect`.

    lanes              what is enqueued and has not run
    kv, host_kv        keys by block and offset
    dev_out, host_out  tokens by slot
    epoch              which parameters later launches use
    unwritten          reads of what nobody wrote; those of rows that a fault has ended mean nothing
    """

    def __init__(self, config: EngineConfig, rows: Rows, adversary: Adversary, faults: tuple[Fault, ...] = ()) -> None:
        self.config = config
        self.epoch = 0
        self.unwritten: list[UnwrittenRead] = []
        size = config.block_size
        self.kv = [[UNWRITTEN] * size for _ in range(config.num_blocks + 1)]
        self.host_kv = [[UNWRITTEN] * size for _ in range(config.num_host_blocks + 1)]
        widest = max(config.max_num_seqs, *config.decode_buckets, 1)
        self.dev_out = [[NO_OUTPUT] * widest for _ in range(config.depth)]
        self.host_out = [[NO_OUTPUT] * widest for _ in range(config.depth)]
        self.host_in = [SlotInputs(config, rows) for _ in range(config.depth)]
        mirror = Rows(config)  # gives the device arrays their shape
        self.dev_in = [SlotInputs(config, mirror) for _ in range(config.depth)]
        self._weights = weights(config.max_blocks_per_seq * size)
        self._window = config.sliding_window or config.max_model_len  # which is all
        self._size = size
        self._seats = config.max_num_seqs
        self._vocab_size = config.vocab_size
        self._faults = {fault.step: fault for fault in faults}
        self.lanes = Lanes(
            adversary,
            {
                OpKind.FILL: self._fill,
                OpKind.H2D: self._h2d,
                OpKind.CARRY: self._carry,
                OpKind.FORWARD: self._forward,
                OpKind.D2H: self._d2h,
                OpKind.RESTORE: self._restore,
                OpKind.OFFLOAD: self._offload,
            },
        )

    def launch(self, program: StepProgram) -> Ticket:
        """Does the host's operations and enqueues the others."""
        template, plan = program
        ticket = Ticket(plan, self.epoch)
        self.lanes.advance()
        fault = self._faults.get(plan.step)
        if fault is not None:
            self._plant(fault, ticket, template)
            if not ticket.enqueued:
                return ticket
        self.lanes.enqueue(template, ticket)
        if fault is not None and fault.kind is FaultKind.HOST_STALL:
            self.lanes.drain()
        return ticket

    def collect(self, ticket: Ticket) -> TokenArray | StepFailure:
        """Runs what the step's last event needs; its tokens, int32[m]. Raises DeadlockError when nothing can run."""
        failure, plan, recording = ticket.failure, ticket.plan, ticket.synchronize
        if failure is not None:
            self.host_in[plan.slot].resend()
        if failure is not None and (failure.stuck or not ticket.enqueued):
            return failure
        self.lanes.advance()
        if recording is not None and not self.lanes.wait_for(recording):
            if not self.lanes.is_stalled:
                raise DeadlockError(f"step {plan.step} waits for an event that nothing will record")
            return StepFailure(f"step {plan.step} timed out", stuck=True)
        if failure is not None:
            return failure
        return np.array(self.host_out[plan.slot][: len(plan.sampled)], INT32)

    def finish(self) -> None:
        """Runs all that is left, late as it is. Nothing can be launched afterwards."""
        self.lanes.end_stalls()
        self.lanes.drain()
        self.lanes.close()

    def _plant(self, fault: Fault, ticket: Ticket, template: Template) -> None:
        """Prepares the fault of this step."""
        step, kind = fault.step, fault.kind
        if kind is FaultKind.MEMORY:
            ticket.failure = StepFailure(f"step {step}: no memory for its slot")
            ticket.enqueued = False
        elif kind is FaultKind.RAISE:
            ticket.broken = OpKind.FORWARD
            ticket.failure = StepFailure(f"step {step}: the forward pass raised")
        elif kind is FaultKind.COPY:
            wanted = COPIES[fault.where % len(COPIES)]
            ticket.broken = wanted if any(op.kind is wanted for op in template.ops) else OpKind.H2D
            ticket.failure = StepFailure(f"step {step}: the {ticket.broken.value} copy raised")
        elif kind is FaultKind.TIME_OUT:
            ticket.failure = StepFailure(f"step {step} timed out", stuck=True)
        elif kind is FaultKind.TOKEN and len(ticket.plan.sampled):
            ticket.bad_token = fault.where % len(ticket.plan.sampled), fault.value
        elif kind is FaultKind.LANE_STALL:
            self.lanes.stall(fault.where % len(LANES), fault.value, ticket)

    # ---- operations ------------------------------------------------------------------------------------------------

    def _fill(self, ticket: Ticket) -> None:
        host_in = self.host_in[ticket.plan.slot]
        host_in.fill(ticket.plan)
        ticket.num_words = host_in.num_words

    def _h2d(self, ticket: Ticket) -> None:
        if ticket.broken is H2D or ticket.broken is RESTORE:
            ticket.broken = FORWARD  # the host went no further
            return
        slot, count = ticket.plan.slot, ticket.num_words
        self.dev_in[slot].buffer[:count] = self.host_in[slot].buffer[:count]

    def _carry(self, ticket: Ticket) -> None:
        """Applies changes of block tables; overwrites placeholders by tokens that are still on the device."""
        if ticket.broken is FORWARD:
            return
        plan, dev_in = ticket.plan, self.dev_in[ticket.plan.slot]
        dev_in.use((plan.bucket, plan.mixed_bucket))
        dev_in.apply_changes()
        mask = dev_in.carry[: plan.num_tokens].tolist()
        if not mask or max(mask) < 0:
            return
        try:
            for place, source in enumerate(mask):
                if source >= 0:
                    token = self.dev_out[source // self._seats][source % self._seats]
                    if token == NO_OUTPUT:
                        request, position = plan.requests.item(place), plan.starts.item(place)
                        self.unwritten.append(UnwrittenRead(plan.step, request, position))
                    dev_in.token_ids[place] = token
        except IndexError:
            raise IllegalAccessError(f"the carry-over of step {plan.step} leaves its buffers") from None

    def _forward(self, ticket: Ticket) -> None:
        if ticket.broken is not FORWARD:
            try:
                self._compute(ticket)
            except IndexError:
                raise IllegalAccessError(f"the forward pass of step {ticket.plan.step} leaves its buffers") from None

    def _compute(self, ticket: Ticket) -> None:
        """Writes the keys of all query tokens and samples; reads nothing but the device's copies."""
        plan = ticket.plan
        dev_in, kv, size, epoch = self.dev_in[plan.slot], self.kv, self._size, ticket.epoch
        dev_in.use((plan.bucket, plan.mixed_bucket))
        num_seqs, num_tokens = dev_in.counts.item(1), plan.bucket or plan.mixed_bucket or plan.num_tokens
        tokens, positions = dev_in.token_ids[:num_tokens].tolist(), dev_in.positions[:num_tokens].tolist()
        targets, starts = dev_in.kv_positions[:num_tokens].tolist(), dev_in.query_start[: num_seqs + 1].tolist()
        rows, lengths = dev_in.rows[:num_seqs].tolist(), dev_in.seq_lens[:num_seqs].tolist()
        keys: list[int] = []
        for target in targets:  # rows run at the same time: what one writes, no other may read
            kv[target // size][target % size] = UNWRITTEN
        first = starts[0]
        for seq, row in enumerate(rows):
            last = starts[seq + 1]
            past = lengths[seq] - last + first
            digest = self._look_back(plan, seq, row, past) if past > 0 else 0
            for query in range(first, last):
                key = new_key(tokens[query], positions[query], digest, epoch)
                target = targets[query]
                kv[target // size][target % size] = key
                keys.append(key)
                if query + 1 < last:  # the next query sees this one, through the table
                    digest = self._move_on(dev_in, row, past + query - first, digest)
            first = last
        if plan.bucket > len(plan.rows) or plan.mixed_bucket > plan.num_tokens:
            kv[NULL_BLOCK] = [UNWRITTEN] * size  # whatever padding writes there, nobody may read
        out, vocab_size = self.dev_out[plan.slot], self._vocab_size
        for place, at in enumerate(dev_in.logits_at[: len(plan.sampled)].tolist()):
            out[place] = sample(keys[at], vocab_size)
        if ticket.bad_token is not None:
            out[ticket.bad_token[0]] = ticket.bad_token[1]

    def _look_back(self, plan: StepPlan, seq: int, row: int, past: int) -> int:
        """The digest of what a query at position `past` sees before it."""
        size = self._size
        seen = max(past - self._window + 1, 0)
        skipped = seen // size
        blocks = self.dev_in[plan.slot].table[row, skipped : -(-past // size)].tolist()
        history = list(chain.from_iterable(map(self.kv.__getitem__, blocks)))
        history = history[seen - skipped * size : past - skipped * size]
        if not all(history):
            request = int(plan.requests[seq]) if seq < len(plan.rows) else NOBODY
            self.unwritten.append(UnwrittenRead(plan.step, request, seen + history.index(UNWRITTEN)))
        return sum(map(mul, history, self._weights[seen:past] if seen else self._weights))

    def _move_on(self, dev_in: SlotInputs, row: int, position: int, digest: int) -> int:
        """The digest for the query after `position`: this one comes into sight, another may leave the window."""
        digest += self._term(dev_in, row, position)
        leaving = position - self._window + 1
        return digest - self._term(dev_in, row, leaving) if leaving >= 0 else digest

    def _term(self, dev_in: SlotInputs, row: int, position: int) -> int:
        column, offset = divmod(position, self._size)
        return self._weights[position] * self.kv[dev_in.table.item(row, column)][offset]

    def _d2h(self, ticket: Ticket) -> None:
        if ticket.broken is not D2H:
            slot, count = ticket.plan.slot, len(ticket.plan.sampled)
            self.host_out[slot][:count] = self.dev_out[slot][:count]

    def _offload(self, ticket: Ticket) -> None:
        if ticket.broken is not OFFLOAD:
            for device, host in zip(*ticket.plan.offload, strict=True):
                self.host_kv[host] = self.kv[device][:]

    def _restore(self, ticket: Ticket) -> None:
        if ticket.broken is not RESTORE:
            for device, host in zip(*ticket.plan.restore, strict=True):
                self.kv[device] = self.host_kv[host][:]
