"""The buffers of one I/O slot: host inputs, device inputs, device outputs, host outputs.

Host buffers are pinned where there is a GPU, so that copies run without the host. Nobody else notes which copies are on
their way: a slot keeps its buffers as long as it lives, and replaces what got too small only while it is free. Device
outputs live here and not in a captured graph's pool: a later graph may not overwrite what a copy still reads or a
carry-over still needs.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncsched.config import EngineConfig
from asyncsched.inputs import NOT_PADDED, Buckets, SlotInputs
from asyncsched.plan import StepPlan
from asyncsched.request import TokenArray
from asyncsched.rows import Rows
from executors.logprobs import num_words
from executors.sampling_layout import NUM_WORDS, Features
from executors.sampling_rows import SamplingRows, SlotSampling
from executors.streams import Stream, Transfer


class DeviceInputs:
    """Views of a slot's device copy as one layout has it, named as in `SlotInputs`; `words` are its samples."""

    def __init__(self, inputs: SlotInputs, buckets: Buckets, host: torch.Tensor, device: torch.Tensor) -> None:
        layout = inputs.layout(buckets)
        self.num_words = layout.num_words
        part = device[: layout.num_words]
        self.transfer = Transfer.of(part, host[: layout.num_words])
        parts = torch.split(part, layout.sizes)
        self.changes_at, self.changes_to = parts[0].view(torch.int64), parts[1]
        self.token_ids, self.positions, self.kv_positions, self.carry = parts[2:6]
        self.rows, self.query_start, self.seq_lens, self.logits_at = parts[6:10]
        self.counts = parts[10]
        self.words = parts[11].view(layout.num_seqs, NUM_WORDS)
        self.table = device[len(device) - inputs.table.size :].view(*inputs.table.shape)

    def apply_changes(self) -> None:
        """Brings the block tables up to date, on the current stream: the compute lane's, before anything reads them."""
        self.table.view(-1).index_copy_(0, self.changes_at, self.changes_to)


class Slot:
    """Slot `index` of `config.depth`; `tokens_out`, int32[max_num_seqs], is its part of the tokens of all slots.

    `device` and `words` are views of the device's copy, for the buckets of the step that was filled last.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        rows: Rows,
        sampling_rows: SamplingRows,
        tokens_out: torch.Tensor,
        *,
        pinned: bool,
    ) -> None:
        self.index = index
        self.features = 0
        self._rows = rows
        self._pinned = pinned
        seqs = config.max_num_seqs
        self._on_device = tokens_out.device
        self.inputs = SlotInputs(config, rows, self._allocate, NUM_WORDS)
        self._device = torch.zeros(self._host.numel(), dtype=torch.int32, device=self._on_device)
        self._everything = Transfer.of(self._device, self._host)
        self._layouts: dict[Buckets, DeviceInputs] = {}
        self.sampling = SlotSampling(sampling_rows, self.inputs.samples)
        self.use(NOT_PADDED)
        self.resets = torch.empty(0, dtype=torch.int32, device=self._on_device)
        self._host_resets = torch.empty(0, dtype=torch.int32)
        width = num_words(sampling_rows.max_logprobs)
        self.tokens_out = tokens_out
        # Token ids and positions as models take them, where a kernel of ours writes them.
        most_tokens = len(self.inputs.token_ids)
        self.ids = torch.zeros(2, most_tokens if tokens_out.is_cuda else 0, dtype=torch.int64, device=self._on_device)
        self.logprobs_out = torch.zeros(seqs, width, dtype=torch.int32, device=self._on_device)
        self.host_tokens = torch.zeros(seqs, dtype=torch.int32, pin_memory=pinned)
        self.host_logprobs = torch.zeros(seqs, width, dtype=torch.int32, pin_memory=pinned)
        self._read_tokens: TokenArray = self.host_tokens.numpy()
        self._outputs: dict[int, tuple[Transfer, Transfer]] = {}  # by count: tokens, and logprobs

    @property
    def input_bytes(self) -> int:
        """What the last filled step copies to the device, resets of the sampler's state aside."""
        return 4 * self.inputs.num_words

    def use(self, buckets: Buckets) -> None:
        """Names the device's arrays for steps that are padded so."""
        if buckets not in self._layouts:
            self._layouts[buckets] = DeviceInputs(self.inputs, buckets, self._host, self._device)
        self.device = self._layouts[buckets]
        self.words = self.device.words

    def fill(self, plan: StepPlan) -> None:
        """Host work: writes everything that the step reads."""
        inputs, sampling = self.inputs, self.sampling
        buckets = (plan.bucket, plan.mixed_bucket)
        if inputs.use(buckets):
            sampling.use(inputs.samples)
        self.use(buckets)
        inputs.fill(plan)
        self.features = sampling.fill(plan, self._rows)
        words = sampling.resets.words
        if len(words):
            self._grow_resets(len(words))
            self._host_resets[: len(words)] = torch.from_numpy(words)

    def copy_in(self, stream: Stream, plan: StepPlan) -> None:
        """Host inputs to the device: one copy, and a second one where rows are reset."""
        device = self.device
        stream.copy(device.transfer if self.inputs.num_words == device.num_words else self._everything)
        count = len(self.sampling.resets.words)
        if count:
            room = self._host_resets.numel()
            if self.resets.numel() < room:  # taken on this lane: what others have given up, kernels of theirs may read
                with stream.on():
                    self.resets = torch.empty(room, dtype=torch.int32, device=self._on_device)
            stream.copy(Transfer.of(self.resets[:count], self._host_resets[:count]))

    def copy_out(self, stream: Stream, plan: StepPlan) -> None:
        """Device outputs to the host."""
        count = len(plan.sampled)
        if not count:
            return
        if count not in self._outputs:
            self._outputs[count] = (
                Transfer.of(self.host_tokens[:count], self.tokens_out[:count]),
                Transfer.of(self.host_logprobs[:count], self.logprobs_out[:count]),
            )
        tokens, logprobs = self._outputs[count]
        stream.copy(tokens)
        if self.features & Features.LOGPROBS:
            stream.copy(logprobs)

    def take_tokens(self, count: int) -> TokenArray:
        """The sampled tokens of a step that is over, copied out of the slot."""
        return self._read_tokens[:count].copy()

    def _allocate(self, count: int) -> np.ndarray:
        self._host = torch.zeros(count, dtype=torch.int32, pin_memory=self._pinned)
        return self._host.numpy()

    def _grow_resets(self, count: int) -> None:
        """Doubles the host's room for resets; the slot is free, so no copy touches the old room."""
        if count > self._host_resets.numel():
            room = max(count, 2 * self._host_resets.numel(), 4096)
            self._host_resets = torch.zeros(room, dtype=torch.int32, pin_memory=self._pinned)
