"""What an `LLM` is asked for by name, checked, and what follows from the model and the machine where nothing was said.

Every problem is one ConfigError that names the setting, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from asyncsched.config import MAX_MIXED_BUCKET, EngineConfig, default_buckets, default_mixed_buckets, smallest_bucket
from asyncsched.errors import ConfigError
from executors import few_rows
from executors.asked import check_device
from executors.compiled import CompileSettings
from executors.invariance import alike
from executors.kv_cache import free_memory
from executors.models import Model

MEMORY_SHARE = 0.9  # of the free device memory, for the KV pool
CPU_POOL_BYTES = 2**30
DEFAULT_MODEL_LEN = 8192
DEFAULT_SEQS = {"cuda": 256, "cpu": 16}
INVARIANT_SIZES = (16, 32, *default_mixed_buckets(MAX_MIXED_BUCKET))  # tokens of batch-invariant steps, if all agree
INVARIANT_TOKENS = 256  # if they do not: more make decoding slower, fewer make prefilling slower


def check_model(model: object, dummy_weights: bool) -> None:
    """Raises ConfigError for what is no model, and for a shape whose random weights nobody asked for."""
    if isinstance(model, PretrainedConfig) and not dummy_weights:
        raise ConfigError("dummy_weights", dummy_weights, "a configuration has no weights: set it for random ones")
    if not isinstance(model, str | PretrainedConfig | Model):
        raise ConfigError("model", model, "use a folder, a .gguf file, a name on the Hub, or a configuration")


def device_of(name: str) -> torch.device:
    check_device(name)
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "no CUDA device is available here: use cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def dtype_of(name: str, device: torch.device) -> torch.dtype | None:
    """None leaves it to the checkpoint."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in known:
        raise ConfigError("dtype", name, f"use one of auto, {', '.join(known)}")
    return known[name]


def compile_settings(compile: bool | CompileSettings | None, device: torch.device) -> CompileSettings | None:
    if isinstance(compile, CompileSettings):
        return compile
    if not isinstance(compile, bool | None):
        raise ConfigError("compile", compile, "use True, False or None, which means on CUDA")
    wanted = device.type == "cuda" if compile is None else compile
    return CompileSettings() if wanted else None


def engine_config(model: Model, depth: int, num_blocks: int | None, given: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig for this model: what was not given follows from the model and the memory that is free."""
    settings = dict(given)
    context = model.max_model_len
    settings.setdefault("max_model_len", min(context or DEFAULT_MODEL_LEN, DEFAULT_MODEL_LEN))
    if context is not None and settings["max_model_len"] > context:
        raise ConfigError("max_model_len", settings["max_model_len"], f"the model's context is {context} tokens")
    settings.setdefault("max_num_seqs", DEFAULT_SEQS[model.device.type])
    window = settings.setdefault("sliding_window", model.sliding_window)
    if window is not None and (model.sliding_window is None or window < model.sliding_window):
        seen = "all of its context" if model.sliding_window is None else f"{model.sliding_window} tokens"
        raise ConfigError("sliding_window", window, f"some layer of the model sees {seen}: leave it out")
    captures_mixed = model.device.type == "cuda" and model.backend.captures_mixed
    if settings.get("batch_invariant"):
        if not captures_mixed:
            raise ConfigError("batch_invariant", True, "it needs a CUDA device and the triton attention backend")
        settings.setdefault("decode_buckets", ())
        _set_invariant_sizes(model, settings)
    settings.setdefault("decode_buckets", default_buckets(settings["max_num_seqs"]))
    if captures_mixed:
        budget = settings.get("max_num_batched_tokens", _default("max_num_batched_tokens"))
        settings.setdefault("mixed_buckets", default_mixed_buckets(budget))
    block_size = settings.get("block_size", _default("block_size"))
    if num_blocks is None:
        num_blocks = _blocks(model, block_size, settings["max_model_len"], settings["max_num_seqs"])
    settings.setdefault("num_host_blocks", num_blocks)
    return EngineConfig(depth=depth, num_blocks=num_blocks, vocab_size=model.vocab_size, **settings)


def _set_invariant_sizes(model: Model, settings: dict[str, Any]) -> None:
    """Tokens that batch-invariant steps are padded to: those that give a token the same bits, or one size for all."""
    given, seats = settings.get("mixed_buckets"), settings["max_num_seqs"]
    if given is not None and not given:
        return  # the configuration refuses it
    largest = settings.get("max_num_batched_tokens", max(given or (MAX_MIXED_BUCKET, seats)))
    wanted = tuple(given or (*(size for size in INVARIANT_SIZES if size < largest), largest))
    found = alike(model, wanted)
    with few_rows.alike():
        model.self_check()
    if given and found != wanted:
        raise ConfigError("mixed_buckets", given, f"a token's numbers are the same only in {found}: leave it out")
    if not given and "max_num_batched_tokens" not in settings:
        one = max(INVARIANT_TOKENS, seats)
        if smallest_bucket(found, seats) > smallest_bucket(wanted, one):  # what decodes would be padded to
            found = (one,)
    settings["mixed_buckets"] = found
    settings.setdefault("max_num_batched_tokens", found[-1])


def _blocks(model: Model, block_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """As many as every sequence can use, within a share of the free memory."""
    useful = -(-max_model_len // block_size) * max_num_seqs
    free = free_memory(model.device)
    budget = CPU_POOL_BYTES if model.device.type == "cpu" or free is None else int(free * MEMORY_SHARE)
    return max(1, min(useful, model.blocks_that_fit(budget, block_size)))


def _default(name: str) -> int:
    default: int = EngineConfig.__dataclass_fields__[name].default
    return default


def eos_token_ids(model: Model) -> tuple[int, ...]:
    """End-of-sequence tokens of the generation configuration, or of the model's."""
    generation = getattr(model.module, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = model.module.config.get_text_config(decoder=True).eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
