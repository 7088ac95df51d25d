"""What each operation of a step takes, in integer nanoseconds of virtual time.

Parameters carry their unit in their name; what a scenario does not mention costs nothing. A cost model knows the sizes
of a step (`StepShape`) and its number, never the clock or other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import Field

from asyncsched.plan import StepShape
from sim.draws import Stream, generator, lognormal
from sim.hardware import Device, ModelShape
from sim.spec import BY_KIND, Rate, Section, Share, Time

# Inputs and outputs of a step are int32. Per token: id, position, KV position, carry-over source. Per sequence: query
# start, KV length, and the entry by which its block table grew or the row it samples from.
H2D_BYTES_PER_TOKEN = 16
H2D_BYTES_PER_SEQ = 12
D2H_BYTES_PER_SAMPLE = 4

JITTER_BLOCK = 1024  # multipliers drawn at a time


class Around(NamedTuple):
    """What a decode step takes but for its forward pass, in nanoseconds."""

    plan: int
    fill: int
    launch: int
    h2d: int
    d2h: int
    commit: int


class DecodePrices(NamedTuple):
    """Prices of consecutive decode steps: `forward` has one for each, `around` one for each or one for all of them."""

    around: Sequence[Around]
    forward: list[int]


DecodePricer = Callable[[int, int, int], DecodePrices]
"""Prices of consecutive decode steps with the same rows: given the KV positions that the first reads, its number, and
how many steps. Each reads one more position per row than the one before."""


class CostModel(Protocol):
    """Prices of one engine's steps. All results are nanoseconds."""

    def host_ns(self, kind: str, shape: StepShape, step: int) -> int:
        """Host work; `kind` is plan, fill, launch or commit."""

    def h2d_ns(self, shape: StepShape, step: int) -> int: ...

    def d2h_ns(self, shape: StepShape, step: int) -> int: ...

    def offload_ns(self, shape: StepShape, step: int) -> int:
        """KV blocks to the host, on d2h."""

    def restore_ns(self, shape: StepShape, step: int) -> int:
        """KV blocks from the host, on h2d."""

    def forward_ns(self, shape: StepShape, step: int) -> int:
        """Carry-over, forward pass and sampling."""

    def output_sync_ns(self) -> int:
        """The compute lane held, but not active, after each step."""

    def decode_pricer(self, shape: StepShape) -> DecodePricer:
        """Prices of pure decode steps with the sizes of this one, equal to those above. Its KV tokens do not matter."""


def h2d_bytes(shape: StepShape) -> int:
    """Inputs of a step."""
    return H2D_BYTES_PER_TOKEN * shape.num_tokens + H2D_BYTES_PER_SEQ * shape.num_seqs


def d2h_bytes(shape: StepShape) -> int:
    """Sampled tokens of a step."""
    return D2H_BYTES_PER_SAMPLE * shape.num_samples


class HostCosts(Section):
    """Host work of a step: kind_us + kind_us_per_seq * sequences, all times `scale` (4 is a host four times slower)."""

    scale: Time = 1.0
    plan_us: Time = 0.0
    plan_us_per_seq: Time = 0.0
    fill_us: Time = 0.0
    fill_us_per_seq: Time = 0.0
    launch_us: Time = 0.0
    commit_us: Time = 0.0
    commit_us_per_seq: Time = 0.0


class CopyCosts(Section):
    """A copy: latency + bytes / bandwidth. A bandwidth not given is the device's `pcie_gb_s` with a roofline, and
    without limit with constants. `kv_bytes_per_token` sizes offloaded KV; with a roofline it follows from the model."""

    h2d_latency_us: Time = 0.0
    h2d_gb_s: Rate | None = None
    d2h_latency_us: Time = 0.0
    d2h_gb_s: Rate | None = None
    kv_bytes_per_token: Rate | None = None


Pricer = Callable[[StepShape], float]
"""Nanoseconds of a forward pass, not rounded."""
DecodesPricer = Callable[[StepShape, float], Callable[[range], list[int]]]
"""Nanoseconds of pure decode steps with the sizes of this one, times a factor, by the KV positions that each reads."""


