"""Planted faults of carry-over and of the arrays of a step: wrong slot, row, batch, position, length or block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mutants.catalogue import Mutant, around, rewrite

SEAL = "scheduler.Scheduler._seal"
SOURCE = "r.source[sampled] = self._slot_base[slot][: len(sampled)]"
FILL = "inputs.SlotInputs._fill_decodes"
MASK = "self.carry[:count] = plan.carry"
CHUNKS = "inputs.SlotInputs._fill_chunks"
PAD = "inputs.SlotInputs._pad"
PAD_TOKENS = "inputs.SlotInputs._pad_mixed"


def overlapping_regions(init: Callable[..., None]) -> Callable[..., None]:
    """The ring of sampled tokens has too few places for a slot."""

    def changed(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._slot_base = [slot * (self.config.max_num_seqs - 1) + self._arange for slot in range(self.config.depth)]

    return changed


INPUTS = (
    Mutant(
        "carry-over from the wrong slot",
        (rewrite(SEAL, (SOURCE, "r.source[sampled] = self._slot_base[slot - 1][: len(sampled)]")),),
        "plain",
    ),
    Mutant(
        "carry-over from the next row",
        (rewrite(SEAL, (SOURCE, SOURCE.replace("[: len(sampled)]", "[1 : len(sampled) + 1]"))),),
        "plain",
    ),
    Mutant(
        "carry-over from a batch too old",
        (
            rewrite(
                SEAL,
                (
                    f"r.sampled_at[sampled] = step\n    {SOURCE}",
                    "fresh = r.sampled_at[sampled] <= self._settled\n    r.sampled_at[sampled] = step\n"
                    "    r.source[sampled[fresh]] = self._slot_base[slot][: len(sampled)][fresh]",
                ),
            ),
        ),
        "deep",
    ),
    Mutant(
        "carry-over from the step before, whoever was in it",
        (
            rewrite(
                SEAL,
                (
                    "carry = r.source[rows]",
                    "carry = self._slot_base[slot - 1][0] + r.source[rows] % self.config.max_num_seqs",
                ),
            ),
        ),
        "03-skipped-then-planned-again",
        3,
    ),
    Mutant(
        "the oldest step in flight counts as collected",
        (rewrite(SEAL, ("r.sampled_at[rows] <= np.array(self._settled)", "r.sampled_at[rows] <= self._settled + 1")),),
        "plain",
    ),
    Mutant(
        "a ring of sampled tokens wraps over what is pending",
        (around("scheduler.Scheduler.__init__", overlapping_regions),),
        "12-ring-of-tokens-wraps",
        12,
    ),
    Mutant("no carry-over mask", (rewrite(FILL, (MASK, "pass")),), "plain", 21),
    Mutant(
        "the placeholder is one off",
        (rewrite(FILL, (MASK, "self.carry[0] = -1; self.carry[1 : count + 1] = plan.carry")),),
        "plain",
    ),
    Mutant(
        "positions are one off",
        (rewrite(FILL, ("self.positions[:count] = positions", "self.positions[:count] = positions + 1")),),
        "plain",
    ),
    Mutant(
        "KV goes to the position before",
        (rewrite(FILL, ("state.offset_of[positions]", "np.maximum(state.offset_of[positions] - 1, 0)")),),
        "plain",
    ),
    Mutant(
        "positions of a prefill are one off",
        (rewrite(CHUNKS, ("self._ramp[start:end]", "self._ramp[start + 1 : end + 1]")),),
        "plain",
    ),
    Mutant(
        "KV of a prefill goes to the position before",
        (rewrite(CHUNKS, ("state.offset_of[start:end]", "np.maximum(state.offset_of[start:end] - 1, 0)")),),
        "plain",
    ),
    Mutant(
        "lengths are one short",
        (rewrite("inputs.SlotInputs.fill", ("= plan.ends", "= np.maximum(plan.ends - 1, 1)")),),
        "plain",
    ),
    Mutant(
        "offsets of the last mixed step stay",
        (rewrite(CHUNKS, ("self._decode_rows = None", "pass")),),
        "a prefill ends between decodes",
    ),
    Mutant(
        "rows that decoded last time stay",
        (rewrite("inputs.SlotInputs.fill", ("plan.rows is not self._decode_rows", "self._decode_rows is None")),),
        "decodes around a prefill",
    ),
    Mutant(
        "padding rows write to a real block",
        (rewrite(PAD, ("= NULL_BLOCK", "= self._state.block_size")),),
        "19-padding-row-in-a-full-pool",
        19,
    ),
    Mutant(
        "padding rows are what was there before",
        (rewrite(PAD, ("if bucket > n:", "if False:")),),
        "19-padding-row-in-a-full-pool",
        19,
    ),
    Mutant(
        "steps are never padded",
        (around("config.smallest_bucket", lambda bucket: lambda buckets, size: 0),),
        "19-padding-row-in-a-full-pool",
        19,
    ),
    Mutant(
        "padding tokens of a captured step write to a real block",
        (rewrite(PAD_TOKENS, ("kv_positions[padding] = NULL_BLOCK", "kv_positions[padding] = self._block_size")),),
        "padding tokens in a full pool",
    ),
    Mutant(
        "a captured step keeps the number of sequences of the one before",
        (rewrite(CHUNKS, ("self.counts[:] =", "counts =")),),
        "padding tokens in a full pool",
    ),
    Mutant(
        "no step is padded to a number of tokens",
        (rewrite("scheduler.Scheduler._seal", ("smallest_bucket(self.config.mixed_buckets, num_tokens)", "0")),),
        "padding tokens in a full pool",
    ),
)
