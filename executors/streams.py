"""A lane as whoever enqueues work on it sees it: copies, captured graphs, and whatever torch is to enqueue there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch


class Transfer(NamedTuple):
    """A copy between two buffers that may be made many times. It keeps both, beside their addresses and their size."""

    to: torch.Tensor
    source: torch.Tensor
    to_ptr: int
    source_ptr: int
    num_bytes: int

    @classmethod
    def of(cls, to: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Raises ValueError where copying bytes would not copy the values, or would make the host wait."""
        if to.shape != source.shape or to.dtype != source.dtype or not (to.is_contiguous() and source.is_contiguous()):
            raise ValueError(f"cannot copy {source.dtype}{[*source.shape]} to {to.dtype}{[*to.shape]} as bytes")
        if to.is_cuda != source.is_cuda and not (source if to.is_cuda else to).is_pinned():
            raise ValueError(f"cannot copy between {source.device} and {to.device}: the host's memory is not pinned")
        return cls(to, source, to.data_ptr(), source.data_ptr(), to.nbytes)


class Stream(Protocol):
    """Work goes to the lane in the order of the calls. None of them waits for it."""

    def on(self) -> AbstractContextManager[object]:
        """What torch enqueues inside goes to the lane."""
        ...

    def copy(self, transfer: Transfer) -> None:
        """Its buffers must stay until the lane is past it."""
        ...

    def replay(self, graph: torch.cuda.CUDAGraph) -> None: ...