class ConstantGpu(Section):
    """Forward pass from constants. `us_per_kv_token` counts KV positions read, summed over sequences.

    Steps that prefill: `prefill_step_us` once, and `us_per_attn_pair` for pairs of query and key beyond one per KV
    position read.
    """

    kind: Literal["constant"]
    step_us: Time
    us_per_decode_seq: Time = 0.0
    us_per_prefill_token: Time = 0.0
    us_per_kv_token: Time = 0.0
    prefill_step_us: Time = 0.0
    us_per_attn_pair: Time = 0.0

    def pricers(self) -> tuple[Pricer, DecodesPricer]:
        step, decode = self.step_us * 1e3, self.us_per_decode_seq * 1e3
        prefill, kv = self.us_per_prefill_token * 1e3, self.us_per_kv_token * 1e3
        prefill_step, pair = self.prefill_step_us * 1e3, self.us_per_attn_pair * 1e3

        def forward_ns(shape: StepShape) -> float:
            # Rows that pad a decode batch cost as much as real ones.
            ns = (
                step
                + decode * (shape.bucket or shape.num_decodes)
                + prefill * shape.num_prefill_tokens
                + kv * shape.kv_tokens
            )
            if shape.num_prefill_tokens:
                ns += prefill_step + pair * (shape.attn_pairs - shape.kv_tokens)
            return ns

        def decodes_ns(shape: StepShape, factor: float) -> Callable[[range], list[int]]:
            even = step + decode * (shape.bucket or shape.num_decodes) + prefill * shape.num_prefill_tokens
            return lambda reads: [round((even + kv * read) * factor) for read in reads]

        return forward_ns, decodes_ns


class RooflineGpu(Section):
    """Forward pass from a model's shape and a device's limits.

    Kernels run one after the other, so each of three groups takes the longer of its memory and its compute time, and
    the groups add up: the layers' matrix products (weights read once per step; 2 operations per parameter and token),
    the head (the same, on sampled tokens only), attention (KV read and written; 4 * layers * heads * head_dim
    operations per query-key pair). Activations, norms and embedding rows are left out. With both efficiencies 1 and no
    overhead this is a floor, not a forecast.

    memory_efficiency, compute_efficiency: reached share of the device's figures.
    kernel_overhead_us: per step, for gaps and for kernels that are neither.
    """

    kind: Literal["roofline"]
    model: ModelShape
    device: Device
    memory_efficiency: Share = 1.0
    compute_efficiency: Share = 1.0
    kernel_overhead_us: Time = 0.0

    def pricers(self) -> tuple[Pricer, DecodesPricer]:
        model = self.model
        ns_per_byte = 1e-3 / (self.device.hbm_tb_s * self.memory_efficiency)
        ns_per_flop = 1e-3 / (self.device.dense_tflop_s * self.compute_efficiency)
        ns_per_weight = model.dtype_bytes * ns_per_byte
        body_memory, body_token = model.body_params * ns_per_weight, 2 * model.body_params * ns_per_flop
        head_memory, head_sample = model.head_params * ns_per_weight, 2 * model.head_params * ns_per_flop
        kv_token = model.kv_bytes_per_token * ns_per_byte
        pair = 4 * model.layers * model.num_heads * model.head_dim * ns_per_flop
        overhead = self.kernel_overhead_us * 1e3

        def products_ns(shape: StepShape) -> tuple[float, float]:
            """Of the layers, and of the head. Conditional expressions, since `max` takes twice as long."""
            tokens, samples = shape.num_tokens, shape.num_samples
            if shape.bucket:  # rows that pad a decode batch are computed like real ones, but read no KV
                tokens = samples = shape.bucket
            elif shape.mixed_bucket:
                tokens = shape.mixed_bucket
            body, head = body_token * tokens, head_sample * samples
            if not samples:
                return body_memory if body_memory > body else body, 0.0
            return body_memory if body_memory > body else body, head_memory if head_memory > head else head

        def forward_ns(shape: StepShape) -> float:
            body, head = products_ns(shape)
            moved, computed = kv_token * (shape.kv_tokens + shape.num_tokens), pair * shape.attn_pairs
            return overhead + (moved if moved > computed else computed) + body + head

        def decodes_ns(shape: StepShape, factor: float) -> Callable[[range], list[int]]:
            (body, head), n = products_ns(shape), shape.num_seqs

            def all_ns(reads: range) -> list[int]:
                attention = [
                    moved if (moved := kv_token * (read + n)) > (computed := pair * read) else computed
                    for read in reads
                ]
                return [round((overhead + ns + body + head) * factor) for ns in attention]

            return all_ns

        return forward_ns, decodes_ns


