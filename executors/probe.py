"""Finds a model's attention layers by watching one tiny forward pass go through the attention hook.

Nothing is attended: the hook answers zeros. What comes back is which modules call it, in order, and with what shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from executors.attention import AttentionRule, during
from executors.errors import UnsupportedModelError
from executors.kv_cache import LayerShape

NUM_TOKENS = 3


class Probed(NamedTuple):
    """The layers in the order in which they ran, and the width of the logits."""

    layers: dict[torch.nn.Module, LayerShape]
    vocab_size: int


def probe(module: torch.nn.Module) -> Probed:
    """Runs the model over `NUM_TOKENS` tokens. Raises UnsupportedModelError where a layer cannot have its own KV."""
    watch = _Watch()
    tokens = torch.zeros((1, NUM_TOKENS), dtype=torch.long, device=next(module.parameters()).device)
    positions = torch.arange(NUM_TOKENS, device=tokens.device)[None]
    with torch.no_grad(), during(watch):
        output = module(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=positions, use_cache=False
        )
    return Probed(watch.layers, output.logits.shape[-1])


class _Watch:
    """A step that only notes who attends."""

    def __init__(self) -> None:
        self.layers: dict[torch.nn.Module, LayerShape] = {}

    def attend(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        if layer in self.layers:
            raise UnsupportedModelError("it runs one attention layer more than once per token")
        if not query.shape[0] == key.shape[0] == value.shape[0] == NUM_TOKENS:
            raise UnsupportedModelError("its attention sees other keys than those of the tokens it is given")
        self.layers[layer] = LayerShape(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            window=rule.window,
            softcap=rule.softcap,
            has_sinks=rule.sinks is not None,
        )
        return query.new_zeros((NUM_TOKENS, query.shape[1], value.shape[2]))
