"""Model shapes by name, built without a download: what `--config NAME --dummy-weights` benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _llama_8b() -> PretrainedConfig:
    """Llama 3.1 8B: 32 layers, 8 KV heads of 128."""
    return _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters=_llama3_rope(factor=8.0),
        bos_token_id=128_000,
        eos_token_id=128_001,
        dtype="bfloat16",
    )


def _llama_1b() -> PretrainedConfig:
    """Llama 3.2 1B: 16 layers, 8 KV heads of 64, tied embeddings."""
    return _llama(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters=_llama3_rope(factor=32.0),
        tie_word_embeddings=True,
        bos_token_id=128_000,
        eos_token_id=128_001,
        dtype="bfloat16",
    )


def _llama_tiny() -> PretrainedConfig:
    """Two layers of Llama, for a CPU and for tests. Its random weights are wide enough that tokens vary."""
    return _llama(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )


def _llama(**sizes: Any) -> PretrainedConfig:
    from transformers import LlamaConfig  # takes seconds: whether there is such a name can be told before

    return LlamaConfig(**sizes)


def _llama3_rope(factor: float) -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-8b": _llama_8b,
    "llama-1b": _llama_1b,
    "llama-tiny": _llama_tiny,
}


def check_name(name: str) -> None:
    """Raises ConfigError with the names there are."""
    if name not in CONFIGS:
        raise ConfigError("config", name, f"use one of {', '.join(CONFIGS)}")


def named_config(name: str) -> PretrainedConfig:
    """A new configuration. Raises ConfigError as `check_name` does."""
    check_name(name)
    return CONFIGS[name]()