GpuCosts = Annotated[ConstantGpu | RooflineGpu, Field(discriminator="kind"), BY_KIND]


class Overlap(Section):
    """What overlapping costs; counts at depth 2 and more only.

    gpu_contention: factor on the forward pass while host and copies run beside it.
    exposed_output_sync_us: per step, the compute lane waits for the output to reach the host.
    """

    gpu_contention: Annotated[float, Field(ge=1)] = 1.0
    exposed_output_sync_us: Time = 0.0


class Jitter(Section):
    """Seeded multipliers with mean 1 on host work, copies and forward passes; sigma is that of their logarithm. The
    kind "profile" draws from what a profile measured."""

    kind: Literal["none", "lognormal", "profile"] = "none"
    host_sigma: Annotated[float, Field(ge=0, le=2)] = 0.0
    copy_sigma: Annotated[float, Field(ge=0, le=2)] = 0.0
    gpu_sigma: Annotated[float, Field(ge=0, le=2)] = 0.0


class LaneCosts:
    """The prices of a scenario's sections. Everything is worked out beforehand: a call is a few multiplications."""

    __slots__ = (
        "_contention",
        "_d2h",
        "_decodes",
        "_forward",
        "_h2d",
        "_host",
        "_offload",
        "_output_sync",
        "_restore",
    )

    def __init__(
        self,
        host: HostCosts,
        copy: CopyCosts,
        gpu: ConstantGpu | RooflineGpu,
        overlap: Overlap,
        *,
        depth: int,
        block_size: int,
    ) -> None:
        ns = 1e3 * host.scale
        self._host = {
            "plan": (host.plan_us * ns, host.plan_us_per_seq * ns),
            "fill": (host.fill_us * ns, host.fill_us_per_seq * ns),
            "launch": (host.launch_us * ns, 0.0),
            "commit": (host.commit_us * ns, host.commit_us_per_seq * ns),
        }
        link = gpu.device.pcie_gb_s if isinstance(gpu, RooflineGpu) else None
        h2d, d2h = _ns_per_byte(copy.h2d_gb_s or link), _ns_per_byte(copy.d2h_gb_s or link)
        self._h2d = (copy.h2d_latency_us * 1e3, H2D_BYTES_PER_TOKEN * h2d, H2D_BYTES_PER_SEQ * h2d)
        self._d2h = (copy.d2h_latency_us * 1e3, D2H_BYTES_PER_SAMPLE * d2h)
        kv_bytes = gpu.model.kv_bytes_per_token if isinstance(gpu, RooflineGpu) else 0.0
        block_bytes = (copy.kv_bytes_per_token or kv_bytes) * block_size
        self._offload = (copy.d2h_latency_us * 1e3, block_bytes * d2h)
        self._restore = (copy.h2d_latency_us * 1e3, block_bytes * h2d)
        self._forward, self._decodes = gpu.pricers()
        self._contention = overlap.gpu_contention if depth > 1 else 1.0
        self._output_sync = round(overlap.exposed_output_sync_us * 1e3) if depth > 1 else 0

    def host_ns(self, kind: str, shape: StepShape, step: int) -> int:
        base, per_seq = self._host[kind]
        return round(base + per_seq * shape.num_seqs)

    def h2d_ns(self, shape: StepShape, step: int) -> int:
        latency, per_token, per_seq = self._h2d
        return round(latency + per_token * shape.num_tokens + per_seq * shape.num_seqs)

    def d2h_ns(self, shape: StepShape, step: int) -> int:
        latency, per_sample = self._d2h
        return round(latency + per_sample * shape.num_samples)

    def offload_ns(self, shape: StepShape, step: int) -> int:
        latency, per_block = self._offload
        return round(latency + per_block * shape.offloaded_blocks)

    def restore_ns(self, shape: StepShape, step: int) -> int:
        latency, per_block = self._restore
        return round(latency + per_block * shape.restored_blocks)

    def forward_ns(self, shape: StepShape, step: int) -> int:
        price: float = self._forward(shape) * self._contention
        return round(price)

    def output_sync_ns(self) -> int:
        return self._output_sync

    def decode_pricer(self, shape: StepShape) -> DecodePricer:
        plan, fill, launch, commit = [self.host_ns(kind, shape, 0) for kind in _HOST_STREAMS]
        around = (Around(plan, fill, launch, self.h2d_ns(shape, 0), self.d2h_ns(shape, 0), commit),)
        n, forward_ns = shape.num_seqs, self._decodes(shape, self._contention)
        return lambda kv_tokens, step, count: DecodePrices(
            around, forward_ns(range(kv_tokens, kv_tokens + n * count, n))
        )


