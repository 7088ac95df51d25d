"""A scenario: everything one simulated run depends on, from a TOML file, a preset, or plain data.

A scenario is checked as a whole when it is made; any problem is one `ConfigError` with the dotted name of the field.
Engine defaults are those of `EngineConfig` and nowhere else. `mode` and `depth` are two spellings of one choice:

    static    depth 1, a whole batch finishes before the next is admitted
    sync      depth 1
    async     depth 2 (what you get without a choice)
    depth=k   depth k
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, create_model, model_validator

from asyncsched.config import Batching, EngineConfig
from asyncsched.errors import MISSING, ConfigError
from asyncsched.goodput import ServiceLevels
from asyncsched.policy_set import PolicySet
from sim.costs import CopyCosts, CostModel, GpuCosts, HostCosts, Jitter, JitteredCosts, LaneCosts, Overlap
from sim.measured import MeasuredCosts
from sim.profile import Profile
from sim.routers import load_router
from sim.spec import Count, Section, unknown, validate
from sim.trace import PACKAGED
from sim.workload import ArrivalTable, Workload, WorkloadSpec, build_workload

PRESETS = Path(__file__).parent / "presets"

Level = Annotated[float, Field(gt=0, le=1e12)]

_MODE_DEPTH = {"static": 1, "sync": 1, "async": 2}
_DEPTH_MODE = {1: "sync", 2: "async"}


def _engine_section() -> type[Section]:
    """EngineConfig as a section, field by field, less what `mode` and `depth` decide."""
    hints = get_type_hints(EngineConfig)
    keys: dict[str, Any] = {
        field.name: (Annotated[hints[field.name], BeforeValidator(_list_to_tuple)], field.default)
        for field in fields(EngineConfig)
        if field.name not in ("depth", "batching")
    }
    return create_model("EngineSection", __base__=Section, **keys)


def _list_to_tuple(value: object) -> object:
    """TOML and JSON have lists only."""
    return tuple(value) if isinstance(value, list) else value


_ENGINE_SECTION = _engine_section()


def _check_engine(data: dict[str, Any]) -> dict[str, Any]:
    section = validate(_ENGINE_SECTION, data)
    values = section.model_dump()
    PolicySet(EngineConfig(**values))  # loads every policy, and says which one cannot be
    return values


class Goodput(Section):
    """Longest latencies of a good request, in milliseconds."""

    ttft_ms: Level | None = None
    tpot_ms: Level | None = None
    e2el_ms: Level | None = None


class Replicas(Section):
    """Engines side by side, each with all of `engine`, and who sends requests to them.

    count   engines
    router  round-robin, least-loaded, prefix-aware, or module:Class
    """

    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    router: str = "round-robin"

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        try:
            load_router(self.router)
        except ConfigError as error:
            raise ConfigError("router", error.value, error.allowed) from error
        return self


class Scenario(Section):
    """A checked scenario, with every default filled in. Make one with `load_scenario` or `Scenario.from_dict`."""

    description: str = ""
    mode: str
    depth: Count
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    engine: Annotated[dict[str, Any], AfterValidator(_check_engine)] = Field(default={}, validate_default=True)
    host: HostCosts = HostCosts()
    copies: CopyCosts = Field(default=CopyCosts(), alias="copy")  # a pydantic model has a method `copy`
    gpu: GpuCosts | None = None
    overlap: Overlap = Overlap()
    jitter: Jitter = Jitter()
    workload: WorkloadSpec
    goodput: Goodput = Goodput()
    replicas: Replicas = Replicas()
    profile: Profile | None = None

    @model_validator(mode="after")
    def _check_prices(self) -> Self:
        """A profile has all prices; without one the GPU's have no default."""
        if self.profile is None:
            if self.gpu is None:
                raise ConfigError("gpu", MISSING, "a value is required, there is no default")
            if self.jitter.kind == "profile":
                raise ConfigError("jitter.kind", "profile", "it needs a profile")
        elif self.gpu is not None:
            raise ConfigError("gpu", self.gpu.kind, "the profile has its prices; leave one of the two out")
        return self

    @model_validator(mode="before")
    @classmethod
    def _resolve_mode(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        mode, depth = _resolve(data.get("mode"), data.get("depth"))
        return {**data, "mode": mode, "depth": depth}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Scenario:
        """Raises ConfigError."""
        return validate(cls, data)

    def to_dict(self) -> dict[str, Any]:
        """The resolved scenario: ready for JSON, and `from_dict` makes an equal one of it."""
        return self.model_dump(mode="json", by_alias=True)

    def engine_config(self) -> EngineConfig:
        batching: Batching = "static" if self.mode == "static" else "continuous"
        return EngineConfig(depth=self.depth, batching=batching, **self.engine)

    def levels(self) -> ServiceLevels | None:
        """What a good request keeps to; None where nothing is asked of it."""
        levels = ServiceLevels(**self.goodput.model_dump())
        return None if levels == ServiceLevels() else levels

    def costs(self, replica: int = 0) -> CostModel | MeasuredCosts:
        if self.profile is not None:
            seed = self.seed if self.jitter.kind == "profile" else None
            seats = self.engine_config().max_num_seqs
            return MeasuredCosts(self.profile, depth=self.depth, seats=seats, seed=seed, replica=replica)
        assert self.gpu is not None  # checked when the scenario was made
        costs = LaneCosts(
            self.host, self.copies, self.gpu, self.overlap, depth=self.depth, block_size=self.engine["block_size"]
        )
        return costs if self.jitter.kind == "none" else JitteredCosts(costs, self.jitter, self.seed, replica)

    def build_workload(self) -> Workload:
        """Raises ConfigError for a trace that cannot be used."""
        return build_workload(self.workload, self.seed)

    def workload_arrivals(self) -> ArrivalTable:
        """In order of arrival. Raises ConfigError for a trace that cannot be used."""
        return self.build_workload().arrivals


def load_scenario(path: str | Path, overrides: Iterable[str] = ()) -> Scenario:
    """A scenario file with `key=value` overrides. Raises ConfigError."""
    return Scenario.from_dict(apply_overrides(read_scenario(path), overrides))


def load_preset(name: str, overrides: Iterable[str] = ()) -> Scenario:
    """A preset with `key=value` overrides. Raises ConfigError."""
    return Scenario.from_dict(apply_overrides(read_preset(name), overrides))


def presets() -> dict[str, str]:
    """Names and descriptions."""
    return {path.stem: read_scenario(path)["description"] for path in sorted(PRESETS.glob("*.toml"))}


def with_profile(data: Mapping[str, Any], profile: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario with a profile's prices instead of its own, and with the sizes of captured steps that they are for,
    where it names none: steps that are launched kernel by kernel have other prices.
    """
    own = ("host", "copy", "gpu", "overlap", "jitter")
    engine, measured = data.get("engine", {}), profile.get("engine", {})
    if isinstance(engine, dict) and isinstance(measured, dict):  # or whoever reads them refuses them
        for name, limit in (("decode_buckets", "max_num_seqs"), ("mixed_buckets", "max_num_batched_tokens")):
            most = engine.get(limit, getattr(EngineConfig, limit))
            if name not in engine and isinstance(most, int):
                engine = {**engine, name: [size for size in measured.get(name, ()) if size <= most]}
    return {**{key: value for key, value in data.items() if key not in own}, "engine": engine, "profile": dict(profile)}


def read_preset(name: str) -> dict[str, Any]:
    """A preset as it is written, unchecked."""
    known = [path.stem for path in PRESETS.glob("*.toml")]
    if name not in known:
        raise ConfigError("preset", name, unknown("preset", name, known))
    return read_scenario(PRESETS / f"{name}.toml")


def read_scenario(path: str | Path) -> dict[str, Any]:
    """A scenario file as it is written, unchecked; but a trace's path counts from the file's folder."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("scenario", str(path), f"it cannot be read ({reason}); use a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("scenario", str(path), f"it is not valid TOML: {error}") from None
    workload = data.get("workload")
    if isinstance(workload, dict) and isinstance(trace := workload.get("trace"), str) and trace not in PACKAGED:
        workload["trace"] = str(path.parent / trace)
    return data


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`data` with each `dotted.key=value` set; values are read by `parse_value`. Raises ConfigError."""
    texts = split_overrides(overrides, "host.plan_us=250")
    return override_values(data, {key: parse_value(text) for key, text in texts.items()})


def split_overrides(overrides: Iterable[str], example: str) -> dict[str, str]:
    """`key=value` of each as key and text. Raises ConfigError, also where a later one would undo an earlier one."""
    texts: dict[str, str] = {}
    for override in overrides:
        key, separator, text = (part.strip() for part in override.partition("="))
        if not separator or not key:
            raise ConfigError("--set", override, f"use key=value, as in {example}")
        for other in texts:
            if f"{dotted_key(other)}.".startswith(f"{dotted_key(key)}."):
                raise ConfigError("--set", override, f"{other}={texts[other]} is set already; set it once")
        texts[key] = text
    return texts


def dotted_key(name: str) -> str:
    """A setting of the engine needs no `engine.` before it."""
    return f"engine.{name}" if name in _ENGINE_SECTION.model_fields else name


def override_values(data: Mapping[str, Any], values: Mapping[str, object]) -> dict[str, Any]:
    """`data` with each key, as `dotted_key` reads it, set to a value.

    A new `mode` or `depth` replaces the other's old value as well.
    """
    result = deepcopy(dict(data))
    if "depth" in values and "mode" not in values and result.get("mode") != "static":
        result.pop("mode", None)
    if "mode" in values and "depth" not in values:
        result.pop("depth", None)
    for name, value in values.items():
        dotted = dotted_key(name)
        *parents, key = dotted.split(".")
        table = result
        for depth, parent in enumerate(parents):
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(".".join(parents[: depth + 1]), table, f"it must be a table for {dotted} to be set")
        table[key] = deepcopy(value)
    return result


def parse_value(text: str) -> object:
    """A TOML value, or the text itself where it is none: `0.5`, `true`, `[8, 16]`, `sync`."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return parsed["value"] if len(parsed) == 1 else text


def _resolve(mode: object, depth: object) -> tuple[object, object]:
    """Both spellings of mode and depth. What is not even of the right type is left to the check of fields."""
    if mode is None:
        depth = 2 if depth is None else depth
        return (_DEPTH_MODE.get(depth, f"depth={depth}"), depth) if isinstance(depth, int) else ("async", depth)
    if not isinstance(mode, str):
        return mode, 1 if depth is None else depth
    implied = _mode_depth(mode)
    if depth is not None and depth != implied:
        raise ConfigError("depth", depth, f"mode {mode!r} has depth {implied}: leave one of the two out")
    canonical = mode if mode == "static" else _DEPTH_MODE.get(implied, f"depth={implied}")
    return canonical, implied if depth is None else depth


def _mode_depth(mode: str) -> int:
    if mode in _MODE_DEPTH:
        return _MODE_DEPTH[mode]
    name, _, digits = mode.partition("=")
    if name != "depth" or not (digits.isascii() and digits.isdigit()) or len(digits) > 9 or int(digits) < 1:
        raise ConfigError("mode", mode, "use static, sync, async, or depth=k with k at least 1")
    return int(digits)
