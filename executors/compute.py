"""What runs on the compute lane: carry-over, forward pass, sampling; and copies of KV blocks for the copy lanes.

A step that is padded to a bucket runs as one captured CUDA graph per (slot, bucket, sampling features). In the graph
of a decode bucket every row is a sequence; in that of a mixed bucket, the device reads which sequences decode and which
prefill. The first step of a shape runs kernel by kernel, as padded as all others: what happens when a kernel is loaded
must not happen in a capture. Its graphs are captured when they are next needed, which costs the host what an eager step
does, once per slot; or before the first request, where somebody said what requests will ask for. All graphs share a
memory pool, because they run one after the other on one lane.

Where a step cannot be captured, because its forward pass waits for the device, it and all that are not captured yet run
kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache

import torch

from asyncsched.config import EngineConfig
from asyncsched.inputs import Buckets
from asyncsched.plan import NO_SOURCE, StepPlan
from executors import few_rows
from executors.garbage import nothing_is_collected
from executors.kv_cache import KvCache
from executors.models import Model
from executors.sampling import sample
from executors.sampling_layout import Features
from executors.sampling_state import SamplerState
from executors.slots import Slot
from executors.step_view import StepView
from executors.streams import Stream

# A row gets the same token from any superset of its features, so a few sets serve all, and few graphs are captured.
CUTS = Features.MIN_P | Features.TOP_K | Features.TOP_P
VARIANTS = (0, int(Features.RANDOM), Features.RANDOM | CUTS, Features.ALL & ~Features.LOGPROBS, int(Features.ALL))

GraphKey = tuple[int, Buckets, int]


@cache
def variant(features: int) -> int:
    """The smallest variant that computes what is asked."""
    return next(found for found in VARIANTS if features & ~found == 0)


class ComputeLane:
    """One model, its KV cache and its sampler. `tokens_out` is int32[depth, max_num_seqs], a row per slot."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        kv: KvCache,
        sampler: SamplerState,
        tokens_out: torch.Tensor,
        *,
        graphs: bool,
    ) -> None:
        self.config = config
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.tokens_out = tokens_out
        self._all_tokens = tokens_out.view(-1)
        self._use_graphs = graphs
        self._has_run: set[tuple[Buckets, int]] = set()  # shapes of padded steps
        self.refusal = ""  # why padded steps are not captured
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._host_keys: tuple[torch.Tensor, ...] = ()
        self._host_values: tuple[torch.Tensor, ...] = ()

    def carry(self, stream: Stream, slot: Slot, plan: StepPlan) -> None:
        """Completes the inputs: changes of block tables, and the tokens that earlier steps in flight sample."""
        if not self._is_padded(plan):
            with stream.on():
                self._complete(slot, plan.num_tokens, plan.num_decodes)

    def forward(self, stream: Stream, slot: Slot, plan: StepPlan) -> None:
        """Resets, forward pass and sampling; writes KV and the slot's outputs."""
        if not plan.num_tokens:
            return
        features, buckets = variant(slot.features), (plan.bucket, plan.mixed_bucket)
        graph = None if len(slot.sampling.resets.words) else self._graphs.get((slot.index, buckets, features))
        if graph is None:
            with stream.on():
                self._prepare(slot, features)
                if not self._is_padded(plan):
                    self._run(slot, self._view(slot, plan), len(plan.sampled), features)
                    return
                graph = self._graph(slot, buckets, features)
                if graph is None:
                    self._run_padded(slot, buckets, features)
                    self._has_run.add((buckets, features))
                    return
        stream.replay(graph)

    @property
    def shapes(self) -> list[Buckets]:
        """Of the steps that run as graphs, beginning with the smallest decode step."""
        if not self._use_graphs:
            return []
        mixed = self.config.mixed_buckets if self.model.backend.captures_mixed else ()
        return [(size, 0) for size in self.config.decode_buckets] + [(0, size) for size in mixed]

    def capture(self, stream: Stream, slots: Sequence[Slot], shapes: Sequence[Buckets], features: int) -> str:
        """Runs each shape once and captures it in each slot, while there is no request yet and inputs are zeros.

        Where the model cannot be captured, graphs are off; returns why.
        """
        features = variant(features)
        for buckets in shapes:
            for slot in slots:
                with stream.on():
                    self.sampler.allocate(features)
                    if (buckets, features) not in self._has_run:
                        self._run_padded(slot, buckets, features)
                        self._has_run.add((buckets, features))
                    self._graph(slot, buckets, features)
        return self.refusal

    def offload(self, stream: Stream, plan: StepPlan) -> None:
        """KV blocks to pinned host memory."""
        self._allocate_host_pool()
        with stream.on():
            for device, host in zip(plan.offload.device.tolist(), plan.offload.host.tolist(), strict=True):
                for on_device, on_host in self._pools():
                    on_host[host].copy_(on_device[device], non_blocking=True)

    def restore(self, stream: Stream, plan: StepPlan) -> None:
        """KV blocks from pinned host memory."""
        with stream.on():
            for device, host in zip(plan.restore.device.tolist(), plan.restore.host.tolist(), strict=True):
                for on_device, on_host in self._pools():
                    on_device[device].copy_(on_host[host], non_blocking=True)

    # ---- one step --------------------------------------------------------------------------------------------------

    def _prepare(self, slot: Slot, features: int) -> None:
        """What no graph does, on the current stream."""
        resets = slot.sampling.resets
        if len(resets.words):
            self.sampler.reset(slot.resets, resets)
        self.sampler.allocate(features)

    def _complete(self, slot: Slot, num_tokens: int, num_decodes: int) -> None:
        if self.tokens_out.is_cuda:
            from executors import triton_inputs  # there is no Triton where there is no GPU

            triton_inputs.complete(slot.device, self._all_tokens, slot.ids, num_tokens)
            return
        slot.device.apply_changes()
        if num_decodes:
            self._carry(slot, num_decodes)

    @torch.no_grad()  # here and not around what replays a graph: it costs the host microseconds
    def _carry(self, slot: Slot, count: int) -> None:
        source = slot.device.carry[:count]
        carried = self._all_tokens.index_select(0, source.clamp(min=0))
        tokens = slot.device.token_ids[:count]
        carried = carried.clamp(min=0)  # a row whose logits were no numbers: it fails when it is collected
        torch.where(source != NO_SOURCE, carried, tokens, out=tokens)

    @torch.no_grad()
    def _run(self, slot: Slot, view: StepView, num_samples: int, features: int) -> None:
        with few_rows.alike() if self.config.batch_invariant else nullcontext():
            logits = self.model.forward(view, self.kv)
        if not num_samples:
            return
        sampled = sample(logits, slot.words[:num_samples], self.sampler, features, slot.tokens_out[:num_samples])
        if sampled.logprobs is not None:
            slot.logprobs_out[:num_samples].copy_(sampled.logprobs)

    def _view(self, slot: Slot, plan: StepPlan) -> StepView:
        return self._slice(
            slot,
            num_tokens=plan.num_tokens,
            num_seqs=plan.num_seqs,
            num_samples=len(plan.sampled),
            max_query_len=int((plan.ends - plan.starts).max()),
            max_seq_len=int(plan.ends.max()),
            num_decodes=plan.num_decodes,
        )

    def _slice(
        self,
        slot: Slot,
        *,
        num_tokens: int,
        num_seqs: int,
        num_samples: int,
        max_query_len: int,
        max_seq_len: int,
        num_decodes: int,
        is_padded: bool = False,
        samples_all: bool = False,
    ) -> StepView:
        device = slot.device
        token_ids, positions = slot.ids if self.tokens_out.is_cuda else (device.token_ids, device.positions)
        return StepView(
            token_ids=token_ids[:num_tokens],
            positions=positions[:num_tokens],
            kv_positions=device.kv_positions[:num_tokens],
            query_start=device.query_start[: num_seqs + 1],
            seq_lens=device.seq_lens[:num_seqs],
            rows=device.rows[:num_seqs],
            table=device.table,
            logits_at=device.logits_at[:num_samples],
            counts=device.counts,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            is_decode=num_decodes == num_seqs and not is_padded,
            num_decodes=num_decodes,
            is_padded=is_padded,
            samples_all=samples_all,
        )

    # ---- graphs ----------------------------------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        """Captured so far, and shapes that have run once to be captured: such a step takes longer."""
        return len(self._graphs) + len(self._has_run)

    def is_captured(self, plan: StepPlan) -> bool:
        """Whether the step runs as one captured graph, unless it is the first of its shape."""
        return not self.refusal and self._is_padded(plan)

    def _is_padded(self, plan: StepPlan) -> bool:
        return self._use_graphs and (plan.bucket > 0 or (plan.mixed_bucket > 0 and self.model.backend.captures_mixed))

    def _graph(self, slot: Slot, buckets: Buckets, features: int) -> torch.cuda.CUDAGraph | None:
        """None where the shape has not run yet, or the step cannot be captured: from then on none is."""
        key = (slot.index, buckets, features)
        if (buckets, features) in self._has_run and key not in self._graphs and not self.refusal:
            try:
                self._graphs[key] = self._capture(slot, buckets, features)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # its forward pass waits for the device, or allocates by what it reads there
                self.refusal = str(error).splitlines()[0]
                logging.getLogger(__name__).warning("CUDA graphs are off from now on: %s", self.refusal)
        return self._graphs.get(key)

    def _capture(self, slot: Slot, buckets: Buckets, features: int) -> torch.cuda.CUDAGraph:
        """Records a padded step on the current stream; runs nothing. Raises what the step raises."""
        graph = torch.cuda.CUDAGraph()
        with nothing_is_collected():  # graphs of an engine that is gone, given up in a capture, would break it
            # Not `torch.cuda.graph`, which synchronizes the device and collects garbage first: steps are in flight.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run_padded(slot, buckets, features)
            except BaseException:
                with suppress(RuntimeError):  # it says that something was wrong before, and not what
                    graph.capture_end()
                self._clean_up()
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._clean_up()
                raise
        return graph

    def _clean_up(self) -> None:
        """A capture that broke off leaves torch's generator in it, and whoever draws next fails: it gets a new state.
        And it leaves the allocator sending memory to the graphs' pool, by what a graph says that is no more."""
        device = self.tokens_out.device
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            with suppress(RuntimeError):  # `capture_end` came so far
                torch._C._cuda_endAllocateToPool(device.index or 0, self._pool)

    def _run_padded(self, slot: Slot, buckets: Buckets, features: int) -> None:
        """Changes, carry-over, forward pass and sampling of whatever the slot's inputs hold, in this shape."""
        slot.use(buckets)
        bucket, mixed_bucket = buckets
        num_tokens, num_seqs = bucket or mixed_bucket, bucket or self.config.max_num_seqs
        view = self._slice(
            slot,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_samples=num_seqs,
            max_query_len=mixed_bucket or 1,
            max_seq_len=self.config.max_model_len,
            num_decodes=0 if self.config.batch_invariant else min(num_seqs, num_tokens),
            is_padded=mixed_bucket > 0,
            samples_all=bucket > 0,
        )
        self._complete(slot, num_tokens, num_tokens)
        self._run(slot, view, num_seqs, features)

    # ---- host pool -------------------------------------------------------------------------------------------------

    def _pools(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip((*self.kv.keys, *self.kv.values), (*self._host_keys, *self._host_values), strict=True))

    def _allocate_host_pool(self) -> None:
        """Pinned memory for `num_host_blocks`, when the first victim is offloaded."""
        if self._host_keys:
            return

        def like(pool: torch.Tensor) -> torch.Tensor:
            shape = (self.config.num_host_blocks + 1, *pool.shape[1:])
            return torch.empty(shape, dtype=pool.dtype, pin_memory=pool.is_cuda)

        self._host_keys = tuple(like(pool) for pool in self.kv.keys)
        self._host_values = tuple(like(pool) for pool in self.kv.values)
