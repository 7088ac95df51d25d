"""The one place where engine defaults live. Simulator, executors, CLI and docs read them from here.

Names follow vLLM's where one exists. The block counts are usable blocks: the null block that padding rows
write to is allocated on top of `num_blocks` and never handed out.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import Literal

from asyncsched.errors import ConfigError

Batching = Literal["continuous", "static"]

# What a machine's memory may hold; nothing real comes near.
MOST_BLOCKS = 10_000_000
MOST_BATCH_TOKENS = 2**33


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine schedules. Lengths are in tokens.

    depth                   steps in flight at most; 1 is synchronous batching, 2 is asynchronous batching
    batching                "continuous", or "static": a whole batch finishes before the next is admitted
    max_num_seqs            rows in a step, and seats in the running batch
    max_num_batched_tokens  token budget of a step
    max_model_len           longest prompt + output
    block_size              tokens in a KV block
    num_blocks              KV blocks in the pool
    enable_prefix_caching   share committed blocks between requests with equal prefixes
    enable_chunked_prefill  let a prompt be computed over several steps; off, a prompt must fit one step
    sliding_window          keys a query sees, itself included; None means all
    decode_buckets          batch sizes that pure decode steps are padded to (CUDA graphs); () means no padding
    mixed_buckets           tokens that other steps are padded to, up to the largest; () means no padding
    batch_invariant         tokens do not depend on who shares the batch: every step is padded to a mixed bucket, and
                            decode rows are computed as prefills are. That buckets agree is up to who names them
    admission               order of the queue: fcfs, priority, shortest-prompt, or module:Class
    victim                  who is preempted: latest-arrival, lowest-priority, least-progress, or module:Class
    reservation             blocks an admission must find free: optimistic, worst-case, or module:Class
    preemption              how the victim gives up its KV: recompute, offload, or module:Class
    num_host_blocks         KV blocks of pinned host memory that offload may fill; where they run out, it recomputes
    vocab_size              sampled tokens from 0 to vocab_size - 1 are valid; any other fails its request
    """

    depth: int = 2
    batching: Batching = "continuous"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    block_size: int = 16
    num_blocks: int = 8192
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = True
    sliding_window: int | None = None
    decode_buckets: tuple[int, ...] = ()
    mixed_buckets: tuple[int, ...] = ()
    batch_invariant: bool = False
    admission: str = "fcfs"
    victim: str = "latest-arrival"
    reservation: str = "optimistic"
    preemption: str = "recompute"
    num_host_blocks: int = 8192
    vocab_size: int = 2**31 - 1

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_host_blocks"):
            if isinstance(getattr(self, name), int) and getattr(self, name) > MOST_BLOCKS:
                raise ConfigError(name, getattr(self, name), f"use a whole number from 1 to {MOST_BLOCKS:,}")
        for name in (
            "depth",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_blocks",
            "num_host_blocks",
            "vocab_size",
        ):
            _require_positive_int(name, getattr(self, name))
        if self.depth * self.max_num_seqs * self.max_model_len > MOST_BATCH_TOKENS:
            sizes = {name: getattr(self, name) for name in ("depth", "max_num_seqs", "max_model_len")}
            allowed = f"{' * '.join(sizes)}, the tokens of all rows, must be at most {MOST_BATCH_TOKENS:,}"
            raise ConfigError(max(sizes, key=lambda name: sizes[name]), max(sizes.values()), allowed)
        if self.sliding_window is not None:
            _require_positive_int("sliding_window", self.sliding_window)
        if self.batching not in ("continuous", "static"):
            raise ConfigError("batching", self.batching, "use 'continuous' or 'static'")
        if self.batching == "static" and self.depth != 1:
            raise ConfigError("depth", self.depth, "static batching runs one step at a time: use 1")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "use true or false")
        for name, what in (("decode_buckets", "batch sizes"), ("mixed_buckets", "numbers of tokens")):
            buckets = getattr(self, name)
            if not isinstance(buckets, list | tuple) or not all(type(size) is int for size in buckets):
                raise ConfigError(name, buckets, f"use a list of {what}")
        if list(self.decode_buckets) != sorted(set(self.decode_buckets)) or any(
            not 1 <= b <= self.max_num_seqs for b in self.decode_buckets
        ):
            allowed = f"use increasing batch sizes from 1 to max_num_seqs {self.max_num_seqs}"
            raise ConfigError("decode_buckets", self.decode_buckets, allowed)
        if list(self.mixed_buckets) != sorted(set(self.mixed_buckets)) or any(
            not 1 <= b <= self.max_num_batched_tokens for b in self.mixed_buckets
        ):
            allowed = f"use increasing numbers of tokens from 1 to max_num_batched_tokens {self.max_num_batched_tokens}"
            raise ConfigError("mixed_buckets", self.mixed_buckets, allowed)
        largest = max(self.mixed_buckets, default=0)
        if self.batch_invariant and (self.decode_buckets or largest != self.max_num_batched_tokens):
            shapes = f"decode_buckets {self.decode_buckets} and mixed_buckets {self.mixed_buckets}"
            allowed = (
                f"every step must be padded, as one that prefills: use no decode_buckets, and mixed_buckets up to "
                f"max_num_batched_tokens {self.max_num_batched_tokens}, not {shapes}"
            )
            raise ConfigError("batch_invariant", self.batch_invariant, allowed)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table: blocks that `max_model_len` tokens take."""
        return -(-self.max_model_len // self.block_size)

    def padded(self, num_decodes: int) -> tuple[int, int]:
        """Bucket and mixed bucket of a step of so many decodes, and nothing else."""
        bucket = smallest_bucket(self.decode_buckets, num_decodes)
        return bucket, 0 if bucket else smallest_bucket(self.mixed_buckets, num_decodes)


MAX_MIXED_BUCKET = 2048  # tokens whose products take a large model longer than the host takes to launch them
FIELD_NAMES = tuple(field.name for field in fields(EngineConfig))


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, then steps of 8, then of 32; the largest is max_num_seqs."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs + 1, 32)]
    return tuple(sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs}))


def default_mixed_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Tokens to capture steps with prefills for; beyond the largest, the host keeps up anyhow."""
    sizes = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, MAX_MIXED_BUCKET + 1, 256))
    return tuple(size for size in sizes if size <= max_num_batched_tokens)


def smallest_bucket(buckets: tuple[int, ...], size: int) -> int:
    """The smallest that holds `size`; 0 where none does, or nothing is to be held."""
    if not buckets:
        return 0
    place = bisect_left(buckets, size)
    return buckets[place] if size and place < len(buckets) else 0


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(name, value, "use a whole number of at least 1")
