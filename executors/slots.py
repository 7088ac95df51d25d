"""The buffers of one I/O slot: host inputs, device inputs, device outputs, host outputs.

Host buffers are pinned where there is a GPU, so that copies run without the host. Device outputs live here and not in a
captured graph's pool: a later graph may not overwrite what a copy still reads or a carry-over still needs.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncsched.config import EngineConfig
from asyncsched.inputs import SlotInputs
from asyncsched.plan import StepPlan
from asyncsched.rows import Rows
from executors.logprobs import num_words
from executors.sampling_layout import Features
from executors.sampling_rows import SamplingRows, SlotSampling


class DeviceInputs:
    """Views of a slot's device copy, int32, named as in `SlotInputs`."""

    def __init__(self, buffer: torch.Tensor, host: SlotInputs) -> None:
        parts = torch.split(buffer, [part.size for part in host.parts])
        self.token_ids, self.positions, self.kv_positions, self.carry = parts[:4]
        self.rows, self.query_start, self.seq_lens, self.logits_at = parts[4:8]
        self.table = parts[8].view(*host.table.shape)


class Slot:
    """Slot `index` of `config.depth`; `tokens_out`, int32[max_num_seqs], is its part of the tokens of all slots."""

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
        self.features = Features.NONE
        self._rows = rows
        self._pinned = pinned
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # host, device
        device, seqs = tokens_out.device, config.max_num_seqs
        self._device = device
        self.inputs = SlotInputs(config, rows, self._allocate)
        self.device = DeviceInputs(self._buffers[0][1], self.inputs)
        self.sampling = SlotSampling(sampling_rows, seqs, self._allocate)
        self.words = self._buffers[1][1].view(self.sampling.words.shape)
        self.resets = torch.empty(0, dtype=torch.int32, device=device)
        self._host_resets = torch.empty(0, dtype=torch.int32)
        width = num_words(sampling_rows.max_logprobs)
        self.tokens_out = tokens_out
        self.logprobs_out = torch.zeros(seqs, width, dtype=torch.int32, device=device)
        self.host_tokens = torch.zeros(seqs, dtype=torch.int32, pin_memory=pinned)
        self.host_logprobs = torch.zeros(seqs, width, dtype=torch.int32, pin_memory=pinned)

    @property
    def input_bytes(self) -> int:
        return sum(host.nbytes for host, _ in self._buffers)

    def fill(self, plan: StepPlan) -> None:
        """Host work: writes everything that the step reads."""
        self.inputs.fill(plan)
        self.features = self.sampling.fill(plan, self._rows)
        words = self.sampling.resets.words
        if len(words):
            self._grow_resets(len(words))
            self._host_resets[: len(words)] = torch.from_numpy(words)

    def copy_in(self) -> None:
        """Host inputs to the device, on the current stream."""
        for host, device in self._buffers:
            device.copy_(host, non_blocking=True)
        count = len(self.sampling.resets.words)
        if count:
            self.resets[:count].copy_(self._host_resets[:count], non_blocking=True)

    def copy_out(self, plan: StepPlan) -> None:
        """Device outputs to the host, on the current stream."""
        count = len(plan.sampled)
        self.host_tokens[:count].copy_(self.tokens_out[:count], non_blocking=True)
        if self.features & Features.LOGPROBS:
            self.host_logprobs[:count].copy_(self.logprobs_out[:count], non_blocking=True)

    def _allocate(self, count: int) -> np.ndarray:
        host = torch.zeros(count, dtype=torch.int32, pin_memory=self._pinned)
        self._buffers.append((host, torch.zeros(count, dtype=torch.int32, device=self._device)))
        return host.numpy()

    def _grow_resets(self, count: int) -> None:
        """Doubles the room for resets; the slot is free, so nothing on the device touches the old room."""
        if count > self._host_resets.numel():
            room = max(count, 2 * self._host_resets.numel(), 4096)
            self._host_resets = torch.zeros(room, dtype=torch.int32, pin_memory=self._pinned)
            self.resets = torch.empty(room, dtype=torch.int32, device=self._device)  # no kernel: it could race
