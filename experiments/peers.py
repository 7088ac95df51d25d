"""The engines that `compare_peers.py` compares, behind one interface: `prepare` for a load, then `generate` it.

Weights are random and of the same shape, prompts and lengths are the same, decoding is greedy and goes on to the end.
`notes` say what an engine could not use.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import tempfile
import time
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PretrainedConfig,
)

from asyncsched.timeline import Span, Timeline
from executors.bench import BenchResult, run_bench
from executors.llm import LLM
from executors.models import Model
from executors.settings import compile_settings, device_of, dtype_of

WARM_UP_TOKENS = 32
BIG_BATCH = 128  # from here on a peer gives its KV cache back after a run: two of them do not fit beside the others
PEER_BLOCK = 256
FLASH = "paged|torch_varlen"  # a name with "flash" in it would be looked up in the flash-attn package

Tokens = tuple[tuple[int, ...], ...]


class Load(NamedTuple):
    """Requests that are all there from the start, each with as many tokens."""

    requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.new_tokens

    def prompts(self, vocab_size: int) -> list[list[int]]:
        random = np.random.default_rng(0)
        return [random.integers(0, vocab_size, self.prompt_tokens).tolist() for _ in range(self.requests)]


class Run(NamedTuple):
    """`tokens` where the engine's are comparable with ours."""

    wall_s: float
    tokens: Tokens | None = None


class Engine(Protocol):
    notes: str

    def prepare(self, load: Load) -> None:
        """Everything that a first run pays once: compiling, capturing, allocating."""

    def generate(self, load: Load) -> Run: ...

    def close(self) -> None: ...


