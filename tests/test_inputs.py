"""Host inputs of a step, against a recomputation of every entry in plain loops; and the sizes a step is priced by."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from harness import Ask, Entry, Run, Script
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases, family_text

from asyncsched.config import EngineConfig
from asyncsched.inputs import SlotInputs
from asyncsched.kv import NULL_BLOCK
from asyncsched.plan import NO_SOURCE, StepPlan, StepShape
from asyncsched.program import StepProgram
from asyncsched.request import SamplingParams
from asyncsched.rows import PLACEHOLDER, Rows
from asyncsched.scheduler import Scheduler

CHANGES = ("changes_at", "changes_to")
ARRAYS = ("token_ids", "positions", "kv_positions", "carry", "rows", "query_start", "seq_lens", "logits_at", "counts")


class InputsRun(Run):
    """Recomputes the inputs of every step that is launched. `users`: the requests that wrote each block."""

    def __init__(self, config: EngineConfig, script: Script) -> None:
        super().__init__(config, script)
        self.users: defaultdict[int, set[int]] = defaultdict(set)
        self.on_device: dict[int, np.ndarray] = {}
        self.copied: list[bool] = []  # of each step, whether the whole table was part of it
        self.most_changes = 0

    def _launch(self, program: StepProgram) -> None:
        plan = program.plan
        known = self.scheduler.rows.known.copy()
        expected = self.expect(plan, known)
        super()._launch(program)
        inputs = self.device.host_in[plan.slot]
        for name, values in expected.items():
            assert getattr(inputs, name)[: len(values)].tolist() == values, name
        assert np.array_equal(inputs.table[:-1], self.scheduler.rows.table)
        assert np.all(inputs.table[-1] == NULL_BLOCK)
        self.copy_to_device(plan.slot, inputs)

    def copy_to_device(self, slot: int, inputs: SlotInputs) -> None:
        """What travels makes the device's table the host's, whatever the order in which changes are applied."""
        on_device = self.on_device.setdefault(slot, np.full_like(inputs.buffer, -1))
        on_device[: inputs.num_words] = inputs.buffer[: inputs.num_words]
        self.copied.append(inputs.num_words == inputs.buffer.size)
        table = on_device[-inputs.table.size :]
        order = np.random.default_rng(len(self.copied)).permutation(len(inputs.changes_at))
        table[inputs.changes_at[order]] = inputs.changes_to[order]
        assert np.array_equal(table, inputs.table.ravel())
        self.most_changes = max(self.most_changes, len(np.unique(inputs.changes_at)) - 1)

    def expect(self, plan: StepPlan, known: np.ndarray) -> dict[str, list[int]]:
        rows, size = self.scheduler.rows, self.config.block_size
        arrays: dict[str, list[int]] = {name: [] for name in ARRAYS}
        arrays["query_start"].append(0)
        sampled = plan.sampled.tolist()
        for row, number, start, end in zip(
            plan.rows.tolist(), plan.requests.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True
        ):
            for position in range(start, end):
                is_known = position < known[row]
                block = int(rows.table[row, position // size])
                self.users[block].add(number)
                token = self.lives[number].story.tokens[position] if is_known else PLACEHOLDER
                arrays["token_ids"].append(token)
                arrays["positions"].append(position)
                arrays["kv_positions"].append(block * size + position % size)
                arrays["carry"].append(NO_SOURCE if is_known else self.source(row, position))
            arrays["rows"].append(row)
            arrays["query_start"].append(len(arrays["token_ids"]))
            arrays["seq_lens"].append(end)
            if row in sampled:
                arrays["logits_at"].append(len(arrays["token_ids"]) - 1)
        for index in range(plan.num_seqs, plan.bucket):
            for name, value in (
                ("token_ids", PLACEHOLDER),
                ("positions", 0),
                ("kv_positions", 0),
                ("carry", NO_SOURCE),
            ):
                arrays[name].append(value)
            for name, value in (
                ("rows", rows.capacity),
                ("query_start", index + 1),
                ("seq_lens", 1),
                ("logits_at", index),
            ):
                arrays[name].append(value)
        decodes = 0 if self.config.batch_invariant else plan.num_decodes
        arrays["counts"] = [max(decodes, plan.bucket), max(plan.num_seqs, plan.bucket)]
        if plan.mixed_bucket:
            self.pad_mixed(arrays, plan)
        return arrays

    def pad_mixed(self, arrays: dict[str, list[int]], plan: StepPlan) -> None:
        """Tokens of nobody up to the bucket, sequences without tokens up to max_num_seqs."""
        for name, value in (("token_ids", PLACEHOLDER), ("positions", 0), ("kv_positions", 0), ("carry", NO_SOURCE)):
            arrays[name] += [value] * (plan.mixed_bucket - plan.num_tokens)
        for name, value in (("rows", self.scheduler.rows.capacity), ("query_start", plan.num_tokens), ("seq_lens", 0)):
            arrays[name] += [value] * (self.config.max_num_seqs - plan.num_seqs)
        arrays["logits_at"] += [0] * (self.config.max_num_seqs - len(plan.sampled))

    def source(self, row: int, position: int) -> int:
        """Where a step in flight leaves the token of `position`."""
        (found,) = (
            earlier.slot * self.config.max_num_seqs + index
            for earlier in self.in_flight
            for index, sample in enumerate(zip(earlier.sampled.tolist(), earlier.sampled_ends.tolist(), strict=True))
            if sample == (row, position)
        )
        return found


@settings(max_examples=120)
@given(cases(faults=False))
def test_every_entry_of_every_step_is_what_a_plain_loop_computes(case):
    InputsRun(case.config, case.script).run()


@settings(max_examples=60)
@given(
    cases(faults=False, max_num_seqs=6, max_num_batched_tokens=24, decode_buckets=(2, 4, 6), reservation="optimistic")
)
def test_every_entry_of_padded_steps(case):
    InputsRun(case.config, case.script).run()


@settings(max_examples=60)
@given(
    cases(
        faults=False,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        decode_buckets=(2,),
        mixed_buckets=(3, 8, 20),
        reservation="optimistic",
    )
)
def test_every_entry_of_steps_in_mixed_buckets(case):
    InputsRun(case.config, case.script).run()


@settings(max_examples=30)
@given(
    cases(
        faults=False,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        decode_buckets=(),
        mixed_buckets=(5, 16),
        batch_invariant=True,
        reservation="optimistic",
    )
)
def test_batch_invariant_steps_are_all_padded_and_have_no_decodes(case):
    run = InputsRun(case.config, case.script)
    run.run()
    for plan in run.plans:
        if plan.num_tokens:
            assert plan.mixed_bucket == (5 if plan.num_tokens <= 5 else 16)


def test_steps_in_mixed_buckets_occur():
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=32,
        block_size=2,
        num_blocks=64,
        decode_buckets=(2,),
        mixed_buckets=(4, 10),
    )
    asks = [Ask(name, family_text(0, 5), SamplingParams(max_tokens=9)) for name in "abcd"]
    run = InputsRun(config, [Entry(3 * number, ask) for number, ask in enumerate(asks)])
    run.run()
    kinds = {(plan.bucket, plan.mixed_bucket, plan.num_decodes > 0) for plan in run.plans}
    assert kinds == {(2, 0, True), (0, 4, True), (0, 10, True), (0, 10, False), (0, 0, True)}
    assert any("mixed bucket 10: " in line for line in run.log)


def test_mixed_padded_and_stale_steps_occur():
    """All kinds of step in one run, blocks that moved between requests included."""
    config = EngineConfig(
        depth=3,
        max_num_seqs=4,
        max_num_batched_tokens=6,
        max_model_len=32,
        block_size=2,
        num_blocks=13,
        decode_buckets=(2,),
    )
    asks = [Ask(name, family_text(0, 5), SamplingParams(max_tokens=9)) for name in "abcd"]
    run = InputsRun(config, [Entry(5 * number, ask) for number, ask in enumerate(asks)])
    run.run()
    kinds = {
        (plan.num_decodes > 0, plan.num_decodes < plan.num_seqs, plan.bucket > plan.num_seqs) for plan in run.plans
    }
    assert kinds >= {(False, True, False), (True, True, False), (True, False, True), (True, False, False)}
    assert run.evictions
    assert run.copied.count(True) > config.depth  # more than the first step of each slot: there was no room
    assert run.copied.count(False) > len(run.copied) // 2
    assert run.most_changes > 1
    assert any(len(users) > 2 for users in run.users.values())


def test_one_buffer_holds_all_arrays():
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=2, max_model_len=8, block_size=4, decode_buckets=(3,))
    asked: list[int] = []

    def allocate(count: int) -> np.ndarray:
        asked.append(count)
        return np.zeros(count, dtype=np.int32)

    rows = Rows(config)
    inputs = SlotInputs(config, rows, allocate, words_per_sample=5)
    assert asked == [inputs.buffer.size]
    for buckets, size in (((0, 0), 3), ((3, 0), 3), ((0, 2), 2)):
        inputs.use(buckets)
        arrays = [getattr(inputs, name) for name in (*CHANGES, *ARRAYS, "samples")]
        assert inputs.layout(buckets).num_words == sum(array.nbytes for array in arrays) // 4
        assert all(np.shares_memory(array, inputs.buffer) for array in arrays)
        assert {array.dtype for array in arrays[1:]} == {np.dtype(np.int32)}
        arrays.append(inputs.table)
        assert not any(np.shares_memory(a, b) for a in arrays for b in arrays if a is not b)
        assert inputs.token_ids.size == size  # the largest bucket
        assert inputs.samples.shape == (3, 5)
    assert inputs.table.shape == (rows.capacity + 1, 2)


def test_a_padded_step_copies_what_its_bucket_needs():
    config = EngineConfig(max_num_seqs=256, decode_buckets=(1, 32, 256))
    inputs = SlotInputs(config, Rows(config), words_per_sample=11)
    sizes = [4 * inputs.layout((bucket, 0)).num_words for bucket in (1, 32, 256)]
    assert sizes == [100, 2852, 22732]
    assert inputs.buffer.nbytes > 1e6  # with the block tables


def test_a_step_that_failed_resends_the_table():
    config = EngineConfig(depth=1, max_num_seqs=1, max_model_len=8, block_size=2)
    scheduler = Scheduler(config)
    inputs = SlotInputs(config, scheduler.rows)
    scheduler.submit("a", np.array([1, 2], dtype=np.int32), SamplingParams(max_tokens=6))
    whole = []
    for step in range(4):
        plan = scheduler.plan(0)
        assert plan is not None
        inputs.fill(plan)
        whole.append(inputs.num_words == inputs.buffer.size)
        if step == 1:
            inputs.resend()
        scheduler.commit(plan, np.array([3], dtype=np.int32))
    assert whole == [True, False, True, False]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    decodes, chunks = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    starts = [draw(st.integers(0, 12)) for _ in range(decodes + chunks)]
    lengths = [1] * decodes + [draw(st.integers(1, 9)) for _ in range(chunks)]
    rows = np.arange(decodes + chunks)
    first, last = np.array(starts, dtype=np.int64), np.array(starts, dtype=np.int64) + np.array(lengths, dtype=np.int64)
    carry = np.full(decodes, NO_SOURCE)
    return StepPlan(0, 0, rows, rows, first, last, decodes, carry, rows[:2], last[:2], np.arange(2), sum(lengths), 0)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 12, 99])
@settings(max_examples=60)
@given(plan=plans())
def test_sizes_of_a_step_are_sums_over_its_queries(plan, window):
    shape = StepShape.of(plan, window)
    views = [
        [range(max(0, query - window + 1) if window else 0, query + 1) for query in range(start, end)]
        for start, end in zip(plan.starts.tolist(), plan.ends.tolist(), strict=True)
    ]
    assert shape.attn_pairs == sum(len(view) for row in views for view in row)
    assert shape.kv_tokens == sum(len(set().union(*row)) for row in views)
    assert shape.num_tokens == shape.num_decodes + shape.num_prefill_tokens == sum(len(row) for row in views)
    assert (shape.num_seqs, shape.num_samples, shape.bucket) == (plan.num_seqs, len(plan.sampled), 0)
