"""Rotary embeddings whose frequencies follow the longest sequence in the batch, pinned.

Such an embedding ("longrope" and "dynamic" in transformers) gives a token other keys depending on who shares its
batch, and makes the host read the device to decide. Up to the length that the model was first trained for, its
frequencies are constant: they are pinned there, and the context ends there.
"""

from __future__ import annotations

from typing import Any

import torch

PINNED = "pinned"


def pin_frequencies(module: torch.nn.Module) -> int | None:
    """Pins every such embedding in the model; returns the longest context they allow, None where there are none."""
    limits = [_pin(embedding) for embedding in module.modules() if hasattr(embedding, "rope_type")]
    return min((limit for limit in limits if limit is not None), default=None)


def _pin(embedding: Any) -> int | None:
    """`rope_type` is one name, or one by kind of layer."""
    rope_type = embedding.rope_type
    parameters = embedding.config.rope_parameters
    if isinstance(rope_type, dict):
        limits = [_limit(embedding, kind, parameters[key]) for key, kind in rope_type.items()]
        embedding.rope_type = {key: _pinned(kind) for key, kind in rope_type.items()}
        return min((limit for limit in limits if limit is not None), default=None)
    embedding.rope_type = _pinned(rope_type)
    return _limit(embedding, rope_type, parameters)


def _pinned(kind: str) -> str:
    return PINNED if _follows_the_batch(kind) else kind


def _limit(embedding: Any, kind: str, parameters: dict[str, Any]) -> int | None:
    if not _follows_the_batch(kind):
        return None
    return int(parameters["original_max_position_embeddings"] if kind == "longrope" else embedding.original_max_seq_len)


def _follows_the_batch(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind
