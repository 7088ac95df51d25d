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


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionRule], torch.Tensor]


class AttentionBackend(Protocol):
    """Attention of one step.

    `begin` prepares what all layers share. The function it returns is called once per layer with queries
    [T, query_heads, key_dim], the step's new keys and new values [T, kv_heads, dim], the layer's cache of keys and of
    values, and its rule; it stores the new KV in the cache and answers [T, query_heads, value_dim] in the queries'
    dtype. Neither may wait for the device, and both must be capturable in a CUDA graph for a decode step, and, with
    `captures_mixed`, for any step.
    """

    captures_mixed: bool

    def begin(self, view: StepView, kv: KvCache) -> Attend: ...


class Step(Protocol):
    """Takes the calls of the hook during one model call."""

    def attend(
        self,
        layer: torch.nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Queries, new keys and new values are [T, heads, dim]; returns [T, query_heads, value_dim].

        layer  who calls; None means the one after the last that called, or the first
        """


@dataclass(slots=True, eq=False)
class PagedStep:
    """A forward pass over the cache. `layers` gives the index of each layer that calls the hook, in order of calls."""

    layers: Mapping[torch.nn.Module, int]
    kv: KvCache
    run: Attend
    turn: int = 0

    @classmethod
    def begin(
        cls, view: StepView, kv: KvCache, layers: Mapping[torch.nn.Module, int], backend: AttentionBackend
    ) -> PagedStep:
        return cls(layers, kv, backend.begin(view, kv))

    def attend(
        self,
        layer: torch.nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        index = self.turn if layer is None else self.layers[layer]
        self.turn = index + 1
        return self.run(query, key, value, self.kv.keys[index], self.kv.values[index], rule)


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
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if torch.compiler.is_compiling():
        return torch.ops.asyncsched.attend(queries, keys, values, scale, sliding_window, softcap, s_aux)[None], None
    rule = AttentionRule(scale, sliding_window, softcap, s_aux)
    return _step.get().attend(module, queries, keys, values, rule)[None], None


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The hook inside a compiled layer: opaque to the compiler, and one code for all layers, so it may not name one."""
    return _step.get().attend(None, queries, keys, values, AttentionRule(scale, window, softcap, sinks))


def _attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    """What the compiler has to know of it: shape and layout of the answer."""
    return queries.new_empty((queries.shape[0], queries.shape[1], values.shape[2]))


# Not `torch.library.custom_op`, whose wrappers cost the host more than the call.
_LIBRARY = torch.library.Library("asyncsched", "DEF")
_LIBRARY.define(
    "attend(Tensor queries, Tensor keys, Tensor values, float scale, int? window, float? softcap, Tensor? sinks)"
    " -> Tensor"
)
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("asyncsched::attend", _attended, lib=_LIBRARY)
AttentionInterface.register(PAGED, paged_attention)