def release() -> None:
    """Gives memory of what is gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Ours:
    """This project, at a depth. Spans are recorded by `profile` only: they cost the host.

    `models` are shared between engines by the caller: weights need room, and compiling takes time, once.
    """

    notes = ""

    def __init__(
        self,
        shape: PretrainedConfig,
        depth: int,
        loads: list[Load],
        device: str,
        models: dict[str, Any],
        **settings: Any,
    ) -> None:
        if "ours" not in models:
            where = device_of(device)
            models["ours"] = Model.load(
                shape,
                device=where,
                dtype=dtype_of("auto", where),
                dummy_weights=True,
                compile=compile_settings(None, where),
            )
        self.llm = LLM(
            models["ours"],
            depth=depth,
            device=device,
            **{
                "max_num_seqs": max(load.requests for load in loads),
                "max_model_len": max(load.length for load in loads),
                **settings,
            },
        )

    def prepare(self, load: Load) -> None:
        run_bench(self.llm, **load._replace(new_tokens=min(WARM_UP_TOKENS, load.new_tokens))._asdict())

    def generate(self, load: Load) -> Run:
        run = run_bench(self.llm, **load._asdict())
        return Run(run.result.wall_s, run.token_ids)

    def profile(self, load: Load) -> dict[str, Any]:
        """The same run with spans of every lane: GPU active by events, what a steady decode step takes, and the longest
        time for which the GPU had nothing to do."""
        result, spans = self.recorded(load)
        figures = {name: result.to_dict()[name] for name in ("ms_per_step", "compute_ms", "gpu_active", "host_us")}
        return {**figures, "longest_gap": longest_gap(spans)}

    def recorded(self, load: Load) -> tuple[BenchResult, list[Span]]:
        timeline = Timeline()
        self.llm.engine.executor.record(timeline)
        result = run_bench(self.llm, **load._asdict()).result
        self.llm.engine.executor.record(None)
        return result, timeline.spans

    def close(self) -> None:
        del self.llm
        release()


def longest_gap(spans: list[Span]) -> dict[str, Any]:
    """Between two steps on the compute lane: which step it ended with, and what the host did for most of it."""
    computed = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.start_ns)
    if len(computed) < 2:
        return {}
    before, after = max(pairwise(computed), key=lambda pair: pair[1].start_ns - pair[0].end_ns)

    def shared_ns(span: Span) -> int:
        return min(span.end_ns, after.start_ns) - max(span.start_ns, before.end_ns)

    beside = max((span for span in spans if span.lane == "host"), key=shared_ns)
    host = f"{beside.name} of step {beside.step}, {shared_ns(beside) / 1e6:.3f} ms"
    return {"ms": (after.start_ns - before.end_ns) / 1e6, "before_step": after.step, "host": host}


class Transformers:
    """transformers' continuous batching. `models` are shared between engines by the caller: weights need room once."""

    def __init__(self, shape: PretrainedConfig, asynchronous: bool, device: str, models: dict[str, Any]) -> None:
        self._is_cuda = device == "cuda"
        self.notes = "no flash-attn package: torch's flash kernel instead; no torch.compile (see --peer-compile)"
        if "transformers" not in models:
            AttentionInterface.register(FLASH, torch_flash)
            with torch.device(device):
                torch.manual_seed(0)
                models["transformers"] = AutoModelForCausalLM.from_config(
                    copy.deepcopy(shape),
                    dtype=torch.bfloat16 if self._is_cuda else torch.float32,
                    attn_implementation=FLASH if self._is_cuda else "paged|sdpa",
                ).eval()
        self._model = copy.copy(models["transformers"])  # the same weights, and a cached manager of its own
        self._asynchronous = asynchronous
        self._vocab_size = shape.vocab_size
        self._prepared: Load | None = None
        self.compile_level = 0

    def prepare(self, load: Load) -> None:
        if self._prepared == load:
            return
        self._model.destroy_cached_continuous_batching_manager()
        release()
        self._generate(load._replace(new_tokens=min(WARM_UP_TOKENS, load.new_tokens)), load)
        self._prepared = load

    def generate(self, load: Load) -> Run:
        self.prepare(load)
        wall = self._generate(load, load)
        if load.requests >= BIG_BATCH:
            self._model.destroy_cached_continuous_batching_manager()
            self._prepared = None
            release()
        return Run(wall)

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()
        del self._model
        release()

    def _generate(self, load: Load, room: Load) -> float:
        settings = ContinuousBatchingConfig(
            use_async_batching=self._asynchronous,
            use_cuda_graph=self._is_cuda,
            max_blocks_per_request=0,
            allow_block_sharing=False,
            block_size=PEER_BLOCK,
            num_blocks=room.requests * (-(-room.length // PEER_BLOCK) + 1),
            max_batch_tokens=min(max(room.requests * room.prompt_tokens, 1024), 8192),
            max_requests_per_batch=room.requests,
            default_compile_level=self.compile_level,
        )
        generation = GenerationConfig(do_sample=False, max_new_tokens=load.new_tokens, eos_token_id=-1, pad_token_id=0)
        prompts = load.prompts(self._vocab_size)
        if self._is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = self._model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=settings, persistent_manager=True
        )
        wall = time.perf_counter() - started
        lengths = {len(output.generated_tokens) for output in outputs.values()}
        if lengths != {load.new_tokens} or len(outputs) != load.requests:
            raise RuntimeError(f"transformers gave {len(outputs)} outputs of {sorted(lengths)} tokens, not of {load}")
        return wall


class Vllm:
    """vLLM, where it is installed."""

    notes = ""

    def __init__(self, shape: PretrainedConfig, asynchronous: bool, loads: list[Load]) -> None:
        import vllm

        self._folder = tempfile.TemporaryDirectory()
        described = copy.deepcopy(shape)
        described.architectures = ["LlamaForCausalLM"]
        described.save_pretrained(self._folder.name)
        self._vocab_size = shape.vocab_size
        self._engine = vllm.LLM(
            model=self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            async_scheduling=asynchronous,
            gpu_memory_utilization=0.4,
            max_num_seqs=max(load.requests for load in loads),
            max_model_len=max(load.length for load in loads),
        )

    def prepare(self, load: Load) -> None:
        self.generate(load._replace(new_tokens=min(WARM_UP_TOKENS, load.new_tokens)))

    def generate(self, load: Load) -> Run:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": tokens} for tokens in load.prompts(self._vocab_size)]
        params = SamplingParams(temperature=0.0, max_tokens=load.new_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self._engine.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - started
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {load.new_tokens}:
            raise RuntimeError(f"vLLM gave outputs of {sorted(lengths)} tokens, not of {load}")
        return Run(wall)

    def close(self) -> None:
        del self._engine
        self._folder.cleanup()
        release()


ENGINES = ("ours-sync", "ours-async", "transformers-sync", "transformers-async", "vllm-sync", "vllm-async")


def cannot_run(name: str, device: str) -> str:
    """Why an engine is left out; nothing where it can run."""
    if name.startswith("vllm") and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if name == "transformers-async" and device != "cuda":
        return "it needs CUDA"
    return ""


def build(
    name: str, shape: PretrainedConfig, loads: list[Load], device: str, models: dict[str, Any], peer_compile: int
) -> Engine:
    """The engine of that name, with room for each of the loads."""
    kind, mode = name.split("-")
    if kind == "ours":
        return Ours(shape, {"sync": 1, "async": 2}[mode], loads, device, models)
    if kind == "vllm":
        return Vllm(shape, mode == "async", loads)
    peer = Transformers(shape, mode == "async", device, models)
    if peer_compile:
        peer.compile_level = peer_compile
        peer.notes = f"no flash-attn package: torch's flash kernel instead; torch.compile at its level {peer_compile}"
    return peer


def torch_flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' paged flash attention, with the flash kernel that comes with torch."""
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k["full_attention"], max_seqlen_k["full_attention"]
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    output = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2).squeeze(0).contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seq_lens_q.to(torch.int32),
        cu_seq_lens_k.to(torch.int32).clone(),
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        True,
        False,
        scale=module.scaling,
    )[0]
    return output, None