class JitteredCosts:
    """Another model's prices times a multiplier per (seed, replica, operation, step), in whatever order asked for."""

    __slots__ = ("_blocks", "_costs", "_replica", "_seed", "_sigmas")

    def __init__(self, costs: CostModel, jitter: Jitter, seed: int, replica: int = 0) -> None:
        self._costs = costs
        self._seed = seed
        self._replica = replica
        self._sigmas = dict.fromkeys(_HOST_STREAMS.values(), jitter.host_sigma)
        copies = (Stream.H2D, Stream.D2H, Stream.OFFLOAD, Stream.RESTORE)
        self._sigmas |= dict.fromkeys(copies, jitter.copy_sigma) | {Stream.FORWARD: jitter.gpu_sigma}
        self._blocks: dict[Stream, tuple[int, list[float]]] = dict.fromkeys(self._sigmas, (-1, []))

    def host_ns(self, kind: str, shape: StepShape, step: int) -> int:
        return round(self._costs.host_ns(kind, shape, step) * self._multiplier(_HOST_STREAMS[kind], step))

    def h2d_ns(self, shape: StepShape, step: int) -> int:
        return round(self._costs.h2d_ns(shape, step) * self._multiplier(Stream.H2D, step))

    def d2h_ns(self, shape: StepShape, step: int) -> int:
        return round(self._costs.d2h_ns(shape, step) * self._multiplier(Stream.D2H, step))

    def offload_ns(self, shape: StepShape, step: int) -> int:
        return round(self._costs.offload_ns(shape, step) * self._multiplier(Stream.OFFLOAD, step))

    def restore_ns(self, shape: StepShape, step: int) -> int:
        return round(self._costs.restore_ns(shape, step) * self._multiplier(Stream.RESTORE, step))

    def forward_ns(self, shape: StepShape, step: int) -> int:
        return round(self._costs.forward_ns(shape, step) * self._multiplier(Stream.FORWARD, step))

    def output_sync_ns(self) -> int:
        return self._costs.output_sync_ns()

    def decode_pricer(self, shape: StepShape) -> DecodePricer:
        certain = self._costs.decode_pricer(shape)

        def prices(kv_tokens: int, step: int, count: int) -> DecodePrices:
            around, forward = certain(kv_tokens, step, count)
            draws = [[self._multiplier(stream, step + place) for place in range(count)] for stream in _DECODE_STREAMS]
            lanes = [[price[kind] for price in around] * (count // len(around)) for kind in range(len(Around._fields))]
            drawn = [
                [round(price * draw) for price, draw in zip(*pair, strict=True)]
                for pair in zip([*lanes, forward], draws, strict=True)
            ]
            return DecodePrices([Around(*each) for each in zip(*drawn[:-1], strict=True)], drawn[-1])

        return prices

    def _multiplier(self, stream: Stream, step: int) -> float:
        wanted, offset = divmod(step, JITTER_BLOCK)
        block, multipliers = self._blocks[stream]
        if block != wanted:
            random = generator(self._seed, stream, wanted, self._replica)
            multipliers = lognormal(random, self._sigmas[stream], JITTER_BLOCK).tolist()
            self._blocks[stream] = (wanted, multipliers)
        return multipliers[offset]


_HOST_STREAMS = {"plan": Stream.PLAN, "fill": Stream.FILL, "launch": Stream.LAUNCH, "commit": Stream.COMMIT}
# As in Around, and the forward pass.
_DECODE_STREAMS = (Stream.PLAN, Stream.FILL, Stream.LAUNCH, Stream.H2D, Stream.D2H, Stream.COMMIT, Stream.FORWARD)


def _ns_per_byte(gb_s: float | None) -> float:
    return 1 / gb_s if gb_s else 0.0
