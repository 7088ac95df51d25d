"""The attention hook: where a transformers model, unchanged, meets the paged KV cache.

A model whose attention implementation is `PAGED` calls `paged_attention` once per layer with that layer's queries and
new keys and values. The step they belong to is the one that `during` announced around the model call: a keyword
argument of the call would do for most models, but some drop it on the way. A backend does the arithmetic; this module
knows which layer is calling, and no mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from executors.kv_cache import KvCache
from executors.step_view import StepView

PAGED = "asyncsched_paged"


class AttentionRule(NamedTuple):
    """How one layer weighs the keys a query sees.

    scale    multiplies the dot products
    window   keys a query sees, itself included; None means all
    softcap  dot products are squashed to -softcap..softcap; None means they aren't
    sinks    [query_heads] logits that take part in the softmax and carry no value, or None
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionRule], torch.Tensor]


class AttentionBackend(Protocol):
    """Attention of one step.

    `begin` prepares what all layers share. The function it returns is called once per layer with queries
    [T, query_heads, key_dim], the layer's cache of keys and of values, and its rule; it answers
    [T, query_heads, value_dim] in the queries' dtype. The KV of the step's own tokens is in the cache by then. Neither
    may wait for the device, and both must be capturable in a CUDA graph for a decode step.
    """

    def begin(self, view: StepView, kv: KvCache) -> Attend: ...


class Step(Protocol):
    """Takes the calls of the hook during one model call."""

    def attend(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Queries, new keys and new values are [T, heads, dim]; returns [T, query_heads, value_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A forward pass over the cache. `layers` gives the index of each layer that calls the hook."""

    layers: Mapping[torch.nn.Module, int]
    kv: KvCache
    kv_positions: torch.Tensor
    run: Attend

    @classmethod
    def begin(
        cls, view: StepView, kv: KvCache, layers: Mapping[torch.nn.Module, int], backend: AttentionBackend
    ) -> PagedStep:
        return cls(layers, kv, view.kv_positions.long(), backend.begin(view, kv))

    def attend(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        index = self.layers[layer]
        self.kv.write(index, key, value, self.kv_positions)
        return self.run(query, self.kv.keys[index], self.kv.values[index], rule)


_step: ContextVar[Step] = ContextVar("asyncsched_step")


@contextmanager
def during(step: Step) -> Iterator[None]:
    """The hook's calls on this thread go to `step` meanwhile."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: tensors are [1, heads, T, dim], the answer [1, T, query_heads, value_dim], no weights.

    The mask is ignored: causality and window follow from positions. What else a model may hand over (a position
    bias, its own mask) is lost here, and is found by the self-check at load.
    """
    rule = AttentionRule(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _step.get().attend(module, queries, keys, values, rule)[None], None


AttentionInterface.register(PAGED, paged_attention)
