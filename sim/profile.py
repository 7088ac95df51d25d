"""A profile: what the operations of one engine on one device were measured to take, as a TOML file for people to read.

`sim/calibrate.py` fits one to recorded runs, `sim/measured.py` prices steps by it. Durations are in microseconds.
Lists that belong together (sizes and durations) are the corners of a line that is straight between them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from asyncsched.errors import ConfigError
from sim.spec import Section, Time, validate

SCHEMA: Final = 2
"""Of files. 1 had prices of the same names for another model: sequences were split by the batch's share, and a step was
slower behind a large prefill whatever that one took."""
HOST_KINDS = ("plan", "fill", "launch", "eager_launch", "commit", "deliver")
STEP_KINDS = ("decode", "mixed", "prefill")
LARGE_SEQS = 64
"""Decode steps of so many sequences and more, padded ones included, vary by tables of their own: they are what a power
limit slows down."""
HOT_TOKENS = 1024
"""A step with so many prefill tokens and more draws more power than a device may for long: its clock falls."""
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Where the tables of ratios are cut."""

MAX_SPLITS = 64
"""Programs that share one sequence, at most."""

Factor = Annotated[float, Field(ge=0.01, le=100)]
Ratios = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1e6)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
Sizes = Annotated[
    tuple[Annotated[int, Field(ge=0, le=10**9)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
Durations = Annotated[
    tuple[Time, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]


class HostPrice(Section):
    """us + us_per_seq * sequences + us_per_prefill_token * prefill tokens; times `busy_factor` if the GPU computes."""

    us: Time = 0.0
    us_per_seq: Time = 0.0
    us_per_prefill_token: Time = 0.0
    busy_factor: Factor = 1.0


class HostProfile(Section):
    """The host's work in a step. `scale` is for what-ifs: 2 is a host that takes twice as long.

    inline          operations of the lanes run in the host's own thread when they are launched, as on a CPU
    launch          of a captured step; eager_launch of one that is launched kernel by kernel
    launch_head_us, eager_head_us   how much of a launch must be over before the compute lane can start
    eager_tail_us   a step launched kernel by kernel ends so long after its launch, or later
    collect_us      to take over a step's tokens; wake_us more where the host had to wait for them
    submit_us       per request that arrives
    hold_ms         how long the host keeps one speed, on average; its speeds are in the jitter
    probe_us, probe_power   a host whose probe takes so long has the speed of this profile; one whose probe takes twice
                    as long is slower by 2 to that power. 0: no probe was read
    probe_during    it was read during the runs, and not beside them: such readings are larger
    cold_fill, cold_launch, cold_us   behind a delay of d, a fill takes 1 + cold_fill * d / (d + cold_us) times as long,
                    for caches have grown cold; so does the launch of a captured step
    delay_us        a busy-wait in each step, a testing aid of recordings; `scale` does not stretch it
    """

    scale: Factor = 1.0
    inline: bool = False
    plan: HostPrice = HostPrice()
    fill: HostPrice = HostPrice()
    launch: HostPrice = HostPrice()
    eager_launch: HostPrice = HostPrice()
    commit: HostPrice = HostPrice()
    deliver: HostPrice = HostPrice()
    launch_head_us: Time = 0.0
    eager_head_us: Time = 0.0
    eager_tail_us: Time = 0.0
    collect_us: Time = 0.0
    wake_us: Time = 0.0
    submit_us: Time = 0.0
    hold_ms: Time = 0.0
    probe_us: Time = 0.0
    probe_power: Annotated[float, Field(ge=0, le=1)] = 0.0
    probe_during: bool = False
    cold_fill: Annotated[float, Field(ge=0, le=100)] = 0.0
    cold_launch: Annotated[float, Field(ge=0, le=100)] = 0.0
    cold_us: Time = 0.0
    delay_us: Time = 0.0


class CopyProfile(Section):
    """Input copies, and output copies."""

    h2d_us: Time = 0.0
    h2d_us_per_token: Time = 0.0
    h2d_us_per_seq: Time = 0.0
    d2h_us: Time = 0.0
    d2h_us_per_sample: Time = 0.0
    restore_us_per_block: Time = 0.0
    offload_us_per_block: Time = 0.0


def _check_line(section: Section, sizes: str, durations: str) -> None:
    xs, ys = getattr(section, sizes), getattr(section, durations)
    if list(xs) != sorted(set(xs)):
        raise ConfigError(sizes, xs, "use increasing sizes")
    if len(xs) != len(ys):
        raise ConfigError(durations, ys, f"one duration is needed for each of {len(xs)} {sizes}")


class PrefillPrice(Section):
    """Steps that prefill.

    tokens, tokens_us        all tokens of a step, padded ones too, and what it takes
    us_per_context_token     KV positions that it reads and does not compute, summed over sequences
    us_per_longest           KV positions that a program reads of its longest decode, split as in a decode step; a
                             captured step splits it as if every seat of the engine had a decode
    us_per_attn_pair         pairs of query and key
    us_per_token_and_decode  tokens of steps that have decodes as well
    """

    tokens: Sizes = ()
    tokens_us: Durations = ()
    us_per_context_token: Time = 0.0
    us_per_longest: Time = 0.0
    us_per_attn_pair: Time = 0.0
    us_per_token_and_decode: Time = 0.0

    @model_validator(mode="after")
    def _check_corners(self) -> Self:
        _check_line(self, "tokens", "tokens_us")
        return self


class GpuProfile(Section):
    """Steps on the compute lane, carry-over and sampling included. `scale` is for what-ifs.

    decode_seqs, decode_us   sequences of a decode step (its bucket where it is padded), and what it takes
    kv_tokens, kv_us         KV positions that a decode step reads, summed over sequences, and what that adds
    us_per_longest, whole_seqs   per KV position that a program reads of the longest sequence. Batches of fewer than
                             `whole_seqs` sequences split it: see `splits`
    eager, padded            steps that prefill: launched kernel by kernel, and padded to a mixed bucket
    idle_start_us            more where the lane had nothing to do before: it waits for its first kernel
    gap_us                   between two steps that follow one another at once
    hot_decode, hot_padded, hot_ms   a decode step, and a captured one that prefills, takes longer by this share where
                             the device did nothing but prefills of HOT_TOKENS and more in the `hot_ms` before, and by
                             less as it did less of that
    contention               factor while the host prepares the next step, at depth 2 and more
    """

    scale: Factor = 1.0
    decode_seqs: Sizes = ()
    decode_us: Durations = ()
    kv_tokens: Sizes = ()
    kv_us: Durations = ()
    us_per_longest: Time = 0.0
    whole_seqs: Annotated[int, Field(ge=1, le=10**6)] = 1
    eager: PrefillPrice = PrefillPrice()
    padded: PrefillPrice = PrefillPrice()
    idle_start_us: Time = 0.0
    gap_us: Time = 0.0
    hot_decode: Annotated[float, Field(ge=0, le=100)] = 0.0
    hot_padded: Annotated[float, Field(ge=0, le=100)] = 0.0
    hot_ms: Time = 0.0
    contention: Annotated[float, Field(ge=1, le=2)] = 1.0

    @model_validator(mode="after")
    def _check_corners(self) -> Self:
        _check_line(self, "decode_seqs", "decode_us")
        _check_line(self, "kv_tokens", "kv_us")
        return self


def splits(whole_seqs: int, seqs: int) -> int:
    """Programs that share each sequence of a batch of so many: the largest power of two with which these are no more
    than `whole_seqs`. 1 for larger batches, MAX_SPLITS at most."""
    return int(min(1 << (max(whole_seqs // max(seqs, 1), 1).bit_length() - 1), MAX_SPLITS))


class JitterProfile(Section):
    """Measured over predicted, as quantiles at 0, 1, 5, 10, 25, 50, 75, 90, 95, 99 and 100%; mean 1. None: no jitter.

    decode_large     of decode steps of LARGE_SEQS sequences and more, padded ones included; () where they are as the
                     others
    eager, padded    of steps that prefill, by how they are launched and priced; `eager_prefill` and `padded_prefill` of
                     those without decodes, () where they are as the others
    decode_hot, padded_hot   of decode steps that are not large, and of captured ones that prefill, where a large
                     prefill was in the `hot_ms` before; () where they are as the others
    host             of all host work at once, over times in which the host has one speed; the tables of plan, fill,
                     launch, commit and deliver are of what is left
    run, run_large   the same of whole runs' decode steps, and of those of LARGE_SEQS sequences and more: what a run has
                     in common with itself and not with others. () for the latter where they are as the others. A run
                     has too few other steps to tell: what it has in common is in their tables
    """

    decode: Ratios = ()
    decode_hot: Ratios = ()
    decode_large: Ratios = ()
    eager: Ratios = ()
    eager_prefill: Ratios = ()
    padded: Ratios = ()
    padded_prefill: Ratios = ()
    padded_hot: Ratios = ()
    plan: Ratios = ()
    fill: Ratios = ()
    launch: Ratios = ()
    eager_launch: Ratios = ()
    commit: Ratios = ()
    deliver: Ratios = ()
    host: Ratios = ()
    run: Ratios = ()
    run_large: Ratios = ()

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        for name in type(self).model_fields:
            table = getattr(self, name)
            if table and (len(table) != len(QUANTILES) or list(table) != sorted(table)):
                raise ConfigError(name, table, f"use {len(QUANTILES)} ratios in order, or none")
        return self


class FitItem(Section):
    """How well one price fits: over `count` samples, relative errors in percent, and the sizes that were seen."""

    count: Annotated[int, Field(ge=0)]
    bias_pct: float = 0.0
    rms_pct: float = 0.0
    p05_pct: float = 0.0
    p95_pct: float = 0.0
    seen: dict[str, tuple[float, float]] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("seen"), Mapping):
            seen = {k: tuple(map(float, v)) if isinstance(v, list) else v for k, v in data["seen"].items()}
            return {**data, "seen": seen}
        return data


class Profile(Section):
    """`fit` says where it comes from and what it is worth; it prices nothing."""

    schema_version: Literal[2] = Field(default=SCHEMA, alias="schema")
    description: str = ""
    runs: Annotated[
        tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
    ] = ()
    device: dict[str, Any] = Field(default={})
    model: dict[str, Any] = Field(default={})
    versions: dict[str, Any] = Field(default={})
    engine: dict[str, Any] = Field(default={})
    host: HostProfile = HostProfile()
    copies: CopyProfile = Field(default=CopyProfile(), alias="copy")
    gpu: GpuProfile = GpuProfile()
    jitter: JitterProfile = JitterProfile()
    fit: dict[str, FitItem] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _check_schema(cls, data: Any) -> Any:
        """Before anything else: keys of another schema say nothing."""
        if isinstance(data, Mapping) and (schema := data.get("schema", SCHEMA)) != SCHEMA:
            allowed = (
                f"this version reads schema {SCHEMA}: fit the profile again from its runs (`asyncsched calibrate`)"
            )
            raise ConfigError("schema", schema, allowed)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Profile:
        """Raises ConfigError."""
        return validate(cls, data)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


def read_profile(path: str | Path) -> Profile:
    """A profile file. Raises ConfigError."""
    return Profile.from_dict(read_profile_data(path))


def read_profile_data(path: str | Path) -> dict[str, Any]:
    """A profile file as it is written, unchecked."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("profile", str(path), f"it cannot be read ({reason}); use a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("profile", str(path), f"it is not valid TOML: {error}") from None
    if not data:
        raise ConfigError("profile", str(path), "it is empty")
    return data


def to_toml(profile: Profile) -> str:
    """The profile as TOML."""
    return toml_text(profile.to_dict())


def toml_text(data: Mapping[str, Any]) -> str:
    """Tables of values as TOML for people to read: floats at five significant digits, None left out."""
    lines: list[str] = []
    _write_table(lines, (), data)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    flat = {key: value for key, value in tables.items() if path and _is_flat(value)}
    if path and (values or flat):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in flat.items()]
    for key, value in tables.items():
        if key not in flat:
            _write_table(lines, (*path, key), value)


def _is_flat(table: Mapping[str, Any]) -> bool:
    return len(table) <= 6 and not any(isinstance(value, Mapping) and len(value) > 3 for value in table.values())


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = f"{value:.5g}"
        return text if any(c in text for c in ".en") else f"{text}.0"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    return "[" + ", ".join(map(_value, value)) + "]"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
