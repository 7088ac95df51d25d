"""Models and devices for the roofline: shapes from the models' public configs, device figures with their source.

`model = "llama-8b"` is short for `model = { name = "llama-8b" }`. Keys beside `name` replace the registered value, and
without a name all keys are needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from asyncsched.errors import ConfigError
from sim.spec import Count, Rate, Section, unknown

_SHAPE = ("layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
_MODELS = {
    "llama-1b": (16, 2048, 8192, 32, 8, 64, 128_256),  # Llama 3.2
    "llama-3b": (28, 3072, 8192, 24, 8, 128, 128_256),  # Llama 3.2
    "llama-8b": (32, 4096, 14_336, 32, 8, 128, 128_256),  # Llama 3.1
    "llama-70b": (80, 8192, 28_672, 64, 8, 128, 128_256),  # Llama 3.1
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151_936),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151_936),
    "qwen3-8b": (36, 4096, 12_288, 32, 8, 128, 151_936),
    "qwen3-14b": (40, 5120, 17_408, 40, 8, 128, 151_936),
    "qwen3-32b": (64, 5120, 25_600, 64, 8, 128, 151_936),
}

# bfloat16 without sparsity; PCIe in one direction
_FIGURES = ("hbm_tb_s", "dense_tflop_s", "pcie_gb_s")
_DEVICES = {
    "h200": (4.28, 790.0, 64.0),  # measured: device-to-device copy, large matrix products; vendor: PCIe 5.0 x16
    "h100": (3.35, 989.0, 64.0),  # vendor's figures, SXM 80 GB
    "a100": (2.04, 312.0, 32.0),  # vendor's figures, SXM 80 GB
    "rtx4090": (1.008, 165.2, 32.0),  # vendor's figures, float32 accumulation
}

HUB_NAME = re.compile(r"(?:.*/)?(?:meta-)?(llama|qwen)-?(3)(?:\.[123])?-(\d+(?:\.\d+)?b)(?:-instruct|-base)?")


class _Named(Section):
    """A section that a registry can fill in."""

    registry: ClassVar[dict[str, dict[str, Any]]]
    what: ClassVar[str]

    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"name": data}
        if not isinstance(data, Mapping) or not isinstance(name := data.get("name"), str):
            return data
        if name not in cls.registry:
            raise ConfigError("name", name, unknown(cls.what, name, cls.registry))
        return {**cls.registry[name], **data}


class ModelShape(_Named):
    """A dense transformer: grouped-query attention and a gated MLP.

    Tied embeddings are no key: the head reads its matrix once per step, tied or not.
    """

    what = "model"

    layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    dtype_bytes: Rate = 2.0

    @property
    def body_params(self) -> int:
        """Parameters of the matrix products of all layers: q and o, k and v, gate, up and down."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_params(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


class Device(_Named):
    """hbm_tb_s: memory, read + write, in 1e12 bytes/s. dense_tflop_s: matrix products, in 1e12 operations/s.
    pcie_gb_s: host link, one direction, in 1e9 bytes/s."""

    what = "device"

    hbm_tb_s: Rate
    dense_tflop_s: Rate
    pcie_gb_s: Rate


ModelShape.registry = {name: dict(zip(_SHAPE, values, strict=True)) for name, values in _MODELS.items()}
Device.registry = {name: dict(zip(_FIGURES, values, strict=True)) for name, values in _DEVICES.items()}


def shape_by_name(hub_name: str) -> ModelShape | None:
    """The shape of a model by the name that it has on the Hugging Face Hub; None where it is not registered."""
    match = HUB_NAME.fullmatch(hub_name.lower())
    if match is None:
        return None
    family, version, size = match.groups()
    name = f"{family}-{size}" if family == "llama" else f"{family}{version}-{size}"
    return ModelShape.model_validate(name) if name in _MODELS else None
