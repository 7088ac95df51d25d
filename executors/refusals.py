"""Models refused by what they are, before any weight is loaded or any logit compared."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from executors.errors import UnsupportedModelError

PAGEABLE = frozenset({"full_attention", "sliding_attention"})  # kinds of layer whose whole state is keys and values
NO_HOOK = "never calls the attention hook, so its KV cannot be paged"
KINDS = {
    "chunked_attention": "attends within chunks, and the attention hook isn't told their size",
    "linear_attention": "has linear-attention or state-space layers, whose state is no KV",
    "conv": "has convolution layers, whose state is no KV",
    "hybrid": "has state-space layers, whose state is no KV",
    "hybrid_sliding": "has state-space layers, whose state is no KV",
}


def refuse_config(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError for a configuration that no weights can save."""
    if config.is_encoder_decoder:
        raise UnsupportedModelError("is an encoder-decoder; only decoder-only models can run")
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    for kind in sorted(kinds - PAGEABLE):
        raise UnsupportedModelError(KINDS.get(kind, f"has layers of kind {kind}, which a paged KV cache cannot serve"))


def refuse_module(module: torch.nn.Module) -> None:
    """Raises UnsupportedModelError for a class of model that carries a state of its own from token to token."""
    if getattr(module, "_is_stateful", False):
        raise UnsupportedModelError("has state-space or recurrent layers, whose state is no KV")


def refuse_layers(calls: int, config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError where some or all layers attend without the hook, or don't attend at all."""
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if calls == 0:
        raise UnsupportedModelError(NO_HOOK)
    if layers is not None and calls != layers:
        raise UnsupportedModelError(
            f"calls the attention hook {calls} times in {layers} layers; all its state must be KV"
        )
