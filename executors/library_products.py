"""Products of many rows: which of the library's algorithms computes them, found by trying.

The library guesses one by the sizes; its other guesses, with other clusters, take up to half as long. What counts are
the sizes that steps are padded to, so each of these is tried once per process, with the model's own weights, before the
first graph is captured. All others are left to the library.

Tokens must not depend on what a stopwatch said. So only algorithms are tried that sum a result up in one part, of these
only such as agree with the first in every bit, and whether the library's own choice may win is decided by bits, too.
What was tried is the process's: a step that is not padded, and has by chance as many rows as one that is padded in
another engine, computes as that one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asyncsched.errors import AsyncschedError
from executors.cublaslt import ALIGNMENT, TYPES, Algorithm, Products, Shape

LEAST_BYTES = 8 * 2**20  # of a weight: reading a smaller one takes no longer than starting a kernel
SPLITTING_ROWS = 96  # up to so many, where the library splits the sum that is the quickest
FINALISTS = 6
ROUNDS = 5
HOST_CYCLES = 2e5  # of the device, in which the host enqueues a try: 0.1 ms
GAIN = 0.97  # of the library's own time: a smaller one may be chance

Try = Callable[[Tensor], None]


class Choice(NamedTuple):
    """Of one shape: the quickest algorithm that was found. `is_used`: instead of what the library would take."""

    products: Products
    algorithm: Algorithm
    is_used: bool


_choices: dict[tuple[torch.device, Shape], Choice | None] = {}  # None: the library has none that splits no sum
_firsts: dict[tuple[torch.device, Shape], Choice | None] = {}  # its first guess, of sizes that were not tried


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, x [rows, depth] and W [columns, depth] contiguous and of one dtype, on CUDA."""
    chosen = choice(Shape(x.shape[0], *weight.shape, weight.dtype), weight.device)
    if chosen is None or not chosen.is_used or not _is_aligned(x, weight):
        return functional.linear(x, weight)
    return _by(chosen, x, weight)


def product_alike(x: Tensor, weight: Tensor) -> Tensor | None:
    """The same, with the bits that a row has whatever the number of rows: all sums are made in one order. None where
    the library has no such product."""
    shape, device = Shape(x.shape[0], *weight.shape, weight.dtype), weight.device
    found = choice(shape, device)  # may have come after the first guess, whose bits it has
    if found is None:
        if (device, shape) not in _firsts:
            _firsts[device, shape] = _first(shape)
        found = _firsts[device, shape]
    return _by(found, x, weight) if found is not None and _is_aligned(x, weight) else None


def _is_aligned(*operands: Tensor) -> bool:
    return all(each.data_ptr() % ALIGNMENT == 0 for each in operands)


def _by(chosen: Choice, x: Tensor, weight: Tensor) -> Tensor:
    output = x.new_empty(x.shape[0], weight.shape[0])
    chosen.products.multiply(chosen.algorithm, x, weight, output)
    return output


def _first(shape: Shape) -> Choice | None:
    try:
        products = Products(shape)
    except AsyncschedError:
        return None
    guesses = products.guesses()
    return Choice(products, guesses[0], is_used=False) if guesses else None


def choice(shape: Shape, device: torch.device) -> Choice | None:
    """None where it was not tried, or there was nothing to try."""
    return _choices.get((device, shape))


@torch.no_grad()
def choose(weights: Sequence[Tensor], sizes: Iterable[int]) -> str:
    """Tries what there is for so many rows and weights of one shape and dtype. Returns why nothing could be tried, or
    "".

    weights  of many layers: the cache must not hold the one whose turn it is
    """
    weights = [weight for weight in weights if weight.is_contiguous() and _is_aligned(weight)]
    if not weights or weights[0].nbytes < LEAST_BYTES or weights[0].dtype not in TYPES:
        return ""
    first = weights[0]
    for rows in sizes:
        key = (first.device, Shape(rows, *first.shape, first.dtype))
        if key not in _choices:
            try:
                _choices[key] = _best(key[1], weights)
            except AsyncschedError as error:
                return str(error)
    return ""


def _best(shape: Shape, weights: Sequence[Tensor]) -> Choice | None:
    products = Products(shape)
    guesses = products.guesses()
    if not guesses:
        return None
    generator = torch.Generator(weights[0].device).manual_seed(0)
    x = torch.randn(shape.rows, shape.depth, generator=generator, device=generator.device).to(shape.dtype)
    output = x.new_empty(shape.rows, shape.columns)

    def trying(algorithm: Algorithm) -> Try:
        return lambda weight: products.multiply(algorithm, x, weight, output)

    trying(guesses[0])(weights[0])
    expected = output.clone()
    library_agrees = torch.equal(functional.linear(x, weights[0]), expected)

    def agrees(algorithm: Algorithm) -> bool:
        try:
            trying(algorithm)(weights[0])
        except AsyncschedError:
            return False
        return torch.equal(output, expected)

    candidates = [one for one in products.variants(guesses) if agrees(one)]
    if not candidates:
        return None
    quickest = sorted(zip(_times([trying(one) for one in candidates], weights, 1), range(len(candidates)), strict=True))
    finalists = [candidates[place] for _, place in quickest[:FINALISTS]]
    library: Try = lambda weight: functional.linear(x, weight)  # noqa: E731
    *times, own = _times([*map(trying, finalists), library], weights, ROUNDS)
    best = min(range(len(times)), key=times.__getitem__)
    is_used = times[best] <= GAIN * own if library_agrees else shape.rows > SPLITTING_ROWS
    return Choice(products, finalists[best], is_used)


def _times(tries: Sequence[Try], weights: Sequence[Tensor], rounds: int) -> list[float]:
    """Medians of milliseconds; all take turns, while the device has not begun yet and so never waits for the host."""
    torch.cuda._sleep(int(HOST_CYCLES * len(tries) * rounds))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2 * rounds)] for _ in tries]
    turn = 0
    for number in range(rounds):
        for each, marks in zip(tries, events, strict=True):
            turn += 1
            marks[2 * number].record()
            each(weights[turn % len(weights)])
            marks[2 * number + 1].record()
    torch.cuda.synchronize()
    return [
        statistics.median(begin.elapsed_time(end) for begin, end in zip(marks[::2], marks[1::2], strict=True))
        for marks in events
    ]
